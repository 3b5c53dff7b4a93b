"""Rankers and trainings on a GPU give what they give on a CPU.

Without a GPU the same tests run on the CPU, where they compare a model with a copy of itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data import Interactions, Split
from ncr_core.fold_in import Evidence
from ncr_core.inference.engine import InferenceEngine, RankedItem, RerankRequest
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import PAD, ExactRanker, algorithm1
from ncr_core.ranking.backends.triton_ranker import EAGER_PASSES, TritonRanker
from ncr_core.train_config import TrainConfig
from ncr_core.training import train_model
from ncr_core.training.batches import Batches, NegativeSampler, Rows, SharedRows
from ncr_core.training.captured_gradients import CapturedGradients
from ncr_core.training.losses import bce_loss
from ncr_core.training.trainer import Adam, make_batches, train_epoch
from tests.ncr_core.conftest import wild_model

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NEAR = 1e-4  # float32 of two devices may differ by this much


def on_device(model: PairwiseRanker) -> PairwiseRanker:
    return copy.deepcopy(model).to(DEVICE)


def lists_of(ranked: torch.Tensor) -> list[list[int]]:
    return [[item for item in row if item != PAD] for row in ranked.tolist()]


def margins_of(ranker: ExactRanker, users: torch.Tensor, n_items: int) -> torch.Tensor:
    """(B, n_items, n_items) margins of every item over every other one, on the CPU."""
    items = torch.arange(n_items)
    i, j = torch.cartesian_prod(items, items).T.unsqueeze(1)
    every = [ranker.compare(user.unsqueeze(0), i, j).view(n_items, n_items).cpu() for user in users]
    return torch.stack(every)


def check_lists(model: PairwiseRanker, candidates: torch.Tensor, k: int) -> int:
    """The device's lists are Algorithm 1's by the device's margins, and those of the CPU.

    Returns how many lists had no margin that float32 of two devices could decide differently.
    """
    users = model.user_vectors(torch.arange(len(candidates)))
    other = on_device(model)
    ranker = ExactRanker(other)
    ranked = lists_of(ranker.rank(users.to(DEVICE), candidates, k))
    margins = margins_of(ranker, users.to(DEVICE), model.n_items)
    of_cpu = margins_of(ExactRanker(model), users, model.n_items)
    assert torch.allclose(margins, of_cpu, rtol=NEAR, atol=NEAR)
    expected = lists_of(ExactRanker(model).rank(users, candidates, k))
    decided = 0
    for row, items in enumerate(candidates.tolist()):
        own = [item for item in items if item != PAD]
        won = (margins[row] > 0).tolist()
        literal = algorithm1(own, lambda i, j: won[i][j], k)  # noqa: B023
        assert ranked[row] == literal
        pairs = of_cpu[row][own][:, own].abs()
        differ = ~torch.eye(len(own), dtype=torch.bool)
        if len(own) and bool((pairs[differ] > NEAR).all()):
            decided += 1
            assert ranked[row] == expected[row]
        elif not HAS_GPU:
            assert ranked[row] == expected[row]
    return decided


def test_every_models_lists(config: ModelConfig) -> None:
    """With twins, which tie, and lists of every length."""
    model = wild_model(config, 30, 25)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name.startswith("items"):
                table[22:] = table[:3]
    generator = torch.Generator().manual_seed(1)
    candidates = torch.stack([torch.randperm(25, generator=generator)[:18] for _ in range(30)])
    lengths = torch.randint(0, 19, (30, 1), generator=generator)
    assert check_lists(model, candidates.masked_fill(torch.arange(18) >= lengths, PAD), 12) > 3


@settings(max_examples=25 if HAS_GPU else 8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(2, 5),
    factors=st.integers(1, 9),
    width=st.integers(1, 30),
    k=st.integers(1, 32),
    activation=st.sampled_from(["tanh", "relu"]),
    shared=st.booleans(),
    scale=st.sampled_from([1e-3, 0.3, 1.0]),
)
def test_lists_of_random_towers(
    seed: int,
    layers: int,
    factors: int,
    width: int,
    k: int,
    activation: Literal["tanh", "relu"],
    shared: bool,
    scale: float,
) -> None:
    kind: Literal["neupr", "dncr"] = "neupr" if shared or seed % 2 else "dncr"
    config = ModelConfig(
        kind=kind, factors=factors, layers=layers, activation=activation, shared_embeddings=shared
    )
    torch.manual_seed(seed)
    model = build_model(config, 3, 40).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=scale)
    for name, table in model.named_parameters():
        if name.startswith("items"):
            table[35:] = table[:5]
    candidates = torch.stack([torch.randperm(40)[:width] for _ in range(3)])
    lengths = torch.randint(0, width + 1, (3, 1))
    check_lists(model, candidates.masked_fill(torch.arange(width) >= lengths, PAD), k)


def test_an_order_does_not_depend_on_the_batch(config: ModelConfig) -> None:
    model = on_device(wild_model(config, 40, 60))
    ranker = ExactRanker(model)
    users = model.user_vectors(torch.arange(40, device=DEVICE))
    candidates = torch.stack([torch.randperm(60)[:50] for _ in range(40)])
    together = ranker.rank(users, candidates, 10)
    for user in range(40):
        one = slice(user, user + 1)
        assert ranker.rank(users[one], candidates[one], 10).equal(together[one])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_items", [200, 5_000])
def test_the_best_of_the_catalogue(bias: bool, n_items: int) -> None:
    """With twins, more of them than are looked at twice, and few allowed items."""
    config = ModelConfig(kind="nbpr", factors=4, item_bias=bias)
    model = wild_model(config, 12, n_items)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name.startswith("items") or name == "bias":
                table[100:160] = table[7]
    users = model.user_vectors(torch.arange(12))
    order, allowed = torch.randperm(n_items), torch.rand(12, n_items) < 0.7
    allowed[3], allowed[4] = False, torch.arange(n_items) < 4
    expected, found = (
        ExactRanker(of).top(users, 10, allowed, order) for of in (model, on_device(model))
    )
    assert found.cpu().equal(expected)


def test_items_that_there_are_not_are_an_error(config: ModelConfig) -> None:
    """Found before they reach a GPU, which would read what is not the model's."""
    model = on_device(wild_model(config, 3, 10))
    users = model.user_vectors(torch.arange(3, device=DEVICE))
    with pytest.raises(IndexError):
        ExactRanker(model).rank(users, torch.tensor([[1, 2], [10, 3], [4, 5]]), 2)


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that torch can use")
@pytest.mark.parametrize(("factors", "layers"), [(8, 3), (16, 3), (64, 3)])
def test_towers_take_the_kernel(factors: int, layers: int) -> None:
    model = wild_model(ModelConfig(kind="neupr", factors=factors, layers=layers), 100, 1_500)
    users = model.user_vectors(torch.arange(100))
    candidates = torch.stack([torch.randperm(1_500)[:1_000] for _ in range(100)])
    expected = ExactRanker(model).rank(users, candidates, 10)
    ranker = ExactRanker(on_device(model))
    assert isinstance(ranker.backend, TritonRanker)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(2 * EAGER_PASSES):  # the later ones by graphs
            some = slice(turn % 7, 72 + turn % 28)
            ranked = ranker.rank(users[some].to(DEVICE), candidates[some], 10)
            assert ranked.cpu().equal(expected[some])
    assert len(ranker.backend._graphs) == 1


