"""The contract of every checkpoint store, and addresses that are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from app.core.errors import SettingsError
from app.core.settings import load_settings
from app.registry import object_store
from app.registry.checkpoint_store import CheckpointStore
from app.registry.service import open_checkpoint_store
from ncr_core.checkpoint import load_checkpoint
from ncr_core.errors import CheckpointError
from tests.app.object_store import SECRET, contents, write

ONE, TWO = "20261101-120000-00aa", "20261102-120000-00bb"

Machine = Callable[[str], CheckpointStore]


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CANDIDATES_POLL_SECONDS", 0.0)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow), "memory", "file"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """Builds the store as a machine with a data folder of its own sees it."""
    shared = tmp_path / "shared"
    url = {
        "folder": str(shared),
        "memory": f"memory://{tmp_path.name}",
        "file": f"file://{shared}",
    }.get(request.param) or request.getfixturevalue("objects").url
    yield lambda name: open_checkpoint_store(
        load_settings(data_dir=tmp_path / name, checkpoint_store=url)
    )
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{tmp_path.name}"):
            memory.rm(f"/{tmp_path.name}", recursive=True)


class TestEveryStore:
    """What all of them promise."""

    def test_another_machine_gets_what_was_published(self, machine: Machine) -> None:
        here, there = machine("here"), machine("there")
        checksum = write(here, ONE)
        here.publish(ONE)
        folder = there.fetch(ONE, checksum)
        assert contents(folder) == contents(here.folder(ONE))
        assert list(load_checkpoint(folder).item_ids) == ["w", "x", "y", "z"]
        assert there.fetch(ONE) == folder  # and it stays
        assert there.fetch_again(ONE, checksum) is None
        here.publish(ONE)  # as after an answer that was lost
        assert {path.name for path in folder.parent.iterdir()} == {ONE}

    def test_candidates(self, machine: Machine) -> None:
        here, there = machine("here"), machine("there")
        write(here, ONE)
        here.publish(ONE)
        here.publish_candidates(ONE)  # there are none
        assert there.fetch_candidates(ONE) is None
        for content in (b"first", b"of another attempt"):
            path = here.folder(ONE).with_name(f"{ONE}.candidates.safetensors")
            path.write_bytes(content)
            here.publish_candidates(ONE)
        found = there.fetch_candidates(ONE)
        assert found is not None
        assert found.read_bytes() == b"of another attempt"

    def test_what_is_removed_is_gone_for_all(self, machine: Machine) -> None:
        here = machine("here")
        for version in (ONE, TWO):
            write(here, version)
            here.publish(version)
        here.remove(ONE)
        here.remove(ONE)
        assert not here.folder(ONE).exists()
        with pytest.raises(CheckpointError):
            load_checkpoint(machine("there").fetch(ONE))
        load_checkpoint(machine("there").fetch(TWO))

    def test_old_folders_are_found(self, machine: Machine) -> None:
        here = machine("here")
        assert here.list_old(time.time() + 3600) == []
        write(here, ONE)
        here.publish(ONE)
        assert here.list_old(time.time() - 3600) == []
        assert here.list_old(time.time() + 3600) == [ONE]
        assert machine("there").list_old(time.time() + 3600) == [ONE]

    def test_a_name_that_is_no_version_is_refused(self, machine: Machine) -> None:
        here = machine("here")
        for name in ("", "..", "../other", "/etc", "a/b", f"{ONE}/..", f"{ONE}\n", "ids.json"):
            for call in (here.folder, here.fetch, here.fetch_candidates):
                with pytest.raises(CheckpointError, match="not a version"):
                    call(name)
        write(here, ONE)
        for name in ("", ".", "..", "../other", "/etc", "a/b", ".hidden"):
            with pytest.raises(CheckpointError, match="not a folder"):
                here.remove(name)
        here.remove("*")
        assert here.folder(ONE).is_dir()


@pytest.mark.parametrize(
    "url",
    [f"s3://key:{SECRET}@bucket/x", f"s3://bucket/x?secret={SECRET}", "simplecache::s3://bucket/x"],
)
def test_a_url_with_credentials_or_options_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="NCR_CHECKPOINT_STORE") as caught:
        load_settings(checkpoint_store=url)
    assert SECRET not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="NCR_CHECKPOINT_STORE cannot be used"):
        open_checkpoint_store(load_settings(data_dir=tmp_path, checkpoint_store="gopher://hole"))

    def missing(*args: Any, **more: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(SettingsError, match=r"neural-collaborative-ranking\[s3\]"):
        open_checkpoint_store(load_settings(data_dir=tmp_path, checkpoint_store="s3://bucket"))
