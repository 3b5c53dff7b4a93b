"""The library's front door: fitted to whatever a caller has, its lists are the ranker's own."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from ncr_core import Recommender, evaluate, leave_latest_out, load_interactions
from ncr_core.checkpoint import save_checkpoint
from ncr_core.data.splits import Split
from ncr_core.data.synthetic import synthetic_catalogue, synthetic_sittings
from ncr_core.errors import CheckpointError, ConfigError, DataError
from ncr_core.manifest import MANIFEST
from ncr_core.ranking import ExactRanker, algorithm1
from ncr_core.recipes import recipe as named_recipe
from ncr_core.training import selection, train_model

DATA = synthetic_catalogue(n_users=60, n_items=50, mean_length=12, seed=1)
ROWS = list(DATA.interactions)
USER = ROWS[0][0]
SEEN = {item for user, item, _ in ROWS if user == USER}


@pytest.fixture(scope="module", params=["nbpr", "neupr"])
def fitted(request: pytest.FixtureRequest) -> Recommender:
    """Fitted to the rows of a small catalogue."""
    return Recommender(kind=request.param, factors=4, epochs=3, pretrain=False).fit(ROWS)


def names(items: list) -> list[str]:
    return [item.item for item in items]


@pytest.mark.slow
def test_lists_equal_the_literal_algorithm_1_over_all_unseen_items(fitted: Recommender) -> None:
    model = fitted.checkpoint.model
    ranker = ExactRanker(model)
    vector = model.user_vectors(torch.tensor([fitted.user_ids.index(USER)]))
    rows = [row for row, item in enumerate(fitted.item_ids) if item not in SEEN]

    def prefers(i: int, j: int) -> bool:
        return float(ranker.compare(vector, torch.tensor([[i]]), torch.tensor([[j]]))) > 0

    listed = names(fitted.recommend(USER, n=len(rows)))
    # Algorithm 1 depends on the order of the candidates; which it is, candidates decide.
    row_of = {item: row for row, item in enumerate(fitted.item_ids)}
    assert sorted(row_of[item] for item in listed) == rows
    best = algorithm1([row_of[item] for item in reversed(listed)], prefers, 1)[0]
    if fitted.recipe.model.kind == "nbpr":  # an order, whatever the candidates' order
        assert fitted.item_ids[best] == listed[0]
    reranked = fitted.rerank(USER, listed)
    expected = algorithm1([row_of[item] for item in listed], prefers, len(listed))
    assert names(reranked) == [fitted.item_ids[row] for row in expected]


@pytest.mark.slow
def test_seen_allowed_and_diverse_lists(fitted: Recommender) -> None:
    assert not SEEN & set(names(fitted.recommend(USER, n=50)))
    assert set(names(fitted.recommend(USER, n=50, exclude_seen=False))) >= SEEN
    allowed = [item for item in fitted.item_ids if item not in SEEN][:3]
    assert set(names(fitted.recommend(USER, allowed=[*allowed, "new"]))) == set(allowed)
    mask = np.isin(np.array(fitted.item_ids), allowed)
    assert fitted.recommend(USER, allowed=mask) == fitted.recommend(USER, allowed=allowed)
    varied = fitted.recommend(USER, n=5, diversity=0.9)
    assert varied[0].item == fitted.recommend(USER, n=5)[0].item
    assert len(varied) == 5


@pytest.mark.slow
def test_many_users_get_what_each_gets_alone(fitted: Recommender) -> None:
    users = list(fitted.user_ids)
    many = fitted.recommend_many(users, n=5)
    assert many[3] == fitted.recommend(users[3], n=5)
    assert [len(items) for items in many] == [5] * len(users)


@pytest.mark.slow
def test_comparisons_explanations_and_similar_items(fitted: Recommender) -> None:
    listed = names(fitted.recommend(USER, n=4))
    comparison = fitted.compare(USER, listed)
    assert comparison.items == listed
    assert comparison.probability + comparison.probability.T == pytest.approx(np.ones((4, 4)))
    assert sorted(comparison.order) == sorted(listed)
    explained = fitted.explain(USER, n=4)
    assert names(explained) == listed
    reasons = {item for entry in explained for item, _ in entry.because}
    assert reasons
    assert reasons <= SEEN
    assert all(effect > 0 for entry in explained for _, effect in entry.because)
    similar = fitted.similar(listed[0], n=3)
    assert listed[0] not in names(similar)
    assert [s.score for s in similar] == sorted((s.score for s in similar), reverse=True)


@pytest.mark.slow
def test_somebody_new_gets_a_list_by_their_items(fitted: Recommender) -> None:
    items = list(SEEN)[:5]
    listed = names(fitted.recommend_for([*items, "unknown"], n=50))
    assert not set(items) & set(listed)
    assert set(items) <= set(names(fitted.recommend_for(items, n=50, exclude_seen=False)))
    without = fitted.recommend_for(items, n=50, disliked=[listed[0]], exclude_seen=False)
    assert listed[0] not in names(without)
    with pytest.raises(DataError, match="knows none"):
        fitted.recommend_for(["unknown"])


@pytest.mark.slow
def test_a_saved_recommender_answers_as_before(fitted: Recommender, tmp_path: Path) -> None:
    fitted.save(tmp_path / "deep" / "model")
    loaded = Recommender.load(tmp_path / "deep" / "model")
    assert loaded.recommend(USER) == fitted.recommend(USER)
    assert loaded.explain(USER) == fitted.explain(USER)
    assert loaded.metrics == fitted.metrics
    with pytest.raises(CheckpointError, match="exists already"):
        fitted.save(tmp_path / "deep" / "model")


@pytest.mark.slow
def test_a_checkpoint_without_interactions_says_what_it_lacks(
    fitted: Recommender, tmp_path: Path
) -> None:
    """As the service writes them."""
    save_checkpoint(
        tmp_path / "model",
        fitted.checkpoint.model,
        user_ids=fitted.user_ids,
        item_ids=fitted.item_ids,
        item_counts=fitted.checkpoint.item_counts,
    )
    loaded = Recommender.load(tmp_path / "model")
    with pytest.raises(DataError, match="pass interactions"):
        loaded.recommend(USER)
    assert len(loaded.recommend(USER, n=5, exclude_seen=False)) == 5
    with_rows = Recommender.load(tmp_path / "model", interactions=ROWS)
    assert names(with_rows.recommend(USER)) == names(fitted.recommend(USER))


@pytest.mark.slow
def test_a_damaged_checkpoint_or_one_of_another_version_is_one_clear_error(
    fitted: Recommender, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    fitted.save(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": "ncr-checkpoint/9"}))
    with pytest.raises(CheckpointError, match="is not a manifest of format ncr-checkpoint/1"):
        Recommender.load(folder)
    other = manifest | {"model": manifest["model"] | {"heads": 4}}
    (folder / MANIFEST).write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="heads"):
        Recommender.load(folder)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / "interactions.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        Recommender.load(folder)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Recommender.load(tmp_path)


@pytest.mark.slow
def test_a_split_is_learned_without_its_test_items() -> None:
    split = leave_latest_out(load_interactions(ROWS).interactions)
    recommender = Recommender(kind="nbpr", factors=4, epochs=3).fit(split)
    metrics = evaluate(recommender, split)
    assert set(metrics) == {"sampled", "full"}
    assert 0.0 < metrics["sampled"].hr <= 1.0
    assert recommender.metrics == {}
    recommender.fit(ROWS)
    assert set(recommender.metrics) == {"sampled", "full"}
    assert recommender.fit(split).metrics == {}  # nothing of the fit before is left
    assert recommender.checkpoint.temperature == 1.0
    other = leave_latest_out(load_interactions(ROWS[:-200]).interactions)
    with pytest.raises(DataError, match="other users or items"):
        evaluate(recommender, other)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the data has no interactions to learn from"),
        ([("ann", "a"), ("ann", "b"), ("ann", "c")], "the data has only one user, 'ann'"),
        (
            [("ann", "a", 1.0), ("bob", "b", float("nan"))],
            "row index 1: timestamp is missing or not finite",
        ),
        ({"user": ["ann", "bob"], "thing": ["a", "b"]}, 'no column "item" .found: user, thing'),
        ([("ann", "a"), ("bob", "b")], "no user has 3 items"),
    ],
)
def test_data_that_cannot_be_fitted_to_is_one_clear_error(rows: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        Recommender(kind="nbpr", epochs=1).fit(rows)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_wrong_questions_are_one_clear_error(fitted: Recommender) -> None:
    with pytest.raises(DataError, match="recommend_for"):
        fitted.recommend("nobody")
    with pytest.raises(DataError, match="no item that the model knows"):
        fitted.recommend(USER, allowed=[])
    with pytest.raises(DataError, match="mask of"):
        fitted.recommend(USER, allowed=np.ones(3, dtype=np.bool_))
    with pytest.raises(DataError, match="does not know item 'nix'"):
        fitted.compare(USER, ["nix"])
    with pytest.raises(ConfigError, match="at least 1"):
        fitted.recommend(USER, n=0)
    with pytest.raises(ConfigError, match="diversity"):
        fitted.recommend(USER, diversity=2.0)


def test_what_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="default, paper, history"):
        Recommender("best")
    with pytest.raises(ConfigError, match="unknown hyper-parameters: depth"):
        Recommender(depth=3)
    with pytest.raises(ConfigError, match="fit or load"):
        Recommender().recommend("ann")


@pytest.mark.slow
def test_auto_is_the_default_and_says_what_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [
        named_recipe("next-item").with_(factors=4),
        named_recipe("next-item-nbpr").with_(factors=4, epochs=1, shared_negatives=8),
    ]
    monkeypatch.setattr(selection, "auto_recipes", lambda *_: few)
    recommender = Recommender(device="cpu").fit(ROWS)
    assert [tried.recipe for tried in recommender.tried] == ["next-item", "next-item-nbpr"]
    chosen = [tried.recipe for tried in recommender.tried if tried.chosen]
    assert chosen == [recommender.recipe.name]
    assert recommender.metrics["full"]["users"] > 0
    assert len(recommender.recommend(USER, n=5)) == 5
    with pytest.raises(ConfigError, match="auto chooses these parameters: factors"):
        Recommender("auto", factors=3)


def test_the_closed_form_stays_as_it_is_when_it_learns_everything() -> None:
    closed = named_recipe("next-item").with_(factors=4, device="cpu")
    fitted = Recommender(closed).fit(ROWS).checkpoint.model
    every = load_interactions(ROWS).interactions
    nothing = np.full(every.n_users, -1)
    expected = train_model(closed.model, closed.training, Split(every, nothing, nothing)).model
    assert torch.equal(fitted.get_parameter("items.weight"), expected.get_parameter("items.weight"))


@pytest.mark.slow
def test_a_list_after_a_break_is_another_than_in_the_middle_of_a_sitting(tmp_path: Path) -> None:
    rows = synthetic_sittings(n_users=400, n_items=100)
    recommender = Recommender("next-item", factors=32).fit(rows)
    user, _, last = rows[-1]
    goes_on = recommender.recommend(user)
    assert recommender.recommend(user, at=last + 3_600) == goes_on
    assert recommender.recommend(user, at=last - 10) == goes_on
    back = recommender.recommend(user, at=last + 90_000)
    assert back != goes_on
    day_later = datetime.fromtimestamp(last + 90_000, UTC)
    assert recommender.recommend(user, at=day_later) == back
    assert recommender.recommend(user, at=day_later.replace(tzinfo=None)) == back

    recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved")
    assert loaded.recommend(user) == goes_on
    assert loaded.recommend_many([user, rows[0][0]], at=last + 90_000)[0] == back
    untimed = Recommender.load(tmp_path / "saved", interactions=[row[:2] for row in rows])
    with pytest.raises(DataError, match="at needs the timestamps of the interactions"):
        untimed.recommend(user, at=last)


def test_importing_the_package_loads_no_torch() -> None:
    check = "import sys, ncr_core; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=Path(__file__).parents[2])


def described(rows: list) -> tuple[dict, dict]:
    """Attributes by which items of one half of the users' catalogue differ from the other."""
    items = {item: {"half": f"h{n % 2}", "noise": n % 7} for n, item in enumerate(_ids(rows, 1))}
    users = {user: {"half": f"h{n % 2}"} for n, user in enumerate(_ids(rows, 0))}
    return items, users


