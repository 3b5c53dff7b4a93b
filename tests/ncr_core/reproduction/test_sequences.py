"""Sequences of the SASRec line: reading them, and what a method sees at test time."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ncr_core.errors import ConfigError, DataError
from ncr_core.evaluation.metrics import held_out_ranks
from ncr_core.reproduction.baselines.scoring import fit_linear_next_item
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.reproduction.methods import FitRequest, fit_method, with_test_input
from ncr_core.reproduction.results_store import ranks_from_text
from ncr_core.reproduction.runner import Runner
from ncr_core.reproduction.sequences import load_sequences
from ncr_core.reproduction.suites import Selection, best, make_run, runs_of, sequential
from tests.ncr_core.reproduction.conftest import Log, write_sequences

pytestmark = pytest.mark.usefixtures("quick")


def _lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_the_last_item_is_for_test_and_the_one_before_for_validation(tmp_path: Path) -> None:
    path = _lines(tmp_path / "s.txt", "u 5 3 9 7", "v 7 9 3 5", "w 3 7 5")
    split = load_sequences(path)
    ids = np.array(split.train.item_ids)
    assert [ids[split.train.items_of(u)].tolist() for u in range(3)] == [
        ["5", "3"],
        ["7", "9"],
        ["3"],
    ]
    assert ids[split.validation].tolist() == ["9", "3", "7"]
    assert ids[split.test].tolist() == ["7", "5", "5"]
    assert ids[split.test_input.items_of(0)].tolist() == ["5", "3", "9"]
    assert split.test_input.nnz == split.train.nnz + 3


def test_users_with_one_or_two_items_are_trained_on_and_not_tested(tmp_path: Path) -> None:
    split = load_sequences(_lines(tmp_path / "s.txt", "u a b c", "v c", "w b a"))
    assert split.test[1:].tolist() == [-1, -1]
    assert split.validation[1:].tolist() == [-1, -1]
    assert np.diff(split.train.indptr).tolist() == [1, 1, 2]


def test_a_test_item_that_no_training_has_is_left_out_and_counted(tmp_path: Path) -> None:
    split = load_sequences(_lines(tmp_path / "s.txt", "u a b new", "v b a b2 a2", "w a2 b a"))
    # "new" is nowhere else; "a2" is in w's training; "a" is in u's.
    assert split.untrained_test_items == 1
    assert (split.test >= 0).tolist() == [False, True, True]
    assert split.validation[0] >= 0  # still the input's last item


def test_the_csv_form_gives_the_same_split(tmp_path: Path) -> None:
    lines = _lines(tmp_path / "s.txt", "u 5 3 9 7", "v 7 9 3 5")
    rows = ["user,item,position,part", "u,9,3,validation", "u,5,1,train", "u,3,2,train"]
    rows += ["u,7,4,test", "v,7,1,train", "v,9,2,train", "v,3,3,validation", "v,5,4,test"]
    path = tmp_path / "s.csv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    one, other = load_sequences(lines), load_sequences(path)
    assert one.train.item_ids == other.train.item_ids
    for a, b in ((one.train.items, other.train.items), (one.test, other.test)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("u a b c\nu d e f\n", "more than one sequence"),
        ("u a b a\n", "an item twice"),
        ("u a b c\n\n", "line 2: not a user"),
        ("", "has no sequences"),
        ("u a b c\nv d e f\n", "nothing to test on"),
        ("u,i,p\n", "the first line is not user,item,position,part"),
        ("user,item,position,part\nu,a,first,train\n", "line 2: not user, item"),
        ("user,item,position,part\nu,a,1,test\nu,b,2,train\n", "has not training items"),
    ],
)
def test_bad_sequences_are_one_clear_error(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "s.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=error):
        load_sequences(path)


def test_a_damaged_or_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "s.txt.gz"
    path.write_bytes(gzip.compress(b"u a b c\n" * 50)[:-12])
    with pytest.raises(DataError, match="damaged"):
        load_sequences(path)
    with pytest.raises(DataError, match="cannot be read"):
        load_sequences(tmp_path / "none.txt")
    with pytest.raises(DataError, match="has no ml-1m-sasrec"):
        load_dataset("ml-1m-sasrec", tmp_path)


def test_at_test_time_the_validation_item_is_input_and_was_not_trained_on(tmp_path: Path) -> None:
    split = load_dataset("beauty-s3rec", write_sequences(tmp_path)).split
    request = FitRequest(split, 8, {"l2": 100.0}, seed=0)
    ranks = with_test_input(fit_method("linear next-item", request), split)  # type: ignore[arg-type]
    trained = fit_linear_next_item(split.train, 100.0)
    expected = trained.with_input(split.test_input)  # type: ignore[attr-defined]
    users = np.arange(20)
    np.testing.assert_array_equal(ranks.scores(users), expected.scores(users))  # type: ignore[attr-defined]
    assert not np.array_equal(trained.scores(users), expected.scores(users))


@pytest.mark.parametrize("method", ["NBPR next-item", "Markov"])
def test_the_input_of_a_model_ends_with_the_validation_item(tmp_path: Path, method: str) -> None:
    split = load_dataset("beauty-s3rec", write_sequences(tmp_path)).split
    settings = make_run(method, Selection("beauty-s3rec"), 8).settings
    fitted = fit_method(method, FitRequest(split, 8, settings, seed=0))
    everything = np.tile(np.arange(split.train.n_items), (20, 1))
    before = fitted.ranks.rank(np.arange(20), everything, 10)
    after = with_test_input(fitted, split).rank(np.arange(20), everything, 10)  # type: ignore[arg-type]
    assert not np.array_equal(before, after)
    if fitted.model is not None:
        items = split.test_input.items_of(3)  # type: ignore[attr-defined]
        pooled = fitted.model.users.pool_one(fitted.model.items.weight.new_tensor(items).long())  # type: ignore[operator,union-attr]
        np.testing.assert_allclose(fitted.model.users.weight[3], pooled.detach(), atol=1e-5)  # type: ignore[union-attr,arg-type,index]


def test_sequential_results_are_full_ranks_and_are_not_made_twice(
    tmp_path: Path, make_runner: Callable[[], tuple[Runner, Log]]
) -> None:
    root = write_sequences(tmp_path / "data")
    selection = Selection("beauty-s3rec", methods=("ItemPop", "Markov"))
    runner, log = make_runner()
    popularity, _ = runner.run(sequential(selection))
    assert set(popularity["metrics"]) == {"full", "lists"}
    assert popularity["data"]["untrained_test_items"] == 1
    split = load_dataset("beauty-s3rec", root).split
    users = np.flatnonzero(split.test >= 0)
    ranks = ranks_from_text(popularity["ranks"]["full"])
    counts = split.train.item_counts()
    for user, rank in list(zip(users, ranks, strict=True))[:30]:
        unseen = np.setdiff1d(np.arange(split.train.n_items), split.test_input.items_of(user))  # type: ignore[attr-defined]
        ahead = int((counts[unseen] > counts[split.test[user]]).sum())
        assert (ahead <= rank) if rank >= 0 else True
        assert held_out_ranks(np.array([unseen]), split.test[user : user + 1])[0] >= 0
    runner, log = make_runner()
    runner.run(sequential(selection))
    assert log.had == ["itempop", "markov"]
    line = (root / "amazon-s3rec/Beauty.txt").read_text()
    (root / "amazon-s3rec/Beauty.txt").write_text(line + "extra 1 2 3 4\n")
    with pytest.raises(DataError, match="made of other data"):
        make_runner()[0].run(sequential(selection))


def test_sequential_and_best_are_each_for_their_own_data() -> None:
    with pytest.raises(ConfigError, match="give --set ml-1m-sasrec"):
        sequential(Selection("ml-1m"))
    with pytest.raises(ConfigError, match="leaves nothing to measure"):
        sequential(Selection("ml-1m-sasrec", full=False))
    for target in ("best", "table1", "temporal"):
        with pytest.raises(ConfigError, match="its target is sequential"):
            runs_of(target, Selection("ml-1m-sasrec"))
    with pytest.raises(ConfigError, match="its target is temporal"):
        runs_of("loss", Selection("ml-100k"))
    assert runs_of("best", Selection()) == best(Selection())


def test_sasrec_is_a_method_that_goes_on_and_is_refused_on_other_data(
    tmp_path: Path, make_runner: Callable[[], tuple[Runner, Log]]
) -> None:
    root = write_sequences(tmp_path / "data")
    few = {"epochs": 2, "window": 8, "blocks": 1}
    run = make_run("SASRec CE", Selection("beauty-s3rec"), 8, refit=False, overrides=few)
    (result,) = make_runner()[0].run([run])
    assert result["resolved"]["loss"] == "ce"
    assert result["validation"]["ndcg"] == pytest.approx(
        max(result["history"][0]["ndcg"]), abs=1e-5
    )
    progress = tmp_path / "work" / f"{run.name}.progress"
    assert progress.exists()
    (tmp_path / "results" / "cells" / "beauty-s3rec.jsonl").unlink()
    path = root / "amazon-s3rec/Beauty.txt"
    path.write_text(path.read_text() + "extra 1 2 3 4\n")
    with pytest.raises(DataError, match="training on other data"):
        make_runner()[0].run([run])
