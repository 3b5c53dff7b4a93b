"""Vectors from content: the placement of items and users by their attributes alone."""

from ncr_core.content.encoder import AttributeEncoder
from ncr_core.content.maps import ContentMaps, map_items, map_users
from ncr_core.content.placement import ContentPlacement
from ncr_core.content.selection import select_attributes

__all__ = [
    "AttributeEncoder",
    "ContentMaps",
    "ContentPlacement",
    "map_items",
    "map_users",
    "select_attributes",
]
