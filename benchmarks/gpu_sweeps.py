"""Trains what a CPU has little time for: SASRec over seeds, gSASRec, towers of 24 and 32 factors.

    python -m benchmarks.gpu_sweeps ROOT RESULTS [SEED]
    python -m benchmarks.gpu_sweeps rank ROOT

ROOT holds ml-1m and ml-1m-sasrec. The results are lines of ``RESULTS/cells``, as those of
`ncr reproduce`, and models lie in ``RESULTS/work``. A repeated command goes on where the one before
ended. SASRec with cross-entropy is trained with each seed, and gSASRec with seed 0, as the last.
Several seeds can run at once on one GPU, with a folder for each.

``rank`` trains the recipe `next-item-nbpr` by one rank of torchrun, with NCCL, and by this process.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import run_command
from ncr_core.recipes import recipe
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.reproduction.runner import Runner, RunnerCallbacks
from ncr_core.reproduction.suites import RunSpec, Selection, make_run, sequential
from ncr_core.training import train_model
from ncr_core.training.torchrun import TorchrunEngine

SIZES = (24, 32)
TOWERS = ("DNCR from ALS", "DNCR from NBPR")


def sweep(seed: int) -> list[RunSpec]:
    """The runs of a seed."""
    selection = Selection(seed=seed)
    runs = [make_run(name, selection, d) for d in SIZES for name in TOWERS]
    by_sequences = partial(Selection, "ml-1m-sasrec", seed=seed)
    runs = [*sequential(by_sequences(methods=("SASRec CE",))), *runs]
    return [*runs, *sequential(by_sequences(methods=("gSASRec",)))] if seed == 0 else runs


def main(root: Path, results: Path, seed: int = 0) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU, and on a CPU gSASRec takes days")
    callbacks = RunnerCallbacks(
        started=lambda run, number, count: print(run.name, flush=True),
        progress=lambda p: print(p.phase, p.epoch, p.ndcg, f"{p.eta_s:.0f} s left", flush=True),
    )
    for result in Runner(root, results, results / "work", callbacks).run(sweep(seed)):
        print(result["cell"], result["metrics"], result["seconds"], flush=True)


def one_rank(root: Path) -> None:
    split, chosen = load_dataset("ml-1m", root).split, recipe("next-item-nbpr")
    with tempfile.TemporaryDirectory() as folder:
        engine = TorchrunEngine(1, "replicated", Path(folder))
        for name, run_phase in (("one rank", engine), ("this process", None)):
            trained = train_model(chosen.model, chosen.training, split, run_phase=run_phase)
            history = trained.history[-1]
            print(f"{name}: NDCG@10 {history.best}, seconds {history.seconds}", flush=True)


if __name__ == "__main__":
    run_command(main, rank=one_rank)
