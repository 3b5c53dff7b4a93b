"""Fold-in: a user's vector fitted to their items against the frozen network.

The vector starts at the mean of the trained users' and is trained on pairs of an item of theirs
and a random other one, by the loss the model was trained with (eq. 15); nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ncr_core.models.ranker import PairwiseRanker

STEPS = 30
POSITIVES = 64
NEGATIVES = 4
RATE = 0.1  # of Adam, in units of the mean user's coordinates
L2 = 1e-3  # towards the start, in units of the loss


def mean_user(model: PairwiseRanker) -> Tensor:
    """(1, E) the mean of the trained users' vectors; compute it once a model."""
    with torch.no_grad():
        every = torch.arange(model.n_users, device=model.device)
        parts = [model.user_vectors(rows).sum(0) for rows in torch.split(every, 65_536)]
        return (torch.stack(parts).sum(0) / model.n_users).unsqueeze(0)


def fold_in(
    model: PairwiseRanker, start: Tensor, items: Sequence[Tensor], centre: Tensor, seed: int = 0
) -> Tensor:
    """Fits (B, E) starting vectors to each user's item rows, old to new (each not empty) → (B, E).

    ``centre`` is ``mean_user(model)``, which gives the scale of the steps. The model's parameters
    must be frozen. All users share the random draws, so that a user's vector does not depend on who
    else is in the batch, and the same items give the same vector.

    A model that pools user vectors from items needs no fitting: it gives the pooled vectors.
    """
    if model.config.users == "history":
        return model.vectors_of(items)
    device = model.device
    generator = torch.Generator(device=device).manual_seed(seed)
    n = len(items)
    start = start.detach()
    lengths = torch.tensor([len(own) for own in items], device=device)
    padded = torch.zeros((n, int(lengths.max())), dtype=torch.long, device=device)
    seen = torch.zeros((n, model.n_items), dtype=torch.bool, device=device)
    for row, own in enumerate(items):
        padded[row, : len(own)] = own
        seen[row, own] = True
    rows = torch.arange(n, device=device).repeat_interleave(POSITIVES)
    rate = RATE * max(0.1, float(centre.abs().mean()))
    with torch.enable_grad():
        vectors = start.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([vectors], lr=rate)
        for _ in range(STEPS):
            draw = torch.rand((1, POSITIVES), generator=generator, device=device)
            i = padded.gather(1, (draw * lengths.unsqueeze(1)).long()).flatten()
            drawn = torch.randint(
                model.n_items, (POSITIVES, NEGATIVES), generator=generator, device=device
            )
            j = drawn.repeat(n, 1)
            z_uij, z_uji = model.pair_logits(vectors[rows], i, j)
            # A drawn negative that is among the user's items says nothing.
            valid = (~seen[rows.unsqueeze(1), j]).view(n, -1)
            loss = (softplus(-z_uij) + softplus(z_uji)).view(n, -1)
            own_loss = (loss * valid).sum(1) / valid.sum(1).clamp(min=1)
            own_loss = own_loss + L2 * (vectors - start).square().sum(1)
            optimizer.zero_grad(set_to_none=True)
            own_loss.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return vectors.detach()
