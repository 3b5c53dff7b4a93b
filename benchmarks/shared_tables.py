"""What several servers of a machine hold of one large model, with and without shared tables.

    python -m benchmarks.shared_tables [ITEMS [FACTORS [SERVERS [SCRATCH [FAISS [OWN]]]]]]

The checkpoint has random items of a model that is a product of vectors. A server is a process that
loads it, makes the engine and ranks some users; it holds nothing else of the service. Memory is
that of Linux's smaps_rollup: PSS counts a page that n processes have by 1/n in each, so the sum
over the servers is what the machine holds. SCRATCH has room for 8 times the bytes of the items.
With FAISS `yes` each server has the index of candidates, too, which takes minutes to build. With
OWN `no` only shared tables are measured: own ones of two servers may be more than the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import IDS, ITEM_COUNTS, WEIGHTS, load_checkpoint
from ncr_core.inference.engine import InferenceEngine
from ncr_core.inference.retrieval import ItemFilter, RankRequest, UserState
from ncr_core.inference.shared_tables import SharedTables
from ncr_core.manifest import FORMAT, MANIFEST, file_sha256
from ncr_core.models import ModelConfig, build_model
from ncr_core.ranking import candidates

USERS, RANKED_USERS, BLOCK = 1_000, 50, 2**16
MIB = 2**20


def main(
    items: int = 1_000_000,
    factors: int = 64,
    servers: int = 2,
    scratch: Path = Path("var"),
    faiss: str = "no",
    own: str = "yes",
) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, items, factors)
        rows: list[list[Any]] = []
        modes: list[tuple[str, Path | None]] = [("own tables", None)] if own == "yes" else []
        for name, tables in [*modes, ("shared tables", Path(folder) / "tables")]:
            rows += _measured(name, checkpoint, tables, servers, faiss)
        size = (checkpoint / WEIGHTS).stat().st_size
    publish(
        f"shared-tables-{items}" + ("-faiss" if faiss == "yes" else ""),
        ["tables", "servers", "PSS MiB", "private MiB", "shared MiB", "start s", "peak MiB"],
        rows,
        items=items,
        factors=factors,
        weights_mib=size / MIB,
    )


def _measured(
    name: str, checkpoint: Path, tables: Path | None, servers: int, faiss: str
) -> list[list[Any]]:
    rows, running = [], []
    try:
        for count in range(1, servers + 1):
            command = [sys.executable, "-m", "benchmarks.shared_tables", "serve", str(checkpoint)]
            process = subprocess.Popen(
                [*command, str(tables or ""), faiss],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(process)
            started = _answer(process.stdout)
            now = []
            for each in running:
                assert each.stdin is not None
                each.stdin.write("\n")
                each.stdin.flush()
                now.append(_answer(each.stdout))
            total = {key: sum(memory[key] for memory in now) for key in now[0]}
            private = total["Anonymous"]
            shared = max(memory["Shared_Clean"] + memory["Shared_Dirty"] for memory in now)
            rows.append(
                [name, count, total["Pss"], private, shared, started["seconds"], started["peak"]]
            )
            print(rows[-1], flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return rows


def _answer(stream: IO[str] | None) -> dict[str, float]:
    assert stream is not None
    answer: dict[str, float] = json.loads(stream.readline())
    return answer


def serve(checkpoint: Path, tables: str = "", faiss: str = "no") -> None:
    """A server; measures itself for each line that it reads."""
    if faiss != "yes":
        candidates.MIN_FAISS_ITEMS = sys.maxsize
    torch.set_num_threads(1)
    started = time.perf_counter()
    engine = InferenceEngine(
        load_checkpoint(checkpoint),
        200,
        shared=SharedTables(Path(tables)) if tables else None,
        shared_key="benchmark",
    )
    everything = ItemFilter(np.ones(engine.n_items, dtype=np.bool_))
    for user in range(RANKED_USERS):
        engine.rank([RankRequest(UserState(user), 10, everything)])
    peak = _status("VmHWM") / MIB
    print(json.dumps({"seconds": time.perf_counter() - started, "peak": peak}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(_memory()), flush=True)


def _memory() -> dict[str, float]:
    """MiB of this process by kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (x.partition(":") for x in lines)
    }


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{name}:")[2].split()[0])


def write_checkpoint(folder: Path, items: int, factors: int) -> None:
    """A checkpoint of random vectors, some rows at a time: its table may be larger than memory."""
    folder.mkdir()
    config = ModelConfig(kind="nbpr", factors=factors)
    small = build_model(config, USERS, 1).state_dict()
    header: dict[str, Any] = {}
    end = 0
    tables = {"items.weight": [items, factors], ITEM_COUNTS: [items]}
    for name, shape in ({k: list(v.shape) for k, v in small.items()} | tables).items():
        size = int(np.prod(shape)) * (8 if name == ITEM_COUNTS else 4)
        kind = "I64" if name == ITEM_COUNTS else "F32"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            if name == "items.weight":
                for start in range(0, items, BLOCK):
                    rows = min(BLOCK, items - start)
                    file.write(rng.standard_normal((rows, factors), np.float32).data)
            elif name == ITEM_COUNTS:
                file.write(np.arange(items, 0, -1, dtype=np.int64).data)
            else:
                file.write(small[name].contiguous().numpy().data)
    ids = {"users": [f"u{n}" for n in range(USERS)], "items": [f"i{n}" for n in range(items)]}
    (folder / IDS).write_text(json.dumps(ids))
    files = {
        name: {"sha256": file_sha256(folder / name), "bytes": (folder / name).stat().st_size}
        for name in (WEIGHTS, IDS)
    }
    manifest = {
        "format": FORMAT,
        "model": config.as_dict(),
        "n_users": USERS,
        "n_items": items,
        "reference_items": np.linspace(0, items - 1, 16).astype(int).tolist(),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


if __name__ == "__main__":
    run_command(main, serve=serve)
