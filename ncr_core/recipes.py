"""Named recipes: model configurations together with their training configurations.

This module is the one source of hyper-parameters. `ncr train`, ``POST /admin/train``, the service's
settings, the reproduction of the paper and ``ncr_core.Recommender`` all begin from its recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ncr_core.errors import ConfigError
from ncr_core.model_config import HEADS, ModelConfig
from ncr_core.parameters import parameters_of
from ncr_core.train_config import TrainConfig

SIZES = (8, 16, 24, 32, 64)
"""The numbers of predictive factors of the paper's tables."""

WINDOWS = (1, 2, 4, 8, 16, 64, 0)
"""The numbers of a user's latest items that are pooled, 0 for all; see docs/experiments.md."""

Sections = dict[str, Any]
"""Overrides by section: ``{"model": {…}, "training": {…}}``, fields of the two configurations."""

_MODEL_FIELDS = {f.name: f.default for f in fields(ModelConfig)}
_TRAINING_FIELDS = {f.name: f.default for f in fields(TrainConfig)}


@dataclass(frozen=True)
class Recipe:
    """A named model configuration together with its training configuration."""

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        """Raises ConfigError if the model cannot begin from the start."""
        start, model = self.training.start, self.model
        if start != "random" and model.init == "paper":
            raise ConfigError('init="paper" is N(0, 0.01²) everywhere: start must be "random"')
        check_tower_start(model, self.training)
        factored = model.kind == "nbpr" or self.training.tower_start == "product"
        if start == "als" and not (factored and model.users == "free"):
            raise ConfigError(
                'start="als" is for nbpr with free users, and for such a dncr with '
                'tower_start="product"'
            )
        if start == "next-item" and not model.ordered:
            raise ConfigError('start="next-item" is for users="history" with windows')

    def with_(self, **overrides: Any) -> Recipe:
        """This recipe with other values for some fields of ``ModelConfig`` and ``TrainConfig``.

        A choice that the new kind of model does not have returns to its default, unless the choice
        is among ``overrides``. Raises ConfigError if a field is unknown, or the values do not fit
        each other.
        """
        unknown = sorted(overrides.keys() - _MODEL_FIELDS.keys() - _TRAINING_FIELDS.keys())
        if unknown:
            raise ConfigError(f"unknown hyper-parameters: {', '.join(unknown)}")
        before = {**vars(self.model), **vars(self.training)}
        values = before | overrides
        for name, applies in _APPLIES.items():
            if name not in overrides and applies(before) and not applies(values):
                values[name] = {**_MODEL_FIELDS, **_TRAINING_FIELDS}[name]
        return replace(
            self,
            model=ModelConfig(**{name: values[name] for name in _MODEL_FIELDS}),
            training=TrainConfig(**{name: values[name] for name in _TRAINING_FIELDS}),
        )

    def public_values(self) -> dict[str, Any]:
        """The hyper-parameters that a request may give, by their names in requests."""
        return {
            spec.public_name: self.value(spec.name)
            for config in (ModelConfig, TrainConfig)
            for spec in parameters_of(config)
            if spec.parameter.request is not None
        }

    def value(self, name: str) -> Any:
        """The value of a field of ``ModelConfig`` or ``TrainConfig``."""
        return getattr(self.model if name in _MODEL_FIELDS else self.training, name)


def check_tower_start(model: ModelConfig, training: TrainConfig) -> None:
    """Raises ConfigError if the tower of a model cannot start as a product, but should."""
    if training.tower_start == "random":
        return
    if not model.product_factors:
        raise ConfigError(
            'tower_start="product" is for dncr with two or more layers of tanh, embeddings of 4 or '
            'more numbers, init="xavier", and users that are free or have windows with matrices '
            "without attention_layers"
        )
    if not training.shared_negatives:
        raise ConfigError('tower_start="product" needs shared_negatives, to draw from')


