"""A checkpoint, and the copy that was evaluated, come back as they were, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ncr_core import checkpoint
from ncr_core.checkpoint import (
    ALIGNMENT,
    load_checkpoint,
    load_evaluation_snapshot,
    save_checkpoint,
)
from ncr_core.data import Interactions, Split, leave_latest_out
from ncr_core.errors import CheckpointError, CheckpointReadError, ConfigError
from ncr_core.evaluation.protocols import ModelRanks, evaluate_sampled, sampled_candidates
from ncr_core.manifest import read_manifest
from ncr_core.models import ModelConfig
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.pretraining import evaluation_snapshot
from ncr_core.training.trainer import learn_held_out
from ncr_core.training.warm_start import (
    StartingPoint,
    evaluated_starting_point,
    grown_model,
    train_warm,
)
from tests.ncr_core.conftest import wild_model

USERS, ITEMS = ["ann", "böb/ 🙂"], ["x", "y\n", "z"]


def saved(folder: Path, config: ModelConfig | None = None, poison: float | None = None) -> Path:
    model = wild_model(config or ModelConfig(kind="neupr", factors=2), 2, 3)
    if poison is not None:
        model.get_parameter("items_d.weight").data[0, 0] = poison
    path = folder / "not" / "there" / "yet"
    save_checkpoint(
        path,
        model,
        user_ids=USERS,
        item_ids=ITEMS,
        item_counts=np.array([5, 1, 3]),
        metrics={"hr": 0.5},
    )
    return path


def test_round_trip_of_every_model(tmp_path: Path, config: ModelConfig) -> None:
    path = saved(tmp_path, config)
    loaded = load_checkpoint(path)
    original = wild_model(config, 2, 3)
    assert loaded.model.config == config
    for (name, a), (other, b) in zip(
        original.state_dict().items(), loaded.model.state_dict().items(), strict=True
    ):
        assert name == other
        assert a.equal(b)
    assert (loaded.user_ids, loaded.item_ids) == (USERS, ITEMS)
    assert loaded.item_counts.tolist() == [5, 1, 3]
    assert sorted(loaded.reference_items) == [0, 1, 2]
    assert loaded.manifest["metrics"] == {"hr": 0.5}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not list(path.parent.glob(".*"))  # no staging folder is left


@pytest.mark.parametrize("at_once", [1, 2, 3, 2**16])
def test_ids_are_one_object_of_json_however_many_are_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(checkpoint, "IDS_AT_ONCE", at_once)
    content = (saved(tmp_path) / "ids.json").read_bytes()
    assert content == json.dumps({"users": USERS, "items": ITEMS}).encode()


@pytest.mark.parametrize("name", ["model.safetensors", "ids.json", "manifest.json"])
def test_a_flipped_byte_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    good = (path / name).read_bytes()
    for at in np.linspace(0, len(good) - 1, 25).astype(int):
        (path / name).write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        if name == "manifest.json":
            # The manifest has no sum over itself here (the registry holds it): what it says of
            # the model must still be checked, never crash.
            try:
                load_checkpoint(path)
            except CheckpointError:
                pass
        else:
            with pytest.raises(CheckpointError, match="damaged"):
                load_checkpoint(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no manifest"):
        load_checkpoint(tmp_path)
    path = saved(tmp_path)
    (path / "ids.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read") as gone:
        load_checkpoint(path)
    assert not isinstance(gone.value, CheckpointReadError)
    (path / "ids.json").mkdir()  # there, and not to be read
    with pytest.raises(CheckpointReadError, match="cannot be read"):
        load_checkpoint(path)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        load_checkpoint(saved(tmp_path, poison=float("nan")))


def test_a_manifest_of_another_model_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = read_manifest(path)
    manifest["model"]["factors"] = 4
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(path)


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        saved(tmp_path)
    assert (path / "manifest.json").read_bytes() == before


def test_ranking_survives_the_round_trip(tmp_path: Path) -> None:
    from ncr_core.ranking import ExactRanker

    loaded = load_checkpoint(saved(tmp_path)).model
    original = wild_model(ModelConfig(kind="neupr", factors=2), 2, 3)
    candidates = torch.tensor([[0, 1, 2], [2, 1, 0]])
    users = torch.arange(2)
    a, b = (ExactRanker(m).rank(m.user_vectors(users), candidates, 3) for m in (original, loaded))
    assert a.equal(b)


def test_the_temperature_comes_with_the_model_and_is_1_where_it_was_never_fitted(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path)
    assert load_checkpoint(path).temperature == 1.0
    manifest = read_manifest(path)
    del manifest["calibration"]  # as older versions wrote it
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert load_checkpoint(path).temperature == 1.0
    manifest["calibration"] = {"temperature": 1.25, "ece": 0.01}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert load_checkpoint(path).temperature == 1.25
    for wrong in (0, -1.0, "hot", None, [], float("nan"), float("inf"), 10**400):
        manifest["calibration"] = {"temperature": wrong}
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="is not the temperature"):
            load_checkpoint(path)
    manifest["calibration"] = [1.25]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is not the temperature"):
        load_checkpoint(path)


SIX_USERS, FIVE_ITEMS = [f"u{n}" for n in range(6)], [f"i{n}" for n in range(5)]
ROWS, HELD_OUT = np.array([1, 4]), np.array([[3, 2], [-1, -1]])


def saved_with_snapshot(folder: Path, config: ModelConfig) -> Path:
    before = wild_model(config, 6, 5, seed=1)
    path = folder / "checkpoint"
    save_checkpoint(
        path,
        wild_model(config, 6, 5, seed=2),
        user_ids=SIX_USERS,
        item_ids=FIVE_ITEMS,
        item_counts=np.arange(5),
        evaluated=evaluation_snapshot(before, ROWS, HELD_OUT),
    )
    return path


@pytest.mark.parametrize(("given", "found"), [(None, 6), (9, 9)])
def test_a_model_may_have_been_trained_on_more_users(
    tmp_path: Path, given: int | None, found: int
) -> None:
    path = tmp_path / "v1"
    config = ModelConfig(kind="nbpr", factors=2, users="history")
    save_checkpoint(
        path,
        wild_model(config, 6, 5),
        user_ids=SIX_USERS,
        item_ids=FIVE_ITEMS,
        item_counts=np.arange(5),
        trained_users=given,
    )
    checkpoint = load_checkpoint(path)
    assert (len(checkpoint.user_ids), checkpoint.trained_users) == (6, found)
    # A checkpoint of an older version does not say it.
    del checkpoint.manifest["trained_users"]
    assert checkpoint.trained_users == 6
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"trained_users": "many"}))
    with pytest.raises(CheckpointError, match="incomplete"):
        load_checkpoint(path)


def test_the_copy_of_every_model_has_its_users_alone(tmp_path: Path, config: ModelConfig) -> None:
    path = saved_with_snapshot(tmp_path, config)
    found = load_evaluation_snapshot(path)
    assert found is not None
    before, served = wild_model(config, 6, 5, seed=1), load_checkpoint(path).model
    assert found.rows.tolist() == [1, 4]
    assert found.held_out.tolist() == [[3, 2], [-1, -1]]
    assert found.model.n_users == 2
    both = torch.arange(2)
    theirs = before.user_vectors(torch.tensor([1, 4]))
    assert found.model.user_vectors(both).equal(theirs)
    i, j = torch.tensor([0, 3]), torch.tensor([2, 1])
    assert found.model.logits(theirs, i, j).equal(before.logits(theirs, i, j))
    assert not found.model.logits(theirs, i, j).equal(served.logits(theirs, i, j))


def test_the_weights_of_a_loaded_model_are_aligned(tmp_path: Path, config: ModelConfig) -> None:
    """A product with a vector may round by its address, so that scores would change by a save."""
    path = saved_with_snapshot(tmp_path, config)
    copy = load_evaluation_snapshot(path)
    assert copy is not None
    for model in (load_checkpoint(path).model, copy.model):
        assert {value.data_ptr() % ALIGNMENT for value in model.state_dict().values()} == {0}


def test_the_base_for_a_model_that_is_measured(tmp_path: Path, config: ModelConfig) -> None:
    path = saved_with_snapshot(tmp_path, config)
    checkpoint, evaluated = load_checkpoint(path), load_evaluation_snapshot(path)
    assert evaluated is not None
    base = evaluated_starting_point(checkpoint.model, evaluated, SIX_USERS, FIVE_ITEMS).model
    every = torch.arange(6)
    before, served = wild_model(config, 6, 5, seed=1), checkpoint.model
    of_copy = torch.tensor([False, True, False, False, True, False])
    vectors = base.user_vectors(every)
    assert vectors[of_copy].equal(before.user_vectors(every)[of_copy])
    assert vectors[~of_copy].equal(served.user_vectors(every)[~of_copy])
    i, j = every % 5, (every + 2) % 5
    assert base.logits(vectors, i, j).equal(before.logits(vectors, i, j))


def test_a_checkpoint_without_a_copy(tmp_path: Path) -> None:
    """As every one was written before."""
    path = tmp_path / "checkpoint"
    model = wild_model(ModelConfig(kind="nbpr", factors=2), 6, 5)
    save_checkpoint(path, model, user_ids=SIX_USERS, item_ids=FIVE_ITEMS, item_counts=np.arange(5))
    assert load_evaluation_snapshot(path) is None
    assert load_checkpoint(path).user_ids == SIX_USERS


def test_a_damaged_copy_is_refused_and_the_model_is_not(tmp_path: Path) -> None:
    path = saved_with_snapshot(tmp_path, ModelConfig(kind="neupr", factors=2))
    file = path / "evaluated.safetensors"
    good = file.read_bytes()
    for at in np.linspace(0, len(good) - 1, 25).astype(int):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            load_evaluation_snapshot(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_evaluation_snapshot(path)
    load_checkpoint(path)


@pytest.mark.parametrize(
    ("rows", "held_out"),
    [([4, 1], [[0, 0], [0, 0]]), ([1, 6], [[0, 0], [0, 0]]), ([1, 4], [[5, 0], [0, 0]]),
     ([1, 4], [[0, -2], [0, 0]]), ([1, 4], [[0, 0]])],
)  # fmt: skip
def test_a_copy_that_does_not_fit_its_checkpoint(
    tmp_path: Path, rows: list[int], held_out: list[list[int]]
) -> None:
    config = ModelConfig(kind="nbpr", factors=2)
    path = tmp_path / "checkpoint"
    bigger = wild_model(config, 7, 5)
    save_checkpoint(
        path,
        wild_model(config, 6, 5),
        user_ids=SIX_USERS,
        item_ids=FIVE_ITEMS,
        item_counts=np.arange(5),
        evaluated=evaluation_snapshot(bigger, np.array(rows), np.array(held_out)),
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        load_evaluation_snapshot(path)


def test_a_copy_of_another_model(tmp_path: Path) -> None:
    path = saved_with_snapshot(tmp_path, ModelConfig(kind="neupr", factors=2))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["model"]["factors"] = 3
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not fit"):
        load_evaluation_snapshot(path)


@pytest.mark.slow
def test_a_warm_start_matches_users_and_items_by_their_ids(config: ModelConfig) -> None:
    base = StartingPoint(wild_model(config, 3, 4, seed=1), ["a", "b", "c"], ["w", "x", "y", "z"])
    rows = np.array([[0, 0], [0, 1], [0, 2], [1, 2], [1, 3], [1, 0], [2, 1], [2, 2], [2, 4]])
    every = Interactions.from_arrays(
        rows[:, 0], rows[:, 1], user_ids=["c", "new", "a"], item_ids=["z", "fresh", "y", "w", "v"]
    )
    model = grown_model(base, Split(every, np.full(3, -1), np.full(3, -1)), seed=0)
    theirs = base.model
    old = torch.tensor([0, 2]), torch.tensor([2, 0])
    vectors = model.user_vectors(old[0]).detach()
    if config.users == "free":  # a pooled one is made anew of what users did
        assert vectors.equal(theirs.user_vectors(old[1]))
    known, in_base = torch.tensor([0, 2, 3]), torch.tensor([3, 2, 0])
    assert model.item_vectors(known).equal(theirs.item_vectors(in_base))
    ours = model.logits(vectors, known[:2], known[1:])
    assert ours.equal(theirs.logits(vectors, in_base[:2], in_base[1:]))
    fresh = model.item_vectors(torch.tensor([1]))
    assert fresh[0].allclose(theirs.item_vectors(in_base).mean(0), atol=1e-6)
    new = model.user_vectors(torch.tensor([1]))
    assert bool(new.isfinite().all())
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in type(model)(config, 1, 1).parameters()
    ]


def test_a_base_that_knows_nobody() -> None:
    base = StartingPoint(wild_model(ModelConfig(kind="nbpr", factors=2), 1, 2), ["x"], ["y", "z"])
    every = Interactions.from_arrays(np.array([0]), np.array([0]), user_ids=["a"], item_ids=["y"])
    with pytest.raises(ConfigError, match="knows none"):
        grown_model(base, Split(every, np.full(1, -1), np.full(1, -1)), seed=0)


@pytest.mark.slow
def test_a_warm_start_reaches_the_same_ndcg_in_fewer_epochs(synthetic: Interactions) -> None:
    """A fifth of everyone's events come in after the first training, and new users with them."""
    lengths = np.diff(synthetic.indptr)
    place = np.arange(synthetic.nnz) - np.repeat(synthetic.indptr[:-1], lengths)
    before = synthetic.select((place < 0.8 * np.repeat(lengths, lengths)) & (synthetic.users < 250))
    before = before.reindex(synthetic.user_ids[:250], synthetic.item_ids)
    config = ModelConfig(kind="nbpr", factors=4)
    training = TrainConfig(epochs=12, device="cpu")
    old_split = leave_latest_out(before)
    first = train_model(config, training, old_split).model
    copy = evaluation_snapshot(first, np.arange(250), np.zeros((250, 2), dtype=np.int64))
    learn_held_out(first, before, training)
    assert not copy.model.item_vectors(torch.arange(5)).equal(first.item_vectors(torch.arange(5)))

    split = leave_latest_out(synthetic)
    base = StartingPoint(first.requires_grad_(False), before.user_ids, before.item_ids)
    warm = train_warm(base, training, split)
    scratch = train_model(config, training, split)
    assert [history.phase for history in warm.history] == ["go on with nbpr"]
    assert len(warm.history[0].loss) <= 8
    candidates = sampled_candidates(split, split.test, seed=0)
    found, beside = (
        evaluate_sampled(ModelRanks(model.eval()), candidates).ndcg
        for model in (warm.model, scratch.model)
    )
    assert found > 0.95 * beside
