"""Trains the same models by two versions of the library, both at once on one core.

    python -m benchmarks.one_process OLD_CHECKOUT [NEW_CHECKOUT [TURNS]]

By default the new version is this one, with 5 turns. Each training is a process of its own with one
thread, this interpreter and the library of its checkout. The two share a core, so that other work
on the machine slows both alike: one after the other, DNCR had a ratio of 0.99 to 1.17 in a turn,
and together it has 1.00 to 1.03. The data are 600,000 interactions of 6,000 users and 3,700 items
at random, without validation. The columns are the medians of the processor seconds of `train_model`
after a first call with few interactions, the median of the ratios new / old of each turn beside the
smallest and the largest, and whether all weights are equal bit for bit. Options that versions
choose by themselves are given: batches of 4,096 and Adam on whole tables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import publish, run_command

COLUMNS = ["model", "old s", "new s", "new / old", "smallest", "largest", "equal weights"]
MODELS: dict[str, dict[str, Any]] = {
    "NBPR": {"factors": 64, "epochs": 3},
    "NBPR history": {"factors": 64, "epochs": 2},
    "DNCR": {"factors": 8, "epochs": 6, "start": "random"},
}
# It has to run with the library of an older checkout.
TRAINING = """
import hashlib, json, sys, time
import numpy as np
import ncr_core
from ncr_core.data import Interactions, leave_latest_out
from ncr_core.recipes import tuned
from ncr_core.training import train_model

method, values, checkout = json.loads(sys.argv[1])
assert ncr_core.__file__.startswith(checkout), ncr_core.__file__
random = np.random.default_rng(0)
recipe = tuned(method).with_(optimizer="dense", batch_size=4096, device="cpu", **values)

def split_of(n):
    users = random.integers(6_000, size=n)
    items = (3_700 * random.random(n) ** 3).astype(np.int64)
    data = Interactions.from_arrays(
        users, items, np.arange(n),
        user_ids=[f"u{n}" for n in range(6_000)], item_ids=[f"i{n}" for n in range(3_700)],
    )
    return leave_latest_out(data, np.zeros(data.n_users, dtype=np.bool_))

train_model(recipe.model, recipe.training, split_of(20_000))  # imports and compiles
split = split_of(600_000)
started = time.process_time()
model = train_model(recipe.model, recipe.training, split).model
seconds = time.process_time() - started
weights = {name: x.numpy().tobytes() for name, x in model.state_dict().items()}
print(json.dumps([seconds, {n: hashlib.sha256(x).hexdigest() for n, x in weights.items()}]))
"""


def main(old: Path, new: Path = Path(), turns: int = 5) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of the trainings too
    rows: list[list[Any]] = []
    for method, values in MODELS.items():
        seconds: list[list[float]] = []
        weights = []
        for turn in range(turns):
            order = [old, new] if turn % 2 == 0 else [new, old]
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(partial(trained, method=method, values=values), order))
            of = dict(zip(order, found, strict=True))
            seconds.append([of[checkout][0] for checkout in (old, new)])
            weights += [of[checkout][1] for checkout in (old, new)]
        ratios = [after / before for before, after in seconds]
        before, after = (median(each) for each in zip(*seconds, strict=True))
        equal = all(each == weights[0] for each in weights)
        ratio = [median(ratios), min(ratios), max(ratios)]
        rows.append([f"{method} {values['factors']}", before, after, *ratio, equal])
        publish("one_process", COLUMNS, rows, old=commit_of(old), new=commit_of(new), turns=turns)


def trained(checkout: Path, method: str, values: dict[str, Any]) -> tuple[float, dict[str, str]]:
    """Processor seconds and the checksum of each weight."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout.resolve())}
    command = [
        sys.executable,
        "-P",
        "-c",
        TRAINING,
        json.dumps([method, values, str(checkout.resolve())]),
    ]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    seconds, weights = json.loads(done.stdout.splitlines()[-1])
    return seconds, weights


def commit_of(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    run_command(main)
