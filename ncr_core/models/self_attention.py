"""A causal self-attention encoder of users' latest items, as in SASRec (Kang & McAuley 2018).

Each item's vector attends to the vectors of the `WINDOW` latest items up to and including its own.
The attention depends on the number of items back, and not on the place in the history. Histories of
any length therefore lie one after the other, without padding, and the encoder works block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, pad

from ncr_core.model_config import HEADS
from ncr_core.models.precision import may_use_bfloat16

WINDOW = 64
"""The number of latest items that a layer attends to."""
DROPOUT = 0.2
OLDEST_BIAS = -3.0  # of the oldest item of a window at the start, beside 0 of the latest
NOT_SEEN = -1e9  # a score that stands for "not looked at"


class CausalEncoder(nn.Module):
    """Layers of causal self-attention with an output that starts at zero.

    x starts as LayerNorm(v). Each layer adds MultiHead(LayerNorm(x)) to x, and then W₂ gelu(W₁
    LayerNorm(x)). The output is W LayerNorm(x) + c. A head scores the item n places back with q·k /
    (size / ``HEADS``)^½ + b_n, where b is the head's own. An item of weight w adds log w to its
    score.

    ``size`` is the size of the vectors, a multiple of ``HEADS``. The output depends on the latest
    ``reach`` items alone.
    """

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.reach = layers * (WINDOW - 1) + 1
        self.norm = nn.LayerNorm(size)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(layers))
        self.last_norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, size)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, items: Tensor, users: Tensor, weights: Tensor | None = None) -> Tensor:
        """(T, size) item vectors, users' one after the other, oldest first → (T, size).

        ``users`` (T,) are numbers from 0, the same for the items of one user. Row t of the output
        depends on that user's items up to row t. ``weights`` (T,), above 0, are the weights of the
        items.
        """
        rows = len(items)
        if not rows:
            return items
        missing = -rows % WINDOW
        blocks = pad(users, (0, missing), value=-1).view(-1, WINDOW)
        seen = self._in_reach(items.device) & (
            blocks.unsqueeze(2) == _with_previous(blocks, -1).unsqueeze(1)
        )
        scores = items.new_zeros(()).expand(len(blocks), 1, WINDOW, 2 * WINDOW)
        if weights is not None:
            logs = pad(weights.to(items.dtype).log(), (0, missing)).view(-1, WINDOW)
            scores = scores + _with_previous(logs, 0.0)[:, None, None]
        scores = scores.masked_fill(~seen.unsqueeze(1), NOT_SEEN)
        x = dropout(self.norm(pad(items, (0, 0, 0, missing))), DROPOUT, self.training)
        # Training bears three digits; lists are ranked by all of them.
        fast = self.training and may_use_bfloat16(items)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            for layer in self.layers:
                x = layer(x, scores)
            encoded: Tensor = self.output(self.last_norm(x[:rows]))
        return encoded.to(items.dtype)

    @staticmethod
    def _in_reach(device: torch.device) -> Tensor:
        """(W, 2W) whether an item may attend to an item of the block before or of its own block."""
        lags = _lags(device)
        return (lags >= 0) & (lags < WINDOW)


class _Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size)
        self.projections = nn.Linear(size, 3 * size, bias=False)
        self.heads = nn.Linear(size, size)
        slopes = OLDEST_BIAS * 0.3 ** torch.arange(HEADS)
        self.lag_bias = nn.Parameter(slopes.unsqueeze(1) * torch.linspace(0.0, 1.0, WINDOW))
        self.dense_norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """(N·W, size) vectors and (N, 1, W, 2W) summands of the scores → (N·W, size)."""
        blocks, size = len(scores), x.shape[1]
        parts = self.projections(self.attention_norm(x)).view(blocks, WINDOW, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (N, heads, W, size / heads) each
        key, value = _with_previous(key), _with_previous(value)
        lags = _lags(x.device).clamp(0, WINDOW - 1)
        by_lag = self.lag_bias[:, lags]
        shares = query @ key.transpose(-1, -2) * (size / HEADS) ** -0.5 + by_lag + scores
        mixed = (shares.softmax(-1) @ value).transpose(1, 2).reshape(-1, size)
        x = x + dropout(self.heads(mixed), DROPOUT, self.training)
        dense = self.down(gelu(self.up(self.dense_norm(x))))
        return x + dropout(dense, DROPOUT, self.training)


def _lags(device: torch.device) -> Tensor:
    """(W, 2W) the places from an item back to the items of the block before and its own block."""
    place = torch.arange(2 * WINDOW, device=device)
    return place[WINDOW:].unsqueeze(1) - place


def _with_previous(blocks: Tensor, before_first: float = 0.0) -> Tensor:
    """(N, …, W, size) or (N, W) blocks → each behind the block before, with 2W in place of W."""
    axis = 1 if blocks.ndim == 2 else 2
    first = torch.full_like(blocks[:1], before_first)
    return torch.cat([torch.cat([first, blocks[:-1]]), blocks], dim=axis)
