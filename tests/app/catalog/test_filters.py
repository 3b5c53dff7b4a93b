"""Filters by attributes: random ones against Python itself, their one form, and what is refused."""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy as np
import orjson
import pytest

from app.catalog.attributes import SPARE_CODES, Attributes
from app.catalog.filters import AttributeFilter, parse_boosts, parse_filter, read_filter
from app.catalog.masks import FilterMask, FilterMasks
from app.catalog.snapshot import Catalogue, CatalogueRow
from app.core.errors import Unprocessable

pytestmark = pytest.mark.anyio

ITEMS = 60
STRINGS = ["", "a", "b", "ab", "é", "x" * 256, *(f"word {n}" for n in range(8))]
NUMBERS = [-1, 0, 0.0, -0.0, 0.5, 1, 1.0, 7, 2**60, 1e300]
COMPARE = {"lt": operator.lt, "lte": operator.le, "gt": operator.gt, "gte": operator.ge}


def some(draw: random.Random, values: list[Any]) -> list[Any]:
    return [draw.choice(values) for _ in range(draw.randint(0, 7))]


def random_value(draw: random.Random, name: str) -> Any:
    """Of a name that has one kind, or of `mixed`, which has all."""
    kinds = {
        "number": lambda: draw.choice(NUMBERS),
        "string": lambda: draw.choice(STRINGS),
        "boolean": lambda: draw.random() < 0.5,
        "list": lambda: some(draw, STRINGS),
        "other": lambda: draw.choice([{"a": 1}, [1, 2], "y" * 257, ["a", 1], None]),
    }
    kind = name if name in kinds else draw.choice(list(kinds))
    return kinds[kind]()


NAMES = ["number", "string", "boolean", "list", "other", "mixed", "rare"]


def random_attributes(draw: random.Random) -> dict[str, Any]:
    chance = {"rare": 0.1, "number": 0.9, "string": 0.9}
    return {n: random_value(draw, n) for n in NAMES if draw.random() < chance.get(n, 0.5)}


