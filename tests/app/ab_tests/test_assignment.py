"""Which users a trial includes: uniform, stable, and independent between trials."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ab_tests.assignment import USER_NUMBERS, is_in_share, user_number
from tests.cluster.process import ROOT

names = st.text(st.characters(codec=None, exclude_categories=()), min_size=1, max_size=40)
KINDS = ["user-{}", "{:032x}", "ann+{}@example.com", "ü{}", "{}"]
USERS = 20_000
Z = 5.0  # standard deviations: one in two million


@given(names, names, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_includes_all_of_a_smaller_one(
    trial: str, user: str, share: float, other: float
) -> None:
    number = user_number(trial, user)
    assert 0 <= number < USER_NUMBERS
    assert number == user_number(trial, user)
    smaller, larger = sorted((share, other))
    assert is_in_share(number, smaller) <= is_in_share(number, larger)
    assert is_in_share(number, 1.0)
    assert not is_in_share(number, 0.0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(names, names, st.sampled_from(KINDS), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_shares_are_as_large_as_they_say_and_independent_between_trials(
    trial: str, other: str, kind: str, share: float, other_share: float
) -> None:
    users = [kind.format(n) for n in range(USERS)]
    numbers = np.array([user_number(trial, user) for user in users], dtype=np.float64)
    # Uniform in each twentieth, and so in each share.
    counts = np.histogram(numbers / USER_NUMBERS, bins=20, range=(0, 1))[0]
    assert abs(counts - USERS / 20).max() < Z * np.sqrt(USERS / 20)
    inside = numbers < share * USER_NUMBERS
    assert abs(inside.mean() - share) < Z * np.sqrt(share * (1 - share) / USERS)
    if trial == other:
        return
    others = np.array([is_in_share(user_number(other, user), other_share) for user in users])
    both, expected = (inside & others).mean(), share * other_share
    assert abs(both - expected) < Z * np.sqrt(expected * (1 - expected) / USERS)


def test_every_process_gives_a_user_the_same_number() -> None:
    code = "from app.ab_tests.assignment import user_number; print(user_number('t', 'ü\\ud800'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    # Written down: servers of all versions that a trial may see have to agree.
    assert found == {str(user_number("t", "ü\ud800"))}
    assert user_number("trial-1", "user-1") == 3_163_527_493_129_001_054
