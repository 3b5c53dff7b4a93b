"""The best items by s_ui alone in a very large catalogue: in full, or by an index of faiss.

s_ui = u·v_i + b_i is the product of (u, 1) and (v_i, b_i), which an inverted file searches in a
small part of the catalogue (Jégou et al. 2011). What it misses is measured when it is built.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.ranking.margins import PAD, Margins
from ncr_core.ranking.sorted import top_of_all

FROM = 50_000  # items
FAISS_FROM = 300_000
RECALL = 0.98  # of the best by s_ui that the index has to find,
SAMPLED = 64  # on average over so many users
PER_LIST = 64  # items to train a list's centre on


class Shortlist(Protocol):
    """Finds the best items by s_ui."""

    def search(self, users: Tensor, allowed: Tensor, n: int) -> Tensor:
        """(B, E) user vectors, (B, n_items) allowed items → (B, ≤ n) rows, best first, padded."""
        ...


class FullShortlist:
    """By a product with every item."""

    def __init__(self, margins: Margins) -> None:
        self._margins = margins

    def search(self, users: Tensor, allowed: Tensor, n: int) -> Tensor:
        return top_of_all(self._margins, users.to(allowed.device), n, allowed, None)


class FaissShortlist:
    """By an inverted file, of which as many lists are searched as ``RECALL`` takes.

    Built from ``margins`` and a sample of (S, E) user vectors. Raises ConfigError where faiss is
    not installed, or the model holds no product of vectors.
    """

    def __init__(self, margins: Margins, users: Tensor, n: int = 1_000) -> None:
        self._faiss = _faiss()
        table = margins.single.linear
        if table is None or not table.items.shape[1]:
            raise ConfigError("this model holds no product of vectors to make an index of")
        self._columns = table.columns
        bias = torch.zeros(len(table.items)) if table.bias is None else table.bias
        items = torch.cat([table.items, bias.unsqueeze(1)], dim=1).cpu()
        vectors = np.ascontiguousarray(items.numpy(), dtype=np.float32)
        n_items, d = vectors.shape
        self._lists = max(1, min(n_items // 39, int(4 * n_items**0.5)))
        quantizer = self._faiss.IndexFlatIP(d)
        self._index: Any = self._faiss.IndexIVFFlat(
            quantizer, d, self._lists, self._faiss.METRIC_INNER_PRODUCT
        )
        some = np.random.default_rng(0).permutation(n_items)[: PER_LIST * self._lists]
        self._index.train(vectors[some])
        self._index.add(vectors)
        self.probes, self.recall = self._tune(margins, users[:SAMPLED], min(n, n_items))

    def search(self, users: Tensor, allowed: Tensor, n: int) -> Tensor:
        masks = np.packbits(allowed.cpu().numpy(), axis=1, bitorder="little")
        n = min(n, allowed.shape[1])
        found = np.full((len(users), n), PAD, dtype=np.int64)
        for row, query, mask in zip(found, self._queries(users), masks, strict=True):
            # As many lists more as it takes to fill up where filters leave little.
            probes = self.probes
            while True:
                row[:] = self._one(query, n, probes, mask)
                if row[-1] >= 0 or probes == self._lists:
                    break
                probes = min(self._lists, 4 * probes)
        return torch.from_numpy(found).to(allowed.device)

    def _one(
        self, query: npt.NDArray[np.float32], n: int, probes: int, mask: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.int64]:
        selector = self._faiss.IDSelectorBitmap(mask)
        how = self._faiss.SearchParametersIVF(sel=selector, nprobe=probes)
        rows: npt.NDArray[np.int64] = self._index.search(query[None], n, params=how)[1][0]
        return rows

    def _queries(self, users: Tensor) -> npt.NDArray[np.float32]:
        own = users[:, self._columns].float().cpu()
        one = torch.ones((len(own), 1))
        return np.ascontiguousarray(torch.cat([own, one], dim=1).numpy(), dtype=np.float32)

    def _tune(self, margins: Margins, users: Tensor, n: int) -> tuple[int, float]:
        """The fewest lists, by doubling, that hold enough of the true best; and how much."""
        allowed = torch.ones((len(users), self._index.ntotal), dtype=torch.bool)
        best = [set(rows) for rows in top_of_all(margins, users, n, None, None).tolist()]
        masks = np.packbits(allowed.numpy(), axis=1, bitorder="little")
        probes = 1
        while True:
            found = [
                self._one(query, n, probes, mask)
                for query, mask in zip(self._queries(users), masks, strict=True)
            ]
            shares = [
                len(true & set(own.tolist())) / n for true, own in zip(best, found, strict=True)
            ]
            recall = float(np.mean(shares)) if shares else 1.0
            if recall >= RECALL or probes == self._lists:
                return probes, recall
            probes = min(self._lists, 2 * probes)


def shortlist_for(margins: Margins, users: Tensor) -> Shortlist | None:
    """What a catalogue of this size takes; None where scoring every item is quick enough, or the
    model holds no product of vectors. ``users`` (S, E) are some vectors to tune an index on."""
    table = margins.single.linear
    if table is None or not table.items.shape[1]:
        return None
    n_items = len(table.items)
    if n_items >= FAISS_FROM and has_faiss():
        return FaissShortlist(margins, users)
    # A sortable model needs no other product than the one that ranks it.
    return FullShortlist(margins) if n_items >= FROM and not margins.sortable else None


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ConfigError("install faiss-cpu, or this package with [faiss]") from None
    return faiss


def has_faiss() -> bool:
    """Whether the optional extra is there."""
    try:
        _faiss()
    except ConfigError:
        return False
    return True
