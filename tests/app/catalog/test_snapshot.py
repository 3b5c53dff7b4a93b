"""The immutable catalogue, by itself and as the service updates it."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from app.catalog import service
from app.catalog.repository import CatalogRepository
from app.catalog.snapshot import Catalogue, CatalogueRow
from app.wiring import Services

pytestmark = pytest.mark.anyio


def row(item: int, seq: int, *, categories: list[str], **more: Any) -> CatalogueRow:
    state = {"title": None, "hidden": False, "deleted": False} | more
    return CatalogueRow(id=item, external_id=f"e{item}", categories=categories, seq=seq, **state)


def test_an_update_makes_another_catalogue() -> None:
    first = Catalogue().updated(
        [row(1, 1, categories=["x"]), row(5, 2, categories=["x", "y"], title="T")]
    )
    assert first.size == 6
    assert first.categories["x"].tolist() == [1, 5]
    second = first.updated(
        [row(5, 3, categories=["z"]), row(1, 4, categories=[], deleted=True, title=None)]
    )
    assert set(second.categories) == {"z"}
    assert second.deleted == {1}
    assert second.visible.tolist() == [False] * 5 + [True]
    assert second.seq == 4
    assert first.categories["y"].tolist() == [5]
    assert second.updated([]) is second
    assert second.updated([row(1, 5, categories=["x"])]).deleted == frozenset()


@pytest.mark.parametrize(
    ("categories", "is_shown"),
    [(["x", "y"], False), (["y", "x", "x"], False), (["x"], True), (["x", "z"], True), ([], True)],
)
def test_lists_depend_on_the_categories_of_an_item(categories: list[str], is_shown: bool) -> None:
    state = Catalogue().updated([row(1, 1, categories=["x", "y", "x"]), row(2, 2, categories=[])])
    change = row(1, 3, categories=categories)
    assert list(state.shown_rows([change])) == ([change] if is_shown else [])
    assert (state.updated([change]).shown_seq == 3) == is_shown


async def test_a_change_that_no_list_shows_leaves_what_lists_are_made_from(
    services: Services,
) -> None:
    for name in "abc":
        await services.catalog.put(name, {"title": name, "categories": ["x"]})
    before = await services.catalog.catalogue()
    await services.catalog.patch("b", {"attributes": {"price": 1}})
    after = await services.catalog.catalogue()
    assert after.seq > before.seq
    assert (after.shown_seq, after.titles) == (before.shown_seq, before.titles)
    assert after.categories is before.categories
    for change in (
        {"title": "B"}, {"hidden": True}, {"hidden": False}, {"categories": ["x", "y"]},
        {"categories": ["y"]}, {"categories": []},
    ):  # fmt: skip
        await services.catalog.patch("b", change)
        before, after = after, await services.catalog.catalogue()
        b = after.internal_ids["b"]
        assert before.shown_seq < after.shown_seq == after.seq == after.shown[b]
        assert after.shown[after.internal_ids["a"]] < before.seq
    await services.catalog.delete("b")
    gone = await services.catalog.catalogue()
    assert gone.shown_seq > after.shown_seq
    await services.catalog.put("new", {})
    assert (await services.catalog.catalogue()).shown_seq > gone.shown_seq


async def test_the_catalogue_follows_every_change(services: Services) -> None:
    before = await services.catalog.catalogue()
    assert before.size == 0
    await services.catalog.put("a", {"title": "A", "categories": ["x"]})
    await services.catalog.put("b", {"title": "B", "hidden": True})
    catalogue = await services.catalog.catalogue()
    a, b = catalogue.internal_ids["a"], catalogue.internal_ids["b"]
    assert (catalogue.titles[a], catalogue.external_ids[a]) == ("A", "a")
    assert (bool(catalogue.visible[a]), bool(catalogue.visible[b])) == (True, False)
    assert catalogue.mask(["x", "absent"]).nonzero()[0].tolist() == [a]
    # Without a change it is the same instance; after one, the old instance stays as it was.
    assert await services.catalog.catalogue() is catalogue
    await services.catalog.patch("a", {"hidden": True})
    changed = await services.catalog.catalogue()
    assert changed.seq > catalogue.seq
    assert bool(catalogue.visible[a])
    assert not changed.visible[a]


@pytest.mark.parametrize("seed", range(5))
async def test_attributes_follow_changes_made_while_they_are_read(
    seed: int, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOADED_ROWS", 3)
    draw, stored = random.Random(seed), dict[str, dict[str, float]]()
    honest = CatalogRepository.attributes_in_order

    async def change() -> None:
        item = f"item {draw.randrange(12)}"
        if item in stored and draw.random() < 0.2:
            await services.catalog.delete(item)
            del stored[item]
        else:
            stored[item] = {n: float(draw.randrange(4)) for n in "ab" if draw.random() < 0.7}
            await services.catalog.put(item, {"attributes": stored[item]})
        if draw.random() < 0.5:  # others are taken in at the end of the reading
            await services.catalog.catalogue()

    async def in_order(repository: CatalogRepository, after: int, n: int) -> Any:
        rows = await honest(repository, after, n)
        for _ in range(draw.randrange(4)):
            await change()
        return rows

    for _ in range(20):
        await change()
    monkeypatch.setattr(CatalogRepository, "attributes_in_order", in_order)
    for names in (["a"], ["a", "b"]):
        await services.catalog.with_attributes(await services.catalog.catalogue(), names)
        catalogue = await services.catalog.catalogue()
        for name in names:
            attribute = catalogue.attributes.by_name.get(name)
            found = {}
            if attribute is not None and attribute.number is not None:
                ids = attribute.number.present()
                values = attribute.number.at(ids)
                found = {catalogue.external_ids[i]: v for i, v in zip(ids, values, strict=True)}
            assert found == {item: own[name] for item, own in stored.items() if name in own}


async def test_a_thread_takes_in_large_changes_and_those_of_large_catalogues(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline: list[bool] = []
    honest = Catalogue.updated

    def updated(catalogue: Catalogue, rows: Sequence[CatalogueRow]) -> Catalogue:
        inline.append(threading.current_thread() is threading.main_thread())
        return honest(catalogue, rows)

    monkeypatch.setattr(Catalogue, "updated", updated)
    monkeypatch.setattr(service, "MAX_INLINE_ROWS", 2)
    monkeypatch.setattr(service, "MAX_INLINE_ITEMS", 5)
    for items in ("ab", "cde"):  # internal ids begin with 1: after "cde" the size is 6
        await services.catalog.upsert_rows([{"id": item} for item in items])
        await services.catalog.catalogue()
    for change in ({"attributes": {"stock": 1}}, {"title": "A"}):  # lists show the second only
        await services.catalog.upsert_rows([{"id": "a", **change}])
        await services.catalog.catalogue()
    assert inline == [True, False, True, False]
