"""Trials over HTTP: begin, list, report, end; and the versions and bodies that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from app.ab_tests import service as trials_module
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import ABTestParams, RunningABTest
from app.ab_tests.service import ABTestService
from app.ab_tests.shadow import ShadowTrials
from app.all_tables import metadata
from app.core.errors import Conflict, Unprocessable
from app.core.ids import new_recommendation_id
from app.core.settings import Settings
from app.wiring import Services, build_services
from tests.app.ab_tests.conftest import (
    URL,
    begin,
    click,
    execute,
    interleaved,
    rows,
    running,
    user_id,
)
from tests.app.conftest import publish_model, until

pytestmark = pytest.mark.anyio


def shadow_of(services: Services) -> ShadowTrials:
    assert services.trials.shadow is not None
    return services.trials.shadow


@pytest.mark.slow
async def test_a_trial_begins_reports_ends_and_is_listed(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    trial = await begin(client, other, share=0.25)
    assert trial["kind"] == "interleaving"
    assert (trial["version_a"], trial["version_b"]) == (active, other)
    assert (trial["share"], trial["status"], trial["ended_at"]) == (0.25, "running", None)
    found = running(served.trials)
    assert found is not None
    assert found[:5] == (trial["trial_id"], "interleaving", active, other, 0.25)

    one = (await client.get(f"{URL}/{trial['trial_id']}")).json()
    assert one["report"]["lists"] == 0
    assert one["report"]["difference"] is None
    ended = (await client.post(f"{URL}/{trial['trial_id']}/stop")).json()
    assert ended["status"] == "ended"
    assert ended["ended_at"] >= ended["created_at"]
    assert ended["report"] == one["report"] | {"ended": "stopped"}
    assert served.trials.interleaving.running is None
    assert (await client.get(f"{URL}/{trial['trial_id']}")).json() == ended

    again = await client.post(f"{URL}/{trial['trial_id']}/stop")
    assert (again.status_code, again.json()["code"]) == (409, "trial_ended")
    second = await begin(client, other)
    page = (await client.get(URL, params={"n": 1})).json()
    assert [each["trial_id"] for each in page["items"]] == [second["trial_id"]]
    rest = (await client.get(URL, params={"cursor": page["next_cursor"]})).json()
    assert rest == {"items": [ended], "next_cursor": None}


async def test_one_of_each_kind_runs_at_a_time(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    await begin(client, versions[0])
    await begin(client, versions[0], kind="shadow")
    assert shadow_of(served).running is not None
    for kind in ("interleaving", "shadow"):
        response = await client.post(URL, json={"kind": kind, "version": versions[0]})
        assert (response.status_code, response.json()["code"]) == (409, "trial_running")


async def test_begin_refuses_unknown_active_and_deleted_versions(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    models = metadata.tables["models"]
    deleted = models.update().where(models.c.version == other).values(status="deleted")
    for version, status, code in (
        ("nope", 404, "unknown_model"),
        ("../../etc", 404, "unknown_model"),
        (active, 422, "same_version"),
    ):
        response = await client.post(URL, json={"kind": "interleaving", "version": version})
        assert (response.status_code, response.json()["code"]) == (status, code)
    await execute(served, deleted)
    response = await client.post(URL, json={"kind": "shadow", "version": other})
    assert (response.status_code, response.json()["code"]) == (409, "deleted_model")
    assert (await client.get(URL)).json()["items"] == []


async def test_begin_refuses_a_version_with_a_damaged_checkpoint(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    (served.models.folder(versions[0]) / "manifest.json").write_bytes(b"{}")
    response = await client.post(URL, json={"kind": "shadow", "version": versions[0]})
    assert (response.status_code, response.json()["code"]) == (409, "checkpoint_damaged")


async def test_begin_refuses_without_an_active_version(
    client: httpx2.AsyncClient, served: Services
) -> None:
    models = metadata.tables["models"]
    values = dict.fromkeys(("factors", "trained_seq", "users", "items", "interactions"), 1)
    row = {"version": "v", "status": "rejected", "kind": "nbpr", "path": "", "checksum": ""}
    await execute(served, models.insert().values(**row, **values, created_at=0))
    response = await client.post(URL, json={"kind": "shadow", "version": "v"})
    assert (response.status_code, response.json()["code"]) == (409, "no_active_model")


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"kind": "both", "version": "v"},
        {"kind": "shadow"},
        {"kind": "shadow", "version": ""},
        {"kind": "shadow", "version": "a\0b"},
        {"kind": "shadow", "version": "v" * 300},
        {"kind": "shadow", "version": "v", "share": 0},
        {"kind": "shadow", "version": "v", "share": 1.5},
        {"kind": "shadow", "version": "v", "share": "1"},
        {"kind": "shadow", "version": "v", "more": 1},
        {"kind": "interleaving", "version": "v", "planned_clicked": 1},
    ],
)
async def test_an_invalid_body_is_422(shared_client: httpx2.AsyncClient, body: Any) -> None:
    response = await shared_client.post(URL, json=body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")


async def test_begin_refuses_if_servers_load_no_second_version(
    settings: Settings, versions: tuple[str, str]
) -> None:
    services = await build_services(settings.model_copy(update={"trial_models": 0}))
    with pytest.raises(Conflict, match="NCR_TRIAL_MODELS"):
        await services.trials.begin(ABTestParams(kind="shadow", version=versions[0]))
    await services.close()


async def test_malformed_json_is_400_and_an_unknown_trial_is_404(
    client: httpx2.AsyncClient,
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(URL, content=b"{", headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "malformed_json")
    for response in (await client.get(f"{URL}/t"), await client.post(f"{URL}/t/stop")):
        assert (response.status_code, response.json()["code"]) == (404, "unknown_trial")


async def test_a_trial_ends_when_another_version_is_activated(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    first = await begin(client, other)
    second = await begin(client, other, kind="shadow")
    await served.trials.end_outdated()
    assert (await client.get(f"{URL}/{first['trial_id']}")).json()["status"] == "running"
    third = await publish_model(served, seed=3)
    await served.trials.end_outdated()
    for trial in (first, second):
        ended = (await client.get(f"{URL}/{trial['trial_id']}")).json()
        assert ended["status"] == "ended"
        assert active in ended["report"]["ended"]
        assert third in ended["report"]["ended"]
    assert not any(kind.running for kind in served.trials.kinds.values())


async def test_begin_ends_an_outdated_trial_first(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    first = await begin(client, versions[0])
    third = await publish_model(served, seed=3)
    second = await begin(client, versions[0])
    assert second["version_a"] == third
    assert (await client.get(f"{URL}/{first['trial_id']}")).json()["status"] == "ended"


async def test_a_trial_ends_when_the_files_of_its_version_are_deleted(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, versions[0])
    assert await ABTestRepository(served.database).versions_in_use() == set(versions)
    models = metadata.tables["models"]
    gone = models.update().where(models.c.version == versions[0]).values(status="deleted")
    await execute(served, gone)
    await served.trials.end_outdated()
    assert (await client.get(f"{URL}/{trial['trial_id']}")).json()["status"] == "ended"


async def test_a_trial_ends_after_the_maximum_of_lists_or_days(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = await begin(client, versions[0])
    monkeypatch.setattr(trials_module, "MAX_TRIAL_LISTS", 0)
    monkeypatch.setattr(trials_module, "COUNT_SECONDS", 0.0)
    await served.trials.end_outdated()
    ended = (await client.get(f"{URL}/{trial['trial_id']}")).json()
    assert (ended["status"], ended["report"]["ended"]) == ("ended", "0 lists were interleaved")
    shadow = await begin(client, versions[0], kind="shadow")
    monkeypatch.setattr(trials_module, "MAX_TRIAL_DAYS", 0)
    await served.trials.end_outdated()
    ended = (await client.get(f"{URL}/{shadow['trial_id']}")).json()
    assert ended["report"]["ended"] == "the trial ran for 0 days"


async def test_other_servers_follow_a_trial(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    settings = served.settings.model_copy(update={"model_poll_seconds": 0.01})
    another = await build_services(settings)
    try:
        await another.trials.start()
        assert another.trials.interleaving.running is None
        trial = await begin(client, versions[0])
        await until(lambda: another.trials.interleaving.running is not None)
        await client.post(f"{URL}/{trial['trial_id']}/stop")
        await until(lambda: another.trials.interleaving.running is None)
    finally:
        await another.close()


async def test_interleaving_includes_the_same_users_in_the_whole_trial(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    await begin(client, versions[0], share=0.3)
    trials, trial = served.trials.interleaving, running(served.trials)
    users = [f"user-{n}" for n in range(2000)]
    taking = [trials.includes(trial, user) for user in users]
    assert 0.25 < sum(taking) / len(users) < 0.35
    assert taking == [trials.includes(trial, user) for user in users]
    # Another trial is another draw.
    another = [trials.includes(trial._replace(trial_id="other"), user) for user in users]
    assert 0.4 < sum(a == b for a, b in zip(taking, another, strict=True)) / len(users) < 0.75
    assert all(trials.includes(trial._replace(share=1.0), user) for user in users)
    assert trials.includes(trial, "\ud800 cannot be encoded") in (True, False)


async def test_shadow_draws_each_request(served: Services, versions: tuple[str, str]) -> None:
    trial = RunningABTest("t", "shadow", "a", "b", 0.3, 0)
    drawn = [shadow_of(served).includes(trial) for _ in range(2000)]
    assert 0.2 < sum(drawn) / len(drawn) < 0.4


async def test_interleaving_report_credits_clicks_to_versions(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.events.click_attribution.PAGE_ROWS", 3)
    other, active = versions
    trial = await begin(client, other)
    url = f"{URL}/{trial['trial_id']}"
    team_a, team_b = ["film-1", "film-2"], ["film-3", "film-4"]

    async def given(user: str | None, *clicked: str, **more: Any) -> str:
        name = new_recommendation_id(trial["trial_id"])
        await interleaved(served, running(served.trials), name, user, team_a, team_b)
        for item in clicked:
            await click(served, user or "newcomer", item, name, **more)
        return name

    await given("user-1", "film-3")  # B
    await given("user-1", "film-3", "film-4", "film-1")  # B
    await given("user-2", "film-2", "film-2", "film-1")  # A: an item counts once
    await given("user-2", "film-1", "film-4")  # a tie
    await given("user-3")  # not clicked
    await given("user-3", "film-9")  # an item that is nobody's
    await given("user-3", "film-3", type="dislike")  # no click
    await given(None, "film-4")  # B, of someone who was nobody
    # Of another trial, of a version, of nothing that was given out, and none of ours at all.
    for name in (
        new_recommendation_id("trial-other"),
        new_recommendation_id(active),
        new_recommendation_id(trial["trial_id"]),
        f"{trial['trial_id']}.forged",
        f"{trial['trial_id']}-{new_recommendation_id('x')}",
        "…",
    ):
        await click(served, "user-4", "film-3", name)

    report = (await client.get(url)).json()["report"]
    assert report["lists"] == 8
    assert report["clicked"] == 5
    assert (report["wins_a"], report["wins_b"], report["ties"]) == (1, 3, 1)
    assert (report["credit_a"], report["credit_b"]) == (4, 5)
    assert report["users"] == 3
    assert report["difference"] == pytest.approx(3.5 / 5 - 0.5)
    assert report["interval"][0] < report["difference"] < report["interval"][1]
    assert report["level"] == 0.95
    assert report["p"] == pytest.approx(1.0)
    assert report["better"] is None

    for n in range(12):
        await given(f"user-{n + 5}", "film-4")
    report = (await client.get(url)).json()["report"]
    assert report["wins_b"] == 15
    assert report["better"] == other
    ended = (await client.post(f"{url}/stop")).json()
    assert ended["report"]["better"] == other


async def test_only_positive_feedback_is_a_click(
    settings: Any, versions: tuple[str, str], served: Services
) -> None:
    """By the same setting as for training."""
    feedback = '{"view": "seen", "rating": [{"from": 4, "weight": 1}]}'
    another = await build_services(settings.model_copy(update={"feedback": feedback}))
    try:
        active = versions[1]
        names = [new_recommendation_id(active) for _ in range(5)]
        await click(another, "user-1", "film-1", names[0], type="view")
        await click(another, "user-1", "film-1", names[1], type="rating", value=3)
        await click(another, "user-1", "film-1", names[2], type="rating", value=4)
        await click(another, "user-1", "film-1", names[3], type="purchase")
        another.trials.impressions.add_lists(active, 5)
        found = await another.trials.click_through.total(active)
        assert found.model_dump() == {"lists": 5, "clicked": 2, "rate": 0.4}
    finally:
        await another.close()


async def test_the_report_has_the_difference_over_time_and_at_the_planned_size(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other = versions[0]
    trial = await begin(client, other, planned_clicked=4.0)  # in JSON as whole as 4
    url = f"{URL}/{trial['trial_id']}"
    assert trial["planned_clicked"] == 4
    assert (await begin(client, other, kind="shadow"))["planned_clicked"] is None
    began = running(served.trials).created_at
    # B wins the first five lists, a minute apart, and A all others.
    for n, item in enumerate(["film-2"] * 5 + ["film-1"] * 3):
        if n == 3:
            assert "planned" not in (await client.get(url)).json()["report"]
        name = new_recommendation_id(trial["trial_id"])
        user = f"user-{n + 1}"
        await interleaved(served, running(served.trials), name, user, ["film-1"], ["film-2"])
        await served.trials.flush()
        impressions = metadata.tables["impressions"]
        at = began - (9 - n) * 60_000_000
        is_this = impressions.c.recommendation_id == name
        await execute(served, impressions.update().where(is_this).values(created_at=at))
        await click(served, user, item, name)
    trials = metadata.tables["trials"]
    await execute(served, trials.update().values(created_at=began - 10 * 60_000_000))
    report = (await client.get(url)).json()["report"]
    planned = report["planned"]
    assert (planned["wins_a"], planned["wins_b"], planned["users"]) == (0, 4, 4)
    assert planned["at"] == began - 6 * 60_000_000
    assert planned["difference"] == 0.5
    series = report["series"]
    assert 1 < len(series) <= 60
    assert [point["at"] for point in series] == sorted(point["at"] for point in series)
    assert [point["clicked"] for point in series] == sorted(point["clicked"] for point in series)
    assert series[0]["difference"] == 0.5
    assert (series[-1]["clicked"], series[-1]["difference"]) == (8, report["difference"])
    assert series[-1]["interval"] == report["interval"]
    assert report["difference"] == 5 / 8 - 0.5
    ended = (await client.post(f"{url}/stop")).json()["report"]
    assert ended["planned"] == planned


async def test_erasing_a_user_deletes_their_impressions(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, versions[0])
    now = running(served.trials)
    for user in ("user-1", "user-2"):
        name = new_recommendation_id(trial["trial_id"])
        await interleaved(served, now, name, user, ["film-1"], ["film-2"])
    await served.trials.flush()
    # These have not been written when their user goes.
    for user in ("user-1", "user-2", "user-3"):
        name = new_recommendation_id(trial["trial_id"])
        await interleaved(served, now, name, user, ["film-1"], ["film-2"])
    gone, stays = await _ids(served, ["user-1", "user-2"])
    assert (await client.delete("/users/user-1")).status_code in (200, 204)
    await served.trials.flush()
    users = [row["user_id"] for row in await rows(served, "impressions")]
    assert gone not in users
    assert users.count(stays) == 2
    assert len(users) == 3


async def _ids(services: Services, users: Sequence[str]) -> list[int]:
    return [await user_id(services, user) for user in users]


async def test_shadow_report_averages_the_agreement_of_lists(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    begun = await begin(client, versions[0], kind="shadow")
    url = f"{URL}/{begun['trial_id']}"
    shadow = shadow_of(served)
    trial = shadow.running
    assert trial is not None
    empty = (await client.get(url)).json()["report"]
    nothing = {"overlap": None, "same_first": None, "rbo": None}
    assert empty == {"requests": 0, "rbo_p": 0.9} | nothing
    shadow.record(trial, [1, 2, 3, 4], [1, 2, 3, 4])
    shadow.record(trial, [1, 2, 3, 4], [2, 1, 8, 9])
    await served.trials.flush()
    another = await build_services(served.settings)  # adds to the same sums
    shadow_of(another).record(trial, [1, 2], [3, 4])
    await another.close()
    shadow.record(trial, [], [])
    report = (await client.post(f"{url}/stop")).json()["report"]
    assert report["requests"] == 4
    assert report["overlap"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    assert report["same_first"] == pytest.approx(0.5)
    assert 0.5 < report["rbo"] < 0.75
    assert report["ended"] == "stopped"


async def test_without_the_shadow_module_its_trials_are_refused(
    served: Services, versions: tuple[str, str]
) -> None:
    trials = served.trials
    without = ABTestService(
        served.database,
        served.models,
        served.settings,
        trials.impressions,
        trials.click_through,
        trials.interleaving,
    )
    with pytest.raises(Unprocessable, match="shadow trials are not installed"):
        await without.begin(ABTestParams(kind="shadow", version=versions[0]))
    trial = await without.begin(ABTestParams(kind="interleaving", version=versions[0]))
    assert (await without.end(trial.trial_id)).status == "ended"
