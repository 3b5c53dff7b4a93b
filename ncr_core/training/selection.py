"""The recipe `auto`: trains a few recipes within a time budget and keeps the best for the data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError, TrainingError, lacks_memory
from ncr_core.evaluation.metrics import FloatArray, hit_of_each, ndcg_of_each
from ncr_core.evaluation.protocols import K, ModelRanks
from ncr_core.models import PairwiseRanker
from ncr_core.recipes import MAX_DENSE_ITEMS, Recipe, auto_recipes
from ncr_core.train_config import resolve_device
from ncr_core.training.initializers import als_seconds
from ncr_core.training.pretraining import (
    TrainingResult,
    estimated_seconds,
    pretrains,
    start_model,
    train_model,
)
from ncr_core.training.rank_engine import RankEngine
from ncr_core.training.trainer import OnProgress, PhaseRunner
from ncr_core.training.validation import validation_ranks

START_FACTORS = 16  # of a start, but ALS, that is looked at before its recipe is trained
MIN_START_SHARE = 0.5
"""The least share of the best NDCG@10 so far that a start needs for its recipe to be trained."""
MIN_BUDGET_SHARE = 0.05
"""The least share of the budget that has to be left for another recipe."""
BUDGET_SECONDS = 60.0
BUDGET_SECONDS_A_MILLION = 50.0  # interactions
BUDGET_SECONDS_A_MILLION_ROWS = 500.0  # users and items, by which ALS takes its time
MAX_ROWS_SECONDS = 60.0


@dataclass(frozen=True)
class TriedRecipe:
    """A tried recipe, and its figures on the validation items over the whole catalogue.

    ``ndcg`` and ``hr`` are NDCG@10 and HR@10; None for a recipe that was not trained to its end.
    """

    recipe: str
    ndcg: float | None
    hr: float | None
    standard_error: float | None
    seconds: float
    chosen: bool = False
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON: figures to five decimal places, seconds to one."""
        values = asdict(self)
        for name in ("ndcg", "hr", "standard_error"):
            if values[name] is not None:
                values[name] = round(values[name], 5)
        return values | {"seconds": round(self.seconds, 1)}

    def line(self) -> str:
        """The recipe with its figures, or with the reason why it was not trained."""
        if self.ndcg is None:
            return f"  {self.recipe}: {self.reason}"
        chosen = ", chosen" if self.chosen else ""
        return (
            f"  {self.recipe}: validation NDCG@{K} {self.ndcg:.4f} in {self.seconds:.0f} s{chosen}"
        )


@dataclass(frozen=True)
class Selection:
    """The chosen recipe, its trained model, and all tried recipes in their order."""

    recipe: Recipe
    trained: TrainingResult
    tried: list[TriedRecipe]


@dataclass(frozen=True)
class _Trained:
    """A trained recipe, (n,) validation users, and (n,) NDCG@10 and HR@10 of each user."""

    recipe: Recipe
    result: TrainingResult
    users: IntArray
    ndcg_of_each: FloatArray
    hr_of_each: FloatArray

    @property
    def ndcg(self) -> float:
        """The mean NDCG@10; 0 without validation users."""
        return _mean(self.ndcg_of_each)

    def as_tried(self, seconds: float) -> TriedRecipe:
        """The figures, without the model."""
        n = len(self.users)
        if n == 0:
            return TriedRecipe(self.recipe.name, None, None, None, seconds)
        error = float(self.ndcg_of_each.std(ddof=1)) / math.sqrt(n) if n > 1 else None
        return TriedRecipe(self.recipe.name, self.ndcg, _mean(self.hr_of_each), error, seconds)


def default_budget(train: Interactions) -> float:
    """The seconds for the choice, by the size of the data.

    The budget is the sum of 60 s, 50 s for each million interactions, and 0.5 s for each thousand
    users and items. The last term is at most 60 s.
    """
    of_rows = BUDGET_SECONDS_A_MILLION_ROWS * (train.n_users + train.n_items) / 1e6
    of_interactions = BUDGET_SECONDS_A_MILLION * train.nnz / 1e6
    return BUDGET_SECONDS + of_interactions + min(MAX_ROWS_SECONDS, of_rows)


