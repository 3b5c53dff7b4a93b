"""`ncr demo`: the whole service on embedded defaults, from data to answers."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import orjson
import typer

from app.cli.common import EpochLines, console, quiet_settings, services_of

if TYPE_CHECKING:
    from app.core.settings import Settings
    from app.wiring import Services

SYNTHETIC_US = 1_767_225_600_000_000
"""The time of the first synthetic event, in microseconds since 1970: 1 January 2026."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(demo)


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="A file or a folder of interactions. Default: a synthetic catalogue."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on.")] = 8000,
) -> None:
    """Fill an embedded database, train a model, and serve it.

    The command then prints requests to try.
    """
    from app.cli.serve import ensure_free, run_server

    ensure_free("127.0.0.1", port)
    # A folder a data set, so that a demo of one is not mixed into another's.
    base = quiet_settings()
    name = "synthetic" if data is None else _slug(data)
    folder = base.data_dir / "demo" / name
    settings = quiet_settings(
        data_dir=folder, database_url=f"sqlite:///{folder.resolve() / 'ncr.db'}", redis_url=None
    )
    if data is None:
        console.print(
            "[bold]No DATA given: this demo uses a synthetic catalogue[/bold], made by a "
            "program. With real data: make demo DATA=path/to/ml-1m"
        )
    started = time.perf_counter()
    asyncio.run(_prepare(settings, data, port))
    console.print(f"ready after {time.perf_counter() - started:.0f} s; serving, Ctrl-C to stop")
    if settings.dashboard:
        console.print(f"[bold]Look at it: http://127.0.0.1:{port}/dashboard[/bold]")
    run_server(settings, "127.0.0.1", port, with_worker=True)


async def _prepare(settings: Settings, data: Path | None, port: int) -> None:
    async with services_of(settings) as services:
        if data is None:
            await _import_synthetic(services)
        else:
            await _import(services, data)
        if (await services.models.activation()).version is None:
            await _train(services, settings)
        await _report(services)
        await _what_to_try(services, settings, port)


async def _import(services: Services, data: Path) -> None:
    from app.cli.datasets import run_import
    from ncr_core.data.readers import Columns
    from ncr_core.errors import DataError

    report = await run_import(services, data, "auto", Columns())
    if not report.good:
        raise DataError(f"{data} holds no interactions that can be read")


async def _import_synthetic(services: Services) -> None:
    from app.catalog.schemas import Item
    from app.events.schemas import NewEvent
    from ncr_core.data.synthetic import synthetic_catalogue

    catalogue = synthetic_catalogue()
    await services.catalog.describe_items(
        Item(item.id, item.title, [item.genre], False, {"synthetic": True})
        for item in catalogue.items
    )
    result = await services.events.import_rows(
        [
            NewEvent(
                f"synthetic-{user}-{item}",
                user,
                item,
                timestamp=SYNTHETIC_US + order * 1_000_000,
            )
            for user, item, order in catalogue.interactions
        ]
    )
    console.print(
        f"{len(catalogue.items)} synthetic items, {result.accepted:,} events added, "
        f"{result.duplicates:,} already there"
    )


async def _train(services: Services, settings: Settings) -> None:
    """Trains a model through the queue and the worker, as in production."""
    from app.jobs.schemas import ENDED, TrainParams
    from app.worker.worker import Worker
    from ncr_core.errors import TrainingError

    # An earlier demo that was stopped may have left a training.
    unfinished = [row for row in (await services.jobs.page(None, 10))[0] if row.status not in ENDED]
    if unfinished:
        job_id = unfinished[-1].job_id
    else:
        job_id = await services.jobs.submit_training(TrainParams())
    worker = Worker(services.database, services.models, settings)
    with EpochLines() as lines:
        while (await services.jobs.get(job_id)).status in ("queued", "running"):
            if not await worker.run_once(on_progress=lines.show):
                await asyncio.sleep(settings.job_poll_seconds)
    job = await services.jobs.get(job_id)
    if job.status != "succeeded":
        raise TrainingError(f"training {job.status}: {job.error}")