# What only some models have.
_APPLIES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "learn_weights": lambda v: v["kind"] == "nbpr",
    "tower_factors": lambda v: v["kind"] == "neupr" and not v["shared_embeddings"],
    "shared_embeddings": lambda v: v["kind"] == "neupr",
    "shared_towers": lambda v: v["kind"] == "twotower",
    "windows": lambda v: v["users"] == "history",
    "window_matrices": lambda v: v["users"] == "history",
    "by_length": lambda v: v["users"] == "history" and tuple(v["windows"]) != (0,),
    "attention_layers": lambda v: v["users"] == "history" and tuple(v["windows"]) != (0,),
    "by_gap": lambda v: (
        v["kind"] == "nbpr" and v["users"] == "history" and tuple(v["windows"]) != (0,)
    ),
    "start_factors": lambda v: (
        v["kind"] == "nbpr" and v["users"] == "history" and tuple(v["windows"]) != (0,)
    ),
    "item_bias": lambda v: v["kind"] in ("nbpr", "neupr") and not v["shared_embeddings"],
    "tower_start": lambda v: v["kind"] == "dncr",
    "shared_negatives": lambda v: (
        v["kind"] == "nbpr"
        or (v["kind"] == "dncr" and v["tower_start"] == "product")
        or (v["kind"] == "neupr" and v["pretrain"] and not v["shared_embeddings"])
    ),
}


def merge_sections(sections: Sections, overrides: Mapping[str, Any]) -> Sections:
    """Settings with some values replaced, section by section."""
    result = dict(sections)
    for key, value in overrides.items():
        nested = isinstance(value, Mapping)
        result[key] = {**result.get(key, {}), **value} if nested else value
    return result


# The models of the paper and beyond, tuned on MovieLens 1M. What ``reproduction.grids`` varies was
# chosen there on validation items, at the sizes it names, and holds at the others; of settings
# within .001 any was taken. What goes with the size (λ, dropout, the passes and negatives of
# towers, which a processor without a GPU has to finish) was set by single trials on validation
# items, as docs/experiments.md tells.

# Passes, negatives a positive, and passes of fine-tuning of a tower with so many factors.
_TOWER_BUDGET = {8: (6, 4, 4), 16: (4, 3, 3), 24: (4, 2, 2), 32: (3, 2, 2), 64: (2, 1, 1)}
_TOWER = {"start": "spectral", "batch_size": 2048, "learning_rate": 5e-3}
# With these a DNCR of 24 or 32 factors gets above its spectral start by sampled NDCG@10. A few
# passes against few negatives do not. 64 factors stay below with twice as many, on a GPU.
_LONG_TOWER = {
    "loss": "listwise", "epochs": 6, "negatives": 8, "learning_rate": 2e-3, "dropout": 0.3
}  # fmt: skip
_LONG_TOWER_SIZES = (24, 32)


def _sections(kind: str, training: Sections, **model: Any) -> Sections:
    return {"model": {"kind": kind, **model}, "training": training}


def _factor_training(factors: int) -> Sections:
    """The training of factors: more factors fit more noise, and need a larger λ."""
    l2 = 1e-3 if factors <= 16 else 3e-3 if factors <= 32 else 1e-2
    return {"epochs": 15, "negatives": 8, "l2": l2}


def _bpr(factors: int) -> Sections:
    training = {**_factor_training(factors), "loss": "bpr", "learning_rate": 2e-2}
    return _sections("nbpr", training, learn_weights=False)


def _nearest_size(factors: int) -> int:
    return min(_TOWER_BUDGET, key=lambda size: abs(size - factors))


def _budget(factors: int) -> tuple[int, int, int]:
    return _TOWER_BUDGET[_nearest_size(factors)]


def _tower_training(factors: int) -> Sections:
    epochs, negatives, _ = _budget(factors)
    return {**_TOWER, "epochs": epochs, "negatives": negatives}


def _dncr(factors: int) -> Sections:
    few = _tower_training(factors)
    is_long = _nearest_size(factors) in _LONG_TOWER_SIZES
    return _sections("dncr", {**few, **_LONG_TOWER} if is_long else few)


# The training of its own parts. In the results, NeuPR starts from the NBPR and DNCR above.
def _neupr(factors: int) -> Sections:
    fine_tuning = {"fine_tune_epochs": _budget(factors)[2], "fine_tune_rate": 2e-3}
    return _sections("neupr", {**_tower_training(factors), **fine_tuning})


def _neupr_alone(factors: int, **model: Any) -> Sections:
    return _sections("neupr", {**_tower_training(factors), "pretrain": False}, **model)


def _history(kind: str, training: Sections, windows: tuple[int, ...] = WINDOWS) -> Sections:
    model: Sections = {"users": "history", "windows": list(windows)}
    if kind != "dncr":
        model["item_bias"] = True
    return _sections(kind, training, **model)