def _ids(rows: list, column: int) -> list[str]:
    return sorted({row[column] for row in rows})


@pytest.fixture(scope="module")
def told() -> tuple[Recommender, dict, dict]:
    """Users of either half take up items of their own half, but for a few."""
    rng = np.random.default_rng(0)
    users, items = [f"u{n:02}" for n in range(60)], [f"i{n:02}" for n in range(40)]
    rows = []
    for n, user in enumerate(users):
        own = [*rng.permutation(items[n % 2 :: 2])[:9].tolist(), items[rng.integers(40)]]
        rows += [(user, item, time) for time, item in enumerate(dict.fromkeys(own))]
    of_items, of_users = described(rows)
    recommender = Recommender(kind="nbpr", factors=4, epochs=12, item_bias=True)
    recommender.fit(rows, item_attributes=of_items, user_attributes=of_users)
    return recommender, of_items, of_users


def test_new_items_are_recommended_by_their_attributes(
    told: tuple[Recommender, dict, dict], tmp_path: Path
) -> None:
    fitted, of_items, of_users = told
    placement = fitted.checkpoint.content.items
    assert placement is not None
    assert placement.encoder.names == ("half",)
    fitted.save(tmp_path / "model")
    recommender = Recommender.load(tmp_path / "model")
    before = names(recommender.recommend("u00", n=5))
    new = {"new 0": {"half": "h0"}, "new 1": {"half": "h1"}}
    assert recommender.add_items(new) is recommender
    assert recommender.item_ids[-2:] == list(new)
    for user, attributes in list(of_users.items())[:10]:
        own = f"new {attributes['half'][1]}"
        assert names(recommender.recommend(user, n=1, allowed=new)) == [own]
    assert [item for item in names(recommender.recommend("u00", n=7)) if item not in new][
        : len(before) - 2
    ] == before[:-2]
    similar = names(recommender.similar("new 0", n=5))
    assert all(of_items.get(item, {"half": "h0"})["half"] == "h0" for item in similar)
    with pytest.raises(DataError, match="already"):
        recommender.add_items({"new 0": {}})
    assert recommender.add_items({}).item_ids[-1] == "new 1"