async def _report(services: Services) -> None:
    from ncr_core.training.selection import TriedRecipe

    activation = await services.models.activation()
    row = await services.models.get(str(activation.version))
    full, popular = row.metrics["full"], row.metrics["popularity_full"]
    sampled, popular_sampled = row.metrics["sampled"], row.metrics["popularity_sampled"]
    for tried in row.metrics.get("tried", ()):
        console.print(TriedRecipe(**tried).line(), markup=False)
    baselines = "".join(
        f"; {name}: HR@10 {figures['hr@10']:.4f}, NDCG@10 {figures['ndcg@10']:.4f}"
        for name, figures in row.metrics.get("baselines", {}).items()
    )
    console.print(
        f"model {row.version}: {row.metrics['recipe']} ({row.kind} with {row.factors} factors) on "
        f"{row.users:,} users, {row.items:,} items, {row.interactions:,} interactions\n"
        f"on its hold-out, the latest item of {full['users']:,} users among all items: "
        f"HR@10 {full['hr@10']:.4f}, NDCG@10 {full['ndcg@10']:.4f}; "
        f"the popularity list: HR@10 {popular['hr@10']:.4f}, NDCG@10 {popular['ndcg@10']:.4f}"
        f"{baselines}\n"
        f"among {sampled['items']} items ({sampled['users']:,} users): "
        f"HR@10 {sampled['hr@10']:.4f}, NDCG@10 {sampled['ndcg@10']:.4f}; the popularity list: "
        f"HR@10 {popular_sampled['hr@10']:.4f}, NDCG@10 {popular_sampled['ndcg@10']:.4f}"
    )


async def _what_to_try(services: Services, settings: Settings, port: int) -> None:
    """Prints the history and the list of a user, and requests to try."""
    from app.recommend.schemas import RecommendationQuery
    from app.recommend.wiring import RecommendFeature

    user = str(await services.events.example_user())
    recommending = RecommendFeature(services.events, services.catalog, services.models, settings)
    try:
        await recommending.models.refresh()
        answer = orjson.loads(await recommending.service.recommend(user, RecommendationQuery(n=5)))
    finally:
        await recommending.stop()
    profile = await services.events.profiles.get(user)
    catalogue = await services.catalog.catalogue(profile.catalog_seq)
    genres = Counter(
        name
        for name, ids in catalogue.categories.items()
        for _ in set(ids.tolist()) & set(profile.seen.tolist())
    )
    console.print(f"\n[bold]User {user}[/bold] has {len(profile.seen)} items", end="")
    if genres:
        top = ", ".join(f"{name} ({count})" for name, count in genres.most_common(4))
        console.print(f": most of {top}", end="", markup=False)
    latest = [catalogue.titles[i] or catalogue.external_ids[i] for i in profile.seen[-5:].tolist()]
    console.print(f".\nThe latest: {'; '.join(latest)}.\nWould like next:", markup=False)
    for item in answer["items"]:
        number = catalogue.internal_ids[item["id"]]
        categories = [name for name, ids in catalogue.categories.items() if number in ids]
        console.print(_line(item, categories), markup=False)
    url, path = f"http://127.0.0.1:{port}", quote(user, safe="")
    first = answer["items"][0]["id"]
    console.print(
        f"""
Try:
  curl '{url}/recommend/{path}?n=5'
  curl '{url}/users/{path}/events?n=5'
  curl '{url}/recommend/somebody-new'
  curl -X POST {url}/events -H 'Content-Type: application/json' \\
       -d '{{"user":"{user}","item":"{first}"}}'
  curl -X POST {url}/admin/train
  curl {url}/admin/jobs
and {url}/docs for the rest.
""",
        markup=False,
        soft_wrap=True,
    )


def _line(item: dict[str, Any], categories: list[str]) -> str:
    score = "" if item["score"] is None else f"  {item['score']:.3f}"
    return f"  {item['rank']}. {item['title'] or item['id']} ({', '.join(categories)}){score}"


def _slug(path: Path) -> str:
    """A name for the data set's folder. Data sets of one name at two paths get two names."""
    full = path.resolve()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", full.name).strip(".-") or "data"
    return f"{name}-{hashlib.sha256(str(full).encode()).hexdigest()[:6]}"