def select_recipe(
    split: Split,
    *,
    recipes: Sequence[Recipe] | None = None,
    budget_seconds: float | None = None,
    device: str = "auto",
    seed: int = 0,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    run_phase: PhaseRunner | None = None,
) -> Selection:
    """Trains recipes, the cheapest first, and keeps the one with the best validation NDCG@10.

    The figures are over the whole catalogue. A recipe is not trained if its start has less than
    half of the best NDCG@10 so far, or if the time left is too short. Recipes of one phase without
    self-attention may have fewer epochs to fit the time.

    The choice is among the recipes within one standard error of the best, measured over the same
    users. The selection takes NeuPR before NBPR, a model without self-attention before one with it,
    and a trained model before a start alone.

    Args:
        split: training and validation items; the validation items decide.
        recipes: the recipes to try; by default `ncr_core.recipes.auto_recipes`.
        budget_seconds: the seconds for all recipes; by default `default_budget`. The first recipe
            that can be trained on the data has no limit.
        device: the device of the training.
        seed: the seed of all random numbers.
        on_progress: called after each epoch.
        clock: gives the time in seconds.
        run_phase: as in `train_model`.

    Raises:
        ConfigError: the ranks of ``run_phase`` can train none of the recipes.
        DataError: there are too few users or items for any recipe.
        TrainingError: every recipe diverged.
    """
    timer = _Timer(clock, default_budget(split.train) if budget_seconds is None else budget_seconds)
    trained: list[_Trained] = []
    tried: dict[str, TriedRecipe] = {}
    starts: dict[str, float] = {}
    failure: Exception | None = None
    if recipes is None:
        on_gpu = resolve_device(device).type == "cuda"
        train = split.train
        recipes = auto_recipes(train.n_users, train.n_items, train.nnz, on_gpu, train.remembered)
    recipes = [each.with_(device=device, seed=seed) for each in recipes]
    if isinstance(run_phase, RankEngine):
        recipes = _trainable(recipes, run_phase, tried)
    for recipe in recipes:
        started = clock()
        try:
            reason = start = None
            if trained:
                best = max(each.ndcg for each in trained)
                recipe, reason, start = _within(recipe, split, best, timer, starts)
            if reason is None:
                named = _named(recipe.name, on_progress)
                result = train_model(
                    recipe.model, recipe.training, split, named, start=start, run_phase=run_phase
                )
                measured = _Trained(recipe, result, *_measure(result.model, split))
                tried[recipe.name] = measured.as_tried(clock() - started)
                if recipe.training.epochs == 0:
                    starts[_start_of(recipe)] = measured.ndcg
                trained = _close_to_best([*trained, measured])
                continue
        except (ConfigError, DataError, TrainingError) as error:
            failure, reason = error.with_traceback(None), str(error)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            # The frames of the traceback hold the model and its batches.
            failure, reason = error.with_traceback(None), "there is too little memory for it"
        seconds = clock() - started
        tried[recipe.name] = TriedRecipe(recipe.name, None, None, None, seconds, reason=reason)
    if not trained:
        raise failure or DataError("the selection has no recipe")
    chosen = min(trained, key=lambda each: (_preference(each), -each.ndcg))
    name = chosen.recipe.name
    tried[name] = replace(tried[name], chosen=True)
    return Selection(chosen.recipe, chosen.result, list(tried.values()))


def _trainable(
    recipes: Sequence[Recipe], ranks: RankEngine, tried: dict[str, TriedRecipe]
) -> list[Recipe]:
    """The recipes that the ranks can train; the reasons of the others go to ``tried``.

    Raises ConfigError if there is none.
    """
    trainable, refused = [], None
    for recipe in recipes:
        try:
            ranks.check(recipe.model)
            trainable.append(recipe)
        except ConfigError as error:
            refused = error
            tried[recipe.name] = TriedRecipe(recipe.name, None, None, None, 0.0, reason=str(error))
    if refused is not None and not trainable:
        raise refused
    return trainable


def _named(recipe: str, on_progress: OnProgress | None) -> OnProgress | None:
    """Adds the name of the recipe to the progress of each epoch."""
    if on_progress is None:
        return None
    return lambda progress: on_progress(replace(progress, phase=f"{recipe}: {progress.phase}"))


def _measure(model: PairwiseRanker, split: Split) -> tuple[IntArray, FloatArray, FloatArray]:
    """(n,) validation users, and (n,) NDCG@10 and HR@10 of each over the whole catalogue."""
    if not (split.validation >= 0).any():
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    users, ranks = validation_ranks(ModelRanks(model), split)
    return users, ndcg_of_each(ranks, K), hit_of_each(ranks, K)


class _Timer:
    """Measures the seconds that are left of a budget."""

    def __init__(self, clock: Callable[[], float], budget: float) -> None:
        self.budget = budget
        self._clock = clock
        self._began = clock()

    def seconds_left(self) -> float:
        return max(0.0, self._began + self.budget - self._clock())


