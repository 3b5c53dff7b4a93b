"""Attributes as columns: any JSON is taken, what is not known contributes nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncr_core.content import AttributeEncoder
from ncr_core.content.encoder import BINS, MAX_COLUMNS, MAX_EMBEDDING, MIN_COUNT
from ncr_core.errors import ConfigError, DataError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -7, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=3)
    | st.just("x" * 300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["a", "b", "", "embedding", "ключ"])
objects = st.lists(st.dictionaries(names, json_values, max_size=5), max_size=12)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(objects, objects, st.sampled_from([1, 2, MIN_COUNT]))
def test_any_json_is_encoded_in_finite_numbers(
    known: list[dict[str, Any]], asked: list[dict[str, Any]], min_count: int
) -> None:
    encoder = AttributeEncoder.fit(known, min_count=min_count)
    encoded = encoder.encode([*known, *asked, {}])
    assert encoded.shape == (len(known) + len(asked) + 1, encoder.n_features)
    assert encoded.dtype == np.float32
    assert np.isfinite(encoded.data).all()
    assert encoded[-1].nnz == 0
    assert len(encoder.groups) == encoder.n_features
    assert len(encoder.names) == len(set(encoder.groups.tolist()))
    again = AttributeEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    assert (again.names, again.n_features) == (encoder.names, encoder.n_features)
    assert (again.encode(asked) != encoder.encode(asked)).nnz == 0


def test_columns_of_each_type() -> None:
    known = [
        {"genres": ["x", "y"], "new": True, "by": "ann", "year": 1990},
        {"genres": ["y"], "new": False, "by": "ann", "year": 2000},
    ] * 2
    encoder = AttributeEncoder.fit(known, min_count=2)
    assert encoder.names == ("by", "genres", "new", "year")
    assert encoder.groups.tolist() == [0, 1, 1, 2, 2, 3, 3, 3]
    assert encoder.encode(known[:2]).toarray().tolist() == [
        [1, 1, 1, 0, 1, -1, 1, 0],
        [1, 1, 0, 1, 0, 1, 0, 1],
    ]
    other = [
        {"genres": ["z", "x", "x", 3], "new": "True", "by": 7, "year": math.nan},
        {"genres": "y", "new": 1, "by": ["ann"], "year": 1994.9},
        {"genres": None, "new": {"a": 1}, "by": [["ann"]], "year": "1990", "more": 1},
    ]
    assert encoder.encode(other).toarray() == pytest.approx(
        np.array(
            [
                [0, 0, 1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, -0.02, 1, 0],
                [0, 0, 0, 0, 0, 0, 0, 0],
            ]
        ),
        abs=1e-6,
    )


def test_a_number_far_away_lies_in_the_last_bin() -> None:
    encoder = AttributeEncoder.fit([{"n": n} for n in range(1000)])
    assert encoder.n_features == 1 + BINS
    shares = encoder.encode([{"n": n} for n in range(1000)]).toarray()[:, 1:].mean(0)
    assert shares == pytest.approx(1 / BINS, rel=0.05)
    low, high = encoder.encode([{"n": -1e300}, {"n": 10**300}]).toarray()
    assert (low[0], low[1]) == (-3, 1)
    assert (high[0], high[-1]) == (3, 1)
    assert encoder.encode([{"n": 10**400}, {"n": math.inf}]).nnz == 0


def test_columns_are_bounded_and_the_most_frequent_values_have_them() -> None:
    known = [{"tag": [f"t{i}", f"t{i % 10_000}"], "id": f"only {i}"} for i in range(20_000)]
    assert AttributeEncoder.fit(known).n_features == 0  # each of 20,000 strings has three at most
    encoder = AttributeEncoder.fit([*known, *[{"tag": "t7"}] * 3], min_count=1)
    assert encoder.n_features == MAX_COLUMNS
    assert encoder.encode([{"tag": "t7"}]).nnz == 1


def test_named_attributes_alone_count() -> None:
    known = [{"a": "x", "b": "y", "embedding": [1.0, 2.0]}] * MIN_COUNT
    assert AttributeEncoder.fit(known).names == ("a", "b", "embedding")
    assert AttributeEncoder.fit(known, ["b", "c"]).names == ("b",)
    assert AttributeEncoder.fit(known, ["embedding"]).names == ("embedding",)
    assert AttributeEncoder.fit(known, []).names == ()
    assert AttributeEncoder.fit(known, embedding=0).names == ("a", "b")


def test_an_embedding_is_a_vector_of_its_length_or_nothing() -> None:
    known = [{"embedding": [3.0, -4]}, {"embedding": [5, 0.0]}, {"embedding": [1.0]}]
    encoder = AttributeEncoder.fit(known)
    encoded = encoder.encode([*known, {"embedding": [1, True]}, {"embedding": [math.nan, 1]}])
    scale = math.sqrt(25 / 2)
    expected = np.array([[3, -4], [5, 0], [0, 0], [0, 0], [0, 0]]) / scale
    assert encoded.toarray() == pytest.approx(expected)
    assert AttributeEncoder.fit(known, embedding=1).n_features == 1
    assert AttributeEncoder.fit(known, embedding=3).n_features == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="embedding"):
        AttributeEncoder.fit([], embedding=MAX_EMBEDDING + 1)
    with pytest.raises(ConfigError, match="min_count"):
        AttributeEncoder.fit([], min_count=0)
    stored = AttributeEncoder.fit([{"a": n} for n in range(9)]).to_json()
    numbers = stored["attributes"][0]["numbers"]
    for broken in (
        {},
        {**stored, "embedding": -1},
        {**stored, "embedding_scale": 0},
        {**stored, "attributes": [{"name": "a", "values": [1.5], "numbers": None}]},
        {**stored, "attributes": [{"name": "a", "values": [], "numbers": {**numbers, "edges": 1}}]},
        {
            **stored,
            "attributes": [{"name": "a", "values": [], "numbers": {**numbers, "deviation": 0}}],
        },
    ):
        with pytest.raises(DataError, match="encoder"):
            AttributeEncoder.from_json(broken)
