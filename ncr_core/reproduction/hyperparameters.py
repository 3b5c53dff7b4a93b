"""The compared methods and their settings.

The settings of our models come from ``ncr_core.recipes``. This module has the settings of the
baselines, and the changes on data sets other than MovieLens 1M.

The grids below hold configurations that were tried: at most eight a method and number of factors.
Sampled NDCG@10 on the validation items chose the settings, except for the linear next-item model,
SASRec and the recipes of `auto`, which full NDCG@10 chose. Validation NDCG@10 also chooses the
iterations and epochs within each run. `ncr reproduce tuning` runs the grids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ncr_core.errors import ConfigError
from ncr_core.recipes import (
    CLOSED_FORM_FACTORS,
    MANY_FACTORS,
    TUNED,
    Recipe,
    merge_sections,
    on_small_data,
    recipe,
)

Settings = dict[str, Any]
"""The settings of a method. Our models have the sections ``model`` and ``training``."""


def _neumf(factors: int) -> Settings:
    if factors < 32:
        return {"pretrain": False, "l2": 1e-3, "epochs": 12}
    return {"l2": 1.2e-2, "epochs": 8, "fine_tune_epochs": 2, "fine_tune_rate": 1e-3}


def _untrained(method: str, factors: int, start: str) -> Settings:
    return merge_sections(TUNED[method](factors), {"training": {"start": start, "epochs": 0}})


def _of_recipe(name: str) -> Callable[[int], Settings]:
    """The changes of a recipe of `auto` to the defaults, the same at any number of factors."""
    chosen, default = recipe(name), Recipe("default")
    pairs = {
        "model": (chosen.model.as_dict(), default.model.as_dict()),
        "training": (chosen.training.as_dict(), default.training.as_dict()),
    }
    settings = {
        section: {key: value for key, value in values.items() if value != defaults[key]}
        for section, (values, defaults) in pairs.items()
    }
    settings["model"] = {"kind": chosen.model.kind, **settings["model"]}
    settings["model"].pop("factors", None)
    return lambda factors: settings


def _trained_alone() -> Callable[[int], Settings]:
    """The settings of the recipe `next-item-nbpr` without the start beside its trained factors."""
    settings = _of_recipe("next-item-nbpr")(0)
    model = {key: value for key, value in settings["model"].items() if key != "start_factors"}
    return lambda factors: {**settings, "model": model}


def _dncr_next_item() -> Settings:
    """The settings of the DNCR part of NeuPR next-item, trained alone."""
    neupr = _of_recipe("next-item-neupr")(0)
    no_dncr = ("item_bias", "tower_factors")
    model = {key: value for key, value in neupr["model"].items() if key not in no_dncr}
    unused = ("alpha", "fine_tune_epochs", "shared_negatives")
    training = {key: value for key, value in neupr["training"].items() if key not in unused}
    return {"model": {**model, "kind": "dncr"}, "training": training}


def _dncr_from_als(factors: int) -> Settings:
    """A tower that starts as the product of the recipe `als-nbpr`, and has one pass of its own."""
    training = {
        "shared_negatives": 4096,
        "negatives": 16,
        "tower_start": "product",
        "fine_tune_epochs": 1,
        "fine_tune_rate": 1e-4,
    }
    changes = {"model": {"kind": "dncr"}, "training": training}
    return merge_sections(_of_recipe("als-nbpr")(factors), changes)


def _by_the_paper(kind: str) -> Callable[[int], Settings]:
    """The settings of the recipe `paper`.

    The parts of NeuPR are trained with them, and so is NeuPR when it starts from its parts.
    """
    settings = _of_recipe("paper")(0)
    rate = settings["training"]["learning_rate"]
    changes = {"model": {"kind": kind}, "training": {"fine_tune_rate": rate}}
    return lambda factors: merge_sections(settings, changes)


METHODS: dict[str, Callable[[int], Settings]] = {
    "ItemPop": lambda factors: {},
    "eALS": lambda factors: {"l2": 10.0, "iterations": 40},
    "NeuMF": _neumf,
    "iALS": lambda factors: {"alpha0": 0.6, "l2": 0.005, "iterations": 20},
    "EASE": lambda factors: {"l2": 1320.0},
    "EASE by recency": lambda factors: {"l2": 1320.0, "half_life": 5.0},
    "cornac BPR": lambda factors: {"learning_rate": 0.02, "regularisation": 0.005},
    "PureSVD": lambda factors: {},
    "GF-CF": lambda factors: {"alpha": 0.3},  # as published, with 256 factors
    "Markov": lambda factors: {},
    "linear next-item": lambda factors: {"l2": 300.0},
    **TUNED,
    "NBPR by the paper": _by_the_paper("nbpr"),
    "DNCR by the paper": _by_the_paper("dncr"),
    "NeuPR by the paper": _by_the_paper("neupr"),
    "NeuPR from ALS": lambda factors: merge_sections(
        TUNED["NeuPR"](factors), {"training": {"alpha": 0.9, "fine_tune_epochs": 0}}
    ),
    # As published on the split of the SASRec line: of Klenitskiy & Vasilev (RecSys 2023), and of
    # the authors' code of gSASRec.
    "SASRec": lambda factors: {"loss": "bce"},
    "SASRec CE": lambda factors: {"loss": "ce"},
    "gSASRec": lambda factors: {
        "loss": "gbce",
        "negatives": 256,
        "calibration": 0.75,
        "blocks": 3,
        "epochs": 1000,
        "patience": 200,
    },
    # Recipes of the choice `auto`; their start is the linear next-item model.
    "NBPR next-item with start": _of_recipe("next-item-nbpr"),
    "NBPR next-item": _trained_alone(),
    "NBPR attention": _of_recipe("next-item-attention"),
    # Without the weight of first items, which is there for newcomers.
    "NBPR two-layer attention": lambda factors: merge_sections(
        _of_recipe("next-item-two-layer-attention")(factors), {"training": {"early_weight": 1.0}}
    ),
    "NeuPR next-item": _of_recipe("next-item-neupr"),
    "DNCR next-item": lambda factors: _dncr_next_item(),
    "DNCR from ALS": _dncr_from_als,
    "DNCR from NBPR": _of_recipe("next-item-dncr"),
    # What ours start from, without training.
    "spectral start": lambda factors: _untrained("NBPR", factors, "spectral"),
    "ALS start": lambda factors: _untrained("NBPR from ALS", factors, "als"),
    "next-item start": _of_recipe("next-item"),
}
"""By method, a function from the number of factors to the settings on MovieLens 1M."""

PARTS = {
    "NeuPR": ("NBPR", "DNCR"),
    "NeuPR history": ("NBPR history", "DNCR history"),
    "NeuPR from ALS": ("NBPR from ALS", "DNCR"),
    "NeuPR by the paper": ("NBPR by the paper", "DNCR by the paper"),
}
SIZELESS = ("ItemPop", "EASE", "EASE by recency", "Markov", "linear next-item")
LARGE = {
    "iALS": 192,
    "DNCR history": 16,
    "NeuPR history": 16,
    "next-item start": 256,
    "NBPR next-item": 128,
    "NBPR next-item with start": 128,
    "NBPR attention": 128,
    "NBPR two-layer attention": 128,
    "NeuPR next-item": 128,
    "DNCR next-item": 16,
    "gSASRec": 256,
    "GF-CF": 256,
}
"""Factors in the comparison with strong baselines, where they are not 64."""

# The recipe `auto` has more factors for the closed form, and more passes at a lower rate, where
# there are so few interactions.
_SMALL_SEQUENCES = ("beauty-s3rec", "sports-s3rec", "ml-100k")
_SMALL_SIZES = {
    "next-item start": MANY_FACTORS,
    "NBPR next-item": CLOSED_FORM_FACTORS,
    "NBPR next-item with start": CLOSED_FORM_FACTORS,
    "NeuPR next-item": CLOSED_FORM_FACTORS,
}


def size_of(method: str, data: str) -> int:
    """The number of factors of a method in the comparison with strong baselines."""
    if data in _SMALL_SEQUENCES and method in _SMALL_SIZES:
        return _SMALL_SIZES[method]
    if data == "gowalla-lightgcn" and method in ("ALS start", "NBPR from ALS"):
        return recipe("als-nbpr").model.factors
    return LARGE.get(method, 64)


# P2 has the items that P1 leaves out, and grids of its own for the methods published for it.
# Amazon Music is sixty times sparser and a hundredth of the size of MovieLens 1M.
OTHER_DATA_SETS: dict[tuple[str, str], Settings] = {
    ("iALS", "ncf-ml-1m"): {"alpha0": 0.3, "l2": 0.007},
    ("NeuMF", "ncf-ml-1m"): {"epochs": 16},
    ("eALS", "amusic-deepcf"): {"c0": 2048, "l2": 1.0},
    ("cornac BPR", "amusic-deepcf"): {"learning_rate": 0.05, "regularisation": 0.005},
    ("iALS", "amusic-deepcf"): {"alpha0": 0.1, "l2": 0.01},
    ("EASE", "amusic-deepcf"): {"l2": 300.0},
    ("NeuMF", "amusic-deepcf"): {"pretrain": False, "epochs": 12, "l2": 3e-2},
    ("NBPR", "amusic-deepcf"): {"training": {"epochs": 20, "l2": 3e-2, "learning_rate": 3e-3}},
    ("NBPR pooled", "amusic-deepcf"): {
        "training": {
            "loss": "bce",
            "learning_rate": 1e-3,
            "batch_size": 2048,
            "shared_negatives": 256,
        }
    },
    ("NBPR from ALS", "amusic-deepcf"): {
        "training": {
            "loss": "listwise",
            "shared_negatives": 16_384,
            "batch_size": 4096,
            "dropout": 0.3,
        }
    },
    # 36 times the density, as in benchmarks/served.py; the recipe of `auto` for data without order.
    ("iALS", "gowalla-lightgcn"): {"alpha0": 0.024},
    ("NBPR from ALS", "gowalla-lightgcn"): {
        "training": {
            "l2": recipe("als-nbpr").training.l2,
            "negatives": recipe("als-nbpr").training.negatives,
            **_of_recipe("als-nbpr")(0)["training"],
        }
    },
    # Chosen on the validation items of that split, see docs/experiments.md.
    ("NBPR attention", "ml-1m-sasrec"): {"training": {"early_weight": 1.0}},
    **{
        (method, data): {"training": on_small_data("next-item-nbpr")}
        for method in ("NBPR next-item", "NBPR next-item with start", "NeuPR next-item")
        for data in _SMALL_SEQUENCES
    },
    **{
        (method, data): {"window": 50}
        for method in ("SASRec", "SASRec CE", "gSASRec")
        for data in _SMALL_SEQUENCES
    },
    **{("linear next-item", data): {"l2": None} for data in _SMALL_SEQUENCES},
}


# The figures that decide are in `benchmarks/results/tuning`.
CHOSEN_IN_FULL: dict[tuple[str, str], Settings] = {
    ("EASE", "ml-1m"): {"l2": 250.0},
    ("EASE by recency", "ml-1m"): {"half_life": 3.0},
    ("NeuMF", "ml-1m"): {"pretrain": False},
    ("eALS", "ml-1m"): {"c0": 2048},
    ("NBPR", "ml-1m"): {"training": {"l2": 2e-2}},
    ("DNCR", "ml-1m"): {"training": {"l2": 1e-3}},
    ("EASE", "amusic-deepcf"): {"l2": 100.0},
    ("eALS", "amusic-deepcf"): {"c0": 512},
    ("iALS", "amusic-deepcf"): {"alpha0": 0.03},
    ("NeuMF", "amusic-deepcf"): {"l2": 1.2e-2},
    ("NBPR", "amusic-deepcf"): {"training": {"learning_rate": 1e-2}},
}
"""By method and data set, the settings with the highest full NDCG@10 of their grids, if that is
more than 1 % above the full NDCG@10 of the settings of ``settings_of``.

