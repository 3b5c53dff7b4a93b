"""What a user of the service gets: lists over HTTP, after a training by request.

    python -m benchmarks.served DATA [PARAMS ...]
    python -m benchmarks.served engines DATA [ENGINE ...]

DATA is what `ncr import` takes; a text file with `user item item …` in each line, oldest first; or
a folder with a published split, train and test. Of the first two the latest item of each user is
held out, of the last one test item, drawn at random. Everything else is sent as events; the lines
of a published split are sorted by item and say nothing of time, so their items are sent in random
order. Each of PARAMS is a body of `POST /admin/train`, by default an empty one; after each training
`GET /recommend/{user}?n=10` is asked for every user, and the place of the held-out item among all
items gives HR@10 and NDCG@10. Beside them stand baselines on the same split. The result
is served-DATA.

The second form trains `next-item-nbpr` by each engine of `NCR_TRAIN_ENGINE`, by default by all
three, with two ranks, each in a service of its own. The result is engines-DATA.
"""

from __future__ import annotations

import csv
import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np

from benchmarks.faults.setup import has_ended, storage, wait_for
from benchmarks.harness import publish, run_command
from ncr_core.data import build_interactions
from ncr_core.data.dataset import load_interactions
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from ncr_core.evaluation.protocols import K, Ranks, evaluate_full
from ncr_core.reproduction.baselines.als import IALSConfig, fit_ials
from ncr_core.reproduction.baselines.scoring import (
    FactorModel,
    Popularity,
    fit_ease,
    fit_linear_next_item,
)
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker

COLUMNS = ["method", "hr@10", "ndcg@10", "seconds", "tried"]
EVENTS_AT_ONCE = 1_000
CLIENTS = 8
TRAINING_SECONDS = 3_600.0
ENGINES = ("local", "torchrun", "ray")
EASE_L2 = 500.0
IALS_SHARE = 36.0  # α₀ beside the density
MAX_MATRIX_ITEMS = 20_000  # of EASE and the linear next-item model, whose matrices are dense


def main(data: str, params: tuple[str, ...] = ("{}",)) -> None:
    split = held_out_split(Path(data))
    rows = [*service_rows(split, [json.loads(text) for text in params])]
    rows += [*baseline_rows(split)]
    train = split.train
    publish(
        f"served-{Path(data).name.partition('.')[0].lower()}",
        COLUMNS,
        rows,
        users=train.n_users,
        items=train.n_items,
        interactions=train.nnz,
    )


def engines(data: str, names: tuple[str, ...] = ENGINES) -> None:
    split = held_out_split(Path(data))
    rows: list[list[Any]] = []
    for name in names or ENGINES:
        (row,) = service_rows(split, [{"recipe": "next-item-nbpr"}], NCR_TRAIN_ENGINE=name)
        rows.append([name, *row[1:-1]])
        publish(
            f"engines-{Path(data).name.partition('.')[0].lower()}",
            ["engine", *COLUMNS[1:-1]],
            rows,
            users=split.train.n_users,
            items=split.train.n_items,
            interactions=split.train.nnz,
        )


def held_out_split(path: Path) -> Split:
    """A split with a test item for each user who has one."""
    if path.is_file() and ".txt" in path.suffixes:
        return latest_out(build_interactions(in_order(path)))
    if not path.is_dir() or not list(path.glob("train.*")):
        return latest_out(load_interactions(path).interactions)
    train, tests = (
        build_interactions(in_order(next(path.glob(f"{part}.*")), np.random.default_rng(0)))
        for part in ("train", "test")
    )
    tests = tests.reindex(train.user_ids, train.item_ids)
    lengths = np.diff(tests.indptr)
    drawn = np.random.default_rng(0).random(train.n_users)
    test = np.full(train.n_users, -1, dtype=np.int64)
    rows = tests.indptr[:-1] + (drawn * lengths).astype(np.int64)
    test[lengths > 0] = tests.items[rows[lengths > 0]]
    return Split(train, np.full_like(test, -1), test)


def in_order(
    path: Path, shuffled: np.random.Generator | None = None
) -> Iterator[tuple[str, str, int]]:
    """Users, items and places of a file: a user's items in each line, or a CSV row for each.

    ``shuffled`` draws the places of a line's items.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        if ".csv" in path.suffixes:
            rows = enumerate(csv.DictReader(lines))
            yield from ((row["user"], row["item"], place) for place, row in rows)
            return
        for line in lines:
            user, *items = line.split()
            places = range(len(items)) if shuffled is None else shuffled.permutation(len(items))
            yield from ((user, item, int(at)) for item, at in zip(items, places, strict=True))


def latest_out(interactions: Interactions) -> Split:
    """Each user's latest item as the test item; items that nobody else has had stay unknown."""
    lengths = np.diff(interactions.indptr)
    last = interactions.indptr[1:][lengths >= 2] - 1
    mask = np.ones(interactions.nnz, dtype=np.bool_)
    mask[last] = False
    test = np.full(interactions.n_users, -1, dtype=np.int64)
    test[lengths >= 2] = interactions.items[last]
    return Split(interactions.select(mask), np.full_like(test, -1), test)


