"""Event weights: the setting, in Python and in SQL."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from app.core.database import Database
from app.core.errors import SettingsError
from app.core.settings import load_settings
from app.events.event_weights import DAY_MICROSECONDS, EventWeights

EXAMPLE = {
    "purchase": 3,
    "click": 1,
    "view": "seen",
    "dislike": -1,
    "rating": [{"from": 4, "weight": 1}, {"from": 3, "weight": "seen"}, {"weight": -1}],
}


def parse(setting: Any) -> EventWeights:
    return EventWeights.parse(json.dumps(setting))


def test_without_a_setting_every_event_is_positive_but_a_dislike() -> None:
    for text in (None, "", " "):
        weights = EventWeights.parse(text)
        assert weights.weight("interaction", None) == 1
        assert weights.weight("rating", 0.5) == 1
        assert weights.weight("dislike", 5.0) == -1
        assert not weights.all_positive
    assert parse({"dislike": 1}).all_positive


@pytest.mark.parametrize(
    ("kind", "value", "weight"),
    [
        ("purchase", None, 3),
        ("purchase", -7.0, 3),
        ("click", None, 1),
        ("view", None, 0),
        ("dislike", None, -1),
        ("rating", 5.0, 1),
        ("rating", 4.0, 1),
        ("rating", 3.999, 0),
        ("rating", 3.0, 0),
        ("rating", 2.5, -1),
        ("rating", -1e300, -1),
        ("rating", None, 0),  # ranges need a value
        ("share", None, 1),
    ],
)
def test_weights_of_the_documented_example(kind: str, value: float | None, weight: float) -> None:
    assert parse(EXAMPLE).weight(kind, value) == weight


def test_ranges_with_ends_leave_gaps_in_which_items_are_only_seen() -> None:
    weights = parse(
        {"rating": [{"from": 1, "below": 2, "weight": -2}, {"from": 4, "below": 5, "weight": 2}]}
    )
    by_value = [weights.weight("rating", value) for value in (0.9, 1, 1.9, 2, 3.9, 4, 4.9, 5)]
    assert by_value == [0, -2, -2, 0, 0, 2, 2, 0]


def test_a_star_is_the_rule_of_every_other_type() -> None:
    weights = parse({"purchase": 2, "*": "seen"})
    assert (weights.weight("purchase", None), weights.weight("click", None)) == (2, 0)
    assert weights.weight("dislike", None) == -1
    by_value = parse({"*": [{"from": 0, "weight": 1}, {"weight": -1}]})
    assert (by_value.weight("x", 0.0), by_value.weight("x", -1.0)) == (1, -1)


@pytest.mark.parametrize(
    ("text", "message_part"),
    [
        ("purchase=3", "is not JSON"),
        ('{"a": 1', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        ('{"a": NaN}', "finite number"),
        ('{"a": Infinity}', "finite number"),
        ('{"a": 1e999}', "finite number"),
        ('{"a": 1' + "0" * 400 + "}", "finite number"),
        ('{"a": true}', "finite number"),
        ('{"a": null}', "finite number"),
        ('{"a": "bought"}', "finite number"),
        ('{"a": {"from": 1}}', "finite number"),
        ('{"a": 5000}', "between"),
        ('{"a": 1e-9}', "between"),
        ('{"": 1}', "name of a type"),
        ('{"' + "x" * 65 + '": 1}', "name of a type"),
        ('{"*": "seen"}', "no type has a positive weight"),
        ('{"*": -1, "view": 0, "r": [{"from": 1, "weight": -1}]}', "no type has a positive weight"),
        ('{"r": []}', "empty list"),
        ('{"r": [3]}', "a range of"),
        ('{"r": [{"from": 1, "to": 2, "weight": 1}]}', "a range of"),
        ('{"r": [{"from": 1}]}', "no weight"),
        ('{"r": [{"from": "x", "weight": 1}]}', "finite number"),
        ('{"r": [{"from": NaN, "weight": 1}]}', "finite number"),
        ('{"r": [{"from": 3, "weight": 1}, {"from": 3, "weight": -1}]}', "overlap"),
        ('{"r": [{"weight": 1}, {"weight": -1}]}', "overlap"),
        ('{"r": [{"from": 1, "below": 4, "weight": 1}, {"from": 3, "weight": -1}]}', "overlap"),
        ('{"r": [{"from": 4, "below": 4, "weight": 1}]}', "ends before it begins"),
    ],
)
def test_an_invalid_setting_is_an_error_of_one_line(text: str, message_part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        EventWeights.from_settings(load_settings(feedback=text))
    message = str(caught.value)
    assert message.startswith("NCR_FEEDBACK: ")
    assert message_part in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("days", [0, -1, math.nan, math.inf])
def test_an_invalid_half_life_is_refused(days: float) -> None:
    with pytest.raises(SettingsError, match="NCR_FEEDBACK_HALF_LIFE_DAYS"):
        load_settings(feedback_half_life_days=days)


numbers = st.sampled_from([3, 1, 0.5, 0, -1, -2.5, "seen"])
bounds = st.floats(-10, 10, allow_nan=False) | st.integers(-5, 5)
ranges = st.lists(bounds, min_size=1, max_size=4, unique_by=float).flatmap(
    lambda starts: st.tuples(
        *(st.fixed_dictionaries({"from": st.just(start), "weight": numbers}) for start in starts)
    ).map(list)
)
settings_of_types = st.dictionaries(
    st.sampled_from(["a", "b'\"%:", "rating", "*", "ü", "dislike"]), numbers | ranges, max_size=5
)
values = st.none() | bounds.map(float)


@given(settings_of_types, st.sampled_from(["a", "rating", "else"]), values)
def test_a_value_has_the_weight_of_the_highest_start_it_reaches(
    setting: dict[str, Any], kind: str, value: float | None
) -> None:
    setting["c"] = 1  # something has to be positive
    rule = setting.get(kind, setting.get("*", 1))
    if isinstance(rule, list):
        reached = [r for r in rule if value is not None and r["from"] <= value]
        rule = max(reached, key=lambda r: float(r["from"]))["weight"] if reached else 0
    assert parse(setting).weight(kind, value) == (0 if rule == "seen" else rule)


@pytest.mark.slow
@given(
    st.text(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    ).map(json.dumps)
)
def test_any_text_parses_or_is_an_error_of_one_line(text: str) -> None:
    weights, message = None, ""
    try:
        weights = EventWeights.parse(text)
    except SettingsError as error:
        message = str(error)
    assert "\n" not in message
    assert weights is None or math.isfinite(weights.weight("a", 1.0))


@pytest.mark.anyio
async def test_weights_in_sql_equal_those_in_python(database: Database) -> None:
    """Many settings and events, on both databases."""
    kinds = ["a", "b'\"%:", "rating", "else", "ü", "dislike", "purchase", "view"]
    cases = [(kind, value) for kind in kinds for value in (None, -1.0, 2.5, 3.0, 3.999, 4.0, 1e300)]
    kind, value = sa.bindparam("kind", type_=sa.Text), sa.bindparam("value", type_=sa.Double)
    gaps = {"a": [{"from": 1, "below": 2.75, "weight": 2}, {"from": 3.5, "weight": -0.25}]}
    for setting in ({}, EXAMPLE, gaps, {"b'\"%:": "seen", "*": [{"from": 3, "weight": 2}]}):
        weights = parse(setting)
        both = sa.select(weights.expression(kind, value), weights.is_positive(kind, value))
        for case in cases:
            row = (await database.fetch(both, {"kind": case[0], "value": case[1]}))[0]
            weight = weights.weight(*case)
            assert (float(row[0]), bool(row[1])) == (weight, weight > 0), (setting, case)


def test_weights_decay_by_half_and_never_vanish() -> None:
    days = np.array([0, 10, 20, 100_000]) * DAY_MICROSECONDS
    now = int(days[2])
    assert EventWeights.parse(None).decay(days, now).tolist() == [1, 1, 1, 1]
    halved = EventWeights.parse(None, 10).decay(days, now)
    assert halved[:3].tolist() == [0.25, 0.5, 1]
    assert halved[3] == 1  # of a time to come
    assert 0 < EventWeights.parse(None, 0.001).decay(days, now)[0] < 1e-5
