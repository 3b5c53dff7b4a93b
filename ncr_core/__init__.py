"""Neural collaborative ranking: data, models, training, ranking and evaluation. No web, no SQL.

`Recommender` is the main entry point. The package loads a name when the name is first used, so an
import of the package loads neither torch nor any file of data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncr_core.data.dataset import Dataset, load_interactions
    from ncr_core.data.interactions import Interactions
    from ncr_core.data.splits import Split, leave_latest_out
    from ncr_core.errors import NcrError
    from ncr_core.model_config import ModelConfig
    from ncr_core.recipes import RECIPES, Recipe, recipe
    from ncr_core.recommender import Recommender, ScoredItem, evaluate
    from ncr_core.train_config import TrainConfig

__all__ = [
    "RECIPES",
    "Dataset",
    "Interactions",
    "ModelConfig",
    "NcrError",
    "Recipe",
    "Recommender",
    "ScoredItem",
    "Split",
    "TrainConfig",
    "evaluate",
    "leave_latest_out",
    "load_interactions",
    "recipe",
]

_MODULES = {
    "RECIPES": "recipes",
    "Dataset": "data.dataset",
    "Interactions": "data.interactions",
    "ModelConfig": "model_config",
    "NcrError": "errors",
    "Recipe": "recipes",
    "Recommender": "recommender",
    "ScoredItem": "recommender",
    "Split": "data.splits",
    "TrainConfig": "train_config",
    "evaluate": "recommender",
    "leave_latest_out": "data.splits",
    "load_interactions": "data.dataset",
    "recipe": "recipes",
}


def __getattr__(name: str) -> Any:
    """The object of a public name, imported from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