P2 has those of P1 for the methods without a grid of P2, as it has their other settings."""

CHOSEN_IN_FULL |= {
    (method, "ncf-ml-1m"): CHOSEN_IN_FULL[method, "ml-1m"]
    for method in ("EASE", "EASE by recency", "eALS", "NBPR", "DNCR")
}


def settings_of(method: str, factors: int, data: str = "ml-1m") -> Settings:
    """The settings of a method with so many factors, on a data set.

    Raises ConfigError if there is no such method.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}: {', '.join(METHODS)}")
    return merge_sections(METHODS[method](factors), OTHER_DATA_SETS.get((method, data), {}))


Grid = list[dict[str, Any]]


def _training(*changes: dict[str, Any]) -> Grid:
    return [{"training": change} for change in changes]


_FACTORS = _training(
    {"learning_rate": 1e-2, "l2": 1e-3},
    {"learning_rate": 1e-2, "l2": 1e-2},
    {"learning_rate": 2e-2, "l2": 1e-3},
    {"learning_rate": 3e-3, "l2": 1e-3},
    {"learning_rate": 1e-2, "l2": 0.0},
    {"learning_rate": 1e-2, "l2": 1e-3, "negatives": 4},
)

_FEW = {"loss": "bce", "learning_rate": 5e-3, "dropout": 0.0}
_LONG_TOWERS = _training(
    {},
    {**_FEW, "epochs": 4, "negatives": 2},
    {**_FEW, "epochs": 8, "negatives": 4},
)

