"""What described items and users get before their first event, at the API.

    python -m benchmarks.cold_items DATA [PARAMS] [FILMS]

DATA is what `ncr import` takes, with items that have categories, such as MovieLens. Drawn at
random are as many FILMS (200) with at least 20 users; they and all their events stay unknown to
the service. Of everybody else's events the latest is held out, for the lists of known users. The
rest is sent, and the other films are described by their categories and the year in the title. The
service is trained without attributes and with them, by PARAMS, a body of `POST /admin/train`. Then
the films are described by `POST /items`. For users who took one up later, `POST /rerank` orders it
among 100 items that they never took up: HR@10 counts those who find it in the first ten. By
popularity a film without events is the last; drawn, it would be there for 10 of 101. Then a few of
its users send their events, and the others are asked again. Beside it stands HR@10 of the held-out
items in the lists of known users among all items, before the films came and with them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.faults.setup import has_ended, storage, wait_for
from benchmarks.harness import publish, run_command
from benchmarks.served import CLIENTS, TRAINING_SECONDS, asked, latest_out, send, serves
from ncr_core.data.dataset import load_interactions
from ncr_core.data.interactions import IntArray, Interactions
from ncr_core.data.readers.source import open_source
from ncr_core.data.splits import Split
from ncr_core.evaluation.metrics import hit_ratio, ndcg
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker

COLUMNS = ["attributes", "what", "takers", "hr@10", "ndcg@10", "asked"]
MIN_USERS, ASKED_USERS = 20, 10  # of a film: at least, and whom is asked for it
OTHERS, K = 100, 10
TAKERS = (0, 1, 2, 5)
LOOK_SECONDS = 5  # between two looks of the server at new events
PLACE_SECONDS, FIT_SECONDS = 120, 60
YEAR = re.compile(r"\((\d{4})\)\s*$")


def main(data: str, params: str = "{}", films: int = 200) -> None:
    source = open_source(Path(data))
    everything = load_interactions(source).interactions
    described = {row.item: description(row) for row in source.items(on_bad=lambda row: None)}
    generator = np.random.default_rng(0)
    popular = np.flatnonzero(everything.item_counts() >= MIN_USERS)
    cold = np.sort(generator.choice(popular, films, replace=False))
    known = everything.select(~np.isin(everything.items, cold))
    split = latest_out(known)
    tests = list(questions(everything, cold, generator))
    rows = measured(split, everything, described, cold, tests, json.loads(params))
    publish(
        f"cold-items-{Path(data).name.partition('.')[0].lower()}",
        COLUMNS,
        [[*row] for row in rows],
        users=known.n_users,
        items=known.n_items - films,
        interactions=split.train.nnz,
        films=films,
        params=params,
        by_chance=K / (OTHERS + 1),
    )


def description(row: Any) -> dict[str, Any]:
    """The body of an item: its categories, and the year that its title ends with."""
    year = YEAR.search(row.title or "")
    attributes = {} if year is None else {"year": int(year[1]), "decade": f"{year[1][:3]}0s"}
    return {
        "id": row.item,
        "title": row.title,
        "categories": list(row.categories),
        "attributes": attributes,
    }


class Question:
    """A user, a film that they took up, and items that they did not."""

    def __init__(self, user: int, film: int, others: IntArray) -> None:
        self.user, self.film, self.others = user, film, others


def questions(
    everything: Interactions, cold: IntArray, generator: np.random.Generator
) -> Iterator[Question]:
    """For each film users drawn of those who are not among its first takers."""
    warm = np.setdiff1d(np.arange(everything.n_items), cold)
    for film in cold.tolist():
        takers = takers_of(everything, film)[max(TAKERS) :]
        for user in generator.permutation(takers)[:ASKED_USERS].tolist():
            own = everything.items[everything.indptr[user] : everything.indptr[user + 1]]
            others = generator.choice(np.setdiff1d(warm, own), OTHERS, replace=False)
            yield Question(user, film, others)


def takers_of(everything: Interactions, film: int) -> IntArray:
    """The users of a film in the order of the data."""
    takers: IntArray = everything.users[everything.items == film]
    return takers


def measured(
    split: Split,
    everything: Interactions,
    described: dict[str, dict[str, Any]],
    cold: IntArray,
    tests: Sequence[Question],
    params: dict[str, Any],
) -> Iterator[tuple[Any, ...]]:
    films = [everything.item_ids[film] for film in cold.tolist()]
    with storage("sqlite") as place:
        env = place.env(NCR_PRECOMPUTE_USERS="0", NCR_NEW_ITEMS_SECONDS=str(LOOK_SECONDS))
        with (
            NcrServer(env, place.folder / "server.log") as server,
            NcrWorker(env, place.folder / "worker.log"),
            httpx2.Client(base_url=server.url, timeout=120) as client,
        ):
            send(client, split.train)
            others = [body for item, body in described.items() if item not in set(films)]
            describe(client, others)
            choices: list[Any] = [[], "auto"]
            for attributes in choices:
                body = params | {"attributes": attributes, "force": True}
                job_id = client.post("/admin/train", json=body).json()["job_id"]
                job = wait_for(client, job_id, has_ended, seconds=TRAINING_SECONDS)
                if job["status"] != "succeeded":
                    raise AssertionError(job)
                print(job["metrics"].get("content"), job["metrics"]["recipe"])
                version = job["model_version"]
                wait_until(partial(serves, client, split.train.user_ids[0], version), 60, "it")
                named = "auto" if attributes else "none"
                if attributes:
                    time.sleep(10)  # described items without events have a place, too
                yield named, "known users' lists", None, *warm(server.url, split)
            describe(client, [described[film] for film in films])
            for takers in TAKERS:
                if takers:
                    take_up(client, everything, cold, takers)
                    time.sleep(FIT_SECONDS)
                wait_until(partial(is_placed, client, films), PLACE_SECONDS, "the films")
                ranks = np.array(ranked(server.url, everything, tests))
                scores = hit_ratio(ranks, K), ndcg(ranks, K)
                yield "auto", "films among 101", takers, *scores, len(ranks)
                if not takers:
                    yield "auto", "lists with the films", None, *warm(server.url, split)
            counts = split.train.item_counts()
            popular = np.array([by_popularity(everything, split.train, counts, q) for q in tests])
            yield "auto", "by popularity", 0, hit_ratio(popular, K), ndcg(popular, K), len(popular)


def describe(client: httpx2.Client, bodies: Sequence[dict[str, Any]]) -> None:
    for start in range(0, len(bodies), 1_000):
        answer = client.post("/items", json=bodies[start : start + 1_000]).json()
        if answer["rejected"]:
            raise AssertionError(answer)


def warm(url: str, split: Split) -> tuple[float, float, int]:
    ranks = asked(url, split)
    return hit_ratio(ranks, K), ndcg(ranks, K), len(ranks)


def take_up(client: httpx2.Client, everything: Interactions, cold: IntArray, n: int) -> None:
    """The first ``n`` users of each film; who has sent the event before sends it again."""
    for film in cold.tolist():
        users = takers_of(everything, film)[:n].tolist()
        events = [
            {
                "event_id": f"{user} {film}",
                "user": everything.user_ids[user],
                "item": everything.item_ids[film],
                "timestamp": 1_000_000 + user,
            }
            for user in users
        ]
        client.post("/events", json=events).raise_for_status()


def is_placed(client: httpx2.Client, films: Sequence[str]) -> bool:
    """Whether the model has every film that is looked at."""
    answers = (
        client.get(f"/items/{film}/similar", params={"n": 1}).json()
        for film in films[:: max(1, len(films) // 10)]
    )
    return all(answer["model_version"] is not None for answer in answers)


def ranked(url: str, everything: Interactions, tests: Sequence[Question]) -> list[int]:
    """The place of each question's film, −1 outside of the first ten."""

    def ask(part: Sequence[Question]) -> list[int]:
        with httpx2.Client(base_url=url, timeout=60) as client:
            return [place_of(client, everything, test) for test in part]

    with ThreadPoolExecutor(CLIENTS) as pool:
        parts = pool.map(ask, [tests[start::CLIENTS] for start in range(CLIENTS)])
        return [rank for part in parts for rank in part]


def place_of(client: httpx2.Client, everything: Interactions, test: Question) -> int:
    film = everything.item_ids[test.film]
    items = [*(everything.item_ids[item] for item in test.others.tolist()), film]
    body = {"user": everything.user_ids[test.user], "items": items}
    answer = client.post("/rerank", json=body).raise_for_status().json()
    place = next(i for i, item in enumerate(answer["items"]) if item["id"] == film)
    return place if place < K else -1


def by_popularity(
    everything: Interactions, train: Interactions, counts: IntArray, test: Question
) -> int:
    """The place of a film without events among the others, by the number of their users."""
    rows = {item: row for row, item in enumerate(train.item_ids)}
    known = [counts[rows[everything.item_ids[item]]] for item in test.others.tolist()]
    place = sum(count > 0 for count in known)
    return place if place < K else -1


if __name__ == "__main__":
    run_command(main)
