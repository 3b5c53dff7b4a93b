"""What a training takes as its data grow, on synthetic data whose truth is known.

    python -m benchmarks.scale [READERS [FACTORS [SCRATCH [EVENTS ...]]]]

By default 1, 3 and 10 million events; a user for every 20, an item for every 100. A user and an
item have one of 100 topics; nine of ten events of a user are in the user's topic, by an item's
popularity there. A model that has learned the truth fills lists with the user's topic; popularity
fills a hundredth. The data are a snapshot in parts, written a part at a time to SCRATCH.

Each size is trained in a process of its own, whose peak of memory counts: NBPR with users from
their histories, four negatives a positive, two epochs without validation. With READERS the process
is the first of so many that share the parts: it reads and trains what one of them would, without
what they would send to each other.

By three sizes or more a line is fitted: seconds an epoch by triples, and bytes by interactions and
parameters. What it says of a billion events on 8 readers is a prediction, and no measurement: it
leaves out communication, and a GPU's rate is not this machine's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import publish, run_command
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.snapshot import Snapshot, SnapshotWriter, snapshot_folder, suitable_parts

SIZES = (1_000_000, 3_000_000, 10_000_000)
EVENTS_A_USER, EVENTS_AN_ITEM, TOPICS, ON_TOPIC = 20, 100, 100, 0.9
NEGATIVES, EPOCHS, JUDGED_USERS, K = 4, 2, 500, 10
PREDICTED_EVENTS, PREDICTED_READERS, PREDICTED_ITEMS = 1_000_000_000, 8, 10_000_000
COLUMNS = [
    "events", "items", "readers", "written/s", "read/s", "triples/s", "epoch s", "peak MiB",
    "interactions of a reader", "in the user's topic",
]  # fmt: skip


def main(
    readers: int = 1,
    factors: int = 64,
    scratch: Path = Path("var"),
    events: tuple[int, ...] = SIZES,
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    fits: dict[str, Any] = {}
    for size in events or SIZES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            started = time.perf_counter()
            written = write_synthetic(Path(folder) / "snapshot", size)
            rate = written / (time.perf_counter() - started)
            command = [sys.executable, "-m", "benchmarks.scale", "train"]
            done = subprocess.run(
                [*command, str(Path(folder) / "snapshot"), str(readers), str(factors)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append([size, size // EVENTS_AN_ITEM, readers, round(rate), *found])
        if len(rows) > 2:
            fits = fitted(rows, factors)
        publish(
            f"scale-{readers}",
            COLUMNS,
            rows,
            factors=factors,
            threads=torch.get_num_threads(),
            cost=fits,
        )
    print(json.dumps(fits, indent=1))


def fitted(rows: list[list[Any]], factors: int) -> dict[str, Any]:
    """The model of cost, and what it predicts."""
    interactions = np.array([row[8] for row in rows], dtype=np.float64)
    parameters = np.array([2 * row[1] * factors for row in rows], dtype=np.float64)
    seconds = np.array([row[6] for row in rows])
    memory = np.array([row[7] for row in rows]) * 2**20
    triples = NEGATIVES * interactions
    a_triple, first = np.polyfit(triples, seconds, 1)
    # Items grow with events here, so their parts of memory cannot be told apart: one slope.
    an_interaction, base = np.polyfit(interactions, memory, 1)
    share = PREDICTED_EVENTS / PREDICTED_READERS
    return {
        "nanoseconds a triple": 1e9 * a_triple,
        "seconds an epoch beside": first,
        "bytes an interaction": an_interaction,
        "of which parameters with Adam": float((16 * parameters / interactions)[-1]),
        "MiB beside": base / 2**20,
        "prediction, unmeasured": {
            "events": PREDICTED_EVENTS,
            "readers": PREDICTED_READERS,
            "hours an epoch at this machine's rate": (
                (first + a_triple * NEGATIVES * share) / 3_600
            ),
            "GiB a reader for interactions": an_interaction * share / 2**30,
            "GiB a reader for item tables with Adam": (16 * 2 * PREDICTED_ITEMS * factors / 2**30),
        },
    }


def write_synthetic(folder: Path, events: int, seed: int = 0) -> int:
    """A snapshot of about so many interactions, of which one part at a time is in memory."""
    rng = np.random.default_rng(seed)
    n_items, parts = events // EVENTS_AN_ITEM, suitable_parts(events)
    of_topic = n_items // TOPICS
    popularity = 1.0 / np.arange(2, of_topic + 2) ** 0.8
    cumulative = np.cumsum(popularity / popularity.sum())
    item_ids = [f"i{n}" for n in range(n_items)]
    total = 0
    with snapshot_folder(folder) as staging:
        writer = SnapshotWriter(staging, n_items, timed=True, weighted=False)
        for part in range(parts):
            n_users = events // EVENTS_A_USER // parts
            users = np.repeat(np.arange(n_users), EVENTS_A_USER)
            topics = rng.integers(TOPICS, size=n_users)
            topic = np.where(
                rng.random(len(users)) < ON_TOPIC,
                topics[users],
                rng.integers(TOPICS, size=len(users)),
            )
            place = np.searchsorted(cumulative, rng.random(len(users))).clip(max=of_topic - 1)
            data = Interactions.from_arrays(
                users,
                place * TOPICS + topic,
                # The id names the user's topic, which is the truth.
                user_ids=[f"{topics[n]}-{part}-{n}" for n in range(n_users)],
                item_ids=item_ids,
                times=1.6e9 + 60.0 * np.arange(len(users), dtype=np.float64),
            )
            writer.add_part(data)
            total += data.nnz
        writer.finish(item_ids)
    return total


def train(folder: Path, readers: int, factors: int) -> None:
    """Reads and trains what the first of the readers does; prints figures."""
    import resource

    from ncr_core.models import ModelConfig
    from ncr_core.training import TrainConfig, train_model

    snapshot = Snapshot.open(folder)
    started = time.perf_counter()
    data = snapshot.read(snapshot.manifest.share(0, readers))
    read = data.nnz / (time.perf_counter() - started)
    split = leave_latest_out(data, np.zeros(data.n_users, dtype=np.bool_))
    config = TrainConfig(negatives=NEGATIVES, epochs=EPOCHS, batch_size=4_096)
    model_config = ModelConfig(kind="nbpr", factors=factors, users="history")
    result = train_model(model_config, config, split, shrink=False)
    epoch = min(result.history[0].seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    share = in_topic(result.model, data)
    print(
        json.dumps(
            [
                round(read),
                round(NEGATIVES * data.nnz / epoch),
                epoch,
                peak,
                data.nnz,
                share,
            ]
        )
    )


@torch.inference_mode()
def in_topic(model: Any, data: Interactions) -> float:
    """The share of the users' own topic among the best ten items that they do not have."""
    from ncr_core.ranking import ExactRanker

    rows = np.linspace(0, data.n_users - 1, min(JUDGED_USERS, data.n_users)).astype(np.int64)
    allowed = torch.ones((len(rows), data.n_items), dtype=torch.bool)
    for place, row in enumerate(rows):
        allowed[place, torch.from_numpy(data.items_of(row))] = False
    vectors = model.user_vectors(torch.from_numpy(rows).to(model.device))
    best = ExactRanker(model).top(vectors, K, allowed).cpu().numpy()
    topics = np.array([int(data.user_ids[int(row)].partition("-")[0]) for row in rows])
    return float((best % TOPICS == topics[:, None]).mean())


if __name__ == "__main__":
    run_command(main, train=train)