def test_somebody_is_recommended_for_by_attributes(told: tuple[Recommender, dict, dict]) -> None:
    recommender, of_items, _ = told
    for half in ("h0", "h1"):
        listed = names(recommender.recommend_for(n=8, attributes={"half": half}))
        assert all(of_items[item]["half"] == half for item in listed)
    # What somebody took up moves them from where their attributes say.
    own = [item for item, attributes in of_items.items() if attributes["half"] == "h1"][:9]

    def places(items: list[str]) -> float:
        every = recommender.recommend_for(
            items, len(of_items), attributes={"half": "h0"}, exclude_seen=False
        )
        listed = names(every)
        return float(np.mean([listed.index(item) for item in own]))

    assert places(own) < places([])


@pytest.mark.slow
def test_attributes_need_a_model_that_was_fitted_with_them(fitted: Recommender) -> None:
    with pytest.raises(DataError, match="item_attributes"):
        fitted.add_items({"new": {"half": "h0"}})
    with pytest.raises(DataError, match="none of these items"):
        fitted.recommend_for(attributes={"half": "h0"})
    by_items = fitted.recommend_for([fitted.item_ids[0]], attributes={"half": "h0"})
    assert names(by_items) == names(fitted.recommend_for([fitted.item_ids[0]]))


def test_attributes_leave_the_trained_model_as_it_is(told: tuple[Recommender, dict, dict]) -> None:
    recommender, _, _ = told
    interactions = recommender._interactions
    assert interactions is not None
    without = Recommender(recommender.recipe).fit(interactions)
    for name, value in without.checkpoint.model.state_dict().items():
        assert value.equal(recommender.checkpoint.model.state_dict()[name]), name
    assert not without.checkpoint.content