def random_filter(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    if depth < 4 and draw.random() < 0.4:
        name = draw.choice(["and", "or", "not"])
        if name == "not":
            return {"not": random_filter(draw, depth + 1)}
        return {name: [random_filter(draw, depth + 1) for _ in range(draw.randint(0, 3))]}
    result: dict[str, Any] = {}
    for name in draw.sample([*NAMES, "absent"], draw.randint(1, 3)):
        # Only of a kind that the name has: others are refused.
        kind = draw.choice(["number", "string", "boolean", "list"]) if name == "mixed" else name
        values: dict[str, list[Any]] = {
            "number": NUMBERS, "string": STRINGS, "boolean": [True, False], "absent": STRINGS
        }  # fmt: skip
        if kind == "list":
            result[name] = {"contains": draw.choice(STRINGS)}
        elif kind not in values or draw.random() < 0.1:
            result[name] = {"exists": draw.random() < 0.5}
        elif draw.random() < 0.3:
            result[name] = some(draw, values[kind]) or draw.choice(values[kind])
        elif kind != "boolean" and draw.random() < 0.5:
            ops = draw.sample(list(COMPARE), draw.randint(1, 2))
            result[name] = {op: draw.choice(values[kind]) for op in ops}
        else:
            op = draw.choice(["eq", "ne", "in", "nin"])
            many = op in ("in", "nin")
            result[name] = {op: some(draw, values[kind]) if many else draw.choice(values[kind])}
    return result


def kind_of(value: Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def same(one: Any, other: Any) -> bool:
    if kind_of(one) is not kind_of(other):
        return False
    return float(one) == float(other) if kind_of(one) is float else bool(one == other)


def holds(wanted: dict[str, Any], item: dict[str, Any]) -> bool:
    """What a filter says of an item, word by word."""
    for name, content in wanted.items():
        if name == "and":
            result = all(holds(part, item) for part in content)
        elif name == "or":
            result = any(holds(part, item) for part in content)
        elif name == "not":
            result = not holds(content, item)
        else:
            operators = content if isinstance(content, dict) else {"in": content}
            if not isinstance(content, dict | list):
                operators = {"eq": content}
            result = all(fits(item.get(name), op, value) for op, value in operators.items())
        if not result:
            return False
    return True


def fits(value: Any, op: str, operand: Any) -> bool:
    if op == "exists":
        return (value is not None) == operand
    if op == "contains":
        return isinstance(value, list) and is_text(value) and operand in value
    if op in ("ne", "nin"):
        return not fits(value, {"ne": "eq", "nin": "in"}[op], operand)
    if op == "in":
        return any(fits(value, "eq", one) for one in operand)
    if isinstance(value, str) and len(value.encode()) > 256:
        return False
    if op == "eq":
        return same(value, operand)
    return kind_of(value) is kind_of(operand) and bool(COMPARE[op](value, operand))


def is_text(values: list[Any]) -> bool:
    return all(isinstance(one, str) for one in values)


def rows_of(items: dict[int, dict[str, Any]], seq: int) -> list[tuple[int, int, str]]:
    return [(item, seq, orjson.dumps(content).decode()) for item, content in items.items()]


def parsed(value: dict[str, Any]) -> AttributeFilter | None:
    return parse_filter(orjson.loads(orjson.dumps(value)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_filters_leave_what_python_leaves(seed: int) -> None:
    draw = random.Random(seed)
    items = {item: random_attributes(draw) for item in range(1, ITEMS)}
    # So that each name has every kind that random filters compare with.
    items[ITEMS] = {"number": 1, "string": "a", "boolean": True, "list": ["a"], "mixed": 1}
    items |= {ITEMS + 1: {"mixed": "a"}, ITEMS + 2: {"mixed": True}, ITEMS + 3: {"mixed": ["a"]}}
    attributes, size = Attributes().updated(rows_of(items, 1)), ITEMS + 5
    for seq in range(2, 8):
        for _ in range(20):
            wanted = random_filter(draw)
            checked = parsed(wanted)
            if checked is None:
                continue
            expected = [item for item in range(1, size) if holds(wanted, items.get(item, {}))]
            mask = attributes.mask(checked, size)
            assert np.flatnonzero(mask[1:]).tolist() == [item - 1 for item in expected], wanted
            assert attributes.fits_without(checked.condition) == holds(wanted, {})
        changed = {i: random_attributes(draw) for i in draw.sample(range(1, ITEMS), 5)}
        later = attributes.updated(rows_of(changed, seq))
        for name in NAMES:
            before, after = attributes.state([name]), later.state([name])
            pairs = [(items.get(i, {}).get(name), value.get(name)) for i, value in changed.items()]
            if all(kind_of(a) is kind_of(b) and a == b for a, b in pairs):
                assert before == after
            elif any(type(a) is not type(b) for a, b in pairs if None in (a, b)):
                assert after == (seq,)
        items |= changed
        attributes = later


def test_filters_that_say_the_same_have_one_key() -> None:
    for one, other in (
        ('{"a":1,"b":"x"}', '{"b":{"eq":"x"},"a":[1.0,1]}'),
        ('{"a":{"gt":1,"lt":2}}', '{"and":[{"a":{"lt":2}},{"a":{"gt":1}},{"a":{"lt":2.0}}]}'),
        ('{"not":{"a":{"ne":1}}}', '{"a":1}'),
        ('{"or":[{"a":1},{"or":[{"b":2}]}]}', '{"or":[{"b":2},{"a":1}]}'),
        ('{"a":{"nin":["x"]}}', '{"a":{"ne":"x"}}'),
        ('{"a":{"exists":false}}', '{"not":{"a":{"exists":true}}}'),
    ):
        first, second = read_filter(one), read_filter(other)
        assert first is not None
        assert second is not None
        assert (first.key, first.names) == (second.key, second.names)
    keys = {
        text: read_filter(text).key  # type: ignore[union-attr]
        for text in (
            '{"a":1}', '{"a":true}', '{"a":"1"}', '{"a":{"contains":"1"}}', '{"a":{"lt":1}}',
            '{"a":{"lte":1}}', '{"a":{"ne":1}}', '{"b":1}', '{"a":[1,2]}', '{"a":1,"b":1}',
            '{"or":[{"a":1},{"b":1}]}', '{"a":[]}', '{"or":[]}',
        )
    }  # fmt: skip
    assert len(set(keys.values())) == len(keys)
    assert read_filter("{}") is None
    assert read_filter('{"and":[{},{"and":[]}]}') is None
    assert read_filter(None) is None


def deep(depth: int) -> str:
    return '{"not":' * depth + '{"a":1}' + "}" * depth


BAD = [
    ("", "the value is not JSON"),
    ("{", "the value is not JSON"),
    ("[" * 5_000, "the value is not JSON"),
    ("[]", "a filter is a JSON object"),
    ('"x"', "a filter is a JSON object"),
    ('{"or":{}}', "filter.or: `or` takes a list of filters"),
    ('{"or":[1]}', "filter.or[0]: a filter is a JSON object"),
    ('{"not":[]}', "filter.not: a filter is a JSON object"),
    ('{"a":{"between":[1,2]}}', "filter.a.between: unknown operator; the operators are eq, ne,"),
    ('{"a":{"eq":{"lt":1}}}', "filter.a.eq: a value is a string, a number or a boolean"),
    ('{"a":{}}', "filter.a: an operator is missing"),
    ('{"a":null}', 'filter.a: null is not a value; use {"exists": false} for a missing attribute'),
    ('{"a":[[1]]}', "filter.a: a value is a string"),
    ('{"a":{"lt":true}}', "filter.a.lt: `lt` takes a number or a string, not a boolean"),
    ('{"a":{"in":"x"}}', "filter.a.in: `in` takes a list of values"),
    ('{"a":{"exists":1}}', "filter.a.exists: `exists` takes true or false"),
    ('{"a":{"contains":1}}', "filter.a.contains: `contains` takes a string, not a number"),
    ('{"a":NaN}', "filter.a: a number must be finite"),
    ('{"a":1e999}', "filter.a: a number must be finite"),
    ('{"":1}', "filter.: the attribute's name must not be empty"),
    ('{"a":"\\u0000"}', "filter.a: a string must not contain NUL"),
    (f'{{"a":"{"x" * 257}"}}', "filter.a: a string is longer than 256 bytes"),
    (f'{{"{"x" * 257}":1}}', "the attribute's name is longer than 256 bytes"),
    (deep(50), "filter: the filter is more than 16 objects deep"),
    (
        orjson.dumps({"a": list(range(1_001))}).decode(),
        "filter: the filter has more than 1,000 values",
    ),
    (
        orjson.dumps({"or": [{"a": 1}] * 200}).decode(),
        "filter: the filter has more than 256 conditions",
    ),
    (f'{{"a":"{"x" * 9_000}"}}', "a query has at most 8,192 characters"),
]


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_what_is_no_filter_is_refused_and_told(text: str, problem: str) -> None:
    with pytest.raises(Unprocessable) as caught:
        read_filter(text)
    assert problem in str(caught.value)
    assert caught.value.code == "invalid_filter"


def test_boosts_have_the_limits_of_a_filter_together() -> None:
    boost = {"filter": {"a": list(range(400))}, "by": 1}
    assert len(parse_boosts([boost | {"by": 1}, {"filter": {"b": [1, 2]}, "by": 1}])) == 2
    with pytest.raises(
        Unprocessable, match=r"boost\[2\].filter: the filter has more than 1,000 values"
    ):
        parse_boosts([boost] * 3)


def test_values_of_a_kind_that_no_item_has_are_refused() -> None:
    attributes = Attributes().updated(
        [(1, 1, '{"price":5,"tags":["x"],"mixed":1,"deep":{"a":1}}'), (2, 1, '{"mixed":"a"}')]
    )
    for wanted, problem in (
        ({"price": {"lt": "cheap"}}, "filter.price: `lt` compares with a string, but the items' "
         "values are numbers"),
        ({"price": [1, "x"]}, "filter.price: `in` compares with a string"),
        ({"price": {"contains": "x"}}, "`contains` looks in a list, but the items' values are num"),
        ({"tags": "x"}, "the items' values are lists; `contains` looks in lists"),
        ({"mixed": True}, "compares with a boolean, but the items' values are numbers or strings"),
    ):  # fmt: skip
        checked = parsed(wanted)
        assert checked is not None
        with pytest.raises(Unprocessable, match="filter") as caught:
            attributes.mask(checked, 3)
        assert problem in str(caught.value)
        assert caught.value.code == "filter_type_mismatch"
    for fine in ({"mixed": 1}, {"mixed": [1, "b"]}, {"absent": "x"}, {"deep": 1}, {"price": []}):
        checked = parsed(fine)
        assert checked is not None
        attributes.mask(checked, 3)


def test_strings_that_no_item_has_any_more_take_no_memory() -> None:
    attributes = Attributes()
    for seq in range(1, 3 * SPARE_CODES):
        rows = [(1, seq, f'{{"at":"t{seq}","tags":["u{seq}"]}}'), (2, seq, '{"at":"fixed"}')]
        attributes = attributes.updated(rows)
    assert len(attributes.by_name["at"].words.codes) <= SPARE_CODES + 5
    assert len(attributes.by_name["tags"].words.codes) <= SPARE_CODES + 5
    for wanted, expected in (({"at": "fixed"}, [2]), ({"at": f"t{seq}"}, [1]), ({"at": "t1"}, [])):
        assert np.flatnonzero(attributes.mask(parsed(wanted), 3)).tolist() == expected  # type: ignore[arg-type]
    wanted = parsed({"tags": {"contains": f"u{seq}"}})
    assert wanted is not None
    assert np.flatnonzero(attributes.mask(wanted, 3)).tolist() == [1]


def row(item: int, seq: int, **attributes: Any) -> CatalogueRow:
    text = orjson.dumps(attributes).decode()
    return CatalogueRow(item, f"e{item}", None, [], False, False, seq, text)


async def test_a_mask_is_made_once_and_again_only_after_a_change_of_what_it_names() -> None:
    masks = FilterMasks(2**20)
    first = Catalogue().updated([row(n, n, price=n, brand="x") for n in range(1, 5)])
    wanted = parsed({"price": {"gte": 3}})
    assert wanted is not None
    mask = await masks.get(wanted, first)
    assert np.flatnonzero(mask.of(first.size)).tolist() == [3, 4]
    # Another attribute, another title, a new item: the same mask.
    other = first.updated([row(1, 5, price=1, brand="y")])
    other = other.updated([row(1, 6, price=1, brand="y")._replace(title="T"), row(9, 7)])
    assert other.size > first.size
    assert await masks.get(wanted, other) is mask
    assert np.flatnonzero(mask.of(other.size)).tolist() == [3, 4]
    changed = other.updated([row(1, 8, price=30, brand="y")])
    later = await masks.get(wanted, changed)
    assert np.flatnonzero(later.of(changed.size)).tolist() == [1, 3, 4]
    assert np.flatnonzero((await masks.get(wanted, first)).of(first.size)).tolist() == [3, 4]
    without = parsed({"price": {"nin": [1, 2]}})
    assert without is not None
    mask = await masks.get(without, first)
    grown = first.updated([row(7, 9)])  # an item without a price is none of these
    assert np.flatnonzero(mask.of(grown.size)).tolist() == [0, 3, 4, 5, 6, 7]


async def test_masks_are_bounded_in_bytes() -> None:
    catalogue = Catalogue().updated([row(n, n, price=n) for n in range(1, 5)])
    masks = FilterMasks(100_000)
    for price in range(50):
        wanted = parsed({"price": price})
        assert wanted is not None
        await masks.get(wanted, catalogue)
    assert 1 < len(masks.cache) < 10
    assert masks.cache.size <= 100_000


def test_the_rows_of_a_model_follow_its_ids() -> None:
    catalogue = Catalogue().updated([row(n, n, price=n % 3) for n in range(1, 30)])
    wanted = parsed({"price": 0})
    assert wanted is not None
    mask = FilterMask(catalogue.attributes.mask(wanted, catalogue.size), False)
    for internal in (np.array([5, 3, -1, 9, 12]), np.array([-1, -1]), np.zeros(0, np.int64)):
        rows = mask.rows(internal)
        assert rows.mask.tolist() == [i > 0 and i % 3 == 0 for i in internal.tolist()]
        assert rows.few is not None
        assert rows.few.tolist() == np.flatnonzero(rows.mask).tolist()
        assert mask.has_rows(internal)
