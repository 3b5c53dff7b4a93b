"""The choice of a recipe on the data at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncr_core.data import Interactions, Split
from ncr_core.data.splits import leave_latest_out
from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import ndcg
from ncr_core.evaluation.protocols import ModelRanks
from ncr_core.model_config import ModelConfig
from ncr_core.models import PairwiseRanker
from ncr_core.recipes import RECIPES, WINDOWS, Recipe, auto_recipes
from ncr_core.train_config import TrainConfig
from ncr_core.training import selection
from ncr_core.training.initializers import STARTS, als_start
from ncr_core.training.pretraining import (
    TrainingResult,
    estimated_seconds,
    learn_everything,
    train_model,
)
from ncr_core.training.selection import default_budget, select_recipe
from ncr_core.training.torchrun import TorchrunEngine
from ncr_core.training.validation import validation_ranks

HISTORY = ModelConfig(kind="nbpr", factors=8, users="history", windows=WINDOWS)
START = TrainConfig(start="next-item", epochs=0, loss="listwise", device="cpu")
TRAINED = replace(START, epochs=2, shared_negatives=64, learning_rate=1e-3, batch_size=256)
NEXT_ITEM = Recipe("start", HISTORY, START)
NBPR = Recipe("trained", HISTORY, TRAINED)
NEUPR = Recipe(
    "tower",
    ModelConfig(factors=4, layers=2),
    TrainConfig(epochs=1, fine_tune_epochs=1, start="spectral", device="cpu"),
)


def chain(n_users: int = 120, n_items: int = 40, length: int = 12) -> Split:
    """Users who walk on from item to item, each from a place of their own."""
    rng = np.random.default_rng(0)
    first = rng.integers(n_items, size=n_users)
    items = (first[:, None] + np.arange(length)) % n_items
    return leave_latest_out(
        Interactions.from_arrays(
            np.repeat(np.arange(n_users), length),
            items.ravel(),
            user_ids=[f"u{n}" for n in range(n_users)],
            item_ids=[f"i{n}" for n in range(n_items)],
        )
    )


class Clock:
    """Goes on by so many seconds each time it is asked."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_the_best_on_the_whole_catalogue_is_kept_with_what_was_tried() -> None:
    split = chain()
    selected = select_recipe(split, recipes=[NEUPR, NEXT_ITEM], device="cpu")
    assert selected.recipe.name == "start"  # the next item is what a walk tells
    _, ranks = validation_ranks(ModelRanks(selected.trained.model), split)
    tower, start = selected.tried
    assert start.ndcg == pytest.approx(ndcg(ranks, 10))
    assert start.ndcg is not None
    assert tower.ndcg is not None
    assert start.ndcg > 0.9 > tower.ndcg
    assert (start.chosen, tower.chosen) == (True, False)
    assert start.as_dict().keys() == {
        *("recipe", "ndcg", "hr", "standard_error", "seconds", "chosen", "reason"),
    }