def _shared(factors: int) -> Sections:
    """Training on negatives that a batch shares, from a spectral start."""
    return {
        "loss": "listwise",
        "start": "spectral",
        "shared_negatives": 512,
        "batch_size": 4096,
        "epochs": 6,
        "dropout": 0.0 if factors < 16 else 0.3,
    }


def _from_als(factors: int) -> Sections:
    training = {"start": "als", "epochs": 8, "learning_rate": 1e-3, "negatives": 8, "l2": 1e-3}
    return _sections("nbpr", training)


def _dncr_history(factors: int) -> Sections:
    return _history("dncr", {**_TOWER, "epochs": 4, "negatives": 4, "loss": "listwise"})


def _neupr_history(factors: int) -> Sections:
    training = {
        "fine_tune_epochs": 2,
        "fine_tune_rate": 1e-3,
        "negatives": 8,
        "loss": "listwise",
        "batch_size": 4096,
    }
    return _history("neupr", training)


TUNED: dict[str, Callable[[int], Sections]] = {
    "BPR": _bpr,
    "NBPR": lambda d: _sections("nbpr", _factor_training(d)),
    "DNCR": _dncr,
    "NeuPR": _neupr,
    "NeuPR without pre-training": _neupr_alone,
    "NeuPR shared embeddings": lambda d: _neupr_alone(d, shared_embeddings=True),
    "two towers": lambda d: _sections("twotower", _tower_training(d)),
    "two towers shared": lambda d: _sections("twotower", _tower_training(d), shared_towers=True),
    "NBPR pooled": lambda d: _history("nbpr", {**_shared(d), "learning_rate": 3e-3}, (0,)),
    "NBPR from ALS": _from_als,
    "NBPR history": lambda d: _history("nbpr", _shared(d)),
    "DNCR history": _dncr_history,
    "NeuPR history": _neupr_history,
}
"""Settings by the number of factors, for each tuned model by its name in docs/results.md."""


def tuned(method: str, factors: int = 8) -> Recipe:
    """The recipe of a tuned model with a number of factors.

    Raises ConfigError if ``TUNED`` does not have the model.
    """
    if method not in TUNED:
        raise ConfigError(f"unknown model {method!r}: {', '.join(TUNED)}")
    return from_sections(_slug(method), TUNED[method](factors), factors)


def from_sections(name: str, sections: Mapping[str, Any], factors: int) -> Recipe:
    """A recipe of settings by section; missing settings take their defaults."""
    model = ModelConfig.from_dict({**sections["model"], "factors": factors})
    return Recipe(name, model, TrainConfig(**sections.get("training", {})))


def _slug(method: str) -> str:
    return method.lower().replace(" ", "-")


# The recipes of the choice `auto`: fit for serving, validated over the whole catalogue.


def _from_next_item(kind: str, **training: Any) -> Sections:
    """Few passes at a low learning rate, because the start already predicts next items."""
    few = {"start": "next-item", "epochs": 3, "learning_rate": 2e-3, "dropout": 0.1}
    few["early_weight"] = 2.0
    training = {**_shared(16), **few, "validation": "full", **training}
    model = {"by_length": True, "by_gap": kind == "nbpr"}
    return merge_sections(_history(kind, training), {"model": model})


def _with_attention() -> Sections:
    """Self-attention with many negatives: a whole small catalogue tells more than a sample."""
    many = {"shared_negatives": 4096, "epochs": 4}
    sections = _from_next_item("nbpr", **many)
    return merge_sections(sections, {"model": {"attention_layers": 1}})


def _with_two_layers() -> Sections:
    """More passes than a CPU has time for."""
    training = {"epochs": 12, "dropout": 0.3}
    return merge_sections(
        _with_attention(), {"model": {"attention_layers": 2}, "training": training}
    )


def _neupr_from_next_item() -> Sections:
    """A small tower beside the factors of NBPR, as trained: fine-tuning makes their lists worse."""
    sections = _from_next_item("neupr", negatives=8, alpha=0.95, fine_tune_epochs=0)
    return merge_sections(sections, {"model": {"tower_factors": 8}})


def _dncr_from_next_item() -> Sections:
    """A tower that starts as the product of an NBPR, and learns from items that the NBPR draws."""
    drawn = {"shared_negatives": 4096, "negatives": 16, "tower_start": "product"}
    passes = {"fine_tune_epochs": 3, "fine_tune_rate": 2e-4, "early_weight": 1.0}
    return _from_next_item("dncr", **drawn, **passes)


