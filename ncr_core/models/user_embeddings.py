"""Sources of a user's vector U_u: a free embedding, or the user's own items."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from ncr_core.data.array_storage import table_storage
from ncr_core.models.lookups import table_rows
from ncr_core.models.self_attention import CausalEncoder

EMBEDDING_STD = 0.01  # weights ~ N(0, 0.01²), §5.1
USERS_AT_ONCE = 256
GPU_USERS_AT_ONCE = 4096
LENGTHS = (0, 1, 2, 3, 5, 8, 12, 20, 40)
"""The largest number of items of each class of ``by_length`` except the last."""
GAPS_SECONDS = (3_600.0, 86_400.0)
"""The longest time since a user's last interaction, in seconds, of each gap class except the
last."""


def gap_class(seconds: float) -> int:
    """The gap class ``seconds`` after a user's last interaction; 0 in the middle of a sitting."""
    return bisect_left(GAPS_SECONDS, seconds)


def embedding(rows: int, size: int, std: float = EMBEDDING_STD) -> nn.Embedding:
    """An embedding table initialised from N(0, std²)."""
    table = nn.Embedding(rows, size, _weight=_stored_table(rows, size))
    nn.init.normal_(table.weight, std=std)
    return table


def _stored_table(rows: int, size: int) -> Tensor | None:
    """The weight of a new `nn.Embedding` in `table_storage`; None: torch makes it."""
    if not table_storage().in_files or torch.get_default_device().type != "cpu":
        return None
    # The numbers that torch would draw: what is drawn later does not depend on the storage.
    return nn.init.normal_(torch.from_numpy(table_storage().zeros((rows, size), np.float32)))


@dataclass(frozen=True)
class UserHistories:
    """The items of some users, oldest first, and the place of the positive of each row of a batch.

    ``items`` (T,) holds whole histories one after the other. Row r's history is
    ``items[start[r]:end[r]]``, and its positive stands at ``position[r]``.
    """

    items: Tensor
    start: Tensor
    position: Tensor
    end: Tensor


