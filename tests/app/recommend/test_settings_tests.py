"""Lists by other settings for a share of the users: who gets them, and what they never mix with."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from app.ab_tests.schemas import parse_trial
from app.wiring import Services
from tests.app.conftest import publish_model, until
from tests.app.recommend.conftest import ITEMS, USERS, ask, ids, post

pytestmark = pytest.mark.anyio


async def begin(app: FastAPI, **body: Any) -> str:
    """Begins a settings trial, and waits until its version is loaded, if it has one."""
    services: Services = app.state.services
    trial = await services.trials.begin(parse_trial({"kind": "settings", "share": 0.5} | body))
    if "version" in body:
        others = app.state.recommend.models.versions
        await until(lambda: others.at_hand(body["version"]) is not None)
    return trial.trial_id


def arms(app: FastAPI, users: list[str]) -> dict[str, list[str]]:
    """The users of either arm of the running trial."""
    trials = app.state.services.trials.settings_trials
    found: dict[str, list[str]] = {"a": [], "b": []}
    for user in users:
        found[trials.arm_of(trials.running, user).arm].append(user)
    return found


async def counted(app: FastAPI, trial_id: str) -> dict[str, tuple[int, int]]:
    """Users and lists of either arm."""
    services: Services = app.state.services
    report = (await services.trials.get(trial_id)).report or {}
    return {arm: (report[arm]["users"], report[arm]["lists"]) for arm in ("a", "b")}


async def test_each_arm_gets_its_lists_and_none_of_the_other(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    plain = {user: await ask(client, user) for user in USERS}
    varied = {user: await ask(client, user, diversity=0.6) for user in USERS}
    assert any(plain[user]["items"] != varied[user]["items"] for user in USERS)
    trial_id = await begin(app, settings={"diversity": 0.6})
    users = arms(app, USERS)
    assert min(map(len, users.values())) >= 10
    for _ in range(2):  # the second time from the cache
        for arm, expected in (("b", varied), ("a", plain)):
            for user in users[arm]:
                answer = await ask(client, user)
                assert answer["items"] == expected[user]["items"]
                assert answer["recommendation_id"].startswith(f"{trial_id}-{arm}.")
                assert answer["model_version"] == trained
    batch = await post(client, "/recommend/batch", users=USERS)
    for user, result in zip(USERS, batch["results"], strict=True):
        assert result["items"] == (varied if user in users["b"] else plain)[user]["items"]
    assert await counted(app, trial_id) == {
        arm: (len(found), 3 * len(found)) for arm, found in users.items()
    }
    await app.state.services.trials.end(trial_id)
    for user in users["b"][:5]:
        answer = await ask(client, user)
        assert answer["items"] == plain[user]["items"]
        assert answer["recommendation_id"].startswith(f"{trained}.")


async def test_a_requests_own_parameter_wins(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    plain = {user: await ask(client, user) for user in USERS}
    trial_id = await begin(app, settings={"diversity": 0.6, "exclude_seen": False}, share=1.0)
    changed = [u for u in USERS if (await ask(client, u))["items"] != plain[u]["items"]]
    user = changed[0]
    before = await counted(app, trial_id)
    own: dict[str, Any] = {"diversity": 0.0, "exclude_seen": True}
    for answer in (
        await ask(client, user, **own),
        (await post(client, "/recommend/batch", users=[user], **own))["results"][0],
        await post(client, "/recommend", user=user, **own),
        await ask(client, user, model=trained),
    ):
        assert answer["recommendation_id"].startswith(f"{trained}.")  # it takes no part
    assert await counted(app, trial_id) == before
    # Of two settings the other one still counts.
    both = await ask(client, user, exclude_seen=False)
    partly = await ask(client, user, diversity=0)
    assert partly["recommendation_id"].startswith(f"{trial_id}-b.")
    assert partly["items"] == (await ask(client, user, **own | {"exclude_seen": False}))["items"]
    assert both["items"] != partly["items"] != plain[user]["items"]


async def test_exploration_is_for_newcomers_and_all_else_for_known_users(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    popular = ids(await ask(client, "anybody", n=10, exclude_seen=False))
    newcomers = [f"new-{n}" for n in range(40)]
    by_default = {user: await ask(client, user) for user in newcomers}
    trial_id = await begin(app, settings={"exploration": 0.0})
    users = arms(app, newcomers)
    for user in users["a"]:
        answer = await ask(client, user)
        assert answer["items"] == by_default[user]["items"]
        assert answer["recommendation_id"].startswith(f"{trial_id}-a.")
    same = {tuple(ids(await ask(client, user))) for user in users["b"]}
    assert len(same) == 1  # nothing is drawn
    assert len({tuple(ids(answer)) for answer in by_default.values()}) > 1
    assert set(popular) - set(next(iter(same))) != set(popular)
    known = await ask(client, USERS[0])
    assert known["recommendation_id"].startswith(f"{trained}.")
    await app.state.services.trials.end(trial_id)
    second = await begin(app, settings={"diversity": 0.5})
    assert (await ask(client, "new-1"))["recommendation_id"].startswith(f"{trained}.")
    basket = await post(client, "/recommend", user="new-1", items=ITEMS[:3])
    assert basket["recommendation_id"].startswith(f"{second}-")
    nobody = await post(client, "/recommend", items=ITEMS[:3])
    assert nobody["recommendation_id"].startswith(f"{trained}.")


async def test_an_arm_by_another_version(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services
) -> None:
    other = await publish_model(filled, seed=3, epochs=3)
    active = await publish_model(filled, seed=4, epochs=3)
    await app.state.recommend.models.refresh()
    own = {v: {u: await ask(client, u, model=v) for u in USERS[:20]} for v in (other, active)}
    trial_id = await begin(app, version=other)
    users = arms(app, USERS[:20])
    for arm, version in (("a", active), ("b", other)):
        for user in users[arm]:
            answer = await ask(client, user)
            assert answer["model_version"] == version
            assert answer["items"] == own[version][user]["items"]
            assert answer["recommendation_id"].startswith(f"{trial_id}-{arm}.")
    # While a server has not loaded it, neither arm is on there.
    app.state.recommend.models.versions.drop(other)
    assert (await ask(client, users["a"][0]))["recommendation_id"].startswith(f"{active}.")


async def test_pages_stay_in_their_arm_while_the_trial_ends(
    app: FastAPI, client: httpx2.AsyncClient, trained: str
) -> None:
    trial_id = await begin(app, settings={"diversity": 0.6, "exclude_seen": False}, share=1.0)
    user = USERS[3]
    own: dict[str, Any] = {"diversity": 0.6, "exclude_seen": False}
    explicit = [await ask(client, user, n=7, **own)]
    while cursor := explicit[-1]["next_cursor"]:
        explicit.append(await ask(client, user, n=7, cursor=cursor, **own))
    found = [await ask(client, user, n=7)]
    while cursor := found[-1]["next_cursor"]:
        if len(found) == 3:
            await app.state.services.trials.end(trial_id)
        found.append(await ask(client, user, n=7, cursor=cursor))
    assert [ids(page) for page in found] == [ids(page) for page in explicit]
    sources = [page["recommendation_id"].rpartition(".")[0].rpartition(".")[0] for page in found]
    assert sources[:3] == [f"{trial_id}-b"] * 3
    assert set(sources[3:]) == {trained}
    everything = [item for page in found for item in ids(page)]
    assert len(everything) == len(set(everything)) == len(ITEMS)
    assert (await counted(app, trial_id))["b"] == (1, 3)


async def test_users_of_an_interleaving_trial_take_no_part(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services
) -> None:
    other = await publish_model(filled, seed=3, epochs=3)
    await publish_model(filled, seed=4, epochs=3)
    await app.state.recommend.models.refresh()
    settings_id = await begin(app, settings={"diversity": 0.5})
    body = {"kind": "interleaving", "version": other, "share": 0.5}
    interleaving = await filled.trials.begin(parse_trial(body))
    others = app.state.recommend.models.versions
    await until(lambda: others.at_hand(other) is not None)
    sources = {"settings": 0, "interleaving": 0}
    for user in USERS:
        name = (await ask(client, user))["recommendation_id"]
        included = filled.trials.interleaving.includes(
            filled.trials.interleaving.running,  # type: ignore[arg-type]
            user,
        )
        expected = f"{interleaving.trial_id}." if included else f"{settings_id}-"
        assert name.startswith(expected)
        sources["interleaving" if included else "settings"] += 1
    assert min(sources.values()) > 10
