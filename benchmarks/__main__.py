"""`make bench`: every benchmark, on the demo's synthetic data unless something else is given.

python -m benchmarks [CHECKPOINT DATA_DIR]

The figures go to var/bench, and not to those that are published: each benchmark writes them by
itself, when it is run by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ingest, ranker, recommend
from benchmarks.harness import RESULTS_VARIABLE

DEMO = Path("var/demo/synthetic")
RESULTS = Path("var/bench")


def main() -> None:
    if len(sys.argv) == 3:
        checkpoint, data_dir = Path(sys.argv[1]), Path(sys.argv[2])
    else:
        data_dir = DEMO
        checkpoints = sorted(path for path in data_dir.glob("models/*") if path.is_dir())
        if not checkpoints:
            sys.exit("the benchmarks use the demo's data: run `make demo` once, then stop it")
        checkpoint = checkpoints[-1]
    env = {**os.environ, RESULTS_VARIABLE: str(RESULTS.resolve())}
    for module, argument in ((ranker, checkpoint), (recommend, data_dir), (ingest, data_dir)):
        name = module.__spec__.name if module.__spec__ else module.__name__
        subprocess.run([sys.executable, "-m", name, str(argument)], env=env, check=True)


if __name__ == "__main__":
    main()
