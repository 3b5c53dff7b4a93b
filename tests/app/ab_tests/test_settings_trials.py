"""Settings trials over HTTP: begin, refuse, count both arms, report, end, and forget users."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from app.ab_tests.assignment import user_number
from app.ab_tests.repository import ABTestRepository
from app.ab_tests.schemas import Arm, parse_trial
from app.ab_tests.settings_trials import SettingsTrials, TrialArm
from app.all_tables import metadata
from app.core.ids import new_recommendation_id
from app.wiring import Services, build_services
from tests.app.ab_tests.conftest import URL, click, execute, rows
from tests.app.conftest import publish_model

pytestmark = pytest.mark.anyio
EMPTY = {"users": 0, "lists": 0, "clicked": 0, "rate": None}


async def begin(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"kind": "settings", "share": 0.5, **body})
    assert response.status_code == 201, response.text
    trial: dict[str, Any] = response.json()
    assert response.headers["location"] == f"{URL}/{trial['trial_id']}"
    return trial


def settings_trials(services: Services) -> SettingsTrials:
    assert services.trials.settings_trials is not None
    return services.trials.settings_trials


def arm_of(trial: dict[str, Any], arm: Arm) -> TrialArm:
    return TrialArm(trial["trial_id"], arm, trial[f"version_{arm}"], {})


async def served_lists(
    services: Services, trial: dict[str, Any], arm: Arm, user: str, clicked: int, lists: int
) -> None:
    """Lists of a user in an arm, some of which they click."""
    for n in range(lists):
        settings_trials(services).record(arm_of(trial, arm), user)
        if n < clicked:
            name = new_recommendation_id(arm_of(trial, arm).source)
            for item in ("film-1", "film-2"):  # one list, however many clicks
                await click(services, user, item, name)


async def test_a_trial_of_settings_begins_reports_and_ends(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    active = versions[1]
    trial = await begin(client, share=0.3, settings={"diversity": 0.3}, planned_lists=500)
    assert trial["kind"] == "settings"
    assert (trial["version_a"], trial["version_b"]) == (active, active)
    assert (trial["settings"], trial["planned_lists"]) == ({"diversity": 0.3}, 500)
    assert (trial["share"], trial["status"], trial["report"]) == (0.3, "running", None)
    url = f"{URL}/{trial['trial_id']}"
    report = (await client.get(url)).json()["report"]
    assert report == {
        "users": 0,
        "lists": 0,
        "clicked": 0,
        "a": EMPTY,
        "b": EMPTY,
        **dict.fromkeys(("difference", "relative_difference", "interval", "p", "better")),
        "level": 0.95,
        "planned_lists": 500,
        "detectable": None,
    }
    second = await client.post(URL, json={"kind": "settings", "settings": {"diversity": 0.1}})
    assert (second.status_code, second.json()["code"]) == (409, "trial_running")
    # Of the other kinds one may run beside it.
    beside = await client.post(URL, json={"kind": "shadow", "version": versions[0]})
    assert beside.status_code == 201
    listed = (await client.get(URL)).json()["items"]
    assert [row["trial_id"] for row in listed] == [beside.json()["trial_id"], trial["trial_id"]]
    assert listed[0]["settings"] is None
    page = (await client.get(URL, params={"n": 1})).json()
    rest = (await client.get(URL, params={"cursor": page["next_cursor"]})).json()
    assert [*page["items"], *rest["items"]] == listed
    ended = (await client.post(f"{url}/stop")).json()
    assert (ended["status"], ended["report"]) == ("ended", report | {"ended": "stopped"})
    assert settings_trials(served).running is None
    assert (await client.get(url)).json() == ended
    again = await client.post(f"{url}/stop")
    assert (again.status_code, again.json()["code"]) == (409, "trial_ended")
    third = await begin(client, version=versions[0], planned_lists=900.0)
    assert third["planned_lists"] == 900
    assert (third["version_b"], third["settings"]) == (versions[0], {})


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "settings"),
        ({"settings": {}}, "settings"),
        ({"settings": {"colour": 1}}, "settings.colour"),
        ({"settings": {"diversity": 1.1}}, "settings.diversity"),
        ({"settings": {"diversity": None}}, "settings.diversity"),
        ({"settings": {"diversity": "0.3"}}, "settings.diversity"),
        ({"settings": {"exploration": -0.1}}, "settings.exploration"),
        ({"settings": {"exclude_seen": 1}}, "settings.exclude_seen"),
        ({"settings": {"diversity": 0.3}, "share": 0}, "share"),
        ({"settings": {"diversity": 0.3}, "share": 1.01}, "share"),
        ({"settings": {"diversity": 0.3}, "share": -1}, "share"),
        ({"settings": {"diversity": 0.3}, "planned_lists": 9}, "planned_lists"),
        ({"settings": {"diversity": 0.3}, "more": 1}, "more"),
        ({"version": ""}, "version"),
        ({"kind": "interleaving", "version": "v", "settings": {"diversity": 0.3}}, "settings"),
        ({"kind": "others"}, "kind"),
    ],
)
async def test_a_bad_body_is_one_problem(
    shared_client: httpx2.AsyncClient, body: dict[str, Any], where: str
) -> None:
    answer = await shared_client.post(URL, json={"kind": "settings", **body})
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["code"]) == (422, "invalid_request"), problem
    assert where in problem["detail"]
    assert (await shared_client.get(URL)).json()["items"] == []


async def test_versions_that_cannot_answer_are_refused(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    for version, status, code in (
        ("nope", 404, "unknown_model"),
        (versions[1], 422, "same_version"),
    ):
        body = {"kind": "settings", "version": version}
        answer = await client.post(URL, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    none = await build_services(served.settings.model_copy(update={"trial_models": 0}))
    try:
        params = {"kind": "settings", "settings": {"diversity": 0.2}}
        trial = await none.trials.begin(parse_trial(params))  # it needs no second version
        assert (await none.trials.end(trial.trial_id)).status == "ended"
    finally:
        await none.close()


async def test_without_an_active_version_there_is_nothing_to_try(
    client: httpx2.AsyncClient,
) -> None:
    answer = await client.post(URL, json={"kind": "settings", "settings": {"diversity": 0.3}})
    assert (answer.status_code, answer.json()["code"]) == (409, "no_active_model")


async def test_it_ends_when_a_version_changes_or_is_deleted(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    other, active = versions
    models = metadata.tables["models"]
    first = await begin(client, version=other)
    gone = models.update().where(models.c.version == other).values(status="deleted")
    await execute(served, gone)
    await served.trials.end_outdated()
    ended = (await client.get(f"{URL}/{first['trial_id']}")).json()
    assert (ended["status"], other in ended["report"]["ended"]) == ("ended", True)
    second = await begin(client, settings={"exploration": 0.5})
    third = await publish_model(served, seed=3)
    await served.trials.end_outdated()
    ended = (await client.get(f"{URL}/{second['trial_id']}")).json()
    assert ended["status"] == "ended"
    assert active in ended["report"]["ended"]
    assert third in ended["report"]["ended"]


async def test_both_arms_are_counted_by_user(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, settings={"diversity": 0.3}, planned_lists=300)
    url = f"{URL}/{trial['trial_id']}"
    for n in range(40):
        await served_lists(served, trial, "a", f"a{n}", int(n < 4), 3)
        await served_lists(served, trial, "b", f"b{n}", int(n < 30), 2)
    # Forged: of a user whom the arm gave no list, of no trial, and with another's arm.
    for name in (
        new_recommendation_id(arm_of(trial, "b").source),
        new_recommendation_id(trial["trial_id"]),
        f"{arm_of(trial, 'b').source}.forged",
    ):
        await click(served, "a9", "film-3", name)
    another = await build_services(served.settings)  # adds to the same counts
    await served_lists(another, trial, "b", "b0", 0, 5)
    await another.close()
    await served.trials.flush()
    report = (await client.get(url)).json()["report"]
    assert report["a"] == {"users": 40, "lists": 120, "clicked": 4, "rate": 4 / 120}
    assert report["b"] == {"users": 40, "lists": 85, "clicked": 30, "rate": 30 / 85}
    assert (report["users"], report["lists"], report["clicked"]) == (80, 205, 34)
    assert report["difference"] == pytest.approx(30 / 85 - 4 / 120)
    assert report["interval"][0] < report["difference"] < report["interval"][1]
    assert report["better"] == "b"
    assert report["p"] < 0.05
    metrics = (await client.get("/metrics")).text
    for line in (
        'ncr_trial_lists{arm="a"} 120.0',
        'ncr_trial_lists{arm="b"} 85.0',
        'ncr_trial_clicked_lists{arm="a"} 4.0',
        'ncr_trials_running{kind="settings"} 1.0',
        f'ncr_lists_served_total{{version="{trial["trial_id"]}-b"}} 80.0',
    ):
        assert line in metrics, line
    # It is no version's own click-through.
    found = (await client.get(f"/admin/models/{versions[1]}")).json()["click_through"]
    assert (found["lists"], found["clicked"]) == (0, 0)


async def test_users_are_forgotten_and_merged(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, settings={"diversity": 0.3})
    trial_id = trial["trial_id"]
    for user, arm, lists in (
        ("user-1", "a", 2),
        ("user-2", "b", 3),
        ("user-3", "a", 1),
        ("user-4", "b", 4),
    ):
        await served_lists(served, trial, arm, user, 0, lists)  # type: ignore[arg-type]
    await served_lists(served, trial, "b", "visitor", 0, 1)  # somebody without events
    await served.trials.flush()
    await served_lists(served, trial, "a", "user-1", 0, 1)  # not written yet
    assert (await client.delete("/users/user-1")).status_code in (200, 204)
    assert (await client.delete("/users/visitor")).status_code == 204
    assert (await client.delete("/users/visitor")).status_code == 404
    await served.trials.flush()
    merged = await client.post("/users/user-2/merge", json={"into": "user-4"})
    assert merged.status_code == 200, merged.text
    merged = await client.post("/users/user-3/merge", json={"into": "user-4"})
    assert merged.status_code == 200, merged.text
    found = {
        (row["arm"], row["user_number"]): row["lists"] for row in await rows(served, "trial_lists")
    }
    assert found == {
        ("b", user_number(trial_id, "user-4")): 7,
        ("a", user_number(trial_id, "user-4")): 1,
    }
    # Their rows go some time after the end of the trial; its report stays.
    ended = (await client.post(f"{URL}/{trial_id}/stop")).json()
    await served.trials.delete_old_impressions()
    assert len(await rows(served, "trial_lists")) == 2
    trials = metadata.tables["settings_trials"]
    await execute(served, trials.update().values(ended_at=1))
    await served.trials.delete_old_impressions()
    assert await rows(served, "trial_lists") == []
    assert (await client.get(f"{URL}/{trial_id}")).json()["report"] == ended["report"]


async def test_lists_of_too_many_users_are_dropped_and_counted(
    client: httpx2.AsyncClient,
    served: Services,
    versions: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.ab_tests.impressions.MAX_TRIAL_USERS", 2)
    trial = await begin(client, settings={"diversity": 0.3})
    for user in ("u1", "u2", "u3", "u1"):
        settings_trials(served).record(arm_of(trial, "a"), user)
    await served.trials.flush()
    assert sorted(row["lists"] for row in await rows(served, "trial_lists")) == [1, 2]
    assert served.trials.impressions.impressions["dropped"] == 1


async def test_only_arms_of_settings_trials_are_found_by_a_cursor(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, settings={"diversity": 0.3}, version=versions[0])
    found = settings_trials(served)
    source = f"{trial['trial_id']}-b"
    expected = (trial["trial_id"], "b", versions[0], {"diversity": 0.3})
    assert await found.find_arm(source) == expected
    await client.post(f"{URL}/{trial['trial_id']}/stop")
    assert await found.find_arm(source) == expected
    assert (await found.find_arm(f"{trial['trial_id']}-a")) == (
        trial["trial_id"], "a", versions[1], {}
    )  # fmt: skip
    shadow = await client.post(URL, json={"kind": "shadow", "version": versions[0]})
    for name in (versions[0], trial["trial_id"], "trial-1-a", f"{shadow.json()['trial_id']}-a"):
        assert await found.find_arm(name) is None


async def test_hours_of_a_trial_are_left_out_of_the_automatic_rollback(
    client: httpx2.AsyncClient, served: Services, versions: tuple[str, str]
) -> None:
    trial = await begin(client, settings={"diversity": 0.3})
    await client.post(URL, json={"kind": "shadow", "version": versions[0]})
    periods = await ABTestRepository(served.database).shown_periods(0, 2**60)
    assert len(periods) == 1
    await client.post(f"{URL}/{trial['trial_id']}/stop")
    (after,) = await ABTestRepository(served.database).shown_periods(0, 2**60)
    assert after[0] == periods[0][0] < after[1] < 2**60
