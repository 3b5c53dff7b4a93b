"""The main entry point of the library: fit a model, recommend, explain, save and load it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from ncr_core.checkpoint import INTERACTIONS, Checkpoint, load_checkpoint, save_checkpoint
from ncr_core.content import ContentMaps, ContentPlacement, map_items, map_users
from ncr_core.data.dataset import Dataset, InteractionSource, load_interactions
from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split, hold_out_users, leave_latest_out
from ncr_core.errors import CheckpointError, ConfigError, DataError
from ncr_core.evaluation.calibration import calibrate
from ncr_core.evaluation.protocols import (
    Metrics,
    ModelRanks,
    evaluate_full,
    evaluate_sampled,
    sampled_candidates,
)
from ncr_core.fold_in import Evidence, extended
from ncr_core.inference.engine import InferenceEngine, RankedItem, RerankRequest
from ncr_core.inference.retrieval import (
    BoolArray,
    IntArray,
    ItemFilter,
    RankRequest,
    UserState,
)
from ncr_core.manifest import read_verified
from ncr_core.models import PairwiseRanker
from ncr_core.ranking.candidates import REFERENCES, spread_over_popularity
from ncr_core.recipes import AUTO_RECIPE, Recipe
from ncr_core.recipes import recipe as named_recipe
from ncr_core.training.gaps import learn_gaps
from ncr_core.training.pretraining import TrainingResult, learn_everything, train_model
from ncr_core.training.selection import TriedRecipe, select_recipe
from ncr_core.training.trainer import OnProgress

CANDIDATES = 200  # items that are ranked exactly a user
BATCH_USERS = 64  # of `recommend_many`, in one pass

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class ScoredItem:
    """An item of a list."""

    item: str
    score: float
    """The mean probability that the user prefers the item to the model's reference items, which are
    spread over popularity. In answers of `Recommender.similar`, the similarity, −1 to 1."""
    preferred_over_next: float | None = None
    """The probability that the user prefers the item to the next item; None for the last."""
    title: str | None = None
    because: tuple[tuple[str, float], ...] = ()
    """The user's own items with the largest effects on this item, each with its effect: the
    decrease of this item's log-odds without the own item; see `Recommender.explain`."""


class ItemComparison(NamedTuple):
    """Items compared pair by pair."""

    items: list[str]
    """The items, each once."""
    probability: NDArray[np.float64]
    """(M, M) the probability that the user prefers the item of the row to that of the column."""
    order: list[str]
    """The items, best first, by Algorithm 1."""


