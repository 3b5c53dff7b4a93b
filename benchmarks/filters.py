"""What filters and boosts by attributes cost in a catalogue of a million items.

    python -m benchmarks.filters [ITEMS]

A model of NBPR with 16 factors and as many items is drawn at random; each item has 30 attributes:
ten numbers, ten strings of twenty values, nine booleans and a list of three tags. Measured are
the mask of a filter over all 30, a change of one attribute, lists with a filter beside lists
without, all of them searched for anew, lists of the few items that a filter leaves, and lists with
a boost. One thread. Lists have 10 items, of 200 candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import orjson
import torch

from app.catalog.attributes import Attributes
from app.catalog.filters import AttributeFilter, parse_filter
from app.catalog.masks import FilterMask
from app.recommend.selection import ItemBoosts
from benchmarks.harness import in_turns, publish, run_command
from ncr_core.checkpoint import Checkpoint
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.models import ModelConfig, build_model

USERS, FACTORS, CANDIDATES, N = 200, 16, 200, 10
REPEATS = 25
CHUNK = 50_000
WORDS = [f"word {n}" for n in range(20)]
FEW = 20


def attributes_of(n_items: int) -> tuple[Attributes, dict[str, Any], float]:
    """The attributes of all items, those of the first, and the seconds that reading them took."""
    generator = np.random.default_rng(0)
    rows: list[tuple[int, int, str]] = []
    for start in range(0, n_items, CHUNK):
        size = min(CHUNK, n_items - start)
        numbers = generator.integers(0, 1_000, (size, 10)).tolist()
        words = generator.integers(0, len(WORDS), (size, 10)).tolist()
        flags = (generator.random((size, 9)) < 0.5).tolist()
        tags = generator.integers(0, 50, (size, 3)).tolist()
        for row in range(size):
            content: dict[str, Any] = {f"n{i}": x for i, x in enumerate(numbers[row])}
            content |= {f"s{i}": WORDS[x] for i, x in enumerate(words[row])}
            content |= {f"b{i}": x for i, x in enumerate(flags[row])}
            content["tags"] = [f"tag {x}" for x in tags[row]]
            item = start + row + 1
            if item <= FEW:
                content["rare"] = "yes"
            rows.append((item, 1, orjson.dumps(content).decode()))
    started = time.perf_counter()
    attributes = Attributes().updated(rows)
    seconds = time.perf_counter() - started
    return attributes, orjson.loads(rows[0][2]), seconds


def checked(value: dict[str, Any]) -> AttributeFilter:
    wanted = parse_filter(value)
    if wanted is None:
        raise ValueError("it leaves every item")
    return wanted


def thirty_ways() -> AttributeFilter:
    """All 30 attributes; nearly all items fit one of the conditions."""
    conditions: list[dict[str, Any]] = [{f"n{i}": {"gte": 930}} for i in range(10)]
    conditions += [{f"s{i}": WORDS[i]} for i in range(10)]
    conditions += [{"and": [{f"b{i}": True}, {f"b{i + 1}": False}]} for i in range(0, 8, 2)]
    conditions += [{"not": {"b8": True}}, {"tags": {"contains": "tag 1"}}]
    return checked({"or": conditions})


def engine_of(n_items: int) -> InferenceEngine:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="nbpr", factors=FACTORS), USERS, n_items)
    return InferenceEngine(
        Checkpoint(
            model=model.requires_grad_(False).eval(),
            user_ids=[str(n) for n in range(USERS)],
            item_ids=[str(n) for n in range(n_items)],
            item_counts=np.arange(n_items)[::-1].copy(),
            reference_items=list(range(0, n_items, max(1, n_items // 16)))[:16],
            manifest={},
        ),
        CANDIDATES,
    )


def main(items: int = 1_000_000) -> None:
    torch.set_num_threads(1)
    attributes, first, read_seconds = attributes_of(items)
    size, internal = items + 1, np.arange(1, items + 1)
    everything = np.ones(items, dtype=np.bool_)
    wanted, few = thirty_ways(), checked({"rare": "yes"})
    mask = FilterMask(attributes.mask(wanted, size), False)
    rare = FilterMask(attributes.mask(few, size), False)
    selected, left = mask.rows(internal), rare.rows(internal)
    boost = ItemBoosts([(mask, 0.5)]).rows(internal, 1.0)
    engine = engine_of(items)
    engine.warm_up()
    users = iter(range(10**9))

    def ranked(filtered: ItemFilter, boost: Any = None) -> list[Any]:
        user = UserState(next(users) % USERS)
        return engine.rank([RankRequest(user, N, filtered, boost=boost)])[0]

    plain = ItemFilter(everything)
    half = ItemFilter(everything, selected=selected.mask, few=selected.few)
    twenty = ItemFilter(everything, selected=left.mask, few=left.few)
    content = {**first, "n0": -1}
    patched = (1, 2, orjson.dumps(content).decode())
    replaced = (1, 2, '{"n0":-1}')
    calls: dict[str, Callable[[], Any]] = {
        "mask of 30 attributes": lambda: attributes.mask(wanted, size),
        "mask of one attribute": lambda: attributes.mask(few, size),
        "rows of the model for a mask": lambda: FilterMask(mask.of(size), False).rows(internal),
        "change of one attribute": lambda: attributes.updated([patched]),
        "change of all of an item": lambda: attributes.updated([replaced]),
        "list": lambda: ranked(plain),
        "list, filtered": lambda: ranked(half),
        f"list of {FEW} items": lambda: ranked(twenty),
        "list, boosted": lambda: ranked(plain, boost),
    }
    for call in calls.values():
        call()
    seconds = in_turns(calls, REPEATS)
    lists = median(seconds["list"])
    rows = [
        [name, median(all_of) * 1e3, max(all_of) * 1e3,
         median(all_of) / lists if name.startswith("list") else None]
        for name, all_of in seconds.items()
    ]  # fmt: skip
    publish(
        "filters",
        ["what", "median ms", "max ms", "of a list"],
        rows,
        items=items,
        read_attributes_seconds=read_seconds,
        share_left=float(selected.mask.mean()),
        few_ranked=len(ranked(twenty)),
        repeats=REPEATS,
        candidates=CANDIDATES,
        n=N,
        threads=1,
    )


if __name__ == "__main__":
    run_command(main)