def _within(
    recipe: Recipe,
    split: Split,
    best: float,
    timer: _Timer,
    starts: dict[str, float],
) -> tuple[Recipe, str | None, PairwiseRanker | None]:
    """The recipe with as many epochs as the time allows, the reason against it, and its start.

    The reason is None for a recipe that is worth training. A recipe of several phases keeps all its
    epochs. So does a recipe with self-attention, whose first epochs are behind those of the model
    without. The start is a model of a one-phase recipe. The training uses it again, because a
    second start would take the same time once more.
    """
    if recipe.training.epochs == 0:
        return recipe, None, None
    if (left := timer.seconds_left()) < MIN_BUDGET_SHARE * timer.budget:
        return recipe, f"of {timer.budget:.0f} s {left:.0f} s are left", None
    start, model = math.inf, None
    if recipe.training.start == "als":
        needed = als_seconds(recipe.model.factors, split.train, recipe.training.torch_device())
        if needed > left:
            reason = f"its start takes about {needed:.0f} s, and {left:.0f} s are left"
            return recipe, reason, None
    if recipe.training.start != "random":
        start, model = _start(recipe, split, starts)
    if start < MIN_START_SHARE * best:
        reason = f"its start has NDCG@10 {start:.4f}, less than half of the best, {best:.4f}"
        return recipe, reason, None
    one_phase = not pretrains(recipe.model, recipe.training)
    may_be_short = one_phase and not recipe.model.attention_layers
    # The start takes seconds: it is not made for a training whose epochs alone take too long.
    needed = estimated_seconds(recipe.model, recipe.training, split, started=True)
    if not may_be_short and needed > (left := timer.seconds_left()):
        return recipe, f"its training takes about {needed:.0f} s, and {left:.0f} s are left", None
    if not one_phase:
        needed = estimated_seconds(recipe.model, recipe.training, split, started=False)
    elif model is None:
        model = start_model(recipe.model, recipe.training, split)
    if needed <= (left := timer.seconds_left()):
        return recipe, None, model
    epochs = int(recipe.training.epochs * left / needed)
    if may_be_short and (epochs or recipe.training.start == "als"):
        return recipe.with_(epochs=epochs), None, model
    return recipe, f"its training takes about {needed:.0f} s, and {left:.0f} s are left", None


def _start(
    recipe: Recipe, split: Split, starts: dict[str, float]
) -> tuple[float, PairwiseRanker | None]:
    """NDCG@10 of an untrained NBPR from a recipe's start, and the model if training can use it.

    A tower does not rank usefully at its start, so the measured model is NBPR. With many items,
    few factors of ALS do not tell the worth of more factors. All factors take too long to be made
    twice, so the training uses the measured model.
    """
    if (name := _start_of(recipe)) in starts:
        return starts[name], None
    whole = recipe.training.start == "als" and split.train.n_items > MAX_DENSE_ITEMS
    factors = recipe.model.factors if whole else min(recipe.model.factors, START_FACTORS)
    start = recipe.with_(kind="nbpr", epochs=0, factors=factors, start_factors=0)
    model = train_model(start.model, start.training, split).model
    starts[name] = _mean(_measure(model, split)[1])
    return starts[name], model if whole else None


def _start_of(recipe: Recipe) -> str:
    return f"{recipe.training.start}, {recipe.model.users}"


def _mean(of_each: FloatArray) -> float:
    return float(of_each.mean()) if len(of_each) else 0.0


def _close_to_best(trained: Sequence[_Trained]) -> list[_Trained]:
    """The recipes within one standard error of the best; the other models need no memory."""
    best = max(trained, key=lambda each: each.ndcg)
    return [each for each in trained if _is_close(best, each)]


def _is_close(best: _Trained, other: _Trained) -> bool:
    """Whether the mean difference over the same users is within its standard error."""
    _, rows, other_rows = np.intersect1d(best.users, other.users, return_indices=True)
    difference = best.ndcg_of_each[rows] - other.ndcg_of_each[other_rows]
    if len(difference) < 2:
        return True
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) <= error


def _preference(trained: _Trained) -> int:
    recipe, last = trained.recipe, trained.result.history[-1]
    # A training whose every epoch made the start worse has left the start alone, too.
    if last.best_epoch == 0 and not pretrains(recipe.model, recipe.training):
        return 3
    if recipe.model.kind == "neupr":
        return 0
    return 2 if recipe.model.attention_layers else 1  # new users' vectors take longer with it
