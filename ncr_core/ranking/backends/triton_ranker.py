"""Algorithm 1 in Triton, for models with a tower on a GPU: one kernel launch a batch."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ncr_core.models.cuda_graph import captured
from ncr_core.models.scoring_tables import TowerTable
from ncr_core.ranking.backends.torch_ranker import TorchRanker
from ncr_core.ranking.margins import CLOSE, PAD, ROUNDING, TIE, BoundMargins, Margins

MIN_WIDTH = 16  # of a product on the tensor cores
# The fastest of some on an H200, `python -m benchmarks.cuda ranker`: the steps of a user follow one
# another, so many users at once make a batch fast, and not many threads for each.
LANES = 16  # candidates that are compared with a champion at once
WARPS = {64: 1, 128: 2, 2**20: 8}  # of 32 threads for a user, up to a width of the first layer
MAX_GRAPHS, EAGER_PASSES = 8, 20  # a capture takes the time of some hundred passes
MAX_GRAPH_K, MAX_GRAPH_CELLS = 128, 2**18  # of usual lists: 256 users with 1,024 candidates
MAX_COUNTED = 1_000  # shapes
MAX_LAYERS = 4  # above the first
MAX_CHUNK = 32  # columns of the first layer at once: what fits into a program's registers
M_BUCKET, B_BUCKET, GRAPH_M_BUCKET = 64, 16, 256
MAX_BYTES = 2**30  # of a pass's working room


Shape = tuple[int, int, int, torch.dtype]
"""Users and candidates of a graph, k, and the type of the users' vectors."""