def _als_nbpr() -> Sections:
    """More negatives at a lower learning rate than `_from_als`, whose passes harm this start."""
    few = {"start": "als", "epochs": 3, "learning_rate": 4e-4, "dropout": 0.1}
    return _sections("nbpr", {**_shared(16), "shared_negatives": 2048, **few})


def _validated_in_full(sections: Sections) -> Sections:
    return merge_sections(sections, {"training": {"validation": "full"}})


AUTO_RECIPE = "auto"
"""The name for the best of ``auto_recipes`` on the data at hand."""

SMALL_DATA = 300_000  # interactions
CLOSED_FORM_FACTORS = 256
MANY_FACTORS = 1024  # 96 % of the NDCG@10 of the whole matrix on Amazon Beauty, 256: 83 %
MAX_SOLVED_CELLS = 1.4e10  # items times the square of these factors: what finding them costs
MAX_DENSE_ITEMS = 8_000  # of the closed form's dense systems: three matrices of 256 MB each
MAX_SPARSE_CELLS, MIN_SPARSE_FACTORS = 8e7, 32  # interactions times factors of sparse systems
MAX_ALS_CELLS = 2e11  # users and items times the cube of the factors: what their systems cost
MIN_FACTORS, MAX_TABLE_CELLS = 8, 2**25  # 128 MiB a table
MIN_START_RATIO, MAX_START_RATIO = 2, 8  # of the start's factors to the trained ones
_ON_SMALL_DATA: dict[str, dict[str, Any]] = {
    "next-item": {"factors": MANY_FACTORS},
    "next-item-nbpr": {
        "factors": CLOSED_FORM_FACTORS,
        "epochs": 8,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "shared_negatives": 2048,
        "early_weight": 1.0,
    },
}


def on_small_data(name: str) -> dict[str, Any]:
    """Training settings of a recipe of the choice `auto` that change for few interactions."""
    changes = _ON_SMALL_DATA.get(name, {})
    return {key: value for key, value in changes.items() if key in _TRAINING_FIELDS}


