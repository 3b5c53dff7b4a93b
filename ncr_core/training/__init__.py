"""Training: configuration, losses, the loop, pre-training."""

from ncr_core.train_config import TrainConfig, resolve_device
from ncr_core.training.pretraining import TrainingResult, train_model
from ncr_core.training.trainer import History, OnProgress, Progress

__all__ = [
    "History",
    "OnProgress",
    "Progress",
    "TrainConfig",
    "TrainingResult",
    "resolve_device",
    "train_model",
]
