"""Training on a split, without the service: from a recipe to a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ncr_core.checkpoint import save_checkpoint
from ncr_core.data.splits import Split
from ncr_core.errors import TrainingError
from ncr_core.models import PairwiseRanker
from ncr_core.recipes import Recipe
from ncr_core.training.gaps import learn_gaps
from ncr_core.training.pretraining import refit_config, train_model
from ncr_core.training.selection import TriedRecipe, select_recipe
from ncr_core.training.trainer import History, OnProgress, PhaseRunner


@dataclass(frozen=True)
class OfflineTraining:
    """A trained model, and the account of the training in its checkpoint.

    ``history`` is that of the training with validation items, even if a refit without them
    followed.
    """

    recipe: Recipe
    model: PairwiseRanker
    history: list[History]
    seconds: float
    refit: bool = False
    tried: Sequence[TriedRecipe] = ()
    """The recipes that ``auto`` tried."""

    @property
    def validation(self) -> dict[str, float]:
        """Validation HR@10 and NDCG@10 (``hr``, ``ndcg``) of the chosen epoch; empty if none."""
        best = self.history[-1].best
        return {} if best is None else {"hr": best[1], "ndcg": best[0]}

    def save(self, folder: Path, split: Split, data: Mapping[str, Any] | None = None) -> None:
        """Writes the checkpoint; ``data`` describes the data set in its manifest.

        Raises CheckpointError if the folder exists already.
        """
        save_checkpoint(
            folder,
            self.model,
            user_ids=split.train.user_ids,
            item_ids=split.train.item_ids,
            item_counts=split.train.item_counts(),
            metrics={"validation": self.validation}
            | ({"tried": [each.as_dict() for each in self.tried]} if self.tried else {}),
            training={
                "config": self.recipe.training.as_dict(),
                "seconds": round(self.seconds, 1),
                "history": [vars(phase) for phase in self.history],
                "refit": self.refit,
            },
            data=dict(data or {}),
        )


def train_checkpoint(
    recipe: Recipe | None,
    split: Split,
    folder: Path,
    *,
    refit: bool = False,
    data: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
    device: str = "auto",
    seed: int = 0,
    run_phase: PhaseRunner | None = None,
) -> OfflineTraining:
    """Trains a recipe on a split and writes the checkpoint.

    Args:
        recipe: The recipe to train; None trains a few and keeps the best, see `select_recipe`.
        split: The data; the validation items choose the epoch.
        folder: The folder to make.
        refit: Train once more with the validation items, for as many epochs as they chose.
        data: Describes the data set in the checkpoint's manifest.
        on_progress: Called after each epoch.
        device: The device without a recipe; a recipe names its own device.
        seed: The seed without a recipe; a recipe names its own seed.
        run_phase: As in `train_model`. Of a training by ranks that fails no epoch is kept.

    Raises:
        CheckpointError: The folder exists already.
        DataError: There are too few users.
        TrainingError: The loss or a parameter is not finite. For a given ``recipe`` the folder
            holds the best epoch so far, if there is one.
    """
    started = time.perf_counter()
    requested = recipe
    tried: Sequence[TriedRecipe] = ()
    try:
        if recipe is None:
            selection = select_recipe(
                split, device=device, seed=seed, on_progress=on_progress, run_phase=run_phase
            )
            recipe, trained, tried = selection.recipe, selection.trained, selection.tried
        else:
            trained = train_model(
                recipe.model, recipe.training, split, on_progress, run_phase=run_phase
            )
        history = trained.history
        if refit:
            config = refit_config(recipe.model, recipe.training, history)
            trained = train_model(
                recipe.model,
                config,
                split.with_validation_in_train(),
                on_progress,
                run_phase=run_phase,
                start_factors=trained.model.config.start_factors,
            )
    except TrainingError as error:
        # A training that failed has no start beside its factors yet.
        trained_config = requested and replace(requested.model, start_factors=0)
        if requested is None or error.model is None or error.model.config != trained_config:
            raise
        seconds = time.perf_counter() - started
        OfflineTraining(requested, error.model, [error.history], seconds, refit).save(
            folder, split, data
        )
        raise TrainingError(f"{error}; {folder} holds the best epoch before") from None
    learn_gaps(trained.model, split.train, recipe.training.seed)
    seconds = time.perf_counter() - started
    training = OfflineTraining(recipe, trained.model, history, seconds, refit, tried)
    training.save(folder, split, data)
    return training