class Recommender:
    """A pairwise ranker with the ids, titles and histories that it was fitted to.

        recommender = Recommender().fit("ratings.csv")
        for item in recommender.recommend("42", n=5):
            print(item.item, item.score)

    Args:
        recipe: the model and its training: a name in `RECIPES`, a `Recipe`, or ``auto``, which
            tries a few recipes and keeps the best for the data. The default is ``auto``, or
            ``default`` with hyper-parameters.
        budget_seconds: the time for the recipes that ``auto`` tries; see `select_recipe`.
        candidates: how many items of a user are ranked exactly. More candidates take more time, and
            lose less of the exact list in large catalogues.
        hyperparameters: other values for fields of `ModelConfig` and `TrainConfig`.

    Raises:
        ConfigError: the recipe or a hyper-parameter is unknown, or a value does not fit.
    """

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        *,
        budget_seconds: float | None = None,
        candidates: int = CANDIDATES,
        **hyperparameters: Any,
    ) -> None:
        if candidates < 1:
            raise ConfigError(f"candidates must be at least 1, not {candidates}")
        fixed = sorted(hyperparameters.keys() - {"seed", "device"})
        if recipe is None:
            recipe = "default" if fixed else AUTO_RECIPE
        self._selects = recipe == AUTO_RECIPE
        if self._selects and fixed:
            raise ConfigError(f"the recipe auto chooses these parameters: {', '.join(fixed)}")
        if self._selects:
            recipe = "default"
        chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
        self.recipe = chosen.with_(**hyperparameters)
        """The recipe to train; with ``auto``, the chosen recipe after `fit`."""
        self.tried: list[TriedRecipe] = []
        """The recipes that ``auto`` tried, in order."""
        self.budget_seconds = budget_seconds
        self.candidates = candidates
        self.metrics: dict[str, Any] = {}
        """HR@10 and NDCG@10 on held-out items, by protocol; empty without held-out items."""
        self._checkpoint: Checkpoint | None = None
        self._calibration: dict[str, Any] | None = None
        self._interactions: Interactions | None = None
        self._titles: Mapping[str, str] = {}
        self._engine: InferenceEngine | None = None
        self._trained_items: int | None = None  # where items were added since

    # Fitting, saving and loading

    def fit(
        self,
        interactions: InteractionSource | Dataset | Split,
        *,
        user: str | None = None,
        item: str | None = None,
        timestamp: str | None = None,
        rating: str | None = None,
        item_attributes: Mapping[str, Mapping[str, Any]] | None = None,
        user_attributes: Mapping[str, Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Trains the model.

        The latest items of some users choose the epoch, measure the model (`metrics`) and calibrate
        its probabilities. At the end the model learns these items too. From a `Split` the model
        learns the training items alone, for `evaluate`.

        Args:
            interactions: a path that `ncr import` takes, arrays, a data frame, rows, or a split;
                see `load_interactions`.
            user: the column that holds the user.
            item: the column that holds the item.
            timestamp: the column that holds the time.
            rating: the column that holds the rating.
            item_attributes: attributes by item id, for `add_items`: strings, numbers, booleans,
                lists of strings, and as ``embedding`` a vector of your own, such as that of a text.
                The model uses the attributes that predict the vectors of items left out.
            user_attributes: attributes by user id, for `recommend_for`.
            on_progress: called after each epoch.

        Raises:
            DataError: the interactions cannot be read or learned from.
            TrainingError: the training diverged.
        """
        self.metrics, self._calibration = {}, None
        if isinstance(interactions, Split):
            split, dataset = interactions, Dataset(interactions.train)
            model = self._train(split, on_progress).model
            learn_gaps(model, split.train, self.recipe.training.seed)
        else:
            dataset = load_interactions(
                interactions, user=user, item=item, timestamp=timestamp, rating=rating
            )
            held_out, _ = hold_out_users(dataset.interactions)
            split = leave_latest_out(dataset.interactions, held_out)
            trained = self._train(split, on_progress)
            calibration = calibrate(trained.model, split)
            self._calibration = None if calibration is None else calibration.as_dict()
            self.metrics = {
                protocol: metrics.as_dict()
                for protocol, metrics in _evaluate(trained.model, split).items()
            }
            model = learn_everything(self.recipe, trained, split, dataset.interactions)
        model.requires_grad_(False).eval()
        counts = dataset.interactions.item_counts()
        references = spread_over_popularity(torch.from_numpy(counts), REFERENCES)
        manifest = {"calibration": self._calibration or {}, "metrics": self.metrics}
        content = ContentMaps(
            _of_attributes(map_items, model, item_attributes, dataset.item_ids, counts),
            _of_attributes(
                map_users,
                model,
                user_attributes,
                dataset.user_ids,
                np.diff(dataset.interactions.indptr),
            ),
        )
        self._set(
            Checkpoint(
                model,
                list(dataset.user_ids),
                list(dataset.item_ids),
                counts,
                references.tolist(),
                manifest,
                content,
            ),
            dataset.interactions,
            dataset.titles,
        )
        return self

    def _train(self, split: Split, on_progress: OnProgress | None) -> TrainingResult:
        training = self.recipe.training
        if not self._selects:
            return train_model(self.recipe.model, training, split, on_progress)
        selection = select_recipe(
            split,
            budget_seconds=self.budget_seconds,
            device=training.device,
            seed=training.seed,
            on_progress=on_progress,
        )
        self.recipe, self.tried = selection.recipe, selection.tried
        return selection.trained

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint that `load` and the service read, with the interactions beside it.

        Raises:
            CheckpointError: the folder exists already.
        """
        checkpoint = self.checkpoint
        interactions = None
        if self._interactions is not None:
            interactions = _pack_interactions(self._interactions, self._titles)
        save_checkpoint(
            Path(folder),
            checkpoint.model,
            user_ids=checkpoint.user_ids,
            item_ids=checkpoint.item_ids,
            item_counts=checkpoint.item_counts,
            metrics=self.metrics,
            training={"recipe": self.recipe.name, "config": self.recipe.training.as_dict()},
            calibration=self._calibration,
            interactions=interactions,
            content=checkpoint.content,
            trained_users=checkpoint.trained_users,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        interactions: InteractionSource | Dataset | None = None,
        device: str = "cpu",
        candidates: int = CANDIDATES,
    ) -> Recommender:
        """Reads a checkpoint of `save`, of `ncr train` or of the service.

        Args:
            folder: the checkpoint.
            interactions: the items that users have seen, for a checkpoint without them, such as one
                of the service.
            device: the device that the model runs on.
            candidates: how many items of a user are ranked exactly.

        Raises:
            CheckpointError: the folder has no checkpoint of this format, or a damaged one.
            DataError: the interactions cannot be read.
        """
        path = Path(folder)
        checkpoint = load_checkpoint(path, device)
        config = checkpoint.model.config
        recommender = cls(Recipe(path.name, config), candidates=candidates)
        recommender.metrics = checkpoint.manifest.get("metrics") or {}
        recommender._calibration = checkpoint.manifest.get("calibration") or None
        seen, titles = _read_interactions(path, checkpoint)
        if interactions is not None:
            dataset = load_interactions(interactions)
            seen = dataset.interactions.reindex(checkpoint.user_ids, checkpoint.item_ids)
            titles = dict(dataset.titles)
        recommender._set(checkpoint, seen, titles)
        return recommender

    @property
    def checkpoint(self) -> Checkpoint:
        """The fitted model with its ids. Raises ConfigError before `fit`."""
        if self._checkpoint is None:
            raise ConfigError("this recommender is not fitted: call fit or load first")
        return self._checkpoint

    @property
    def user_ids(self) -> Sequence[str]:
        """The users that the model was trained on, as far as the checkpoint names them."""
        return self.checkpoint.user_ids

    @property
    def item_ids(self) -> Sequence[str]:
        """The items that can be recommended; masks are in this order."""
        return self.checkpoint.item_ids

    # Recommending

    def recommend(
        self,
        user: str | int,
        n: int = 10,
        *,
        exclude_seen: bool = True,
        allowed: Iterable[str] | BoolArray | None = None,
        diversity: float = 0.0,
        at: datetime | float | None = None,
    ) -> list[ScoredItem]:
        """The best items for a user that the model was trained on.

        Args:
            user: the user's id.
            n: the number of items, at most.
            exclude_seen: leave out the items that the user was trained with.
            allowed: the only items that may be recommended: their ids, or an (n_items,) mask in the
                order of `item_ids`.
            diversity: the share of the order that is given up for variety, 0 to 1.
            at: the time of the list; a number is in seconds since 1970. After a break of more than
                an hour, the model ranks as it has learned from such breaks. By default the list
                continues from the user's last interaction without a break.

        Raises:
            DataError: the user is unknown, no item is allowed, or the recommender does not have the
                seen items, or for ``at`` their times.
            ConfigError: ``n`` is below 1, or ``diversity`` is not 0 to 1.
        """
        return self.recommend_many(
            [user], n, exclude_seen=exclude_seen, allowed=allowed, diversity=diversity, at=at
        )[0]

    def recommend_many(
        self,
        users: Iterable[str | int],
        n: int = 10,
        *,
        exclude_seen: bool = True,
        allowed: Iterable[str] | BoolArray | None = None,
        diversity: float = 0.0,
        at: datetime | float | None = None,
    ) -> list[list[ScoredItem]]:
        """The list of each user, as of `recommend`, with many users in one pass."""
        mask = self._mask(allowed)
        _check_list(n, diversity)
        requests = []
        for user in users:
            row = self._user_row(user)
            seen = self._seen(row) if exclude_seen else _NO_ROWS
            state = UserState(row, gap_class=0 if at is None else self._gap_class(row, at))
            items = ItemFilter(mask, seen)
            requests.append(RankRequest(state, n, items, diversity=diversity))
        return self._rank(requests)

    def add_items(self, attributes: Mapping[str, Mapping[str, Any]]) -> Self:
        """Adds items that training has not seen, each with the vector that its attributes predict.

        The new items are recommended and compared like the others. Users' vectors stay unchanged.

        Args:
            attributes: attributes by new item id, as ``item_attributes`` of `fit`.

        Raises:
            DataError: one of the items is known, the model was fitted without attributes of items,
                or no attribute predicted their vectors.
        """
        checkpoint = self.checkpoint
        placement = checkpoint.content.items
        if placement is None:
            raise DataError(
                "this model has no placement by attributes: fit it with predictive item_attributes"
            )
        added = [str(item) for item in attributes]
        known = [item for item in added if item in self._row_of_item]
        if known:
            raise DataError(f"the model knows item {known[0]!r:.80} already")
        if not added:
            return self
        item_ids = [*checkpoint.item_ids, *added]
        nobody = np.zeros(len(added), dtype=np.int64)
        larger = replace(
            checkpoint,
            model=extended(checkpoint.model, placement.predict(list(attributes.values()))),
            item_ids=item_ids,
            item_counts=np.concatenate([checkpoint.item_counts, nobody]),
        )
        interactions = self._interactions
        if interactions is not None:
            interactions = interactions.reindex(checkpoint.user_ids, item_ids)
        trained_items = self._trained_items or checkpoint.model.n_items
        self._set(larger, interactions, self._titles, trained_items)
        return self

    def recommend_for(
        self,
        items: Iterable[str | int] = (),
        n: int = 10,
        *,
        attributes: Mapping[str, Any] | None = None,
        disliked: Iterable[str | int] = (),
        exclude_seen: bool = True,
        allowed: Iterable[str] | BoolArray | None = None,
        diversity: float = 0.0,
    ) -> list[ScoredItem]:
        """The best items for a user that training has not seen, by items and attributes.

        Args:
            items: the user's items, oldest first; unknown ids are left out.
            n: the number of items, at most.
            attributes: the user's attributes, as ``user_attributes`` of `fit`. With fewer items,
                attributes count more.
            disliked: items that the user does not want.
            exclude_seen: leave out ``items``; ``disliked`` items are always left out.
            allowed: as of `recommend`.
            diversity: as of `recommend`.

        Raises:
            DataError: the model knows none of the items and cannot use attributes, or no item is
                allowed.
            ConfigError: as of `recommend`.
        """
        _check_list(n, diversity)
        placement = self.checkpoint.content.users
        prior = None
        if attributes is not None and placement is not None:
            prior = placement.predict([attributes])[0].numpy()
        evidence = self._evidence(items, disliked, needed=prior is None)
        excluded = np.concatenate([evidence.items, evidence.disliked])
        if not exclude_seen:
            excluded = evidence.disliked
        candidates = ItemFilter(self._mask(allowed), excluded)
        state = UserState(None, evidence, prior=prior)
        request = RankRequest(state, n, candidates, diversity=diversity)
        return self._rank([request])[0]

    def rerank(self, user: str | int, items: Iterable[str | int]) -> list[ScoredItem]:
        """The given items in the order in which a user prefers them, by Algorithm 1.

        An additive model ranks all items exactly. Any other model ranks exactly the best 200 items
        by their mean margin over the anchors; further items follow in the order of that margin.

        Raises:
            DataError: the user or one of the items is unknown, or the request has no items.
        """
        request = RerankRequest(UserState(self._user_row(user)), self._item_rows(items))
        return self._scored(self._fitted_engine.rerank([request])[0])

    def compare(self, user: str | int, items: Iterable[str | int]) -> ItemComparison:
        """The probability that a user prefers one item to another, for all pairs of the items.

        Raises:
            DataError: the user or one of the items is unknown, or the request has no items.
        """
        rows = self._item_rows(items)
        request = RerankRequest(UserState(self._user_row(user)), rows)
        comparison = self._fitted_engine.compare([request])[0]
        names = [self.item_ids[row] for row in rows.tolist()]
        order = [names[position] for position in comparison.order]
        return ItemComparison(names, comparison.probability, order)

    def similar(
        self, item: str | int, n: int = 10, *, allowed: Iterable[str] | BoolArray | None = None
    ) -> list[ScoredItem]:
        """The items most similar to an item, by the model's vectors without popularity.

        Raises:
            DataError: the item is unknown, or no item is allowed.
            ConfigError: ``n`` is below 1.
        """
        _check_list(n, 0.0)
        row = int(self._item_rows([item])[0])
        nearest = self._fitted_engine.item_space.nearest(row, self._mask(allowed), n)
        return [
            ScoredItem(self.item_ids[other], similarity, title=self._title(other))
            for other, similarity in nearest
        ]

    def explain(
        self,
        user: str | int,
        n: int = 10,
        *,
        exclude_seen: bool = True,
        allowed: Iterable[str] | BoolArray | None = None,
    ) -> list[ScoredItem]:
        """The list of `recommend`, each item with the user's own items of the largest effects.

        Raises:
            DataError: as of `recommend`; the recommender always needs the seen items.
            ConfigError: ``n`` is below 1.
        """
        _check_list(n, 0.0)
        row = self._user_row(user)
        seen, weights = self._seen(row), None
        if self._interactions is not None and self._interactions.weights is not None:
            weights = self._interactions.weights[self._interactions.indptr[row] :][: len(seen)]
        request = RankRequest(
            UserState(row),
            n,
            ItemFilter(self._mask(allowed), seen if exclude_seen else _NO_ROWS),
            explain_by=Evidence(seen, weights),
        )
        return self._rank([request])[0]

    # What these have in common

    def _set(
        self,
        checkpoint: Checkpoint,
        interactions: Interactions | None,
        titles: Mapping[str, str],
        trained_items: int | None = None,
    ) -> None:
        self._trained_items = trained_items
        self._checkpoint = checkpoint
        self._interactions = interactions
        self._titles = titles
        self._engine = None
        self.__dict__.pop("_user_rows", None)
        self.__dict__.pop("_row_of_item", None)

    @property
    def _fitted_engine(self) -> InferenceEngine:
        if self._engine is None:
            self._engine = InferenceEngine(
                self.checkpoint, self.candidates, trained_items=self._trained_items
            )
        return self._engine

    @cached_property
    def _user_rows(self) -> dict[str, int]:
        return {user: row for row, user in enumerate(self.user_ids)}

    @cached_property
    def _row_of_item(self) -> dict[str, int]:
        return {item: row for row, item in enumerate(self.item_ids)}

    def _user_row(self, user: str | int) -> int:
        row = self._user_rows.get(str(user))
        if row is None:
            raise DataError(
                f"the model has no vector of user {str(user)!r:.80}: use "
                "recommend_for(items) for other users"
            )
        return row

    def _item_rows(self, items: Iterable[str | int]) -> IntArray:
        """The rows of items, each once, in the order given."""
        rows = []
        for item in dict.fromkeys(map(str, items)):
            row = self._row_of_item.get(item)
            if row is None:
                raise DataError(f"the model does not know item {item!r:.80}")
            rows.append(row)
        if not rows:
            raise DataError("the request has no items")
        return np.array(rows, dtype=np.int64)

    def _evidence(
        self, items: Iterable[str | int], disliked: Iterable[str | int], *, needed: bool
    ) -> Evidence:
        known, unwanted = (
            np.array(
                [row for item in ids if (row := self._row_of_item.get(item)) is not None],
                dtype=np.int64,
            )
            for ids in (dict.fromkeys(map(str, items)), dict.fromkeys(map(str, disliked)))
        )
        if needed and not len(known) and not len(unwanted):
            raise DataError("the model knows none of these items")
        return Evidence(known, disliked=unwanted)

    def _seen(self, row: int) -> IntArray:
        if self._interactions is None:
            raise DataError(
                "this checkpoint does not hold what users have seen: pass interactions to "
                "Recommender.load, or exclude_seen=False"
            )
        return self._interactions.items_of(row)

    def _gap_class(self, row: int, at: datetime | float) -> int:
        """The class of the time from the user's last interaction to ``at``."""
        interactions = self._interactions
        if interactions is None or interactions.times is None:
            raise DataError(
                "at needs the timestamps of the interactions, which this recommender does not have"
            )
        if isinstance(at, datetime):
            at = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        times = interactions.times[interactions.indptr[row] : interactions.indptr[row + 1]]
        return self._fitted_engine.gap_class(at - float(times[-1])) if len(times) else 0

    def _mask(self, allowed: Iterable[str] | BoolArray | None) -> BoolArray:
        n_items = len(self.item_ids)
        if allowed is None:
            return np.ones(n_items, dtype=np.bool_)
        if isinstance(allowed, np.ndarray) and allowed.dtype == np.bool_:
            if allowed.shape != (n_items,):
                raise DataError(
                    f"allowed must be a mask of {n_items:,} items, not of shape {allowed.shape}"
                )
            mask: BoolArray = allowed
        else:
            mask = np.zeros(n_items, dtype=np.bool_)
            rows = [
                row for item in allowed if (row := self._row_of_item.get(str(item))) is not None
            ]
            mask[rows] = True
        if not mask.any():
            raise DataError("allowed has no item that the model knows")
        return mask

    def _rank(self, requests: Sequence[RankRequest]) -> list[list[ScoredItem]]:
        engine, lists = self._fitted_engine, []
        for start in range(0, len(requests), BATCH_USERS):
            lists += engine.rank(requests[start : start + BATCH_USERS])
        return [self._scored(items) for items in lists]

    def _scored(self, items: Sequence[RankedItem]) -> list[ScoredItem]:
        return [
            ScoredItem(
                self.item_ids[item.row],
                item.score,
                item.preferred_over_next,
                self._title(item.row),
                tuple((self.item_ids[reason.row], reason.effect) for reason in item.because),
            )
            for item in items
        ]

    def _title(self, row: int) -> str | None:
        return self._titles.get(self.item_ids[row])


def evaluate(recommender: Recommender, split: Split, *, seed: int = 0) -> dict[str, Metrics]:
    """HR@10 and NDCG@10 of a recommender that was fitted to a split, on the split's test items.

    Args:
        recommender: fitted to the split.
        split: as of `leave_latest_out`.
        seed: draws the negatives of the sampled protocol.

    Returns:
        The metrics by protocol: ``sampled`` ranks each test item among 100 drawn items (He et al.
        2017), ``full`` among the whole catalogue.

    Raises:
        DataError: the split has other users or items than the recommender.
    """
    checkpoint = recommender.checkpoint
    if list(split.train.user_ids) != list(checkpoint.user_ids) or list(
        split.train.item_ids
    ) != list(checkpoint.item_ids):
        raise DataError(
            "the recommender was fitted to other users or items than those of the split"
        )
    return _evaluate(checkpoint.model, split, seed)


def _evaluate(model: PairwiseRanker, split: Split, seed: int = 0) -> dict[str, Metrics]:
    ranks = ModelRanks(model)
    return {
        "sampled": evaluate_sampled(ranks, sampled_candidates(split, split.test, seed=seed)),
        "full": evaluate_full(ranks, split, split.test, seed=seed),
    }


def _of_attributes(
    fit: Callable[..., ContentPlacement | None],
    model: PairwiseRanker,
    attributes: Mapping[str, Mapping[str, Any]] | None,
    ids: Sequence[str],
    counts: IntArray,
) -> ContentPlacement | None:
    """The placement by `map_items` or `map_users`, from attributes by id."""
    if attributes is None:
        return None
    by_id = {str(each): of_id for each, of_id in attributes.items()}
    return fit(model, [by_id.get(each, {}) for each in ids], counts)


def _check_list(n: int, diversity: float) -> None:
    if n < 1:
        raise ConfigError(f"n must be at least 1, not {n}")
    if not 0.0 <= diversity <= 1.0:
        raise ConfigError(f"diversity must be between 0 and 1, not {diversity}")


def _pack_interactions(interactions: Interactions, titles: Mapping[str, str]) -> bytes:
    names = np.frombuffer(json.dumps(dict(titles)).encode(), dtype=np.uint8)
    arrays: dict[str, NDArray[Any]] = {
        "indptr": interactions.indptr,
        "items": interactions.items,
        "titles": names,
    }
    if interactions.weights is not None:
        arrays["weights"] = interactions.weights
    if interactions.times is not None:
        arrays["times"] = interactions.times
    return save_arrays(arrays)


def _read_interactions(
    folder: Path, checkpoint: Checkpoint
) -> tuple[Interactions | None, dict[str, str]]:
    """A checkpoint's interactions, None without any, and its titles by item id."""
    file = checkpoint.manifest["files"].get(INTERACTIONS)
    if file is None:
        return None, {}
    try:
        arrays = load_arrays(read_verified(folder / INTERACTIONS, str(file["sha256"])))
        indptr, items = arrays["indptr"], arrays["items"]
        weights, times = arrays.get("weights"), arrays.get("times")
        titles = json.loads(arrays["titles"].tobytes())
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{INTERACTIONS} of {folder.name} is damaged: {error}") from None
    n_users, n_items = len(checkpoint.user_ids), len(checkpoint.item_ids)
    fits = (
        indptr.shape == (n_users + 1,)
        and indptr[0] == 0
        and indptr[-1] == len(items)
        and bool((np.diff(indptr) >= 0).all())
        and (not len(items) or 0 <= items.min() <= items.max() < n_items)
        and all(part is None or part.shape == items.shape for part in (weights, times))
        and isinstance(titles, dict)
    )
    if not fits:
        raise CheckpointError(f"{INTERACTIONS} of {folder.name} does not fit its model")
    users, item_ids = checkpoint.user_ids, checkpoint.item_ids
    return Interactions(indptr, items, users, item_ids, weights, times=times), titles
