"""Fold-in: vectors of users and items that training has not seen."""

from ncr_core.fold_in.evidence import Evidence, FoldInConfig
from ncr_core.fold_in.items import ItemFoldIn, extended
from ncr_core.fold_in.users import FoldIn

__all__ = ["Evidence", "FoldIn", "FoldInConfig", "ItemFoldIn", "extended"]