@pytest.mark.parametrize(
    ("of_each", "chosen"),
    [
        ({"start": 0.30, "trained": 0.30, "tower": 0.30}, "tower"),
        ({"start": 0.30, "trained": 0.30, "tower": 0.10}, "trained"),
        ({"start": 0.50, "trained": 0.30, "tower": 0.40}, "start"),
    ],
)
def test_within_a_standard_error_the_papers_models_go_first(
    of_each: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The differences are the same for each user, so that their standard error is next to none."""
    order = iter(("start", "trained", "tower"))

    def measured(_: object, split: Split) -> tuple[np.ndarray, ...]:
        noise = np.linspace(0, 1e-6, 50)
        return np.arange(50), of_each[next(order)] + noise, np.ones(50)

    monkeypatch.setattr(selection, "_measure", measured)
    monkeypatch.setattr(selection, "_within", lambda recipe, *_: (recipe, None, None))
    trained = NBPR.with_(start="random")
    selected = select_recipe(chain(), recipes=[NEXT_ITEM, trained, NEUPR], device="cpu")
    assert selected.recipe.name == chosen


def test_a_training_that_only_made_its_start_worse_does_not_go_first() -> None:
    worse = replace(NEXT_ITEM.with_(epochs=1, learning_rate=0.5), name="trained")
    selected = select_recipe(chain(), recipes=[NEXT_ITEM, worse], device="cpu")
    start, trained = selected.tried
    assert trained.ndcg == start.ndcg  # it was left at its start
    assert selected.recipe.name == "start"


def test_a_recipe_whose_start_is_far_behind_is_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "_start", lambda *_: (0.1, None))
    selected = select_recipe(chain(), recipes=[NEXT_ITEM, NEUPR], device="cpu")
    start, tower = selected.tried
    assert start.chosen
    assert tower.ndcg is None
    assert tower.reason is not None
    assert "its start has NDCG@10" in tower.reason
    assert "less than half of the best" in tower.reason


def test_a_recipe_for_which_the_time_is_too_short_is_not_trained() -> None:
    selected = select_recipe(
        chain(), recipes=[NEXT_ITEM, NBPR], budget_seconds=1.0, device="cpu", clock=Clock(10.0)
    )
    assert selected.recipe.name == "start"
    assert selected.tried[1].reason == "of 1 s 0 s are left"


def test_where_time_is_short_there_are_fewer_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "estimated_seconds", lambda *_, **__: 90.0)
    twelve = NBPR.with_(epochs=12)
    epochs = []

    def train_counted(*args: Any, **start: Any) -> TrainingResult:
        result = train_model(*args, **start)
        epochs.append(len(result.history[0].loss))
        return result

    monkeypatch.setattr(selection, "train_model", train_counted)
    selected = select_recipe(
        chain(), recipes=[NEXT_ITEM, twelve], budget_seconds=60.0, device="cpu", clock=Clock(5.0)
    )
    # 35 of the 60 s are left, and 90 are for 12 epochs.
    assert epochs == [0, 4]
    assert selected.tried[1].ndcg is not None


def test_self_attention_is_not_trained_for_a_part_of_its_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "estimated_seconds", lambda *_, **__: 90.0)
    attention = NBPR.with_(epochs=12, attention_layers=1)
    selected = select_recipe(
        chain(), recipes=[NEXT_ITEM, attention], budget_seconds=60.0, device="cpu", clock=Clock(5.0)
    )
    assert selected.tried[1].reason == "its training takes about 90 s, and 35 s are left"
    selected = select_recipe(
        chain(), recipes=[NEXT_ITEM, attention], budget_seconds=600.0, device="cpu"
    )
    assert selected.tried[1].ndcg is not None


def test_no_start_is_made_for_a_training_whose_epochs_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "estimated_seconds", lambda *_, started: 90.0 if started else 0)
    monkeypatch.setattr(selection, "start_model", None)  # is not called
    monkeypatch.setattr(selection, "MIN_START_SHARE", 0.0)
    for recipe in (NBPR.with_(epochs=12, attention_layers=1), NEUPR):
        selected = select_recipe(
            chain(), recipes=[NEXT_ITEM, recipe], budget_seconds=60.0, device="cpu"
        )
        reason = selected.tried[1].reason
        assert reason is not None
        assert reason.startswith("its training takes about 90 s")


def test_among_equals_the_model_without_self_attention_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "_is_close", lambda best, other: True)
    monkeypatch.setattr(selection, "MIN_START_SHARE", 0.0)
    plain = NBPR.with_(start="spectral", learning_rate=2e-2)
    with_attention = plain.with_(attention_layers=1)
    chosen = [
        select_recipe(chain(), recipes=recipes, device="cpu", budget_seconds=600.0)
        for recipes in ([plain, with_attention], [with_attention, plain])
    ]
    assert all(each.trained.history[-1].best_epoch > 0 for each in chosen)
    assert [each.recipe.model.attention_layers for each in chosen] == [0, 0]


ALS = Recipe(
    "als",
    ModelConfig(kind="nbpr", factors=20),
    TrainConfig(start="als", epochs=2, negatives=2, device="cpu"),
)


@pytest.mark.parametrize(("estimate", "epochs"), [(0.0, 2), (1e9, 0)])
def test_an_als_start_is_made_once_and_trained_for_as_long_as_there_is_time(
    estimate: float, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, passes = [], []

    def train_counted(*args: Any, **start: Any) -> TrainingResult:
        result = train_model(*args, **start)
        passes.append(len(result.history[-1].loss))
        return result

    def counted(model: PairwiseRanker, train: Interactions, seed: int) -> None:
        starts.append(model.config.factors)
        als_start(model, train, seed)

    monkeypatch.setattr(selection, "train_model", train_counted)
    monkeypatch.setitem(STARTS, "als", counted)
    monkeypatch.setattr(selection, "MIN_START_SHARE", 0.0)
    monkeypatch.setattr(selection, "MAX_DENSE_ITEMS", 0)  # all data have many items
    monkeypatch.setattr(selection, "estimated_seconds", lambda *_, started: estimate + started)
    selected = select_recipe(chain(), recipes=[NEUPR, ALS], device="cpu")
    assert selected.tried[1].ndcg is not None
    assert starts == [20]
    assert passes[-1] == epochs


def test_an_als_start_alone_is_fitted_again_to_everything() -> None:
    split, alone = chain(), ALS.with_(epochs=0)
    model = learn_everything(
        alone, train_model(alone.model, alone.training, split), split, split.all_seen
    )
    nothing = np.full(split.train.n_users, -1)
    expected = train_model(alone.model, alone.training, Split(split.all_seen, nothing, nothing))
    assert model.get_parameter("items.weight").equal(expected.model.get_parameter("items.weight"))


def test_an_als_start_for_which_the_time_is_too_short_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "als_seconds", lambda *_: 400.0)
    monkeypatch.setitem(STARTS, "als", None)  # is not called
    selected = select_recipe(
        chain(), recipes=[NEXT_ITEM, ALS], budget_seconds=60.0, device="cpu", clock=Clock(5.0)
    )
    assert selected.tried[1].reason == "its start takes about 400 s, and 40 s are left"


def test_an_estimate_counts_the_starts_that_are_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def slow(model: PairwiseRanker, train: Interactions, seed: int) -> None:
        clock.now += 30.0

    monkeypatch.setitem(STARTS, "spectral", slow)
    split = chain()
    config = NEUPR.training
    assert estimated_seconds(NEUPR.model, config, split) == 60.0  # of both parts
    assert estimated_seconds(NEUPR.model, config, split, started=True) == 0.0
    assert estimated_seconds(NEUPR.model, replace(config, pretrain=False), split) == 30.0


def one_item_each() -> Split:
    users = np.arange(30)
    data = Interactions.from_arrays(
        users,
        users % 7,
        user_ids=[f"u{n}" for n in range(30)],
        item_ids=[f"i{n}" for n in range(7)],
    )
    nothing = np.full(30, -1)
    return Split(data, nothing, nothing)


def everybody_the_same() -> Split:
    data = Interactions.from_arrays(
        np.repeat(np.arange(20), 6),
        np.tile(np.arange(6), 20),
        user_ids=[f"u{n}" for n in range(20)],
        item_ids=[f"i{n}" for n in range(10)],
    )
    return leave_latest_out(data)


@pytest.mark.parametrize(
    "data",
    [
        one_item_each,
        everybody_the_same,
        lambda: chain(50, 10, 5),
        lambda: chain(5, 12, 4),
        lambda: chain(30, 15, 3),
    ],
    ids=["one item each", "everybody the same", "50 users of 10 items", "5 users", "3 items each"],
)
@pytest.mark.slow
def test_small_and_odd_data_end_with_a_model(data: Callable[[], Split]) -> None:
    split = data()
    selected = select_recipe(split, device="cpu")
    assert sum(each.chosen for each in selected.tried) == 1
    assert [each.recipe for each in selected.tried] == [each.name for each in auto_recipes(1, 1, 0)]
    ranks = ModelRanks(selected.trained.model).rank(np.array([0]), np.arange(5)[None], 5)
    assert sorted(ranks[0].tolist()) == list(range(5))


def test_no_recipe_that_can_be_trained_is_the_reason_of_the_last_one() -> None:
    data = Interactions.from_arrays(
        np.zeros(3, dtype=np.int64), np.arange(3), user_ids=["u"], item_ids=["a", "b", "c"]
    )
    with pytest.raises(DataError, match="1 user is too few"):
        select_recipe(Split(data, np.full(1, -1), np.full(1, -1)), device="cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_a_recipe_that_exceeds_the_memory_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(model: ModelConfig, training: TrainConfig, *rest: Any, **more: Any) -> TrainingResult:
        if training.epochs:
            raise error
        return train_model(model, training, *rest, **more)

    monkeypatch.setattr(selection, "train_model", train)
    selected = select_recipe(chain(), recipes=[NEXT_ITEM, NBPR], device="cpu")
    assert selected.recipe.name == "start"
    assert selected.tried[1].reason == "there is too little memory for it"
    assert error.__traceback__ is None  # its frames would hold the model and its batches
    with pytest.raises(type(error)):
        select_recipe(chain(), recipes=[NBPR], device="cpu")


def test_a_fault_of_the_program_ends_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(model: ModelConfig, training: TrainConfig, *rest: Any, **more: Any) -> TrainingResult:
        if training.epochs:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)")
        return train_model(model, training, *rest, **more)

    monkeypatch.setattr(selection, "train_model", train)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        select_recipe(chain(), recipes=[NEXT_ITEM, NBPR], device="cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_has_recipes_of_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def recipes(
        users: int, items: int, interactions: int, on_gpu: bool, remembered: int | None
    ) -> tuple[Recipe, ...]:
        asked.append(on_gpu)
        return (NEXT_ITEM,)

    monkeypatch.setattr(selection, "resolve_device", lambda name: torch.device(device))
    monkeypatch.setattr(selection, "auto_recipes", recipes)
    select_recipe(chain(), device="cpu")
    assert asked == [device == "cuda"]


def test_the_budget_grows_with_the_data() -> None:
    data = chain(n_users=300, n_items=200, length=12).all_seen  # 3,600 interactions
    assert default_budget(data) == pytest.approx(60.0 + 0.18 + 0.25)
    many = replace(data, item_ids=[str(n) for n in range(500_000)])
    assert default_budget(many) == pytest.approx(60.0 + 0.18 + 60.0)


@pytest.mark.parametrize(
    ("users", "items", "interactions", "closed_form", "trained", "als"),
    [
        (1_000, 1_000, 300_000, 1_024, 256, 128),
        (1_000, 1_000, 300_001, 1_000, 128, 128),
        (1_000, 8_000, 10**6, 1_024, 128, 128),
        (1_000, 8_001, 10**6, 80, 80, 128),
        (30_000, 40_000, 800_000, 100, 100, 128),
        (1_000, 500_000, 10**6, 66, 66, 66),
        (1_000, 500_000, 10**7, 32, 32, 66),
        (250_000, 250_000, 10**7, 32, 32, 72),
        (10**8, 1_000, 10**9, 8, 8, 8),
    ],
)
def test_the_factors_go_by_the_size_of_the_data(
    users: int, items: int, interactions: int, closed_form: int, trained: int, als: int
) -> None:
    recipes = {each.name: each for each in auto_recipes(users, items, interactions)}
    names = ("next-item", "next-item-nbpr", "als-nbpr")
    assert [recipes[name].model.factors for name in names] == [closed_form, trained, als]


CLOSED, ATTENTION, TRAINED = "next-item", "next-item-attention", "next-item-nbpr"
TOWER = "spectral-neupr"


@pytest.mark.parametrize(
    ("items", "interactions", "order"),
    [
        (40_000, 300_001, [CLOSED, "als-nbpr", TRAINED, ATTENTION, TOWER]),
        (8_000, 300_001, [CLOSED, TRAINED, ATTENTION, "als-nbpr", TOWER]),
        (40_000, 300_000, [CLOSED, TRAINED, "als-nbpr", TOWER]),
    ],
    ids=["many items", "few items", "few interactions"],
)
def test_the_size_of_the_data_says_what_is_tried_and_in_what_order(
    items: int, interactions: int, order: list[str]
) -> None:
    assert [each.name for each in auto_recipes(1_000, items, interactions)] == order
    more = [] if interactions <= 300_000 else ["next-item-two-layer-attention"]
    on_gpu = auto_recipes(1_000, items, interactions, on_gpu=True)
    assert [each.name for each in on_gpu] == [*order, *more]


def test_progress_names_the_recipe() -> None:
    phases: list[str] = []
    select_recipe(
        chain(),
        recipes=[NEXT_ITEM, NBPR],
        device="cpu",
        on_progress=lambda progress: phases.append(progress.phase),
    )
    assert set(phases) == {"trained: train nbpr"}


@pytest.mark.parametrize("much", [True, False])
def test_what_was_held_out_is_learned(much: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncr_core.training.pretraining.MIN_REFIT_SHARE", 0.0 if much else 1.0)
    split = chain()
    everything = split.all_seen
    trained = train_model(NBPR.model, NBPR.training, split)
    before = trained.model.get_parameter("items.weight").detach().clone()
    vectors = trained.model.user_vectors(torch.arange(120)).detach().clone()
    model = learn_everything(
        NBPR, TrainingResult(trained.model, trained.history), split, everything
    )
    assert before.equal(model.get_parameter("items.weight")) != much
    assert not vectors.equal(model.user_vectors(torch.arange(120)))


def test_a_model_that_cannot_be_sharded_is_not_tried(
    split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncr_core.training.pretraining.start_model", lambda *_: 1 / 0)
    engine = TorchrunEngine(2, "sharded", tmp_path)
    with pytest.raises(ConfigError, match=r"^tables sharded by rows are for nbpr and dncr, not "):
        select_recipe(split, recipes=[RECIPES["spectral-neupr"]], device="cpu", run_phase=engine)
    with pytest.raises(ZeroDivisionError):  # of the first recipe
        select_recipe(split, device="cpu", run_phase=engine)


def test_a_refused_model_does_not_hide_why_the_others_failed(split: Split, tmp_path: Path) -> None:
    one = np.zeros(1, np.int64)
    alone = Split(split.train.of_rows(one), split.validation[one], split.test[one])
    engine = TorchrunEngine(2, "sharded", tmp_path)
    with pytest.raises(DataError, match="1 user is too few"):
        select_recipe(alone, device="cpu", run_phase=engine)
