"""Published splits in both forms, their oddities, and what cannot be read of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ncr_core.errors import DataError
from ncr_core.evaluation.protocols import (
    PAD,
    Metrics,
    evaluate_full,
    evaluate_sampled,
    given_candidates,
)
from ncr_core.reproduction.baselines.scoring import Popularity
from ncr_core.reproduction.datasets import (
    MAX_NEGATIVES,
    BenchmarkDataset,
    PublishedSplit,
    load_deepcf_amusic,
    load_ncf,
    load_published,
)
from tests.ncr_core.data.conftest import put

# 1 has three training items in another order than that of time, 2 one, 3 none at all, and 4 is
# trained on only. The held-out item of 2 is among its own negatives, and a training item of 1 is
# among those of 1.
TRAIN = [("1", "a", 30), ("1", "b", 10), ("2", "a", 10), ("1", "c", 20), ("4", "a", 5)]
TEST = [("1", "d", 40), ("2", "b", 40), ("3", "a", 40)]
NEGATIVES = {"1": ["x", "b", "y"], "2": ["x", "b", "c"], "3": ["y", "x", "z"]}


def csv(header: str, rows: list[tuple[object, ...]]) -> str:
    return "\n".join([header, *(",".join(map(str, row)) for row in rows), ""])


def as_csv(folder: Path, end: str = "", *, times: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    header, width = ("user,item,timestamp", 3) if times else ("user,item", 2)
    put(folder / f"train.csv{end}", csv(header, [row[:width] for row in TRAIN]))
    put(folder / f"test.csv{end}", csv(header, [row[:width] for row in TEST]))
    pairs: list[tuple[object, ...]] = [(u, i) for u, own in NEGATIVES.items() for i in own]
    put(folder / f"negatives.csv{end}", csv("user,item", pairs))
    return folder


def as_originals(
    folder: Path, end: str = "", *, name: str = "Some", times: bool = True, feed: str = "\n"
) -> Path:
    folder.mkdir(exist_ok=True)

    def tabbed(rows: list[tuple[str, str, int]]) -> str:
        return "".join(f"{u}\t{i}\t5" + f"\t{t}" * times + feed for u, i, t in rows)

    put(folder / f"{name}.train.rating{end}", tabbed(TRAIN))
    put(folder / f"{name}.test.rating{end}", tabbed(TEST))
    lines = ["\t".join([f"({u},{i})", *NEGATIVES[u]]) for u, i, _ in TEST]
    put(folder / f"{name}.test.negative{end}", "".join(line + feed for line in lines))
    return folder


def as_test_and_all_ratings(folder: Path) -> Path:
    as_csv(folder).joinpath("train.csv").unlink()
    everything = folder / "all"
    everything.mkdir()
    rows = [(u, i, t, int(u in "12" and t == 40)) for u, i, t in [*TEST, *TRAIN]]
    put(everything / "ratings.csv.gz", csv("user,item,position,latest", list(rows)))
    return folder


def items(split: PublishedSplit, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    return "".join("-" if row < 0 else split.train.item_ids[row] for row in rows.tolist())


def items_of(split: PublishedSplit, user: str) -> str:
    return items(split, split.train.items_of(list(split.train.user_ids).index(user)))


def fails(folder: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        load_published(folder, name=options.get("name"))
    message = str(caught.value)
    assert "\n" not in message
    return message


FORMS = {
    "csv": as_csv,
    "csv.gz": lambda folder: as_csv(folder, ".gz"),
    "originals": as_originals,
    "originals.gz": lambda folder: as_originals(folder, ".gz"),
    "crlf": lambda folder: as_originals(folder, feed="\r\n"),
    "less the test rows": as_test_and_all_ratings,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_split(tmp_path: Path, form: str) -> None:
    folder = FORMS[form](tmp_path / "split")
    split = load_published(folder, ratings=folder / "all")
    assert sorted(split.train.item_ids) == list("abcdxyz")  # z is a negative only
    assert sorted(split.train.user_ids) == list("1234")
    assert split.in_time_order
    assert items_of(split, "1") == "bc"
    by_user = dict(zip(split.train.user_ids, items(split, split.validation), strict=True))
    # The latest training item is held out, unless nothing would be left to learn from.
    assert by_user == {"1": "a", "2": "-", "3": "-", "4": "-"}
    by_user = dict(zip(split.train.user_ids, items(split, split.test), strict=True))
    assert by_user == {"1": "d", "2": "b", "3": "a", "4": "-"}
    users = [split.train.user_ids[user] for user in split.test_users]
    negatives = dict(zip(users, (items(split, row) for row in split.negatives), strict=True))
    # The training item stays; the held-out item goes, and the padding is at the right.
    assert negatives == {"1": "xby", "2": "xc-", "3": "yxz"}


def test_the_refit_split(tmp_path: Path) -> None:
    split = load_published(as_csv(tmp_path))
    refit = split.with_validation_in_train()
    assert isinstance(refit, PublishedSplit)
    assert items_of(refit, "1") == "bca"
    assert refit.train.nnz == len(TRAIN)
    assert (refit.validation == -1).all()
    assert (refit.test == split.test).all()
    assert refit.negatives is split.negatives


def test_test_items_that_no_training_has_are_counted(tmp_path: Path) -> None:
    described = BenchmarkDataset("some", "given", load_published(as_csv(tmp_path))).description()
    assert described["untrained_test_items"] == 1  # d, of user 1
    assert described["test_users"] == 3


def test_without_times_the_validation_item_is_drawn(tmp_path: Path) -> None:
    for folder in (
        as_csv(tmp_path / "csv", times=False),
        as_originals(tmp_path / "tabs", times=False),
    ):
        drawn = set()
        for seed in range(20):
            split = load_published(folder, seed=seed)
            assert not split.in_time_order
            chosen = items(split, split.validation)
            assert chosen[1:] == "---"
            drawn.add(chosen[0])
            # what is left stays in the order of the file
            assert items_of(split, "1") == "abc".replace(chosen[0], "")
            again = load_published(folder, seed=seed)
            assert (again.validation == split.validation).all()
        assert drawn == set("abc")


def test_equal_times_are_no_order(tmp_path: Path) -> None:
    folder = as_csv(tmp_path)
    put(folder / "train.csv", csv("user,item,timestamp", [(u, i, 7) for u, i, _ in TRAIN]))
    assert not load_published(folder).in_time_order
    # nor is a time that some rows lack
    put(folder / "train.csv", csv("user,item,timestamp", [*TRAIN, ("2", "c", "")]))
    assert not load_published(folder).in_time_order


def test_candidates_have_the_held_out_item_once_at_a_random_place(tmp_path: Path) -> None:
    split = load_published(as_csv(tmp_path))
    places = np.zeros((3, 4), dtype=np.int64)
    for seed in range(200):
        chosen = given_candidates(split, seed)
        assert chosen.users.tolist() == split.test_users.tolist()
        assert chosen.candidates.shape == (3, 4)
        for row, (held_out, candidates) in enumerate(
            zip(chosen.held_out, chosen.candidates, strict=True)
        ):
            (place,) = np.flatnonzero(candidates == held_out)
            places[row, place] += 1
            assert np.delete(candidates, place).tolist() == split.negatives[row].tolist()
    assert (places[[0, 2]] > 25).all()
    assert (places[1, :3] > 40).all()  # one candidate fewer, the padding last
    again = given_candidates(split, 199)
    assert (again.candidates == chosen.candidates).all()
    assert (chosen.candidates == PAD).sum() == 1


def test_a_list_of_nothing_but_the_held_out_item(tmp_path: Path) -> None:
    put(tmp_path / "N.train.rating", "1\ta\t1\n2\tb\t1\n")
    put(tmp_path / "N.test.rating", "1\tb\t1\n2\ta\t1\n")
    put(tmp_path / "N.test.negative", "(1,b)\tb\n(2,a)\tc\n")
    split = load_published(tmp_path)
    assert items(split, split.negatives[:, 0]) == "-c"
    assert items(split, given_candidates(split, 0).candidates[0]) == "b-"


def test_loaders_by_name(tmp_path: Path) -> None:
    """The folders of either form; NAME without regard to case, as some file systems have it."""
    as_originals(tmp_path, name="ml-1m")
    as_originals(tmp_path, name="AMusic")
    assert load_ncf(tmp_path).train.nnz == 4
    assert load_deepcf_amusic(tmp_path).train.nnz == 4
    assert "several splits, name one: amusic, ml-1m" in fails(tmp_path)
    assert load_published(tmp_path, name="amusic").train.nnz == 4
    assert "no Other.train.rating (nor Other.train.rating.gz)" in fails(tmp_path, name="Other")
    as_test_and_all_ratings(tmp_path / "ncf-ml-1m")
    (tmp_path / "ncf-ml-1m" / "all").rename(tmp_path / "ml-1m")
    as_csv(tmp_path / "amusic-deepcf")
    assert load_ncf(tmp_path).train.nnz == 4
    assert load_deepcf_amusic(tmp_path).train.nnz == 4


def test_of_a_plain_and_a_gzipped_file_the_plain_one_is_read(tmp_path: Path) -> None:
    as_csv(tmp_path)
    put(tmp_path / "train.csv.gz", "nothing of use")
    assert load_published(tmp_path).train.nnz == 4


def test_missing_files(tmp_path: Path) -> None:
    assert "nowhere is not a folder" in fails(tmp_path / "nowhere")
    assert "has no test.csv (nor test.csv.gz)" in fails(tmp_path)
    for file in ("train.csv", "test.csv", "negatives.csv"):
        as_csv(tmp_path / file).joinpath(file).unlink()
        assert f"has no {file}" in fails(tmp_path / file)
    for end in ("test.rating", "test.negative"):
        as_originals(tmp_path / end).joinpath(f"Some.{end}").unlink()
        assert f"has no some.{end}" in fails(tmp_path / end)
    folder = as_test_and_all_ratings(tmp_path / "whole")
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_published(folder, ratings=folder / "nowhere")


@pytest.mark.parametrize(
    "file, content, expected",
    [
        ("train.csv", "", "train.csv is empty"),
        ("train.csv", "user,item\n", "train.csv has no rows"),
        ("train.csv", "user,item\n1,a\n1\n", "train.csv, line 3: 1 fields instead of 2"),
        ("train.csv", "user,item\n1,a\n,b\n", "train.csv, line 3: the user is empty"),
        ("train.csv", "user,item,timestamp\n1,a,then\n", "train.csv, line 2: the timestamp"),
        ("test.csv", "user,thing\n1,a\n", 'test.csv has no column "item"'),
        ("test.csv", "user,item\n", "test.csv has no rows"),
        ("test.csv", "user,item\n1,d,9\n", "test.csv, line 2: 3 fields instead of 2"),
        ("test.csv", "user,item\n1,\n", "test.csv, line 2: the item is empty"),
        (
            "test.csv",
            "user,item\n1,d\n2,b\n1,d\n",
            "test.csv, line 4: user '1' has a test item already, in line 2",
        ),
        (
            "test.csv",
            "user,item\n1,d\n2,b\n3,a\n4,x\n",
            "test.csv, line 5: user '4' has no negatives in negatives.csv",
        ),
        ("negatives.csv", "user,item\n9,a\n", "line 2: user '9' is not in test.csv"),
        ("negatives.csv", "user,item\n1,\n", "negatives.csv, line 2: the item is empty"),
        ("negatives.csv", "user,item\n", "user '1' has no negatives in negatives.csv"),
        (
            "negatives.csv",
            "user,item\n1,a\n1,b\n2,a\n3,a\n3,b\n",
            "negatives.csv, line 4: user '2' has 1 negatives, but user '1' has 2",
        ),
        (
            "negatives.csv",
            "user,item\n" + "1,a\n" * (MAX_NEGATIVES + 1),
            f"line {MAX_NEGATIVES + 2}: user '1' has more than {MAX_NEGATIVES} negatives",
        ),
        ("negatives.csv", "user,item\n1," + "a" * 2**21, "line 2: the line is longer than"),
        ("negatives.csv", b"user,item\n1,\xff\n", "negatives.csv, line 2: the line is not UTF-8"),
    ],
)
def test_bad_csv(tmp_path: Path, file: str, content: str | bytes, expected: str) -> None:
    folder = as_csv(tmp_path)
    put(folder / file, content)
    assert expected in fails(folder)


@pytest.mark.parametrize(
    "end, content, expected",
    [
        ("train.rating", "", "Some.train.rating is empty"),
        ("train.rating", "1,a,5\n", "Some.train.rating has no tabs in its first line"),
        ("train.rating", "1\ta\t5\n1\tb\n", "Some.train.rating, line 2: 2 fields instead of 3"),
        ("train.rating", "1\ta\t5\tthen\n", "Some.train.rating, line 1: the timestamp"),
        ("test.rating", "1\td\n1\td\n", "Some.test.rating, line 2: user '1' has a test item"),
        ("test.negative", "(1,d)\tx\n1,b\tx\n", "line 2: the line is not (user,item) and"),
        ("test.negative", "(1,d)\tx\n(2,b)\n", "line 2: the line is not (user,item) and"),
        ("test.negative", "(1,d)\tx\t\n", "Some.test.negative, line 1: the item is empty"),
        ("test.negative", "(1,a)\tx\n", "item of user '1' is 'a' here, but 'd' in Some.test.r"),
        ("test.negative", "(9,a)\tx\n", "line 1: user '9' is not in Some.test.rating"),
        ("test.negative", "(1,d)\tx\n(1,d)\ty\n", "line 2: user '1' has a line already"),
        (
            "test.negative",
            "(1,d)\tx\ty\n(2,b)\tx\n(3,a)\tx\ty\n",
            "Some.test.negative, line 2: user '2' has 1 negatives, but user '1' has 2",
        ),
        ("test.negative", "(1,d)\tx\n", "Some.test.rating, line 2: user '2' has no negatives"),
    ],
)
def test_bad_originals(tmp_path: Path, end: str, content: str, expected: str) -> None:
    folder = as_originals(tmp_path)
    put(folder / f"Some.{end}", content)
    assert expected in fails(folder)


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    folder = as_originals(tmp_path, ".gz")
    path = folder / "Some.test.negative.gz"
    path.write_bytes(path.read_bytes()[:-9])
    assert "Some.test.negative.gz" in fails(folder)


def test_test_rows_that_are_not_among_all_ratings(tmp_path: Path) -> None:
    folder = as_test_and_all_ratings(tmp_path / "split")
    put(folder / "all" / "ratings.csv.gz", csv("user,item", [("1", "d"), ("1", "a")]))
    with pytest.raises(DataError, match=r"^test.csv, line 3: user '2' has no item 'b' in "):
        load_published(folder, ratings=folder / "all")
    put(folder / "all" / "ratings.csv.gz", csv("user,item", [row[:2] for row in TEST]))
    with pytest.raises(DataError, match="has no rows to learn from"):
        load_published(folder, ratings=folder / "all")


def popularity(split: PublishedSplit) -> Metrics:
    """ItemPop trained with the validation items too."""
    refit = split.with_validation_in_train()
    return evaluate_sampled(Popularity(refit.train), given_candidates(refit, seed=0))


@pytest.mark.slow
def test_ncf_movielens_1m(ml_1m: Path) -> None:
    if not (ml_1m.parent / "ncf-ml-1m").is_dir():
        pytest.skip("the NCF split is not here: NCR_TEST_DATA has no folder ncf-ml-1m/")
    split = load_ncf(ml_1m.parent)
    refit = split.with_validation_in_train()
    assert (split.train.n_users, split.train.n_items) == (6040, 3706)
    assert refit.train.nnz == 994_169
    assert split.train.nnz == 994_169 - 6040
    assert split.in_time_order
    assert split.negatives.shape == (6040, 99)
    assert (split.negatives == PAD).sum() == 156
    users = np.repeat(split.test_users, 99).reshape(-1, 99)
    real = split.negatives != PAD
    assert not refit.all_seen.contains(users[real], split.negatives[real]).any()
    measured = popularity(split)
    assert measured.hr == pytest.approx(0.4535, abs=0.002)
    assert measured.ndcg == pytest.approx(0.2542, abs=0.002)
    full = evaluate_full(Popularity(refit.train), refit, refit.test, seed=0)
    assert full.hr < 0.1


@pytest.mark.slow
def test_deepcf_amazon_music(ml_1m: Path) -> None:
    if not (ml_1m.parent / "amusic-deepcf").is_dir():
        pytest.skip("DeepCF's Amazon Music is not here: NCR_TEST_DATA has no amusic-deepcf/")
    split = load_deepcf_amusic(ml_1m.parent)
    refit = split.with_validation_in_train()
    assert (split.train.n_users, split.train.n_items) == (1776, 12_929)
    assert refit.train.nnz == 44_311
    assert not split.in_time_order
    lengths = np.diff(refit.train.indptr)
    assert (lengths == 0).sum() == 43
    assert ((split.validation >= 0) == (lengths >= 2)).all()
    assert (split.test >= 0).all()
    assert (refit.train.item_counts() == 0).sum() == 440
    assert (split.negatives == PAD).sum() == 18
    users = np.repeat(split.test_users, 99).reshape(-1, 99)
    real = split.negatives != PAD
    assert refit.train.contains(users[real], split.negatives[real]).sum() == 348
    measured = popularity(split)
    assert measured.hr == pytest.approx(0.2483, abs=0.004)
    assert measured.ndcg == pytest.approx(0.1304, abs=0.004)
