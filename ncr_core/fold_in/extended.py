"""A model with items that it was not trained on, as rows at the end of its tables."""

from __future__ import annotations

import torch
from torch import Tensor

from ncr_core.errors import ConfigError
from ncr_core.models.factory import build_model
from ncr_core.models.ranker import PairwiseRanker
from ncr_core.models.users import HistoryUsers


def item_rows(model: PairwiseRanker, items: Tensor) -> Tensor:
    """(m,) rows → (m, F) all that makes up these items: embeddings, and the bias if there is one.

    Not what users' vectors are pooled from.
    """
    tables = [model.get_parameter(name).detach() for name in model.item_tables]
    return torch.cat([_as_matrix(table)[items] for table in tables], dim=1)


def split_rows(model: PairwiseRanker, rows: Tensor) -> dict[str, Tensor]:
    """(m, F) as ``item_rows`` gives it → what goes into each of the item tables, by its name."""
    tables = {name: model.get_parameter(name) for name in model.item_tables}
    widths = [_as_matrix(table).shape[1] for table in tables.values()]
    if rows.ndim != 2 or rows.shape[1] != sum(widths):
        raise ConfigError(
            f"the model's items are {sum(widths)} numbers each, not {tuple(rows.shape)}"
        )
    return {
        name: part.reshape(len(rows), *table.shape[1:])
        for (name, table), part in zip(
            tables.items(), torch.split(rows, widths, dim=1), strict=True
        )
    }


def extended(model: PairwiseRanker, vectors: Tensor) -> PairwiseRanker:
    """A frozen model with (m, F) fitted item vectors as its items from n_items on.

    Users and all that is no item table share the memory of ``model``. Where users' vectors are
    pooled from items, the new ones add nothing to them. Raises ConfigError for vectors of another
    size.
    """
    added = {
        name: rows.to(model.device, torch.float32)
        for name, rows in split_rows(model, vectors).items()
    }
    for name, part in model.named_modules():
        if isinstance(part, HistoryUsers):
            table = part.items.weight
            added[f"{name}.items.weight"] = table.new_zeros((len(vectors), table.shape[1]))
    with torch.device("meta"):
        larger = build_model(model.config, model.n_users, model.n_items + len(vectors))
    state = {
        name: torch.cat([value, added[name].to(value.dtype)]) if name in added else value
        for name, value in model.state_dict().items()
    }
    larger.load_state_dict(state, assign=True)
    return larger.requires_grad_(False).eval()


def shared_copy(model: PairwiseRanker) -> PairwiseRanker:
    """Another module with the same parameters, in the same memory: what is done to it as a module,
    as `functional_call` does, is not seen by others who use ``model``."""
    with torch.device("meta"):
        copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict(model.state_dict(), assign=True)
    return copy.requires_grad_(False).eval()


def _as_matrix(table: Tensor) -> Tensor:
    return table if table.ndim == 2 else table.unsqueeze(1)
