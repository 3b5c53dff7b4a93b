"""`make bench`: every benchmark, on the demo's synthetic data unless something else is given.

python -m benchmarks [CHECKPOINT DATA_DIR]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import ingest, ranker, recommend

DEMO = Path("var/demo/synthetic")


def main() -> None:
    if len(sys.argv) == 3:
        checkpoint, data_dir = Path(sys.argv[1]), Path(sys.argv[2])
    else:
        data_dir = DEMO
        checkpoints = sorted(path for path in data_dir.glob("models/*") if path.is_dir())
        if not checkpoints:
            sys.exit("the benchmarks use the demo's data: run `make demo` once, then stop it")
        checkpoint = checkpoints[-1]
    for module, argument in ((ranker, checkpoint), (recommend, data_dir), (ingest, data_dir)):
        name = module.__spec__.name if module.__spec__ else module.__name__
        subprocess.run([sys.executable, "-m", name, str(argument)], check=True)


if __name__ == "__main__":
    main()