_MOVIELENS: dict[str, dict[int, Grid]] = {
    "eALS": {
        8: [
            {"c0": c0, "alpha": alpha, "l2": l2}
            for c0, alpha, l2 in (
                (512, 0.5, 0.01),
                (512, 0.4, 0.01),
                (1024, 0.5, 0.01),
                (256, 0.5, 0.01),
                (512, 0.5, 10.0),
                (1024, 0.4, 10.0),
                (2048, 0.4, 0.01),
                (512, 0.0, 10.0),
            )
        ],
        64: [
            {"c0": c0, "l2": l2}
            for c0, l2 in ((512, 10.0), (512, 1.0), (512, 30.0), (128, 10.0), (2048, 10.0))
        ],
    },
    "cornac BPR": {
        64: [
            {"learning_rate": rate, "regularisation": l2}
            for rate, l2 in (
                (0.05, 0.005),
                (0.05, 0.01),
                (0.05, 0.02),
                (0.02, 0.01),
                (0.02, 0.005),
                (0.01, 0.005),
                (0.02, 0.002),
                (0.01, 0.002),
            )
        ]
    },
    "EASE": {0: [{"l2": l2} for l2 in (250.0, 500.0, 800.0, 1320.0, 2000.0, 3000.0, 120.0, 60.0)]},
    "EASE by recency": {
        0: [
            *({"half_life": h} for h in (100.0, 30.0, 10.0, 7.0, 5.0, 3.0, 2.0)),
            {"half_life": 3.0, "l2": 500.0},
        ],
    },
    "linear next-item": {
        0: [{"l2": l2} for l2 in (50.0, 100.0, 300.0, 500.0, 1000.0, 2000.0, 4000.0)],
    },
    "iALS": {
        192: [
            {"alpha0": alpha0, "l2": l2}
            for alpha0, l2 in (
                (0.3, 0.007),
                (0.3, 0.005),
                (0.3, 0.01),
                (0.2, 0.007),
                (0.4, 0.005),
                (0.6, 0.005),
                (0.6, 0.007),
                (1.0, 0.005),
            )
        ],
    },
    "NeuMF": {
        8: [
            {"pretrain": True, "learning_rate": 1e-2, "l2": 0.0},
            {"pretrain": True, "learning_rate": 3e-3, "l2": 0.0},
            {"pretrain": True, "learning_rate": 1e-2, "l2": 1e-3},
            {"pretrain": True, "learning_rate": 1e-2, "l2": 3e-3},
            {"pretrain": True, "learning_rate": 2e-2, "l2": 1e-3},
            {"pretrain": True, "learning_rate": 1e-2, "l2": 0.0, "negatives": 8},
            {"pretrain": False, "learning_rate": 1e-2, "l2": 1e-3},
            {"pretrain": False, "learning_rate": 1e-2, "l2": 1e-2},
        ],
        64: [
            {"pretrain": True, "l2": 1.2e-2},
            {"pretrain": True, "l2": 6e-3},
            {"pretrain": True, "l2": 3e-2},
            {"pretrain": False, "l2": 1.2e-2},
        ],
    },
    "BPR": {8: _FACTORS},
    "NBPR": {
        8: _FACTORS,
        64: _training(
            {"learning_rate": 1e-2, "l2": 1e-2},
            {"learning_rate": 1e-2, "l2": 2e-2},
            {"learning_rate": 1e-2, "l2": 5e-3},
            {"learning_rate": 3e-3, "l2": 1e-2},
        ),
    },
    "DNCR": {
        8: [
            {"training": {"start": "random", "epochs": 10, "learning_rate": 2e-2}},
            {"training": {"start": "random", "epochs": 10, "learning_rate": 1e-2}},
            {"training": {"learning_rate": 1e-2, "batch_size": 4096}},
            {"training": {"learning_rate": 5e-3}},
            {"training": {"learning_rate": 5e-3}, "model": {"activation": "relu"}},
            {"training": {"learning_rate": 5e-3, "l2": 1e-3}},
        ],
        24: _LONG_TOWERS,
        32: _LONG_TOWERS[:2],
        64: _training(
            {"learning_rate": 5e-3},
            {"learning_rate": 2e-3},
            {"learning_rate": 1e-2},
            {"learning_rate": 5e-3, "l2": 1e-3},
        ),
    },
    "NeuPR": {
        8: _training(
            {"fine_tune_rate": 1e-3},
            {"fine_tune_rate": 2e-3},
            {"fine_tune_rate": 5e-3},
            {"fine_tune_rate": 2e-3, "alpha": 0.3},
        ),
        64: _training({"fine_tune_rate": 1e-3}, {"fine_tune_rate": 2e-3}, {"fine_tune_rate": 5e-3}),
    },
    "NeuPR without pre-training": {
        8: _training({"learning_rate": 5e-3}, {"learning_rate": 1e-2, "l2": 1e-3}),
    },
    "NBPR pooled": {
        64: _training(
            {"start": "random", "learning_rate": 1e-2},
            {"learning_rate": 1e-2},
            {"learning_rate": 3e-3},
            {"learning_rate": 1e-3},
        ),
    },
    "NBPR from ALS": {
        64: _training(
            {"learning_rate": 1e-3, "l2": 1e-3},
            {"learning_rate": 4e-4, "l2": 1e-3},
            {"learning_rate": 2e-3, "l2": 1e-3},
            {"learning_rate": 1e-3, "l2": 1e-2},
        ),
    },
    "NBPR history": {
        64: _training(
            {"start": "random", "learning_rate": 1e-2},
            {"learning_rate": 1e-2},
            {"learning_rate": 5e-3},
            {"learning_rate": 1e-2, "dropout": 0.5},
        ),
    },
    "DNCR history": {
        16: _training(
            {"learning_rate": 5e-3},
            {"learning_rate": 2e-3},
            {"learning_rate": 1e-2},
            {"learning_rate": 5e-3, "l2": 1e-3},
        ),
    },
    "NeuPR history": {
        16: _training({"fine_tune_rate": 1e-3}, {"fine_tune_rate": 5e-4}, {"fine_tune_rate": 2e-3}),
    },
}

