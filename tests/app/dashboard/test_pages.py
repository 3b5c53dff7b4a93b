"""Every page over HTTP: empty, with a model, with strangers' text, and for keys with few roles."""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy.exc import OperationalError

from app.all_tables import metadata
from app.core.access import Role, declared_access
from app.core.ids import new_recommendation_id
from app.core.settings import Settings, load_settings
from app.dashboard import kept, rendering, users, which
from app.jobs.repository import JobRepository
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import client_of, run_job_here, until

pytestmark = pytest.mark.anyio

ORIGIN = {"Origin": "http://localhost"}
SCRIPT = "<script>alert('x')</script>"
ODD_ID = "a/b \"q\" 'é' 🎬 <i>"
LISTS = ("", "/users", "/items", "/which", "/models", "/jobs", "/trials", "/data")


@pytest.fixture(autouse=True)
def count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, pages show what was just stored."""
    monkeypatch.setattr(kept, "MIN_SECONDS", math.inf)


async def test_what_takes_long_to_count_is_kept_a_hundred_times_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(kept, "MIN_SECONDS", 0.02)
    monkeypatch.setattr(kept, "time", SimpleNamespace(monotonic=lambda: now))
    figures = kept.KeptFigures()
    counts: Counter[str] = Counter()

    async def look(name: str, seconds: float) -> int:
        async def count() -> int:
            nonlocal now
            now += seconds
            counts[name] += 1
            return counts[name]

        return await figures.get(name, count)

    assert [await look("slow", 0.5), await look("slow", 0.5)] == [1, 1]
    assert [await look("fast", 0.01), await look("fast", 0.01)] == [1, 2]
    now += 49.0
    assert await look("slow", 0.5) == 1
    now += 1.0
    assert await look("slow", 0.5) == 2
    figures.forget("slow")
    assert await look("slow", 0.5) == 3

    async def forgotten_meanwhile() -> str:
        nonlocal now
        now += 0.5
        figures.forget("slow")
        return "outdated"

    await figures.get("changed", forgotten_meanwhile)
    assert await look("changed", 0.5) == 1  # counted anew
    assert await look("slow", 0.5) == 4
    for n in range(2 * kept.MAX_FIGURES):
        await look(f"other {n}", 0.5)
    assert len(figures._kept) == kept.MAX_FIGURES
    assert await look("slow", 0.5) == 5


async def test_names_that_strangers_send_stay_in_no_memory(client: httpx2.AsyncClient) -> None:
    assert rendering.static_file("app.css") is not None
    kept = rendering._read_static.cache_info().currsize
    for n in range(5):
        assert (await client.get(f"/dashboard/static/x/none-{n}")).status_code == 404
    assert rendering._read_static.cache_info().currsize == kept


def path_of(*segments: str) -> str:
    return "/".join(("/dashboard", *(quote(segment, safe="") for segment in segments)))


async def page(client: httpx2.AsyncClient, path: str, status: int = 200) -> str:
    """The text of a page, which runs and loads nothing but the service's own files."""
    response = await client.get(path)
    assert response.status_code == status, (path, response.text[:2000])
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'self'")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["referrer-policy"] == "same-origin"  # else forms hide their origin
    text = response.text
    assert not re.search(r"<script(?![^>]*\bsrc=)", text), path
    assert not re.search(r"\s(style|on\w+)=", re.sub(r'"[^"]*"', '""', text)), path
    assert all(url.startswith("/") for url in re.findall(r'(?:src|href)="([^"#?][^"]*)"', text))
    return text


async def post(client: httpx2.AsyncClient, path: str, **fields: str) -> httpx2.Response:
    return await client.post(path, data=fields, headers=ORIGIN)


async def test_pages_of_an_empty_database_say_what_to_do(client: httpx2.AsyncClient) -> None:
    for path in LISTS:
        assert "<h1>" in await page(client, f"/dashboard{path}")
    assert "No events yet" in await page(client, "/dashboard")
    assert "A question needs two items" in await page(client, "/dashboard/which")
    newcomer = await page(client, path_of("users", "nobody"))
    assert "The service has no events of this user" in newcomer
    for missing in (("items", "x"), ("models", "x"), ("jobs", "x"), ("trials", "x"), ("nowhere",)):
        await page(client, path_of(*missing), 404)


