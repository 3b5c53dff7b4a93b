"""Tests on what users click: interleaving, and a sequential test of click-through."""