def auto_recipes(
    users: int,
    items: int,
    interactions: int,
    on_gpu: bool = False,
    remembered: int | None = None,
) -> tuple[Recipe, ...]:
    """The recipes that ``auto`` tries, the cheapest first; see ``ncr_core.training.selection``.

    For many interactions with many items, ALS comes before trainings that start from the closed
    form. Such data are often no sequences, and the time may be too short for both.

    Few interactions leave time for many factors of the closed form, and for more passes. There
    self-attention is left out, because it is no better than the model without it. A GPU has time
    for two layers of it.

    For many users or items, each recipe has fewer factors. A table of embeddings has at most
    ``MAX_TABLE_CELLS`` numbers, unless that leaves fewer than ``MIN_FACTORS`` factors. The closed
    form of many items and interactions takes about a minute, and so does ALS of many users and
    items. The number of factors is a multiple of ``HEADS``, because the heads share the factors.
    ``remembered`` is the number of users whose pooled vectors a model keeps; None: all.
    """
    pooled = users if remembered is None else min(users, remembered)
    few = interactions <= SMALL_DATA
    recipes = [*_AUTO, _NEXT_ITEM_TWO_LAYERS] if on_gpu else list(_AUTO)
    if few:
        plain = [each for each in recipes if not each.model.attention_layers]
        recipes = [each.with_(**_ON_SMALL_DATA.get(each.name, {})) for each in plain]
    solved = _solved_factors(items, interactions)
    if items > MAX_DENSE_ITEMS and not few:
        als = next(each for each in recipes if each.training.start == "als")
        recipes = [recipes[0], als, *(each for each in recipes[1:] if each is not als)]
    by_als = max(MIN_FACTORS, int((MAX_ALS_CELLS / max(users + items, 1)) ** (1 / 3)))

    # The trainings need them too, and then have them at once.
    kept = affordable_start_factors(RECIPES["next-item-nbpr"].model, pooled, items, interactions)

    def factors(each: Recipe) -> int:
        of_users = pooled if each.model.users == "history" else users
        most = max(MIN_FACTORS, MAX_TABLE_CELLS // max(of_users, items, 1))
        affordable = by_als if each.training.start == "als" else solved
        wanted = max(each.model.factors, kept) if each is recipes[0] else each.model.factors
        most_of_each = min(wanted, most, affordable)
        return most_of_each - most_of_each % HEADS

    return tuple(each.with_(factors=factors(each)) for each in recipes)


def affordable_start_factors(model: ModelConfig, users: int, items: int, interactions: int) -> int:
    """The number of factors of the start that a model keeps beside its trained ones; 0 for none.

    ``users`` are those whose vectors the model keeps. The number is at most ``start_factors``, and
    bounded as the factors of `auto_recipes` are. Less than twice the trained factors gain too
    little. At most eight times as many leave a small model small.
    """
    most = MAX_TABLE_CELLS // max(users, items, 1) - model.factors
    bounds = (items, most, MAX_START_RATIO * model.factors, _solved_factors(items, interactions))
    kept = min(model.start_factors, *bounds)
    return kept - kept % HEADS if kept >= MIN_START_RATIO * model.factors else 0


def _solved_factors(items: int, interactions: int) -> int:
    """The number of factors of the closed form that can be found in about a minute."""
    solved = max(CLOSED_FORM_FACTORS, int((MAX_SOLVED_CELLS / max(items, 1)) ** 0.5))
    if items > MAX_DENSE_ITEMS and interactions > SMALL_DATA:
        solved = min(solved, max(MIN_SPARSE_FACTORS, int(MAX_SPARSE_CELLS / interactions)))
    return solved


_AUTO = (
    from_sections(
        "next-item",
        merge_sections(_from_next_item("nbpr", epochs=0), {"model": {"window_matrices": False}}),
        CLOSED_FORM_FACTORS,
    ),
    # Beside self-attention the start gains nothing, see docs/experiments.md.
    from_sections(
        "next-item-nbpr",
        merge_sections(_from_next_item("nbpr"), {"model": {"start_factors": MANY_FACTORS}}),
        128,
    ),
    from_sections("next-item-attention", _with_attention(), 128),
    from_sections("als-nbpr", _validated_in_full(_als_nbpr()), 128),
    from_sections("spectral-neupr", _neupr(8), 8),
)

# Only a GPU trains it in a minute.
_NEXT_ITEM_TWO_LAYERS = from_sections("next-item-two-layer-attention", _with_two_layers(), 128)

# Its lists are about as good as those of "next-item-nbpr", at a longer training and a slower
# ranking, so that the choice `auto` leaves it out.
_NEXT_ITEM_NEUPR = from_sections("next-item-neupr", _neupr_from_next_item(), 128)

# Its lists are a little better than those of "next-item-nbpr", after ten times the training.
_NEXT_ITEM_DNCR = from_sections("next-item-dncr", _dncr_from_next_item(), 64)

_NAMED = (
    Recipe("default"),
    Recipe(
        "paper",
        ModelConfig(init="paper"),
        TrainConfig(  # at most as many iterations as the paper's figure of the loss
            epochs=100,
            fine_tune_epochs=100,
            batch_size=256,
            negatives=1,
            learning_rate=1e-3,
            schedule="constant",
            stopping="paper",
        ),
    ),
    Recipe(
        "history",
        ModelConfig(users="history", windows=WINDOWS, item_bias=True),
        TrainConfig(
            epochs=6,
            learning_rate=5e-3,
            loss="listwise",
            start="spectral",
            shared_negatives=512,
            fine_tune_epochs=2,
        ),
    ),
    *(tuned(method) for method in TUNED),
    *_AUTO,
    _NEXT_ITEM_TWO_LAYERS,
    _NEXT_ITEM_NEUPR,
    _NEXT_ITEM_DNCR,
)

SERVICE_RECIPES = (
    AUTO_RECIPE, "default", "history", *(each.name for each in _AUTO),
    _NEXT_ITEM_TWO_LAYERS.name, _NEXT_ITEM_NEUPR.name, _NEXT_ITEM_DNCR.name,
)  # fmt: skip
"""The recipes that a request for training may name."""

RECIPES: dict[str, Recipe] = {each.name: each for each in _NAMED}
"""All recipes by name: ``default``; ``paper`` with the paper's settings; ``history`` with users'
vectors pooled from items; each tuned model with 8 factors, such as ``nbpr-pooled``; the recipes
that ``auto`` chooses from; ``next-item-neupr``; and ``next-item-dncr``.

``auto`` tries ``next-item-two-layer-attention`` only on a GPU."""


def recipe(name: str) -> Recipe:
    """A recipe by its name.

    Raises ConfigError if the name is unknown; the message lists the known names.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}: {', '.join(RECIPES)}")
    return RECIPES[name]
