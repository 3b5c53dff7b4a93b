"""The search for candidates: reference items, and an index of a large catalogue.

In a large catalogue a retriever first finds the best items by s_ui alone. s_ui = u·v_i + b_i is the
product of (u, 1) and (v_i, b_i). An inverted file of faiss finds the largest products in a small
part of the catalogue (Jégou et al. 2011). The construction of the index measures the recall.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.models.scoring_tables import LinearTable
from ncr_core.optional_imports import is_installed, require
from ncr_core.ranking.backends.additive_topk import top_of_catalogue
from ncr_core.ranking.margins import Margins
from ncr_core.ranking.ranker import PAD

MIN_ITEMS = 50_000
MIN_FAISS_ITEMS = 300_000
MIN_RECALL = 0.98  # of the best by s_ui that the index has to find,
SAMPLED = 64  # on average over so many users
MAX_PROBED = 1 / 8  # of the lists: more save little over a product for a batch of users
PER_LIST = 64  # items to train a list's centre on
ADDED_AT_ONCE = 2**17  # items


class Retriever(Protocol):
    """Finds the best items by s_ui."""

    def search(self, users: Tensor, allowed: Tensor, n: int, boost: Tensor | None = None) -> Tensor:
        """(B, E) user vectors, (B, n_items) allowed items → (B, ≤ n) rows, best first, padded.

        ``boost`` (n_items,) is added to the scores.
        """
        ...


class ExactRetriever:
    """Finds the best items by a product with every item."""

    def __init__(self, margins: Margins) -> None:
        self._margins = margins

    def search(self, users: Tensor, allowed: Tensor, n: int, boost: Tensor | None = None) -> Tensor:
        """See ``Retriever.search``."""
        device = self._margins.double.linear.items.device  # type: ignore[union-attr]
        users, allowed = users.to(device), allowed.to(device)
        return top_of_catalogue(self._margins, users, n, allowed, None, boost=boost)


class FaissRetriever:
    """Finds the best items in an inverted file, in as many lists as ``MIN_RECALL`` takes.

    If these are more than ``MAX_PROBED`` of all lists, as with vectors that do not cluster, the
    index stays empty, and a product with every item finds the best.

    The index is built from ``margins``, and tuned on a sample of (S, E) user vectors. With a
    ``file`` the index is mapped into memory from a file whose name begins with that name, so that
    several servers share the index. If there is no such file, the retriever writes the file. Raises
    ConfigError if faiss is not installed, or the model has no product of vectors.
    """

    is_quick: bool
    """Whether the index holds the items, and is searched in place of a product with each."""

    def __init__(
        self, margins: Margins, users: Tensor, n: int = 1_000, *, file: Path | None = None
    ) -> None:
        self._faiss = require("faiss", "faiss")
        self._exact = ExactRetriever(margins)
        table = margins.single.linear
        if table is None or not table.items.shape[1]:
            raise ConfigError("this model holds no product of vectors to make an index of")
        self._columns = table.columns
        found = None if file is None else self._mapped(table, file)
        self._index: Any = self._trained(table) if found is None else found
        self._lists = int(self._index.nlist)
        users = users[:SAMPLED]
        best = top_of_catalogue(margins, users, min(n, len(table.items)), None, None)
        self.probes, self.recall = self._tune(table, users, best)
        # An index in a file was filled or left empty by whoever wrote it.
        self.is_quick = self.probes <= max(1, MAX_PROBED * self._lists)
        if found is not None:
            self.is_quick = found.ntotal > 0
        else:
            if self.is_quick:
                for rows in torch.split(torch.arange(len(table.items)), ADDED_AT_ONCE):
                    self._index.add(_vectors(table, rows))
            if file is not None:
                self._index = self._written(file)

    def _mapped(self, table: LinearTable, file: Path) -> Any | None:
        """The index in the file; None without one for this table."""
        # faiss maps a file that is cut off, too, and would end the process where it ends: the name
        # holds the length.
        for found in file.parent.glob(f"{file.name}.*"):
            if found.suffix == f".{found.stat().st_size}":
                index = self._faiss.read_index(str(found), self._faiss.IO_FLAG_MMAP)
                if index.d == table.items.shape[1] + 1 and index.ntotal in (0, len(table.items)):
                    with contextlib.suppress(OSError):  # in use: old files are removed
                        os.utime(found)
                    return index
            found.unlink(missing_ok=True)
        return None

    def _written(self, file: Path) -> Any:
        """The index, mapped from the file that it is now in."""
        partial = file.with_name(f".{file.name}-{secrets.token_hex(6)}")
        try:
            self._faiss.write_index(self._index, str(partial))
            whole = file.with_name(f"{file.name}.{partial.stat().st_size}")
            partial.replace(whole)
        finally:
            partial.unlink(missing_ok=True)
        return self._faiss.read_index(str(whole), self._faiss.IO_FLAG_MMAP)

    def _trained(self, table: LinearTable) -> Any:
        """An index with the centres of its lists, and no items yet."""
        n_items, d = len(table.items), table.items.shape[1] + 1
        lists = max(1, min(n_items // 39, int(4 * n_items**0.5)))
        index = self._faiss.IndexIVFFlat(
            self._faiss.IndexFlatIP(d), d, lists, self._faiss.METRIC_INNER_PRODUCT
        )
        sample = np.random.default_rng(0).permutation(n_items)[: PER_LIST * lists]
        index.train(_vectors(table, torch.from_numpy(sample)))
        return index

    def search(self, users: Tensor, allowed: Tensor, n: int, boost: Tensor | None = None) -> Tensor:
        """See ``Retriever.search``. With a boost the search is exact, as the index has no boost."""
        if boost is not None or not self.is_quick:
            return self._exact.search(users, allowed, n, boost)
        masks = np.packbits(allowed.cpu().numpy(), axis=1, bitorder="little")
        n = min(n, allowed.shape[1])
        rows = np.full((len(users), n), PAD, dtype=np.int64)
        for row, query, mask in zip(rows, self._queries(users), masks, strict=True):
            # As many lists more as it takes to fill up where filters leave little.
            probes = self.probes
            while True:
                row[:] = self._search_one(query, n, probes, mask)
                if row[-1] >= 0 or probes == self._lists:
                    break
                probes = min(self._lists, 4 * probes)
        return torch.from_numpy(rows).to(allowed.device)

    def _search_one(
        self, query: npt.NDArray[np.float32], n: int, probes: int, mask: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.int64]:
        selector = self._faiss.IDSelectorBitmap(mask)
        parameters = self._faiss.SearchParametersIVF(sel=selector, nprobe=probes)
        rows: npt.NDArray[np.int64] = self._index.search(query[None], n, params=parameters)[1][0]
        return rows

    def _queries(self, users: Tensor) -> npt.NDArray[np.float32]:
        vectors = users[:, self._columns].float().cpu()
        ones = torch.ones((len(vectors), 1))
        return np.ascontiguousarray(torch.cat([vectors, ones], dim=1).numpy(), dtype=np.float32)

    def _tune(self, table: LinearTable, users: Tensor, best: Tensor) -> tuple[int, float]:
        """The fewest lists that reach ``MIN_RECALL`` of (S, n) best items; and their recall.

        The centres are enough: a search finds all best items of the lists that it looks at.
        """
        if not best.numel():
            return 1, 1.0
        quantizer = self._index.quantizer
        list_of = quantizer.search(_vectors(table, best.flatten()), 1)[1].reshape(best.shape)
        order = quantizer.search(self._queries(users), self._lists)[1]
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(self._lists)[None], axis=1)
        probed = np.take_along_axis(place, list_of, axis=1) + 1
        held = np.bincount(probed.ravel(), minlength=self._lists + 1).cumsum() / best.numel()
        probes = max(1, int(np.searchsorted(held, MIN_RECALL)))
        return probes, float(held[probes])


def _vectors(table: LinearTable, rows: Tensor) -> npt.NDArray[np.float32]:
    """(R, d + 1) vectors and biases of items, as the index has them."""
    rows = rows.to(table.items.device)
    bias = torch.zeros(len(rows)) if table.bias is None else table.bias[rows].cpu()
    vectors = torch.cat([table.items[rows].cpu(), bias.unsqueeze(1)], dim=1)
    return np.ascontiguousarray(vectors.numpy(), dtype=np.float32)


def shortlist_for(
    margins: Margins, users: Tensor, index_file: Path | None = None
) -> Retriever | None:
    """The retriever for a catalogue of this size; None if scoring every item is fast enough.

    A model without a product of vectors has no retriever either. ``users`` (S, E) are vectors to
    tune an index on. With an ``index_file`` several servers share the index, see `FaissRetriever`.
    """
    table = margins.single.linear
    if table is None or not table.items.shape[1]:
        return None
    n_items = len(table.items)
    # A GPU computes the product in less time than faiss takes on a CPU.
    on_cpu = table.items.device.type == "cpu"
    if n_items >= MIN_FAISS_ITEMS and on_cpu and is_installed("faiss"):
        retriever = FaissRetriever(margins, users, file=index_file)
        if retriever.is_quick:
            return retriever
    # A sortable model needs no other product than the one that ranks it.
    return ExactRetriever(margins) if n_items >= MIN_ITEMS and not margins.sortable else None


REFERENCES = 16  # that scores are told against
ANCHORS = 4  # of them that candidates are chosen by: `python -m benchmarks.candidates`
BEST_LAST = 32


def spread_over_popularity(counts: Tensor, n: int) -> Tensor:
    """``n`` item rows at equal steps of the popularity ranking: (n_items,) counts → (≤ n,)."""
    ranked = torch.sort(counts, descending=True, stable=True).indices
    n = min(n, len(ranked))
    steps = torch.linspace(0, len(ranked) - 1, n + 2)[1:-1] if n > 1 else torch.zeros(1)
    picked: Tensor = ranked[steps.round().long()]
    return picked


def anchors_of(references: Sequence[int]) -> list[int]:
    """Some of the reference items, which are in the order of popularity, at equal steps."""
    n = min(ANCHORS, len(references))
    return [references[(2 * step + 1) * len(references) // (2 * n)] for step in range(n)]


def cheap_to_rank(best: Tensor) -> Tensor:
    """(B, M) items, best first, padded with −1 → the same items in an order that is cheap to rank.

    All items except the best 32 come first, from good to bad. The best 32 items follow, from bad to
    good. Hardly any of the following items then beats the first champion. At the end nearly every
    item beats the item before, so that later passes compare few pairs.
    """
    m = best.shape[1]
    length = (best != PAD).sum(dim=1, keepdim=True)
    position = torch.arange(m, device=best.device).expand(len(best), -1)
    rest = (length - BEST_LAST).clamp(min=0)
    source = torch.where(position < rest, position + BEST_LAST, length - 1 - position)
    return torch.where(position < length, best.gather(1, source.clamp(0, max(0, m - 1))), PAD)