def service_rows(
    split: Split, bodies: list[dict[str, Any]], **settings: str
) -> Iterator[list[Any]]:
    """A row for each training: a service with a worker, asked over HTTP."""
    with storage("sqlite") as place:
        env = place.env(NCR_PRECOMPUTE_USERS="0", **settings)
        with (
            NcrServer(env, place.folder / "server.log") as server,
            NcrWorker(env, place.folder / "worker.log"),
            httpx2.Client(base_url=server.url, timeout=60) as client,
        ):
            send(client, split.train)
            for body in bodies:
                started = time.perf_counter()
                job_id = client.post("/admin/train", json=body | {"force": True}).json()["job_id"]
                job = wait_for(client, job_id, has_ended, seconds=TRAINING_SECONDS)
                if job["status"] != "succeeded":
                    raise AssertionError(job)
                version = job["model_version"]
                user = split.train.user_ids[0]
                wait_until(partial(serves, client, user, version), 60, "the new model")
                seconds = time.perf_counter() - started
                ranks = asked(server.url, split)
                name = "the service " + (json.dumps(body) if body else "by default")
                tried = job["metrics"].get("tried")
                yield [name, hit_ratio(ranks, K), ndcg(ranks, K), seconds, tried]


def send(client: httpx2.Client, train: Interactions) -> None:
    """Everything as events, a second between two of a user's."""
    position = np.arange(train.nnz) - np.repeat(train.indptr[:-1], np.diff(train.indptr))
    for start in range(0, train.nnz, EVENTS_AT_ONCE):
        part = slice(start, start + EVENTS_AT_ONCE)
        events = [
            {
                "event_id": f"{user} {item}",
                "user": train.user_ids[user],
                "item": train.item_ids[item],
                "timestamp": int(place),
            }
            for user, item, place in zip(
                train.users[part], train.items[part], position[part], strict=True
            )
        ]
        client.post("/events", json=events).raise_for_status()


def serves(client: httpx2.Client, user: str, version: str) -> bool:
    """Whether lists come from this version."""
    answer = client.get(f"/recommend/{quote(user, safe='')}").json()
    return bool(answer.get("model_version") == version)


def asked(url: str, split: Split) -> IntArray:
    """(n,) the place of each user's held-out item in their list, −1 outside."""
    users = np.flatnonzero(split.test >= 0)
    train = split.train

    def places(part: IntArray) -> list[int]:
        with httpx2.Client(base_url=url, timeout=60) as client:
            return [place(client, user) for user in part]

    def place(client: httpx2.Client, user: int) -> int:
        path = f"/recommend/{quote(train.user_ids[user], safe='')}"
        response = client.get(path, params={"n": K}).raise_for_status()
        ids = [item["id"] for item in response.json()["items"]]
        wanted = train.item_ids[split.test[user]]
        return ids.index(wanted) if wanted in ids else -1

    with ThreadPoolExecutor(CLIENTS) as pool:
        return np.concatenate([*pool.map(places, np.array_split(users, CLIENTS))])


def unobserved_weight(train: Interactions) -> float:
    """α₀ of iALS: what is best on MovieLens 1M, and less of it where the data are sparser."""
    return min(IALSConfig().alpha0, IALS_SHARE * train.nnz / (train.n_users * train.n_items))


def baseline_rows(split: Split) -> Iterator[list[Any]]:
    """Popularity, EASE, iALS and the linear next-item model, with seconds of fitting."""

    def ials() -> Ranks:
        config = IALSConfig(factors=64, alpha0=unobserved_weight(split.train))
        model: FactorModel = fit_ials(split.train, config)
        return model

    methods: dict[str, Any] = {"popularity": lambda: Popularity(split.train), "iALS": ials}
    if split.train.n_items <= MAX_MATRIX_ITEMS:
        methods["EASE"] = lambda: fit_ease(split.train, EASE_L2)
        methods["linear next-item"] = lambda: fit_linear_next_item(split.train)
    for name, fit in methods.items():
        started = time.perf_counter()
        model: Ranks = fit()
        seconds = time.perf_counter() - started
        metrics = evaluate_full(model, split, split.test, seed=0)
        yield [name, metrics.hr, metrics.ndcg, seconds, None]


if __name__ == "__main__":
    run_command(main, engines=engines)
