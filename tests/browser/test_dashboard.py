"""The dashboard in Chromium: every page, and the stories of those who use it."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from sqlalchemy.exc import OperationalError

from app.all_tables import metadata
from tests.browser.conftest import ADMIN_KEY, ODD_ITEM, SCRIPT, Site, report

pytestmark = pytest.mark.browser

SCREENSHOTS = os.environ.get("NCR_TEST_SCREENSHOTS")
"""A folder that screenshots of every page are written to."""
PAGES = ("", "/users", "/items", "/which", "/models", "/jobs", "/trials", "/data")
LIGHT, DARK = "light", "dark"
WIDTHS = {"phone": 360, "desk": 1440}
WAIT_MS = 15_000


def axe_source() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return (Path(found.origin).parent / "axe.min.js").read_text()


@contextmanager
def tab(
    browser: Any, site: Site, width: int = 1440, scheme: str = LIGHT, refused: str = ""
) -> Iterator[Any]:
    """A page of a browser. What it logs as an error or asks of another origin fails the test.

    ``refused`` is what it may log, as of an answer that is an error.
    """
    # The rules come from outside the page, which itself may run no script but the service's.
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, base_url=site.url
    )
    problems: list[str] = []
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)

    def check_origin(route: Any) -> None:
        if urlsplit(route.request.url).netloc == urlsplit(site.url).netloc:
            route.continue_()
        else:
            problems.append(f"asked {route.request.url}")
            route.abort()

    page.route("**/*", check_origin)
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        yield page
        # Of an answer that is an error the browser itself logs one line.
        assert [each for each in problems if not (refused and refused in each)] == []
    finally:
        context.close()


def pages_of(site: Site) -> dict[str, str]:
    """The path of every page, by a name for its screenshot."""
    paths = {path.strip("/") or "overview": f"/dashboard{path}" for path in PAGES}
    if site.versions:
        user, item = quote(site.user, safe=""), quote(site.item, safe="")
        paths |= {
            "user": f"/dashboard/users/{user}",
            "user-beside": f"/dashboard/users/{user}?model={site.versions[0]}",
            "item": f"/dashboard/items/{item}",
            "model": f"/dashboard/models/{site.versions[1]}",
            "job": f"/dashboard/jobs/{site.job}",
            "confirm": f"/dashboard/models/{site.versions[0]}/activate",
            "strange-item": f"/dashboard/items/{quote(ODD_ITEM, safe='')}",
            "strange-user": f"/dashboard/users/{quote(SCRIPT, safe='')}",
            "trial": f"/dashboard/trials/{site.ended_trial}",
            "trial-running": f"/dashboard/trials/{site.running_trial}",
            "confirm-stop": f"/dashboard/trials/{site.running_trial}/stop",
            "no-page": "/dashboard/nowhere",
        }
    return paths


def check(page: Any, path: str, axe: str) -> None:
    missing = path.endswith("/nowhere")
    response = page.goto(path)
    assert response.status == (404 if missing else 200), path
    page.wait_for_load_state("networkidle")
    assert page.title() != "taken over"
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], f"{path} is wider than the window"
    page.evaluate(axe)  # by the debugger, which the page's policy does not concern
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [
        (each["id"], node["target"], node["failureSummary"])
        for each in found["violations"]
        for node in each["nodes"]
    ] == [], path


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_quiet_accessible_and_fits(
    browser: Any, site: Site, width: str, scheme: str
) -> None:
    axe = axe_source()
    for name, path in pages_of(site).items():
        with tab(browser, site, WIDTHS[width], scheme) as page:
            if name == "no-page":  # the browser itself logs that it is missing
                page.goto("/dashboard")
                continue
            check(page, path, axe)
            if SCREENSHOTS and width == "desk" and not name.startswith("strange"):
                shoot(page, Path(SCREENSHOTS) / f"{name}-{scheme}.png")


def shoot(page: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({"width": 1120, "height": 760})
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    page.screenshot(path=path)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_pages_of_an_empty_service(browser: Any, empty_site: Site, scheme: str) -> None:
    axe = axe_source()
    for path in pages_of(empty_site).values():
        with tab(browser, empty_site, 360, scheme) as page:
            check(page, path, axe)


def test_the_keyboard_reaches_everything(browser: Any, site: Site) -> None:
    """Every link, button and field of every page, in a circle of tabs."""
    focusable = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
    for path in pages_of(site).values():
        with tab(browser, site, refused="404") as page:
            page.goto(path)
            # Some pages put the cursor into their field: the circle begins at the top all the same.
            page.evaluate("document.activeElement.blur()")
            page.keyboard.press("Tab")
            if page.evaluate("document.querySelector('[autofocus]') === null"):
                assert page.evaluate("document.activeElement.textContent") == "To the content"
            page.evaluate(
                "selector => { window.left = new Set([...document.querySelectorAll(selector)]"
                ".filter(each => each.checkVisibility())); window.total = left.size; }",
                focusable,
            )
            total = page.evaluate("window.total")
            for _ in range(total + 3):
                page.evaluate("window.left.delete(document.activeElement)")
                page.keyboard.press("Tab")
            assert page.evaluate("[...window.left].map(each => each.outerHTML)") == [], path


def test_a_newcomer_finds_a_users_list_and_why_its_first_item_is_there(
    browser: Any, site: Site
) -> None:
    with tab(browser, site) as page:
        page.goto("/")
        assert page.url.endswith("/dashboard")
        page.get_by_role("link", name="Users", exact=True).click()
        page.get_by_role("searchbox").fill(site.user)
        page.keyboard.press("Enter")
        page.locator("main").get_by_role("link", name=site.user, exact=True).click()
        page.wait_for_url(f"**/users/{quote(site.user)}")
        first = page.locator(".place").first
        assert "because of" in first.inner_text()
        assert "over the next" in first.inner_text()
        reason = first.locator(".about a").first.inner_text()
        assert reason in page.locator(".events").first.inner_text()
        # What if they liked the third: a second list stands beside it, and nothing is stored.
        stored = site.run(site.services.events.last_seq())
        third = page.locator(".place .item").nth(2).get_attribute("href")
        page.get_by_label("With a further liked item").fill(third.rpartition("/")[2])
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("heading", name=re.compile("If they liked")).wait_for()
        assert site.run(site.services.events.last_seq()) == stored


def test_an_operator_sees_a_training_get_better_and_rolls_back(browser: Any, site: Site) -> None:
    with tab(browser, site) as page:
        page.goto("/dashboard/jobs")
        live = page.locator("[data-live]")
        live.get_by_text("3 of 10").wait_for()
        site.run(report(site, 4))
        live.get_by_text("4 of 10").wait_for()
        live.locator("canvas").wait_for()
        page.goto("/dashboard/models")
        page.get_by_role("link", name=site.versions[1]).last.click()
        page.get_by_role("heading", name="The gate").wait_for()
        page.go_back()
        page.get_by_role("link", name="Roll back").click()
        page.get_by_role("button", name="Roll back").click()
        page.wait_for_url("**/dashboard/models")
        served = site.run(site.services.models.activation()).version
        assert served == site.versions[0]
        assert page.locator("tr.on").inner_text().startswith(site.versions[0])
        assert "rolled back" in page.locator(".log").first.inner_text()


def test_a_preference_moves_the_list_in_sight(browser: Any, site: Site) -> None:
    with tab(browser, site) as page:
        page.goto("/dashboard/which")
        before = page.locator(".place .item").all_inner_texts()
        for n in range(1, 4):
            page.locator(".choice").first.click()
            page.get_by_text("Answers", exact=True).wait_for()
            page.locator("dd", has_text=re.compile(f"^{n}$")).wait_for()
        assert page.url.endswith("/dashboard/which")
        assert page.locator(".place .item").all_inner_texts() != before
        assert "places moved" in page.locator(".done").inner_text()
        assert page.locator(".said li").count() == 3
        if SCREENSHOTS:
            shoot(page, Path(SCREENSHOTS) / "which-light.png")
            page.emulate_media(color_scheme=DARK)
            shoot(page, Path(SCREENSHOTS) / "which-dark.png")


def test_a_file_is_uploaded_with_its_verdicts(browser: Any, site: Site, tmp_path: Path) -> None:
    file = tmp_path / "events.csv"
    file.write_text('user,item,type\nnew-user,"item, with a comma",click\n,no-user,click\n')
    with tab(browser, site) as page:
        page.goto("/dashboard/data")
        page.locator("input[type=file]").set_input_files(file)
        page.get_by_role("button", name="Upload").click()
        verdicts = page.locator("#verdicts")
        verdicts.get_by_text("missing user").wait_for()
        assert re.search(r"Accepted\s+1\s", verdicts.inner_text())


def test_a_trial_says_how_far_it_is_and_is_stopped_after_a_question(
    browser: Any, site: Site
) -> None:
    with tab(browser, site) as page:
        page.goto("/dashboard/trials")
        page.get_by_role("link", name=f"interleaving of {site.versions[0]}").last.click()
        page.get_by_text("at the planned size", exact=False).first.wait_for()
        page.locator("[data-chart] canvas").wait_for()
        page.go_back()
        page.get_by_role("link", name=f"interleaving of {site.versions[0]}").first.click()
        assert "60 of 800 clicked lists" in page.locator("main").inner_text()
        assert page.locator("svg.interval").count() == 0
        page.get_by_role("link", name="End it").click()
        page.get_by_role("link", name="Let it run").click()
        page.get_by_role("link", name="End it").click()
        page.get_by_role("button", name="End it").click()
        page.wait_for_url(f"**/trials/{site.running_trial}")
        assert "The trial ended after 60 of 800 planned lists" in page.locator("main").inner_text()


def test_a_session_that_ends_within_an_action_leads_back_to_it(
    browser: Any, locked_site: Site
) -> None:
    with tab(browser, locked_site, refused="401") as page:
        page.goto("/dashboard/jobs")
        assert "/sign-in?next=" in page.url
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("not a valid key").wait_for()
        page.get_by_label("API key").fill(ADMIN_KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard/jobs")
        page.context.clear_cookies()  # as when twelve hours are over
        page.get_by_role("button", name="Train").click()
        page.get_by_label("API key").fill(ADMIN_KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard/jobs")
        page.get_by_role("button", name="Train").wait_for()
        assert "No jobs so far" in page.locator("main").inner_text()  # nothing was done unseen
        page.goto("/dashboard/which")
        page.context.clear_cookies()
        page.goto("/dashboard/data")
        page.get_by_label("API key").fill(ADMIN_KEY)
        page.keyboard.press("Enter")
        page.wait_for_url("**/dashboard/data")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")


def test_pages_say_that_the_database_is_away(
    browser: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise OperationalError("", {}, Exception("refused"))

    axe = axe_source()
    monkeypatch.setattr(site.services.database, "fetch", away)
    monkeypatch.setattr(site.services.database, "fetch_heavy", away)
    for path in ("", "/users?q=user", "/models", "/jobs", "/trials", "/data"):
        with tab(browser, site, refused="503") as page:
            assert page.goto(f"/dashboard{path}").status == 503, path
            assert "the database does not answer" in page.locator("main").inner_text()
            page.evaluate(axe)
            assert page.evaluate("axe.run(document).then(found => found.violations)") == []


def test_a_version_that_is_deleted_meanwhile_is_not_served(browser: Any, site: Site) -> None:
    models = metadata.tables["models"]

    def set_status(status: str) -> None:
        async def write() -> None:
            async with site.services.database.write() as conn:
                is_it = models.c.version == other
                await conn.execute(models.update().where(is_it).values(status=status))

        site.run(write())

    active = site.run(site.services.models.activation()).version
    other = next(version for version in site.versions if version != active)
    with tab(browser, site, refused="409") as page:
        page.goto(f"/dashboard/models/{other}/activate")
        set_status("deleted")
        try:
            page.get_by_label("to confirm").fill(other)
            page.get_by_role("button", name="Serve it").click()
            page.get_by_text("deleted", exact=False).first.wait_for()
            assert site.run(site.services.models.activation()).version == active
            page.goto(f"/dashboard/models/{other}/activate")
            assert "no action is possible" in page.locator("main").inner_text()
        finally:
            set_status("published")
