"""An object store for tests of the registry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.object_store import ObjectStore


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store = ObjectStore(monkeypatch)
    try:
        yield store
    finally:
        store.clear()
