"""The methods that are compared and the settings they are run with.

What ``grids`` varies was chosen there, on validation items, at the sizes it names, and holds at the
others; of settings within .001 any was taken. What goes with the size (λ, dropout, the passes and
negatives of towers, which a processor without a GPU has to finish) was set by single trials on
validation items, as docs/experiments.md tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ncr_core.errors import ConfigError

SIZES = (8, 16, 24, 32, 64)
WINDOWS = [1, 2, 4, 8, 16, 64, 0]
Settings = dict[str, Any]

# Passes, negatives a positive, and passes of fine-tuning of a tower with so many factors.
TOWER_BUDGET = {8: (6, 4, 4), 16: (4, 3, 3), 24: (4, 2, 2), 32: (3, 2, 2), 64: (2, 1, 1)}
TOWER = {"start": "spectral", "batch_size": 2048, "learning_rate": 5e-3}


def _ours(kind: str, training: Settings, **model: Any) -> Settings:
    return {"model": {"kind": kind, **model}, "training": training}


def _factor_training(factors: int) -> Settings:
    """More factors fit more of the noise, and want a larger λ."""
    l2 = 1e-3 if factors <= 16 else 3e-3 if factors <= 32 else 1e-2
    return {"epochs": 15, "negatives": 8, "l2": l2}


def _nbpr(factors: int) -> Settings:
    return _ours("nbpr", _factor_training(factors))


def _bpr(factors: int) -> Settings:
    training = {**_factor_training(factors), "loss": "bpr", "learning_rate": 2e-2}
    return _ours("nbpr", training, learn_weights=False)


def _budget(factors: int) -> tuple[int, int, int]:
    return TOWER_BUDGET[min(TOWER_BUDGET, key=lambda size: abs(size - factors))]


def _tower_training(factors: int) -> Settings:
    epochs, negatives, _ = _budget(factors)
    return {**TOWER, "epochs": epochs, "negatives": negatives}


def _dncr(factors: int) -> Settings:
    return _ours("dncr", _tower_training(factors))


def _neupr(factors: int) -> Settings:
    fine_tuning = {"fine_tune_epochs": _budget(factors)[2], "fine_tune_rate": 2e-3}
    return _ours("neupr", {**_tower_training(factors), **fine_tuning})


def _neupr_alone(factors: int) -> Settings:
    return _ours("neupr", {**_tower_training(factors), "pretrain": False})


def _neumf(factors: int) -> Settings:
    if factors < 32:
        return {"pretrain": False, "l2": 1e-3, "epochs": 12}
    return {"l2": 1.2e-2, "epochs": 8, "fine_tune_epochs": 2, "fine_tune_rate": 1e-3}


def _history(kind: str, training: Settings, windows: list[int]) -> Settings:
    model: Settings = {"users": "history", "windows": windows}
    if kind != "dncr":
        model["item_bias"] = True
    return _ours(kind, training, **model)


def _shared(factors: int) -> Settings:
    """Training on negatives that a batch shares, from a spectral start."""
    return {
        "loss": "listwise",
        "start": "spectral",
        "shared_negatives": 512,
        "batch_size": 4096,
        "epochs": 6,
        "dropout": 0.0 if factors < 16 else 0.3,
    }


def _pooled(factors: int) -> Settings:
    return _history("nbpr", {**_shared(factors), "learning_rate": 3e-3}, [0])


def _from_als(factors: int) -> Settings:
    training = {"start": "als", "epochs": 8, "learning_rate": 1e-3, "negatives": 8, "l2": 1e-3}
    return _ours("nbpr", training)


def _dncr_history(factors: int) -> Settings:
    training = {**TOWER, "epochs": 4, "negatives": 4, "loss": "listwise"}
    return _history("dncr", training, WINDOWS)


def _neupr_history(factors: int) -> Settings:
    training = {
        "fine_tune_epochs": 2,
        "fine_tune_rate": 1e-3,
        "negatives": 8,
        "loss": "listwise",
        "batch_size": 4096,
    }
    return _history("neupr", training, WINDOWS)


METHODS: dict[str, Callable[[int], Settings]] = {
    "ItemPop": lambda factors: {},
    "eALS": lambda factors: {"l2": 10.0, "iterations": 40},
    "BPR": _bpr,
    "NeuMF": _neumf,
    "NBPR": _nbpr,
    "DNCR": _dncr,
    "NeuPR": _neupr,
    "NeuPR without pre-training": _neupr_alone,
    "NeuPR shared embeddings": lambda d: _with_model(_neupr_alone(d), shared_embeddings=True),
    "two towers": lambda d: _ours("twotower", _tower_training(d)),
    "two towers shared": lambda d: _ours("twotower", _tower_training(d), shared_towers=True),
    "NBPR pooled": _pooled,
    "NBPR from ALS": _from_als,
    "NBPR history": lambda d: _history("nbpr", _shared(d), WINDOWS),
    "DNCR history": _dncr_history,
    "NeuPR history": _neupr_history,
    "iALS": lambda factors: {"alpha0": 0.6, "l2": 0.005, "iterations": 20},
    "EASE": lambda factors: {"l2": 1320.0},
    "EASE by recency": lambda factors: {"l2": 1320.0, "half_life": 5.0},
    "cornac BPR": lambda factors: {},
}
PARTS = {"NeuPR": ("NBPR", "DNCR"), "NeuPR history": ("NBPR history", "DNCR history")}
SIZELESS = ("ItemPop", "EASE", "EASE by recency")
LARGE = {"iALS": 192, "DNCR history": 16, "NeuPR history": 16}
"""Sizes in the comparison with strong baselines, where 64 is not it."""

# P2 has the items that P1 leaves out, and grids of its own for the methods published for it.
# Amazon Music is sixty times sparser and a hundredth of the size of MovieLens 1M.
ELSEWHERE: dict[tuple[str, str], Settings] = {
    ("iALS", "ncf-ml-1m"): {"alpha0": 0.3, "l2": 0.007},
    ("NeuMF", "ncf-ml-1m"): {"epochs": 16},
    ("eALS", "amusic-deepcf"): {"c0": 2048, "l2": 1.0},
    ("iALS", "amusic-deepcf"): {"alpha0": 0.1, "l2": 0.01},
    ("EASE", "amusic-deepcf"): {"l2": 300.0},
    ("NeuMF", "amusic-deepcf"): {"pretrain": False, "epochs": 12, "l2": 3e-2},
    ("NBPR", "amusic-deepcf"): {"training": {"epochs": 20, "l2": 3e-2, "learning_rate": 3e-3}},
    ("NBPR pooled", "amusic-deepcf"): {
        "training": {
            "loss": "bce",
            "learning_rate": 1e-3,
            "batch_size": 2048,
            "shared_negatives": 256,
        }
    },
}


def settings_of(method: str, factors: int, data: str = "ml-1m") -> Settings:
    """The settings of a method at this size, on this data set.

    Raises ConfigError for a method that is not there.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}: {', '.join(METHODS)}")
    return merged(METHODS[method](factors), ELSEWHERE.get((method, data), {}))


def merged(settings: Settings, over: Mapping[str, Any]) -> Settings:
    """Settings with some of them replaced, section by section."""
    result = dict(settings)
    for key, value in over.items():
        within = isinstance(value, Mapping)
        result[key] = {**result.get(key, {}), **value} if within else value
    return result


def _with_model(settings: Settings, **model: Any) -> Settings:
    return {**settings, "model": {**settings["model"], **model}}