@pytest.mark.parametrize("shared", [0, 64])
def test_a_step_of_every_model(config: ModelConfig, shared: int, split: Split) -> None:
    """The same rows of one epoch give the same parameters."""
    model = build_model(config, split.train.n_users, split.train.n_items)
    if shared and not model.shares_negatives:
        pytest.skip("shared negatives are not for this model")
    training = TrainConfig(
        device="cpu", batch_size=512, shared_negatives=shared, loss="listwise", dropout=0.0
    )
    rows = list(make_batches(model, split.train, training, torch.device("cpu")))[:2]
    if model.config.attention_layers:
        pytest.skip("each device draws dropout of its own")
    losses = []
    states = []
    for device in (torch.device("cpu"), DEVICE):
        trained = copy.deepcopy(model).to(device)
        moved = [_to(batch, device) for batch in rows]
        adam = Adam(trained, training, 1e-2, None)
        losses.append(train_epoch(trained, moved, split.train.n_items, training, adam))
        states.append({name: value.cpu() for name, value in trained.state_dict().items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, value in states[0].items():
        # Adam's first steps are as long whatever the gradient: the smallest may turn.
        assert ((states[1][name] - value).abs() > 1e-3).float().mean() < 0.01, name


@pytest.mark.parametrize("kind", ["nbpr", "dncr", "neupr"])
def test_a_graph_gives_the_gradients_of_single_steps(
    kind: Literal["nbpr", "dncr", "neupr"], split: Split
) -> None:
    """Also for a last batch of another size, and after one, with parameters that change."""
    config = ModelConfig(kind=kind, factors=4)
    model = build_model(config, split.train.n_users, split.train.n_items).to(DEVICE)

    def direct(rows: Rows | SharedRows) -> torch.Tensor:
        vectors = model.training_vectors(rows.users, rows.histories)
        loss = bce_loss(*model.pair_logits(vectors, rows.items, rows.negatives))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    captured = CapturedGradients(model)
    compute = captured.of(direct)
    batches = make_batches(model, split.train, TrainConfig(batch_size=256), DEVICE)
    for rows in [*batches, *batches]:
        expected: list[tuple[float, list[torch.Tensor]]] = []
        for function in (direct, compute):
            model.zero_grad()
            loss = float(function(rows))
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            expected.append((loss, gradients))
        assert expected[1][0] == pytest.approx(expected[0][0], rel=1e-5)
        for single, of_graph in zip(expected[0][1], expected[1][1], strict=True):
            assert torch.allclose(of_graph, single, rtol=1e-3, atol=1e-6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    assert (captured._graph is not None) == HAS_GPU


def test_an_epoch_of_batches(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each positive comes once, with items that the user has not had.

    Three batches are drawn at once, and fewer at the end.
    """
    draws: list[int] = []
    sample = NegativeSampler.sample

    def counted(sampler: NegativeSampler, users: torch.Tensor, n: int) -> torch.Tensor:
        draws.append(len(users))
        return sample(sampler, users, n)

    monkeypatch.setattr(NegativeSampler, "sample", counted)
    monkeypatch.setattr(Batches, "drawn_at_once", lambda batches: 3)
    model = build_model(
        ModelConfig(kind="nbpr", factors=4), split.train.n_users, split.train.n_items
    )
    config = TrainConfig(batch_size=100, negatives=4)
    batches = make_batches(model, split.train, config, DEVICE)
    for _ in range(2):
        draws.clear()
        epoch = list(batches)
        assert draws[:-1] == [300] * (len(draws) - 1)
        assert sum(draws) == len(split.train.items)
        assert [len(rows.items) for rows in epoch[:-1]] == [100] * (len(batches) - 1)
        positives = [
            (user, item)
            for rows in epoch
            for user, item in zip(rows.users.tolist(), rows.items.tolist(), strict=True)
        ]
        own = zip(split.train.users.tolist(), split.train.items.tolist(), strict=True)
        assert sorted(positives) == sorted(own)
        for rows in epoch:
            assert isinstance(rows, Rows)
            assert rows.negatives.shape == (len(rows.items), 4)
            users = rows.users.cpu().numpy()[:, None].repeat(4, 1)
            assert not split.train.contains(users, rows.negatives.cpu().numpy()).any()


def _to(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: _to(field, device) for name, field in vars(value).items()}
        return type(value)(**fields)
    return value


TRAININGS: list[tuple[str, ModelConfig, TrainConfig]] = [
    ("nbpr", ModelConfig(kind="nbpr", factors=8), TrainConfig(epochs=3)),
    ("neupr", ModelConfig(kind="neupr", factors=4), TrainConfig(epochs=2, start="spectral")),
    (
        "attention",
        ModelConfig(
            kind="nbpr", factors=8, users="history", windows=(1, 4, 0), attention_layers=1,
            by_length=True, by_gap=True,
        ),
        TrainConfig(epochs=3, start="next-item", loss="listwise", shared_negatives=64),
    ),
    ("als", ModelConfig(kind="nbpr", factors=8), TrainConfig(epochs=2, start="als")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "training"), [pytest.param(*rest, id=name) for name, *rest in TRAININGS]
)
def test_a_training_and_what_is_made_of_it(
    model: ModelConfig,
    training: TrainConfig,
    synthetic: Interactions,
    split: Split,
    tmp_path: Path,
) -> None:
    """A model of the device is as good as one of the CPU, and a server on a CPU can load it."""
    figures = []
    for device in ("cpu", str(DEVICE)):
        config = TrainConfig(**{**vars(training), "device": device, "validation": "full"})
        trained = train_model(model, config, split)
        best = trained.history[-1].best
        assert best is not None
        figures.append(best[0])
    assert figures[1] == pytest.approx(figures[0], abs=0.05)
    save_checkpoint(
        tmp_path / "model",
        trained.model,
        user_ids=synthetic.user_ids,
        item_ids=synthetic.item_ids,
        item_counts=synthetic.item_counts(),
    )
    engines = [
        InferenceEngine(load_checkpoint(tmp_path / "model", str(device)), 40)
        for device in ("cpu", DEVICE)
    ]
    for answer in ANSWERS:
        of_cpu, of_device = (answer(engine) for engine in engines)
        assert len(of_cpu) == len(of_device)
        for one, other in zip(of_cpu, of_device, strict=True):
            assert [item.row for item in one] == [item.row for item in other]
            scores = [[item.score for item in items] for items in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
            reasons = [[reason.row for item in items for reason in item.because][:1]
                       for items in (one, other)]  # fmt: skip
            assert reasons[0] == reasons[1]


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that torch can use")
def test_a_pass_that_exceeds_the_memory(tmp_path: Path) -> None:
    """A pass continues in halves, and one request on the CPU; the lists stay the same."""
    users, items = 1_000, 40_000
    model = build_model(ModelConfig(kind="nbpr", factors=8), users, items)
    save_checkpoint(
        tmp_path / "model",
        model,
        user_ids=[str(row) for row in range(users)],
        item_ids=[str(row) for row in range(items)],
        item_counts=np.arange(items, 0, -1),
    )
    fallbacks: list[str] = []
    checkpoint = load_checkpoint(tmp_path / "model", str(DEVICE))
    engine = InferenceEngine(checkpoint, 40, on_fallback=fallbacks.append)
    everything = ItemFilter(np.ones(items, dtype=np.bool_))
    requests = [RankRequest(UserState(row), 8, everything) for row in range(users)]

    def lists(some: list[RankRequest]) -> list[list[int]]:
        return [[item.row for item in ranked] for ranked in engine.rank(some)]

    def limit(more: float) -> None:
        """Leaves this process so many bytes beside those that it holds."""
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)

    expected = lists(requests)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert lists(requests) == expected
    needed = torch.cuda.max_memory_allocated() - held
    assert fallbacks == []
    taken: list[torch.Tensor] = []
    try:
        limit(0.75 * needed)
        assert lists(requests) == expected
        assert set(fallbacks) == {"half"}
        limit(0.0)
        with suppress(torch.OutOfMemoryError):  # takes what it holds and does not use
            taken.extend(torch.empty(2**16, device=DEVICE) for _ in range(2**18))
        assert lists(requests[:2]) == expected[:2]
        assert fallbacks[-3:] == ["half", "cpu", "cpu"]
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    fallbacks.clear()
    assert lists(requests) == expected
    assert fallbacks == []


def _requests(engine: InferenceEngine, **more: object) -> list[RankRequest]:
    everything = ItemFilter(np.ones(engine.n_items, dtype=np.bool_))
    own = Evidence(np.array([3, 9, 27]))
    states = [
        UserState(0),
        UserState(1, own),
        UserState(None, own),
        UserState(None, Evidence(np.array([5]), disliked=np.array([6, 7]))),
        UserState(2, gap_class=engine.gap_class(1e6)),
        UserState(),
    ]
    return [RankRequest(state, 8, everything, **more) for state in states]  # type: ignore[arg-type]


Answer = Callable[[InferenceEngine], list[list[RankedItem]]]
ANSWERS: list[Answer] = [
    lambda engine: engine.rank(_requests(engine)),
    lambda engine: engine.rank(_requests(engine, diversity=0.5)),
    lambda engine: engine.rank(_requests(engine, boost=np.linspace(0.0, 0.5, engine.n_items))),
    lambda engine: engine.rank(_requests(engine, explain_by=Evidence(np.array([3, 9, 27])))),
    lambda engine: engine.rerank(
        [RerankRequest(UserState(0), np.arange(20)), RerankRequest(UserState(), np.arange(9))]
    ),
]