_AMAZON: dict[str, dict[int, Grid]] = {
    "eALS": {
        64: [
            {"c0": c0, "l2": l2}
            for c0, l2 in ((512, 10.0), (512, 1.0), (128, 1.0), (2048, 1.0), (512, 0.1))
        ],
    },
    "EASE": {0: [{"l2": l2} for l2 in (30.0, 100.0, 300.0, 1000.0)]},
    "iALS": {
        192: [
            {"alpha0": alpha0, "l2": l2}
            for alpha0, l2 in (
                (0.3, 0.01),
                (0.1, 0.01),
                (0.03, 0.01),
                (0.1, 0.003),
                (0.1, 0.02),
                (0.15, 0.01),
                (0.2, 0.007),
                (0.07, 0.015),
            )
        ],
    },
    "NeuMF": {
        64: [
            {"pretrain": True, "epochs": 8, "l2": 1.2e-2},
            {"pretrain": True, "epochs": 8, "l2": 3e-2},
            {"pretrain": True, "epochs": 8, "l2": 3e-3},
            {"pretrain": False, "epochs": 12, "l2": 1.2e-2},
            {"pretrain": False, "epochs": 12, "l2": 3e-2},
            {"pretrain": False, "epochs": 12, "l2": 3e-3},
            {"pretrain": False, "epochs": 20, "l2": 1.2e-2},
            {"pretrain": False, "epochs": 20, "l2": 3e-2, "learning_rate": 3e-3},
        ],
    },
    "NBPR": {
        64: _training(
            {"learning_rate": 1e-2, "l2": 1e-2},
            {"learning_rate": 3e-3, "l2": 1e-2},
            {"learning_rate": 1e-2, "l2": 3e-2},
            {"learning_rate": 3e-3, "l2": 3e-2},
        ),
    },
    "NBPR pooled": {
        64: _training(
            {"loss": "listwise", "shared_negatives": 1024},
            {
                "loss": "listwise",
                "shared_negatives": 1024,
                "start": "random",
                "learning_rate": 1e-2,
                "epochs": 20,
            },
            {
                "loss": "listwise",
                "shared_negatives": 1024,
                "learning_rate": 3e-3,
                "dropout": 0.5,
            },
            {"loss": "bce", "shared_negatives": 256},
        ),
    },
    "NBPR from ALS": {
        64: _training(
            {"loss": "bce", "shared_negatives": 0, "batch_size": 0, "dropout": 0.0},
            {},
        ),
    },
}

_PUBLISHED: dict[str, dict[int, Grid]] = {
    "iALS": _MOVIELENS["iALS"],
    "NeuMF": {
        64: [
            {"pretrain": True, "epochs": 8, "l2": 1.2e-2},
            {"pretrain": False, "epochs": 8, "l2": 1.2e-2},
            {"pretrain": False, "epochs": 12, "l2": 1.2e-2},
            {"pretrain": False, "epochs": 8, "l2": 3e-2},
            {"pretrain": True, "epochs": 8, "l2": 1.2e-2, "fine_tune_epochs": 5},
            {"pretrain": True, "epochs": 8, "l2": 1.2e-2, "negatives": 8},
            {"pretrain": True, "epochs": 8, "l2": 6e-3},
            {"pretrain": True, "epochs": 16, "l2": 1.2e-2},
        ],
    },
}

GRIDS: dict[str, dict[str, dict[int, Grid]]] = {
    "ml-1m": _MOVIELENS,
    "ncf-ml-1m": _PUBLISHED,  # the rest are the choices of P1
    "amusic-deepcf": _AMAZON,
}