class TritonRanker:
    """Ranks a batch by one kernel launch, without a synchronisation in it; see ``Ranker``.

    One ranker serves a model. Tests run the ranker on a CPU by Triton's interpreter.
    """

    def __init__(self, margins: Margins) -> None:
        from ncr_core.ranking.backends import triton_kernel

        tower, single = margins.double.tower, margins.single.tower
        if tower is None or single is None or tower.items is not None:
            raise ValueError("the kernel is for towers over C + A + B alone")
        if len(tower.layers) > MAX_LAYERS:
            raise ValueError(f"the kernel is for at most {MAX_LAYERS} layers above the first")
        self._kernel: Any = triton_kernel.scan
        self._margins = margins
        self._width = _padded_width(tower.first.shape[1])
        self._widths = tuple(_padded_width(len(bias)) for _, bias in tower.layers)
        self._warps = next(n for width, n in WARPS.items() if self._width <= width)
        self._graphs: OrderedDict[Shape, _Graph] = OrderedDict()
        self._passes: Counter[Shape] = Counter()  # of each shape without a graph
        self._may_capture = tower.first.device.type == "cuda"
        self._lock = Lock()
        self._single, self._double = (self._tables(table) for table in (single, tower))

    def supports(self, n_users: int, n_candidates: int) -> bool:
        """Whether the workspace of such a pass is at most ``MAX_BYTES``."""
        return n_users * n_candidates * 32 <= MAX_BYTES

    def bind(self, users: BoundMargins) -> TritonBatch:
        """The ranker for a batch of users."""
        return TritonBatch(self, users)

    @torch.inference_mode()
    def rank(self, users: BoundMargins, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See ``TritonBatch.rank``."""
        b, m = candidates.shape
        if not (self._may_capture and users.boost is None and b and m and k):
            return self._rank(users, candidates, k)
        # Some forty small kernels come before the scan, and a graph starts all of them at once.
        n_rows, width = 1 << (b - 1).bit_length(), _round_up(m, GRAPH_M_BUCKET)
        device = candidates.device
        if (
            k > MAX_GRAPH_K
            or n_rows * width > MAX_GRAPH_CELLS
            or torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        ):
            return self._rank(users, candidates, k)
        with self._lock:
            graph = self._graph_of((n_rows, width, k, users.users.dtype), users)
            if graph is not None:
                return graph(users.users, candidates)
        return self._rank(users, candidates, k)

    def free_graphs(self) -> None:
        """Lets go of all graphs and their memory; the next passes have none."""
        with self._lock:
            self._graphs.clear()
            self._passes.clear()

    def _graph_of(self, key: Shape, users: BoundMargins) -> _Graph | None:
        """The graph of a shape, made once the shape is usual; None without one."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._passes) >= MAX_COUNTED:
                self._passes.clear()
            self._passes[key] += 1
            if self._passes[key] <= EAGER_PASSES:
                return None
            graph = self._captured(key, users)
            if graph is None:
                return None
        self._graphs[key] = graph
        while len(self._graphs) > MAX_GRAPHS:
            evicted, _ = self._graphs.popitem(last=False)
            self._passes[evicted] = 0
        return graph

    def _captured(self, key: Shape, users: BoundMargins) -> _Graph | None:
        """A new graph; None, with a warning and for all shapes, if the capture fails."""
        n_rows, width, k, dtype = key
        device = users.users.device

        def rank(vectors: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
            return self._rank(self._margins.bind(vectors), items, k)

        try:
            return _Graph(
                rank,
                torch.zeros((n_rows, users.users.shape[1]), dtype=dtype, device=device),
                torch.full((n_rows, width), PAD, device=device),
            )
        except RuntimeError as error:
            self._may_capture = False
            reason = str(error).partition("\n")[0]
            warnings.warn(f"lists have no CUDA graph, which is slower: {reason}", stacklevel=2)
            return None

    def _rank(self, users: BoundMargins, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tower = self._margins.double.tower
        assert tower is not None  # noqa: S101 - the constructor saw to it
        b, m = candidates.shape
        # Shapes in steps: the allocator finds room of the same sizes again.
        n_rows, width = _round_up(b, B_BUCKET), _round_up(m, M_BUCKET)
        device = candidates.device
        vectors = tower.user_columns(users.users.double())
        projected = (vectors.unsqueeze(1) * tower.user_weight).sum(dim=2) + tower.user_bias
        close = CLOSE * self._margins.caution(projected)
        padded = _widened(projected, self._width)
        stack = torch.zeros((n_rows, width), dtype=torch.int32, device=device)
        is_ranked = torch.zeros((n_rows, width), dtype=torch.int8, device=device)
        items = torch.full((b, width), 0, dtype=torch.int32, device=device)
        items[:, :m] = candidates.clamp(min=0)
        scores = torch.zeros((b, width), dtype=torch.float64, device=device)
        scores[:, :m] = users.all_linear_scores(candidates.clamp(min=0))
        lengths = (candidates != PAD).sum(dim=1).to(torch.int32)
        ranked = torch.full((b, k), PAD, dtype=torch.int32, device=device)
        pairs = torch.zeros(b, dtype=torch.int32, device=device)
        if b and m and k:
            n1, n2, n3, n4 = (*self._widths, 0, 0, 0, 0)[:MAX_LAYERS]
            with torch.cuda.device_of(items):  # type: ignore[no-untyped-call]  # Triton takes this
                self._kernel[(b,)](
                    items, lengths, scores, close, padded.float(), padded,
                    *self._single, *self._double, stack, is_ranked, ranked, pairs, width, k,
                    tie=TIE, rounding=ROUNDING, H=self._width, CHUNK=min(self._width, MAX_CHUNK),
                    N1=n1, N2=n2, N3=n3, N4=n4, LOOK=LANES,
                    RELU=tower.activation == "relu", num_warps=self._warps,
                )  # fmt: skip
        return ranked.long(), pairs

    def _tables(self, tower: TowerTable) -> tuple[Tensor, ...]:
        """(first, second, weights, w), padded with zeros; see ``triton_kernel``."""
        layers = []
        below = self._width
        for (weight, bias), width in zip(tower.layers, self._widths, strict=True):
            padded = weight.new_zeros((below, width))
            padded[: weight.shape[1], : weight.shape[0]] = weight.T
            layers += [padded.flatten(), _widened(bias.unsqueeze(0), width).squeeze(0)]
            below = width
        buffer = torch.cat(layers) if layers else tower.weight.new_zeros(1)
        last = _widened(tower.weight.unsqueeze(0), below).squeeze(0)
        return _widened(tower.first, self._width), _widened(tower.second, self._width), buffer, last


class _Graph:
    """A pass of one shape as a CUDA graph: smaller batches are padded with users without items."""

    def __init__(
        self,
        rank: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        users: Tensor,
        items: Tensor,
    ) -> None:
        self._users, self._items = users, items
        rank(users, items)  # a thread's first product of matrices could not be captured
        self._graph, (self._ranked, self._pairs) = captured(
            lambda: rank(users, items), items.device
        )

    def __call__(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """(B, E) vectors and (B, M) item rows → (B, k) rows of the top k, and (B,) pairs."""
        b, m = items.shape
        if (b, m) != self._items.shape:
            self._items.fill_(PAD)
        self._users[:b].copy_(users)
        self._items[:b, :m].copy_(items)
        self._graph.replay()
        return self._ranked[:b].clone(), self._pairs[:b].clone()


class TritonBatch:
    """A ``TritonRanker`` for a batch of B users."""

    def __init__(self, ranker: TritonRanker, users: BoundMargins) -> None:
        self._ranker = ranker
        self._users = users

    def rank(self, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(B, M) item rows → (B, k) rows of the top k, both padded with −1, and (B,) pairs."""
        return self._ranker.rank(self._users, candidates, k)


def triton_ranker(margins: Margins) -> TritonRanker | None:
    """The ranker of a model, checked against torch, or None.

    The result is None for a model without a tower on a GPU. If the kernel is not for the tower, or
    the check fails, the result is None and a warning gives the reason. Raises
    torch.OutOfMemoryError if the check has too little memory.
    """
    tower = margins.double.tower
    if tower is None or tower.first.device.type != "cuda":
        return None
    try:
        ranker = TritonRanker(margins)
        _try_out(ranker, margins)
    except torch.OutOfMemoryError:  # of this moment: the caller takes smaller batches
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        warnings.warn(f"torch ranks the lists, which is slower: {reason}", stacklevel=2)
        return None
    return ranker


def _try_out(ranker: TritonRanker, margins: Margins) -> None:
    """Ranks a few items for a few random users, and compares the lists with the scan in torch.

    Raises RuntimeError if a list differs.
    """
    tower, linear = margins.double.tower, margins.double.linear
    assert tower is not None  # noqa: S101 - the caller saw to it
    generator = torch.Generator().manual_seed(0)
    device, n_items = tower.first.device, len(tower.first)
    size = max(table.columns.stop for table in (tower, linear) if table is not None)
    users = margins.bind(torch.randn((4, size), generator=generator).to(device))
    m = min(100, n_items)
    items = torch.stack([torch.randperm(n_items, generator=generator)[:m] for _ in range(4)])
    items = items.to(device)
    k = min(10, m)
    expected, _ = TorchRanker(margins).bind(users).rank(items, k)
    ranked, _ = ranker._rank(users, items, k)
    if not ranked.equal(expected):
        raise RuntimeError("the kernel for this GPU ranks incorrectly")


def _widened(x: Tensor, width: int) -> Tensor:
    if x.shape[1] == width:
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, width - x.shape[1])).contiguous()


def _padded_width(n: int) -> int:
    """The next power of two, at least ``MIN_WIDTH``."""
    return max(MIN_WIDTH, 1 << (n - 1).bit_length())


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