@pytest.mark.slow
async def test_pages_with_a_model(
    client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    user, item = "u1", "i1"
    user = str(await filled.events.example_user())
    item = (await filled.events.history(user, None, 1))[0][0][1]
    for path in LISTS:
        await page(client, f"/dashboard{path}")
    text = await page(client, path_of("users", user))
    assert "because of" in text
    assert "over the next" in text
    assert "Preferences between items" in text
    text = await page(client, f"{path_of('users', user)}?diversity=0.8&model={trained}")
    assert f"With version {trained} and diversity 0.8" in text
    stored = await filled.events.last_seq()
    liked = (await page(client, path_of("users", user))).split(
        'class="item" href="/dashboard/items/'
    )
    other = liked[-1].partition('"')[0]
    assert "If they liked" in await page(client, f"{path_of('users', user)}?like={other}")
    assert await filled.events.last_seq() == stored
    assert "Similar items" in await page(client, path_of("items", item))
    text = await page(client, path_of("models", trained))
    assert "Comparison with the baselines" in text
    assert "Calibration" in text


async def test_a_list_on_a_page_is_the_one_of_the_api_and_counts_nowhere(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    user = str(await filled.events.example_user())
    shown = re.findall(
        r'<span class="rank">\d+</span>\s*<a class="item" href="/dashboard/items/([^"]+)"',
        await page(client, path_of("users", user)),
    )
    await filled.trials.flush()
    assert (await filled.models.click_through(trained)).lists == 0
    answer = (await client.get(f"/recommend/{user}")).json()
    assert shown == [item["id"] for item in answer["items"]]


async def test_what_if_ranks_as_if_the_event_were_stored_and_leaves_caches_alone(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    user = str(await filled.events.example_user())
    before = (await client.get(f"/recommend/{user}")).json()["items"]
    item = before[0]["id"]
    text = await page(client, f"{path_of('users', user)}?like={item}")
    second = text.partition("If they liked")[2].partition("Preferences between items")[0]
    shown = re.findall(r'<a class="item" href="/dashboard/items/([^"]+)"', second)
    assert (await client.get(f"/recommend/{user}")).json()["items"] == before
    await client.post("/events", json={"user": user, "item": item})
    after = (await client.get(f"/recommend/{user}")).json()["items"]
    assert shown == [each["id"] for each in after]


async def test_a_settings_trial_is_begun_and_its_arms_are_shown(
    client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    empty = {"version": "", "exploration": "", "exclude_seen": "", "planned_lists": "300"}
    form = empty | {"kind": "settings", "percent": "50", "diversity": "0.4"}
    for wrong in ({"diversity": "much"}, {"diversity": "2"}, {"diversity": ""}):
        assert (await post(client, "/dashboard/trials", **form | wrong)).status_code == 422
    begun = await post(client, "/dashboard/trials", **form)
    assert begun.status_code == 303, begun.text
    path = begun.headers["location"]
    assert "too few users for a result" in await page(client, path)
    trials = filled.trials.settings_trials
    assert trials is not None
    assert trials.running is not None
    assert trials.running.settings == {"diversity": 0.4}
    for n in range(100):
        trials.record(trials.arm_of(trials.running, f"user-{n}"), f"user-{n}")
    await filled.trials.flush()
    shown = re.sub(r"<[^>]+>|\s+", " ", await page(client, path))
    report = (await filled.trials.get(trials.running.trial_id)).report or {}
    assert re.search(rf" A\s+{report['a']['users']}\s+{report['a']['lists']}\s+0\s+0", shown), shown
    assert "95 % interval" in shown
    assert "diversity 0.4" in shown
    assert re.search(r"100\s+of 300", shown)
    listed = re.sub(r"<[^>]+>|\s+", " ", await page(client, "/dashboard/trials"))
    assert "settings of diversity 0.4" in listed
    assert (await post(client, f"{path}/stop")).status_code == 303
    assert "not shown" in await page(client, path)


async def test_titles_and_ids_are_text(
    client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    await filled.catalog.upsert_rows(
        [{"id": ODD_ID, "title": SCRIPT, "categories": [SCRIPT], "attributes": {SCRIPT: SCRIPT}}]
    )
    response = await client.post("/events", json={"user": SCRIPT, "item": ODD_ID, "type": SCRIPT})
    assert response.json()["accepted"] == 1
    paths = [
        *(f"/dashboard{path}" for path in LISTS),
        path_of("users", SCRIPT),
        path_of("users", SCRIPT, "erase"),
        path_of("items", ODD_ID),
        path_of("items", ODD_ID, "hide"),
        f"/dashboard/users?q={quote(SCRIPT)}x",
        f"/dashboard/items?q={quote(SCRIPT)}",
    ]
    seen = 0
    for path in paths:
        text = await page(client, path)
        assert "<script>" not in text, path
        assert "<i>" not in text, path
        seen += "&lt;script&gt;" in text
    assert seen >= 6
    link = re.search(r'href="(/dashboard/items/a%2Fb[^"]+)"', await page(client, paths[-1]))
    assert link is not None
    assert SCRIPT.replace("<", "&lt;")[:10] in await page(client, link[1])
    long_id = "ü" * 128
    assert long_id in await page(client, path_of("users", long_id))
    await page(client, path_of("users", long_id + "x"), 422)


async def test_which_of_the_two_moves_the_list(
    client: httpx2.AsyncClient, filled: Services, trained: str
) -> None:
    text = await page(client, "/dashboard/which")
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', text.partition("</form>")[0]))
    answer = await client.post(
        "/dashboard/which", data=fields, headers=ORIGIN | {"HX-Request": "true"}
    )
    assert answer.status_code == 200
    assert "places moved" in answer.text
    assert "<html" not in answer.text
    moved = re.search(r"(\d+) of 10 places moved", answer.text)
    assert moved is not None
    assert int(moved[1]) > 0
    assert len((await filled.events.profiles.get(fields["user"])).pairs) == 1
    # Without JavaScript it is a page.
    plain = await post(client, "/dashboard/which", **fields)
    assert plain.status_code == 303
    assert "Learned of your taste" in await page(client, plain.headers["location"])
    refused = await post(client, "/dashboard/which", **fields | {"user": "somebody"})
    assert refused.status_code == 422
    forgot = await post(client, "/dashboard/which/forget", user=fields["user"])
    assert forgot.status_code == 303
    assert (await filled.events.profiles.get(fields["user"])).user_id is None


@pytest.mark.slow
async def test_a_trial_shows_its_difference_from_its_planned_size_on(
    client: httpx2.AsyncClient, filled: Services, settings: Settings, trained: str
) -> None:
    other = str((await run_job_here(filled, settings, epochs=5, force=True)).model_version)
    assert "Until" in await page(client, "/dashboard/trials")
    for wrong in ("x", "1", "-5", "2000000"):
        refused = await post(
            client, "/dashboard/trials", kind="interleaving", version=trained, planned=wrong
        )
        assert refused.status_code == 422, wrong
    fields = {"kind": "interleaving", "version": trained, "percent": "100", "planned": "3"}
    begun = await post(client, "/dashboard/trials", **fields)
    path = begun.headers["location"]
    trial = (await filled.trials.page(None, 1))[0][0]
    assert (trial.version_a, trial.version_b, trial.planned_clicked) == (other, trained, 3)
    known = (await filled.catalog.catalogue()).external_ids
    for n in range(4):
        text = await page(client, path)
        assert ("The difference" in text, "95 % interval" in text) == (True, n >= 3)
        assert ("Clicks for B" in text) == (n >= 3)  # they would tell
        if n < 3:
            assert f"{n} of 3 clicked lists" in text
        name = new_recommendation_id(trial.trial_id)
        running = filled.trials.interleaving.running
        assert running is not None
        filled.trials.interleaving.record(name, running, None, [0, 1], [2, 3])
        event = {"user": f"u{n}", "item": known[2], "recommendation_id": name}
        assert (await filled.events.add_rows([event], 0)).accepted == 1
    assert "at the planned size" in text
    assert "Let it run" in await page(client, f"{path}/stop")
    assert (await filled.trials.get(trial.trial_id)).status == "running"
    assert (await post(client, f"{path}/stop")).status_code == 303
    assert "no action is possible" in await page(client, f"{path}/stop")
    assert (await post(client, f"{path}/stop")).status_code == 409


async def test_a_part_of_an_id_finds_users_among_the_newest(
    client: httpx2.AsyncClient, filled: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["Anna-50%@x", "anna-other", "old-anna"]
    for name in reversed(names):
        await filled.events.add_rows([{"user": name, "item": "i"}], 0)
    text = await page(client, "/dashboard/users?q=nna")
    assert "3 that contain it" in text
    text = await page(client, "/dashboard/users?q=anna")
    assert "1 that begin with" in text
    assert "2 that contain it" in text
    assert path_of("users", names[0]) in text
    assert "No user" in await page(client, "/dashboard/users?q=n%25a")  # % is no wildcard
    assert "1 that contain it" in await page(client, "/dashboard/users?q=50%25")
    assert "From 3 characters on" in await page(client, "/dashboard/users?q=nn")
    monkeypatch.setattr(users, "SEARCHED_USERS", 2)
    text = await page(client, "/dashboard/users?q=nna")
    assert "2 that contain it" in text
    assert "among the newest 2" in text


async def test_questions_are_prepared_while_the_page_waits(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, trained: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = app.state.recommend.models.current.engine
    may_go_on = threading.Event()
    make = engine.question_pool

    def slowly(rows: Any) -> Any:
        assert may_go_on.wait(30)
        return make(rows)

    monkeypatch.setattr(engine, "question_pool", slowly)
    monkeypatch.setattr(which, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(which, "POLL_SECONDS", 0.1)
    text = await page(client, "/dashboard/which")
    assert "Preparing questions" in text
    live = re.search(r'hx-get="([^"]+)"', text)
    assert live is not None
    again = live[1].replace("&amp;", "&")
    asking = ORIGIN | {"HX-Request": "true"}
    assert (await client.get(again, headers=asking)).status_code == 204
    may_go_on.set()
    await until(lambda: _is_ready(client, again))
    answer = await client.get(again, headers=asking)
    assert "First question" in answer.text
    assert "<html" not in answer.text
    assert "hx-trigger" not in answer.text  # nothing is asked for any more


async def _is_ready(client: httpx2.AsyncClient, path: str) -> bool:
    answer = await client.get(path, headers=ORIGIN | {"HX-Request": "true"})
    return answer.status_code == 200


@pytest.mark.slow
async def test_an_operator_follows_a_training_and_changes_what_is_served(
    app: FastAPI, client: httpx2.AsyncClient, filled: Services, settings: Settings, trained: str
) -> None:
    started = await post(client, "/dashboard/jobs", recipe="auto")
    assert started.status_code == 303
    job_page = started.headers["location"]
    assert "waits for a worker" in await page(client, job_page)
    live = re.search(r'hx-get="([^"]+)"', await page(client, job_page))
    assert live is not None
    assert (await client.get(live[1].replace("&amp;", "&"))).status_code == 204
    assert (await post(client, f"{job_page}/cancel")).status_code == 303
    assert "cancelled" in await page(client, job_page)
    assert (await post(client, f"{job_page}/cancel")).status_code == 409

    job = await run_job_here(filled, settings, epochs=5, force=True)
    assert [point["epoch"] for point in (job.metrics or {})["curve"]] == [1, 2, 3, 4, 5]
    text = await page(client, path_of("jobs", job.job_id))
    assert "data-chart" in text
    jobs = JobRepository(filled.database)
    running = await jobs.insert("train", {"recipe": "auto", "trigger": "request"})
    claim = await jobs.claim("test", 10**9, 3)
    assert claim is not None
    progress = {"phase": "train", "epoch": 3, "epochs": 9, "eta_s": 61.0, "peak_bytes": 3 * 2**29}
    await jobs.heartbeat(claim, 10**9, progress)
    for path in ("/dashboard/jobs", path_of("jobs", running)):
        text = await page(client, path)
        assert re.search(r"<dt>Memory</dt>\s*<dd>1.5 GiB</dd>", text)
        assert re.search(r"<dt>Time left</dt>\s*<dd>61 s</dd>", text)
    await post(client, f"{path_of('jobs', running)}/cancel")
    assert "The job is cancelled and ends within seconds" in await page(client, "/dashboard/jobs")
    async with filled.database.write() as conn:
        await jobs.finish(conn, claim, "cancelled")
    assert "1.5 GiB" in await page(client, path_of("jobs", running))
    assert "no action is possible" in await page(client, f"{path_of('jobs', running)}/cancel")
    version = str(job.model_version)
    assert "data-chart" in await page(client, path_of("models", version))
    unsure = await post(client, path_of("models", trained, "activate"), version="other")
    assert unsure.headers["location"] == path_of("models", trained, "activate")
    assert (await filled.models.activation()).version == version
    done = await post(client, path_of("models", trained, "pin"), version=trained)
    assert done.status_code == 303
    assert await filled.models.activation() == (trained, version, 3, True)
    assert (await post(client, "/dashboard/unpin")).status_code == 303
    assert (await post(client, "/dashboard/rollback")).status_code == 303
    activation = await filled.models.activation()
    assert (activation.version, activation.pinned) == (version, False)
    assert "rolled back" in await page(client, "/dashboard/models")


@pytest.mark.slow
async def test_a_version_that_is_deleted_meanwhile_is_not_served(
    client: httpx2.AsyncClient, filled: Services, settings: Settings, trained: str
) -> None:
    active = str((await run_job_here(filled, settings, epochs=5, force=True)).model_version)
    path = path_of("models", trained, "activate")
    assert "Serve this version?" in await page(client, path)
    models = metadata.tables["models"]
    async with filled.database.write() as conn:
        is_it = models.c.version == trained
        await conn.execute(models.update().where(is_it).values(status="deleted"))
    refused = await post(client, path, version=trained)
    assert refused.status_code == 409
    assert "<h1>" in refused.text
    assert "no action is possible" in await page(client, path)
    assert (await filled.models.activation()).version == active
    begun = await post(client, "/dashboard/trials", kind="interleaving", version=trained)
    assert begun.status_code == 409


async def test_an_item_is_hidden_and_a_user_erased_after_a_question(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    user = str(await filled.events.example_user())
    item = (await filled.events.history(user, None, 1))[0][0][1]
    assert "Hide" in await page(client, path_of("items", item, "hide"))
    await post(client, path_of("items", item, "hide"))
    assert (await filled.catalog.get(item)).hidden
    await post(client, path_of("items", item, "show"))
    assert not (await filled.catalog.get(item)).hidden
    exported = await client.get(path_of("users", user, "export"))
    assert exported.headers["content-disposition"].startswith("attachment")
    assert len(exported.text.splitlines()) == len((await filled.events.profiles.get(user)).seen)
    assert (await post(client, path_of("users", user, "erase"), user="other")).status_code == 303
    await filled.events.history(user, None, 1)
    assert (await post(client, path_of("users", user, "erase"), user=user)).status_code == 303
    assert (await filled.events.profiles.get(user)).user_id is None


async def test_the_root_leads_browsers_to_the_dashboard_and_is_not_there_for_others(
    client: httpx2.AsyncClient,
) -> None:
    browser = await client.get("/", headers={"Accept": "text/html,*/*"})
    assert (browser.status_code, browser.headers["location"]) == (303, "/dashboard")
    other = await client.get("/")
    assert other.status_code == 404
    assert other.json()["code"] == "not_found"


async def test_forms_of_other_origins_are_refused(client: httpx2.AsyncClient) -> None:
    for headers in (
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        response = await client.post("/dashboard/jobs", data={"recipe": "auto"}, headers=headers)
        assert response.status_code == 403, headers
    for body_type in ("application/json", "multipart/form-data", "text/plain"):
        response = await client.post(
            "/dashboard/jobs", content=b"{}", headers=ORIGIN | {"Content-Type": body_type}
        )
        assert response.status_code == 415
    fields = {f"f{n}": "x" for n in range(60)}
    assert (await post(client, "/dashboard/jobs", **fields)).status_code == 400
    assert (await post(client, "/dashboard/jobs", recipe="x" * 100_000)).status_code == 413
    assert (await post(client, "/dashboard/jobs", recipe="nothing")).status_code == 422


async def test_files_of_the_page_are_small_and_cached(client: httpx2.AsyncClient) -> None:
    text = await page(client, "/dashboard/jobs")
    total = len(text.encode())
    for path in re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', text):
        response = await client.get(path, headers={"Accept-Encoding": "gzip"})
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
        assert response.headers["content-encoding"] == "gzip"
        total += int(response.headers["content-length"])
    assert total < 150_000
    assert (await client.get("/dashboard/static/0/app.css")).status_code == 404
    for odd in ("../rendering.py", "%2e%2e/rendering.py", "vendor/VENDOR.md"):
        assert (await client.get(f"/dashboard/static/0/{odd}")).status_code == 404


def test_vendored_files_are_what_the_list_says() -> None:
    folder = Path(rendering.__file__).parent / "static" / "vendor"
    listed = dict(
        re.findall(r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (folder / "VENDOR.md").read_text(), re.M)
    )
    files = {path.name for path in folder.iterdir()} - {"VENDOR.md"}
    assert listed.keys() == files
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_every_route_of_the_dashboard_is_a_page_with_a_role(tmp_path: Path) -> None:
    app = create_app(load_settings(data_dir=tmp_path))
    routes = [r for r in app.routes if getattr(r, "path", "").startswith("/dashboard")]
    public = set()
    for route in routes:
        assert isinstance(route, APIRoute)
        assert not route.include_in_schema
        rules = declared_access(route)
        assert rules is not None
        assert rules.page or rules.cached
        if rules.role is None:
            public.add(route.path)
    assert public == {
        "/dashboard/sign-in",
        "/dashboard/sign-out",
        "/dashboard/static/{digest}/{name:path}",
    }
    # A form is on the page of its own path: after signing in one is where one was.
    paths = {(m, r.path) for r in routes for m in getattr(r, "methods", ())}
    forms = {path for method, path in paths if method == "POST"} - {"/dashboard/sign-out"}
    assert {path for path in forms if ("GET", path) not in paths} == set()
    off = create_app(load_settings(data_dir=tmp_path, dashboard=False))
    assert not [r for r in off.routes if getattr(r, "path", "").startswith("/dashboard")]


class TestKeys:
    ADMIN = "administrator-of-tests"

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(
            update={"admin_key": load_settings(admin_key=self.ADMIN).admin_key}
        )

    async def sign_in(self, client: httpx2.AsyncClient, key: str) -> httpx2.Response:
        return await post(client, "/dashboard/sign-in", key=key, next="/dashboard/models")

    async def test_a_session_opens_pages_and_not_the_api(self, client: httpx2.AsyncClient) -> None:
        away = await client.get("/dashboard/users?q=a")
        assert away.status_code == 303
        assert away.headers["location"] == ("/dashboard/sign-in?next=%2Fdashboard%2Fusers%3Fq%3Da")
        form = await page(client, away.headers["location"])
        assert 'value="/dashboard/users?q=a"' in form
        assert (await self.sign_in(client, "wrong")).status_code == 401
        signed = await self.sign_in(client, self.ADMIN)
        assert (signed.status_code, signed.headers["location"]) == (303, "/dashboard/models")
        cookie = signed.headers["set-cookie"]
        for part in ("HttpOnly", "SameSite=strict", "Path=/dashboard", "Max-Age=43200"):
            assert part in cookie
        assert self.ADMIN not in cookie
        assert "Sign out" in await page(client, "/dashboard/models")
        session = cookie.partition(";")[0]
        assert (await client.get("/admin/models", headers={"Cookie": session})).status_code == 401
        await post(client, "/dashboard/sign-out")
        assert (await client.get("/dashboard/models")).status_code == 303

    async def test_another_server_takes_the_session_and_time_ends_it(
        self,
        client: httpx2.AsyncClient,
        settings: Settings,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        cookie = (await self.sign_in(client, self.ADMIN)).headers["set-cookie"].partition(";")[0]
        other = create_app(settings)
        async with other.router.lifespan_context(other), client_of(other, Cookie=cookie) as second:
            await page(second, "/dashboard/models")
            broken = {"Cookie": cookie[:-2] + ("aa" if cookie[-2:] != "aa" else "bb")}
            async with client_of(other, **broken) as false:
                assert (await false.get("/dashboard/models")).status_code == 303
            real = __import__("time").time
            monkeypatch.setattr("app.keys.service.time.time", lambda: real() + 12 * 3600 + 1)
            # In the middle of an action: back to where one was.
            late = await post(second, "/dashboard/jobs", recipe="auto")
            assert late.status_code == 303
            assert late.headers["location"] == "/dashboard/sign-in?next=%2Fdashboard%2Fjobs"
            part = await second.post(
                "/dashboard/which",
                data={"user": "x"},
                headers=ORIGIN
                | {
                    "HX-Request": "true",
                    "HX-Current-URL": "http://localhost/dashboard/which?bits=1",
                },
            )
            assert part.status_code == 401
            assert part.headers["hx-redirect"] == (
                "/dashboard/sign-in?next=%2Fdashboard%2Fwhich%3Fbits%3D1"
            )

    async def test_a_key_sees_the_pages_of_its_roles_until_it_is_revoked(
        self, app: FastAPI, client: httpx2.AsyncClient
    ) -> None:
        services: Services = app.state.services
        row, key = await services.keys.create("reader", [Role.READ])
        assert (await self.sign_in(client, key)).status_code == 303
        text = await page(client, "/dashboard/users")
        for name in ("Overview", "Items", "Data"):
            assert f">{name}</a>" in text
        assert ">Models</a>" not in text
        await page(client, "/dashboard/models", 403)
        assert (await post(client, "/dashboard/jobs", recipe="auto")).status_code == 403
        assert "Erase" not in await page(client, path_of("users", "nobody"))
        assert (await post(client, path_of("users", "x", "erase"), user="x")).status_code == 403
        await services.keys.revoke(row.key_id)
        assert (await client.get("/dashboard/users")).status_code == 303

    @pytest.mark.parametrize(
        "target",
        ["https://evil.example/", "//evil.example", "/dashboard\\@evil", "/admin", "/dashboardx"],
    )
    async def test_signing_in_leads_nowhere_else(
        self, client: httpx2.AsyncClient, target: str
    ) -> None:
        response = await post(client, "/dashboard/sign-in", key=self.ADMIN, next=target)
        assert response.headers["location"] == "/dashboard"

    async def test_guesses_are_slowed_down(self, client: httpx2.AsyncClient) -> None:
        statuses = {(await self.sign_in(client, f"wrong {n}")).status_code for n in range(103)}
        assert statuses == {401, 429}
        assert "HX" not in (await self.sign_in(client, self.ADMIN)).text


async def send_csv(client: httpx2.AsyncClient, *parts: bytes) -> httpx2.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    headers = ORIGIN | {"Content-Type": "text/csv", "HX-Request": "true"}
    headers["X-File-Name"] = quote("a file é.csv")
    return await client.post("/dashboard/data", content=pieces(), headers=headers)


def verdicts(text: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(\w+)</dt>\s*<dd>([\d,]+)</dd>", text))


async def test_a_csv_file_is_read_in_pieces_with_a_verdict_a_row(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    file = (
        "\ufeffuser,Item,type,value,timestamp,event_id\r\n"
        'é,"a, ""b""\nc",click,,2026-01-01,e1\r\n'
        "é,i,rating,4.5,1700000000,e2\n\né,i,rating,much,,\n,i,,,,\n"
    ).encode()
    pieces = [file[n : n + 3] for n in range(0, len(file), 3)]  # within letters, cells and lines
    response = await send_csv(client, *pieces)
    assert response.status_code == 200
    assert verdicts(response.text) == {
        "Rows": "4", "Accepted": "2", "Duplicates": "0", "Rejected": "2"
    }  # fmt: skip
    assert "row 3: value must be a finite number" in response.text
    assert "row 4: user is missing" in response.text
    history, _ = await filled.events.history("é", None, 10)
    assert {(event.event_id, item) for event, item in history} == {
        ("e1", 'a, "b"\nc'), ("e2", "i")
    }  # fmt: skip
    again = verdicts((await send_csv(client, file)).text)
    assert (again["Accepted"], again["Duplicates"]) == ("0", "2")
    text = await page(client, "/dashboard/data")
    imports = text.partition("Last imports")[2].partition("</table>")[0]
    assert "a file é.csv" in imports
    assert "1 × missing user" in imports
    assert imports.count("<tr>") == 3
    assert "missing user" in text
    assert "invalid value" in text
    assert re.search(r"<th scope=\"row\">rating</th>", text)


@pytest.mark.parametrize(
    ("file", "status", "says"),
    [
        (b"", 422, "the file is empty"),
        (b"a,b\n1,2\n", 422, "there is no column"),
        (b"user\nx\n", 422, "must name the columns"),
        (b"\xff\xfe\x00", 400, "not CSV in UTF-8"),
        (b"user,item\n" + b"x" * 200_000, 400, "longer than"),
        (b'user,item\n"a"b,c\n', 400, "not CSV"),
    ],
)
async def test_what_is_no_csv_file_of_events_is_refused(
    client: httpx2.AsyncClient, file: bytes, status: int, says: str
) -> None:
    response = await send_csv(client, file)
    assert response.status_code == status
    assert says in response.text


async def test_reading_stops_after_too_many_rejected_rows(client: httpx2.AsyncClient) -> None:
    response = await send_csv(client, b"user,item\n", *[b",i\n" * 1000] * 5)
    assert response.status_code == 200
    assert "Reading stopped after 1,000 rejected rows" in response.text
    assert verdicts(response.text)["Rows"] == "1,000"


async def test_a_file_of_two_gigabytes_is_read_as_it_comes_and_no_further_than_it_is_csv(
    client: httpx2.AsyncClient, filled: Services
) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b"user,item\n" + b"of a large file,film-1\n" * 600
        for _ in range(2 * 2**10):  # zeros: a line without an end
            sent += 1
            yield bytes(2**20)

    headers = ORIGIN | {"Content-Type": "text/csv", "HX-Request": "true"}
    answer = await client.post("/dashboard/data", content=pieces(), headers=headers)
    assert answer.status_code == 200
    assert "Reading stopped at row 501" in answer.text
    assert sent < 5
    assert verdicts(answer.text)["Accepted"] == "500"
    history, _ = await filled.events.history("of a large file", None, 1)
    assert len(history) == 1


async def test_a_page_says_that_the_database_is_away(
    app: FastAPI, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> int:
        raise OperationalError("", {}, Exception("10.0.0.1 refused"))

    monkeypatch.setattr(app.state.services.events, "count_users", away)
    text = await page(client, "/dashboard", 503)
    assert "the database does not answer" in text
    assert "10.0.0.1" not in text
