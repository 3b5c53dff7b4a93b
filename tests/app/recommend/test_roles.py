"""What a key that may only read can ask for: all of it, though it is posted."""

from __future__ import annotations

import pytest

from app.core.roles import Role
from app.core.security import needed_role


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/recommend/user-1"),
        ("GET", "/recommend/batch"),
        ("POST", "/recommend/batch"),
        ("POST", "/rerank"),
        ("POST", "/compare"),
        ("GET", "/items/a%2Fb/similar"),
    ],
)
def test_asking_takes_the_role_to_read(method: str, path: str) -> None:
    assert needed_role(method, path) is Role.READ


@pytest.mark.parametrize("path", ["/rerank/x", "/compare/x", "/recommend/x", "/recommend/batch/x"])
def test_what_is_not_known_takes_more(path: str) -> None:
    assert needed_role("POST", path) is Role.ADMIN
