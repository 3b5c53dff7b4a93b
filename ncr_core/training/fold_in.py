"""Fold-in: a user's vector fitted to their items against the frozen network.

The vector starts at the mean of the trained users' and is trained on pairs of an item of theirs
and a random other one, by the loss the model was trained with (eq. 15); nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ncr_core.models.ranker import PairwiseRanker
from ncr_core.training.losses import bce_loss

STEPS = 30
POSITIVES = 64
NEGATIVES = 4
RATE = 0.1
L2 = 1e-3  # towards the mean user, in units of that loss


def mean_user(model: PairwiseRanker) -> Tensor:
    """(1, E) the mean of the trained users' vectors; compute it once a model."""
    with torch.no_grad():
        every = torch.arange(model.n_users, device=model.device)
        parts = [model.user_vectors(rows).sum(0) for rows in torch.split(every, 65_536)]
        return (torch.stack(parts).sum(0) / model.n_users).unsqueeze(0)


def fold_in(model: PairwiseRanker, start: Tensor, items: Sequence[Tensor], seed: int = 0) -> Tensor:
    """(B, E) or (1, E) starting vectors and each user's item rows (each not empty) → (B, E).

    The model's parameters must be frozen. The same input gives the same vectors.
    """
    device = model.device
    generator = torch.Generator(device=device).manual_seed(seed)
    n = len(items)
    centre = start.detach().expand(n, -1)
    lengths = torch.tensor([len(own) for own in items], device=device)
    width = int(lengths.max())
    padded = torch.zeros((n, width), dtype=torch.long, device=device)
    seen = torch.zeros((n, model.n_items), dtype=torch.bool, device=device)
    for row, own in enumerate(items):
        padded[row, : len(own)] = own
        seen[row, own] = True
    take = min(POSITIVES, max(width, 16))
    rows = torch.arange(n, device=device).repeat_interleave(take)
    scale = centre.abs().mean().clamp(min=1e-3)
    with torch.enable_grad():
        vectors = centre.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([vectors], lr=float(RATE * scale.clamp(min=0.1)))
        for _ in range(STEPS):
            draw = torch.rand((n, take), generator=generator, device=device)
            i = padded.gather(1, (draw * lengths.unsqueeze(1)).long()).flatten()
            j = torch.randint(
                model.n_items, (n * take, NEGATIVES), generator=generator, device=device
            )
            z_uij, z_uji = model.pair_logits(vectors[rows], i, j)
            # A drawn negative that is among the user's items says nothing.
            valid = ~seen[rows.unsqueeze(1), j]
            loss = bce_loss(z_uij[valid], z_uji[valid]) if bool(valid.any()) else z_uij.sum() * 0
            loss = loss + L2 * (vectors - centre).square().sum(1).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return vectors.detach()
