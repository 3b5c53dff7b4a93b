"""Models of the two kinds, trained on what a comparison leaves of MovieLens 1M."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data.splits import Split
from ncr_core.experiments.datasets import fingerprint
from ncr_core.manifest import read_manifest
from ncr_core.models import ModelConfig, PairwiseRanker
from ncr_core.training import TrainConfig, train_model

WINDOWS = (1, 2, 4, 8, 16, 64, 0)
FREE = (ModelConfig(kind="neupr", factors=8), TrainConfig(device="cpu"))
HISTORY = (
    ModelConfig(kind="neupr", factors=8, users="history", windows=WINDOWS, item_bias=True),
    TrainConfig(
        loss="listwise",
        start="spectral",
        shared_negatives=512,
        epochs=6,
        learning_rate=5e-3,
        fine_tune_epochs=2,
        device="cpu",
    ),
)
"""The service's usual size with the service's settings, and with users made of their items."""
KINDS = {"free": FREE, "history": HISTORY}


def trained(kind: str, name: str, split: Split, work: Path) -> tuple[PairwiseRanker, float]:
    """A frozen model and the seconds of one core that its training took.

    A model that ``work`` has of the same settings and data is not trained again.
    """
    shape, config = KINDS[kind]
    folder = work / f"{kind}-{name}"
    made_of = {
        "model": shape.as_dict(),
        "config": config.as_dict(),
        "fingerprint": fingerprint(split),
    }
    made_of = json.loads(json.dumps(made_of))
    if folder.exists():
        manifest = read_manifest(folder)
        if manifest["training"]["made_of"] == made_of:
            return load_checkpoint(folder).model, manifest["training"]["seconds"]
        raise SystemExit(f"{folder} was made of other data or settings: remove it")
    started = time.process_time()
    model = train_model(shape, config, split).model
    seconds = time.process_time() - started
    save_checkpoint(
        folder,
        model,
        user_ids=split.train.user_ids,
        item_ids=split.train.item_ids,
        item_counts=split.train.item_counts(),
        training={"made_of": made_of, "seconds": seconds},
    )
    print(f"{folder.name}: {seconds:,.0f} s", flush=True)
    return model.requires_grad_(False), seconds
