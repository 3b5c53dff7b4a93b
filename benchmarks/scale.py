"""What a training by several ranks takes as its data grow, on synthetic data of a known truth.

    python -m benchmarks.scale [SCRATCH [FACTORS [RANKS [EVENTS ...]]]]
    python -m benchmarks.scale items [SCRATCH [FACTORS [RANKS [ITEMS ...]]]]
    python -m benchmarks.scale users [SCRATCH [FACTORS [RANKS [EVENTS_A_USER ...]]]]
    python -m benchmarks.scale batches [SCRATCH [FACTORS [RANKS [BATCH ...]]]]

By default 0, 2 and 4 ranks, as in `0,2,4`, for 1, 10 and 100 million events; a user for every 20,
and 20,000 items. Above 20 million events no more ranks than cores are measured. A user and an item
have one of 100 topics; nine of ten events of a user are in the user's topic, by an item's
popularity there. A model that has learned the truth fills lists with the user's topic; popularity
fills a hundredth. The data are a snapshot in parts, written a part at a time to SCRATCH.

Each size is trained with the engine `torchrun` and so many ranks of a thread each, or with 0 ranks
in one process with a thread. The model is NBPR with users from their histories: 512 shared
negatives, two epochs without validation, and above 20 million events one. The columns are

peak MiB            of the process that starts the ranks, or that trains alone
peak MiB of a rank  the largest of all ranks
wire MB a step      what all ranks together send for a step, by the counters of a network namespace
                    of their own (Linux, with the right to make one); what begins and ends the
                    phase is in it

Lines are fitted: seconds an epoch of one process by triples, and bytes of a rank by its own
interactions and by all users. What they say of a billion events of 50 million users on 8 ranks is a
prediction, and no measurement: it leaves out the messages, and a GPU's rate is not this machine's.
No bytes are negative, and without any growth with the data there is no prediction of memory.

``items`` trains 3 million events of 20,000, 200,000 and 2 million items, by default with 0 and 2
ranks. Other numbers of items have to be multiples of 100.

``users`` trains 10 million events with 5, 20 and 80 events a user, by default with 2 ranks. Only
these rows tell the bytes of interactions and of users apart. Their result has the lines that are
fitted to them and to the published rows of the first form.

``batches`` trains 3 million events with batches of 4,096 and 32,768 events, by default with 0 and 2
ranks, and by one process with two threads. The rows with a thread for each process tell what ranks
share out, the rows of a step, from what each rank does for a step, as Adam, and from the messages.
Their result has the lines that are fitted to them, and what they say of a billion events.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks.harness import publish, published, run_command
from benchmarks.size import peak_bytes
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.data.snapshot import Snapshot, SnapshotWriter, snapshot_folder, suitable_parts

SIZES, RANKS = (1_000_000, 10_000_000, 100_000_000), "0,2,4"
MANY_EVENTS = 20_000_000
EVENTS_BY_ITEMS, NUMBERS_OF_ITEMS = 3_000_000, (20_000, 200_000, 2_000_000)
EVENTS_BY_USERS, SEVERAL_A_USER = 10_000_000, (5, 20, 80)
EVENTS_BY_BATCHES, BATCHES, MANY_THREADS = 3_000_000, (4_096, 32_768), 2
EVENTS_A_USER, ITEMS, TOPICS, ON_TOPIC = 20, 20_000, 100, 0.9
NEGATIVES, BATCH, JUDGED_USERS, K = 512, 4_096, 500, 10
PREDICTED_EVENTS, PREDICTED_RANKS, PREDICTED_ITEMS = 1_000_000_000, 8, 10_000_000
COLUMNS = [
    "events", "ranks", "written/s", "peak MiB of a rank", "read/s", "triples/s", "epoch s",
    "peak MiB", "wire MB a step", "interactions", "in the user's topic",
]  # fmt: skip


def main(
    scratch: Path = Path("var"),
    factors: int = 64,
    ranks: str = RANKS,
    events: tuple[int, ...] = SIZES,
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    numbers, cores = [*map(int, ranks.split(","))], os.cpu_count() or 1
    cost: dict[str, Any] = {}
    for size in events or SIZES:
        few = [number for number in numbers if size <= MANY_EVENTS or number <= cores]
        if not few:
            sys.exit(f"{size:,} events are measured with at most a rank for each of {cores} cores")
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            started = time.perf_counter()
            written = write_synthetic(Path(folder) / "snapshot", size)
            rate = written / (time.perf_counter() - started)
            for number in few:
                found, peak = measured(Path(folder), number, factors)
                rows.append([size, number, round(rate), peak, *found])
                cost = fitted(named(rows), factors)
                publish("scale", COLUMNS, rows, factors=factors, items=ITEMS, cost=cost)
    print(json.dumps(cost, indent=1))


def measure_users(
    scratch: Path = Path("var"), factors: int = 64, ranks: str = "2", a_user: tuple[int, ...] = ()
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    others = published().get("scale", {"rows": []})["rows"]
    for events in a_user or SEVERAL_A_USER:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            started = time.perf_counter()
            snapshot = Path(folder) / "snapshot"
            written = write_synthetic(snapshot, EVENTS_BY_USERS, a_user=events)
            rate = written / (time.perf_counter() - started)
            for number in map(int, ranks.split(",")):
                found, peak = measured(Path(folder), number, factors)
                rows.append([events, number, round(rate), peak, *found])
                own = [
                    each | {"users": EVENTS_BY_USERS // row[0]}
                    for row, each in zip(rows, named(rows), strict=True)
                ]
                cost = fitted([*others, *own], factors)
                head = ["events a user", *COLUMNS[1:]]
                publish("scale-users", head, rows, factors=factors, items=ITEMS, cost=cost)
    print(json.dumps(cost, indent=1))


def named(rows: list[list[Any]]) -> list[dict[str, Any]]:
    """The rows by the names of the columns."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def measure_items(
    scratch: Path = Path("var"), factors: int = 64, ranks: str = "0,2", items: tuple[int, ...] = ()
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    for n_items in items or NUMBERS_OF_ITEMS:
        if n_items < TOPICS or n_items % TOPICS:
            sys.exit(f"the number of items is no multiple of {TOPICS}: {n_items}")
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            started = time.perf_counter()
            written = write_synthetic(Path(folder) / "snapshot", EVENTS_BY_ITEMS, n_items)
            rate = written / (time.perf_counter() - started)
            for number in map(int, ranks.split(",")):
                found, peak = measured(Path(folder), number, factors)
                rows.append([n_items, number, round(rate), peak, *found])
                head = ["items", *COLUMNS[1:]]
                publish("scale-items", head, rows, factors=factors, events=EVENTS_BY_ITEMS)


