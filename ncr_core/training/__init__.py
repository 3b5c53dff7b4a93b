"""Training: configuration, losses, the loop, pre-training."""

from ncr_core.training.config import TrainConfig, resolve_device
from ncr_core.training.loop import History, OnProgress, Progress
from ncr_core.training.pretraining import Trained, train_model

__all__ = [
    "History",
    "OnProgress",
    "Progress",
    "TrainConfig",
    "Trained",
    "resolve_device",
    "train_model",
]