class PooledUsers(nn.Module):
    """U_u pooled from the user's own items, as in FISM (Kabbur et al. 2013), by recency.

    U_u = Σ_w (Σ_k P_k / n_w^½) M_w. k runs over the n_w latest items that window w holds (0: all).
    P is an item embedding of its own. M_w is a matrix (size, size), or a number if ``matrices`` is
    false. With the single window 0 the order of items has no effect, and in training the pool
    leaves out the positive. With other windows the pool ends before the positive, so that only
    earlier items make a vector.

    With ``by_length`` U_u = g_l Σ_w (Σ_k P_k / w^½) M_w + c_l, where l is the class of the number
    of items by ``LENGTHS``. The vector of few items is then short, and near the taste of newcomers.
    The divisor of window 0 remains n^½.

    With ``attention_layers`` the sum of the windows also includes the output of a `CausalEncoder`
    for the latest item, over the vectors P_k.

    The last ``start_factors`` coordinates have a number in place of each M_w, and neither g_l, c_l
    nor an output of the encoder, which reads the other coordinates of P_k alone.

    With ``by_gap`` the vector of a user in the gap class g is s_g U_u + o_g. s is 1 and o is 0
    before the fit, and always for class 0. ``latest_time``, in seconds since 1970, is the time
    before which nearly all interactions of the fit lie.

    ``weight`` (n_users, size) are the vectors of the trained users as ``remember`` last computed
    them. A user who was not trained on needs no fit: ``pool`` gives the vector of any items.
    """

    weight: Tensor
    gap_scale: Tensor
    gap_offset: Tensor
    latest_time: Tensor

    def __init__(
        self,
        n_users: int,
        n_items: int,
        size: int,
        windows: tuple[int, ...],
        std: float,
        *,
        by_length: bool = False,
        matrices: bool = True,
        by_gap: bool = False,
        attention_layers: int = 0,
        start_factors: int = 0,
    ) -> None:
        super().__init__()
        self.windows = windows
        self.by_length = by_length
        self.trained = size - start_factors
        self.items = embedding(n_items, size, std)
        identity = torch.eye(self.trained if matrices else 1).repeat(len(windows), 1, 1)
        self.mix = nn.Parameter(identity / len(windows))
        if start_factors:
            self.start_mix = nn.Parameter(torch.ones(len(windows), 1, 1) / len(windows))
        self.register_buffer("weight", torch.zeros(n_users, size))
        if by_length:
            self.gate = nn.Parameter(torch.ones(len(LENGTHS) + 1))
            self.offset = nn.Parameter(torch.zeros(len(LENGTHS) + 1, self.trained))
        if by_gap:
            self.register_buffer("gap_scale", torch.ones(len(GAPS_SECONDS) + 1))
            self.register_buffer("gap_offset", torch.zeros(len(GAPS_SECONDS) + 1, size))
            self.register_buffer("latest_time", torch.zeros(1, dtype=torch.float64))
        self.encoder = CausalEncoder(self.trained, attention_layers) if attention_layers else None

    def without_positives(self, rows: UserHistories, *, by_rows: bool = False) -> Tensor:
        """(B, size) vectors of a training batch, each without its own positive.

        ``by_rows`` says whether the gradient of P comes by rows.
        """
        embedded = table_rows(rows.items, self.items.weight, sparse=by_rows)
        sums = nn.functional.pad(_running_sums(embedded), (0, 0, 1, 0))
        if self.windows == (0,):
            others = (rows.end - rows.start - 1).clamp(min=1)
            pooled = sums[rows.end] - sums[rows.start] - embedded[rows.position]
            return self._mixed(pooled / others.sqrt().unsqueeze(1), 0)
        vectors = torch.zeros((), device=sums.device)
        # As a look-up of embeddings: its gradient takes a fraction of that of an index.
        until = nn.functional.embedding(rows.position, sums)
        for number, window in enumerate(self.windows):
            first = self._first(window, rows.start, rows.position)
            divisor = self._divisor(window, rows.position - first)
            since = nn.functional.embedding(first, sums)
            pooled = (until - since) / divisor.sqrt().unsqueeze(1)
            vectors = vectors + self._mixed(pooled, number)
        if self.encoder is not None:
            encoded = self.encoder(embedded[:, : self.trained], self._owners(rows))
            before = nn.functional.embedding((rows.position - 1).clamp(min=0), encoded)
            vectors = self._with(vectors, before * (rows.position > rows.start).unsqueeze(1))
        return self._of_length(vectors, rows.position - rows.start)

    @staticmethod
    def _owners(rows: UserHistories) -> Tensor:
        """(T,) a number for each item, the same for the items of one history.

        A history without a row in the batch has the number of the history before. No row attends to
        that history, because its items come later.
        """
        is_first = torch.zeros_like(rows.items)
        is_first[rows.start] = 1
        return is_first.cumsum(0)

    def pool(self, items: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """(T,) items of B users one after the other, oldest first, (B,) lengths → (B, size).

        ``weights`` (T,), above 0, are the weights of the items, relative to the other items of a
        window.
        """
        end = lengths.cumsum(0)
        start = end - lengths
        vectors = torch.zeros((), device=items.device)
        for number, window in enumerate(self.windows):
            first = self._first(window, start, end)
            count = end - first
            offsets = count.cumsum(0) - count
            position = torch.arange(int(count.sum()), device=items.device)
            rows = position + (first - offsets).repeat_interleave(count)
            shares = None
            if weights is not None:
                pooled_weights = weights[rows].to(self.items.weight.dtype)
                user = torch.arange(len(count), device=items.device).repeat_interleave(count)
                totals = pooled_weights.new_zeros(len(count)).index_add_(0, user, pooled_weights)
                shares = pooled_weights * (count / totals)[user]
            pooled = nn.functional.embedding_bag(
                items[rows], self.items.weight, offsets, mode="sum", per_sample_weights=shares
            )
            divisor = self._divisor(window, count)
            vectors = vectors + self._mixed(pooled / divisor.sqrt().unsqueeze(1), number)
        if self.encoder is not None:
            vectors = self._with(vectors, self._encoded(self.encoder, items, lengths, weights))
        return self._of_length(vectors, lengths)

    def _mixed(self, pooled: Tensor, number: int) -> Tensor:
        """(B, size) sums of the window with this number → (B, size) their part of the vectors."""
        if self.trained == pooled.shape[1]:
            return _product(pooled, self.mix[number])
        mixed = _product(pooled[:, : self.trained], self.mix[number])
        return torch.cat([mixed, pooled[:, self.trained :] * self.start_mix[number]], dim=1)

    @staticmethod
    def _with(vectors: Tensor, encoded: Tensor) -> Tensor:
        """Adds the (B, trained) output of the encoder to the first coordinates of the vectors."""
        kept = vectors.shape[1] - encoded.shape[1]
        return vectors + (nn.functional.pad(encoded, (0, kept)) if kept else encoded)

    def _encoded(
        self, encoder: CausalEncoder, items: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """The encoder's part of `pool`; zeros for a user without items."""
        end = lengths.cumsum(0)
        first = self._first(encoder.reach, end - lengths, end)
        count = end - first
        last = count.cumsum(0)
        users = torch.arange(len(count), device=items.device).repeat_interleave(count)
        position = torch.arange(len(users), device=items.device)
        rows = position + (end - last).repeat_interleave(count)
        latest_weights = None if weights is None else weights[rows]
        embedded = nn.functional.embedding(items[rows], self.items.weight[:, : self.trained])
        encoded = encoder(embedded, users, latest_weights)
        vectors = embedded.new_zeros(len(count), embedded.shape[1])
        has_items = count > 0
        vectors[has_items] = encoded[last[has_items] - 1]
        return vectors

    def pool_one(self, items: Tensor, weights: Tensor | None = None) -> Tensor:
        """``pool`` for one user with (k,) items → (size,), independent of any batch, bit by bit."""
        k = len(items)
        counts = [min(window or k, k) for window in self.windows]
        pooled_counts = torch.tensor(counts, device=items.device)
        latest_first = items.flip(0)
        embedded = nn.functional.embedding(latest_first, self.items.weight)
        sizes = pooled_counts.to(embedded.dtype)
        divisors = [window or k for window in self.windows] if self.by_length else counts
        scale = torch.tensor(divisors, device=items.device).to(embedded.dtype).rsqrt()
        if weights is not None:
            latest_weights = weights.flip(0).to(embedded.dtype)
            embedded = embedded * latest_weights.unsqueeze(1)
            scale = scale * sizes / latest_weights.cumsum(0)[pooled_counts - 1]
        pooled = embedded.cumsum(0)[pooled_counts - 1] * scale.unsqueeze(1)
        vector = _product(pooled[:, : self.trained].unsqueeze(1), self.mix).sum(0)
        if self.trained < pooled.shape[1]:
            kept = pooled[:, self.trained :].unsqueeze(1) * self.start_mix
            vector = torch.cat([vector, kept.sum(0)], dim=1)
        if self.encoder is not None:
            length = torch.tensor([k], device=items.device)
            vector = self._with(vector, self._encoded(self.encoder, items, length, weights))
        return self._of_length(vector, torch.tensor([k], device=items.device)).squeeze(0)

    @torch.no_grad()
    def remember(self, items: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        """Computes ``weight`` from the items of all users; the arguments are as in ``pool``."""
        ends = lengths.cumsum(0)
        at_once = USERS_AT_ONCE if items.device.type == "cpu" else GPU_USERS_AT_ONCE
        for first in range(0, len(lengths), at_once):
            users = slice(first, first + at_once)
            part = slice(int(ends[first] - lengths[first]), int(ends[users][-1]))
            part_weights = None if weights is None else weights[part]
            self.weight[users] = self.pool(items[part], lengths[users], part_weights)

    def after_gap(self, vectors: Tensor, classes: Tensor) -> Tensor:
        """(B, size) vectors and (B,) gap classes → (B, size) vectors after such a gap."""
        return self.gap_scale[classes].unsqueeze(1) * vectors + self.gap_offset[classes]

    def _divisor(self, window: int, counts: Tensor) -> Tensor:
        """The number whose square root divides the sum of ``counts`` items of a window."""
        if self.by_length and window:
            return torch.full_like(counts, window)
        return counts.clamp(min=1)

    def _of_length(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """(B, size) sums of the windows → (B, size) vectors of users with ``lengths`` items."""
        if not self.by_length:
            return vectors
        at = torch.searchsorted(_lengths(lengths.device), lengths)
        gate = nn.functional.embedding(at, self.gate.unsqueeze(1))
        gated = gate * vectors[:, : self.trained] + nn.functional.embedding(at, self.offset)
        if self.trained == vectors.shape[1]:
            return gated
        return torch.cat([gated, vectors[:, self.trained :]], dim=1)

    @staticmethod
    def _first(window: int, start: Tensor, end: Tensor) -> Tensor:
        return start if window == 0 else torch.maximum(start, end - window)


@cache
def _lengths(device: torch.device) -> Tensor:
    return torch.tensor(LENGTHS, device=device)


def _running_sums(x: Tensor) -> Tensor:
    """(T, size) → (T, size) the sums of the rows up to each row."""
    if x.device.type == "cpu":
        return x.cumsum(0)
    # A GPU sums along the last dimension in parallel.
    return x.T.contiguous().cumsum(1).T


def _product(vectors: Tensor, matrix: Tensor) -> Tensor:
    """(…, B, size) vectors times a matrix (…, size, size), or times a number (…, 1, 1)."""
    return vectors * matrix if matrix.shape[-1] == 1 else vectors @ matrix


class FreeUsers(nn.Embedding):
    """U_u is an embedding of its own, initialised from N(0, 0.01²)."""

    def __init__(self, n_users: int, size: int) -> None:
        super().__init__(n_users, size, _weight=_stored_table(n_users, size))
        nn.init.normal_(self.weight, std=EMBEDDING_STD)


def pooled_tables(model: nn.Module) -> set[str]:
    """The names of the tables of users' vectors in a model that are pooled from items."""
    return {
        f"{name}.weight" for name, part in model.named_modules() if isinstance(part, PooledUsers)
    }


def user_state(model: nn.Module) -> set[str]:
    """The names in a model's state that make users' vectors, which lists for given ones lack."""
    parts = [n for n, part in model.named_modules() if isinstance(part, FreeUsers | PooledUsers)]
    return {name for name in model.state_dict() if name.startswith(tuple(f"{n}." for n in parts))}