def measure_batches(
    scratch: Path = Path("var"),
    factors: int = 64,
    ranks: str = "0,2",
    batches: tuple[int, ...] = (),
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        started = time.perf_counter()
        written = write_synthetic(Path(folder) / "snapshot", EVENTS_BY_BATCHES)
        rate = written / (time.perf_counter() - started)
        for batch in batches or BATCHES:
            processes = [(int(number), 1) for number in ranks.split(",")] + [(0, MANY_THREADS)]
            for number, threads in processes:
                found, peak = measured(Path(folder), number, factors, batch, threads)
                rows.append([batch, threads, number, round(rate), peak, *found])
                head = ["batch", "threads", *COLUMNS[1:]]
                of_one = [dict(zip(head, row, strict=True)) for row in rows if row[1] == 1]
                cost = seconds_of_steps(of_one)
                publish("scale-batches", head, rows, factors=factors, items=ITEMS, cost=cost)
    print(json.dumps(cost, indent=1))


def seconds_of_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The seconds of a step by events of a rank, by what every rank does, and by messages."""
    seconds = [row["epoch s"] / -(-row["interactions"] // row["batch"]) for row in rows]
    of_rows = [[row["batch"] / max(row["ranks"], 1), 1.0, float(row["ranks"] > 1)] for row in rows]
    if len(rows) < len(of_rows[0]):
        return {}
    (an_event, beside, messages), _ = nnls(np.array(of_rows), np.array(seconds))
    fit = np.array(of_rows) @ [an_event, beside, messages]
    largest = max(row["batch"] for row in rows)
    own = largest / PREDICTED_RANKS
    return {
        "microseconds an event of a rank": 1e6 * an_event,
        "milliseconds a step beside": 1e3 * beside,
        "milliseconds a step for messages": 1e3 * messages,
        "fitted / measured": [round(f / s, 3) for f, s in zip(fit, seconds, strict=True)],
        "prediction, unmeasured": {
            "events": PREDICTED_EVENTS,
            "ranks": PREDICTED_RANKS,
            "batch": largest,
            "hours an epoch, a thread a rank": (
                PREDICTED_EVENTS / largest * (an_event * own + beside + messages) / 3_600
            ),
        },
    }


def measured(
    folder: Path, ranks: int, factors: int, batch: int = BATCH, threads: int = 1
) -> tuple[list[Any], float | None]:
    """What `train` prints in a process of its own, and the peak of the largest rank in MiB."""
    command = [sys.executable, "-m", "benchmarks.scale", "train"]
    command += [str(folder), str(ranks), str(factors), str(batch)]
    own_network = ["unshare", "--map-root-user", "--net"]
    has_tools = shutil.which("unshare") and shutil.which("ip")
    tried = [*own_network, "ip", "link"]
    if not has_tools or subprocess.run(tried, capture_output=True, check=False).returncode:
        own_network = []
    found, (peak,) = watched(
        own_network + command, lambda pid: of_ranks(pid, peak_bytes), threads=threads
    )
    return found, peak / 2**20 if ranks else None


def watched(
    command: list[str],
    *readings: Callable[[int], int],
    env: Mapping[str, str] = os.environ,
    threads: int = 1,
) -> tuple[list[Any], list[int]]:
    """What a command prints last, and the largest of each reading of its process in bytes (Linux).

    The command gets so many threads, and is read 20 times a second.
    """
    env = {**env, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    largest = [0] * len(readings)
    while process.poll() is None:
        for place, reading in enumerate(readings):
            with suppress(OSError, IndexError):  # it has just ended
                largest[place] = max(largest[place], reading(process.pid))
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"failed: {' '.join(command)}")
    assert process.stdout is not None
    found: list[Any] = json.loads(process.stdout.read().splitlines()[-1])
    return found, largest


def of_ranks(pid: int, reading: Callable[[int], int]) -> int:
    """The largest reading of the ranks below a process."""
    return of_command(pid, b"rank_process", reading)


def of_command(pid: int, words: bytes, reading: Callable[[int], int]) -> int:
    """The largest reading of a process and those below it whose command has these words."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        is_wanted = words in Path(f"/proc/{pid}/cmdline").read_bytes()
        own = reading(pid) if is_wanted else 0
    except (OSError, IndexError):  # it has just ended
        return 0
    return max([own, *(of_command(int(child), words, reading) for child in children)])


def fitted(rows: list[dict[str, Any]], factors: int) -> dict[str, Any]:
    """The model of cost, and what it predicts; empty while there are too few rows."""
    alone = [row for row in rows if row["ranks"] == 0]
    together = [row for row in rows if row["ranks"]]
    if len(alone) < 2 or len(together) < 4:
        return {}
    triples = NEGATIVES * np.array([row["interactions"] for row in alone], dtype=np.float64)
    a_triple, first = np.polyfit(triples, [row["epoch s"] for row in alone], 1)
    sizes = np.array(
        [
            [
                row["interactions"] / row["ranks"],
                row.get("users", row["events"] // EVENTS_A_USER),
                1.0,
            ]
            for row in together
        ]
    )
    peaks = np.array([row["peak MiB of a rank"] for row in together]) * 2**20
    (an_interaction, a_user, base), _ = nnls(sizes, peaks)
    own = PREDICTED_EVENTS / PREDICTED_RANKS
    users = PREDICTED_EVENTS / EVENTS_A_USER
    memory = {}
    if an_interaction + a_user > 0:  # else the data are small beside what a rank starts with
        bytes_a_rank = an_interaction * own + a_user * users
        memory = {"GiB a rank for interactions and users": bytes_a_rank / 2**30}
    return {
        "nanoseconds a triple": 1e9 * a_triple,
        "seconds an epoch beside": first,
        "bytes an interaction of a rank": an_interaction,
        "bytes a user of all ranks": a_user,
        "MiB of a rank beside": base / 2**20,
        "prediction, unmeasured": {
            "events": PREDICTED_EVENTS,
            "ranks": PREDICTED_RANKS,
            "hours an epoch, a thread a rank, without messages": (
                (first + a_triple * NEGATIVES * own) / 3_600
            ),
            **memory,
            "GiB a rank for item tables with Adam": (16 * 2 * PREDICTED_ITEMS * factors / 2**30),
        },
    }


def write_synthetic(
    folder: Path,
    events: int,
    n_items: int = ITEMS,
    seed: int = 0,
    a_user: int = EVENTS_A_USER,
) -> int:
    """A snapshot of about so many interactions, of which one part at a time is in memory."""
    rng = np.random.default_rng(seed)
    parts = suitable_parts(events)
    of_topic = n_items // TOPICS
    popularity = 1.0 / np.arange(2, of_topic + 2) ** 0.8
    cumulative = np.cumsum(popularity / popularity.sum())
    item_ids = [f"i{n}" for n in range(n_items)]
    total = 0
    with snapshot_folder(folder) as staging:
        writer = SnapshotWriter(staging, n_items, timed=True, weighted=False)
        for part in range(parts):
            n_users = events // a_user // parts
            users = np.repeat(np.arange(n_users), a_user)
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


def train(folder: Path, ranks: int, factors: int, batch: int = BATCH) -> None:
    """Trains with so many ranks; prints figures."""
    import resource

    from ncr_core.models import ModelConfig
    from ncr_core.training import TrainConfig, train_model
    from ncr_core.training.torchrun import TorchrunEngine

    if os.getuid() == 0:
        subprocess.run(["ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    started = time.perf_counter()
    data = Snapshot.open(folder / "snapshot").read()
    read = data.nnz / (time.perf_counter() - started)
    split = leave_latest_out(data, np.zeros(data.n_users, dtype=np.bool_))
    epochs = 1 if data.nnz > MANY_EVENTS else 2
    config = TrainConfig(
        shared_negatives=NEGATIVES, loss="listwise", epochs=epochs, batch_size=batch
    )
    model_config = ModelConfig(kind="nbpr", factors=factors, users="history")
    phases = TorchrunEngine(ranks, "replicated", folder / "ranks") if ranks else None
    before = sent_bytes()
    result = train_model(model_config, config, split, shrink=False, run_phase=phases)
    sent = sent_bytes() - before
    epoch = min(result.history[0].seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = epochs * -(-data.nnz // batch)
    wire = sent / steps / 1e6 if ranks and is_own_network() else None
    rates = [round(read), round(NEGATIVES * data.nnz / epoch)]
    print(json.dumps([*rates, epoch, peak, wire, data.nnz, in_topic(result.model, data)]))


def is_own_network() -> bool:
    """Whether the process has no network interface but loopback."""
    return all(line.strip().startswith("lo:") for line in _interfaces())


def sent_bytes() -> int:
    """The bytes sent over loopback so far."""
    own = [line for line in _interfaces() if line.strip().startswith("lo:")]
    return int(own[0].partition(":")[2].split()[8]) if own else 0


def _interfaces() -> list[str]:
    return Path("/proc/net/dev").read_text().splitlines()[2:]


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
    run_command(
        main, items=measure_items, users=measure_users, batches=measure_batches, train=train
    )
