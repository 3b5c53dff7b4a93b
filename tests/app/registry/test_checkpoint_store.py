"""Checkpoint stores: the contract of every one, and object storage that is damaged or away."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from app.core.errors import SettingsError
from app.core.settings import load_settings
from app.registry import object_store
from app.registry.checkpoint_store import MARK, CheckpointStore, check_files
from app.registry.object_store import RemoteCheckpointStore
from app.registry.service import open_checkpoint_store
from ncr_core import object_files
from ncr_core.checkpoint import load_checkpoint
from ncr_core.errors import CheckpointError
from ncr_core.manifest import MANIFEST
from tests.app.registry.conftest import SECRET, ObjectStore, contents, write

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
        for name in ("", ".", "..", "*", "../other", "/etc", "a/b", ".hidden", "my-model"):
            with pytest.raises(CheckpointError, match="not a version"):
                here.remove(name)
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


@pytest.fixture
def here(objects: ObjectStore, tmp_path: Path) -> RemoteCheckpointStore:
    return RemoteCheckpointStore(objects.url, tmp_path / "here")


@pytest.fixture
def there(objects: ObjectStore, tmp_path: Path) -> RemoteCheckpointStore:
    return RemoteCheckpointStore(objects.url, tmp_path / "there")


def nothing_came(store: RemoteCheckpointStore) -> bool:
    root = store.folder(ONE).parent
    return not list(root.iterdir())


@pytest.mark.slow
def test_a_version_is_never_overwritten(
    objects: ObjectStore, here: RemoteCheckpointStore, there: RemoteCheckpointStore
) -> None:
    write(here, ONE, seed=1)
    here.publish(ONE)
    write(there, ONE, seed=2)
    with pytest.raises(CheckpointError, match="never overwritten"):
        there.publish(ONE)
    assert objects.names() == {f"{ONE}/{name}" for name in contents(here.folder(ONE))}
    for name, content in contents(here.folder(ONE)).items():
        assert objects.files.cat_file(objects.path(f"{ONE}/{name}")) == content


@pytest.mark.slow
def test_the_manifest_is_uploaded_last_and_half_a_version_is_none(
    objects: ObjectStore,
    here: RemoteCheckpointStore,
    there: RemoteCheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checksum = write(here, ONE)
    create = here._files.create

    def broken(path: Path, name: str) -> None:
        if path.name == MANIFEST:
            raise OSError(5, "cut off")
        create(path, name)

    monkeypatch.setattr(here._files, "create", broken)
    with pytest.raises(CheckpointError, match="cannot be stored"):
        here.publish(ONE)
    assert objects.names() == {f"{ONE}/ids.json", f"{ONE}/model.safetensors"}
    with pytest.raises(CheckpointError, match="not in the store, or not yet"):
        there.fetch(ONE, checksum)
    monkeypatch.undo()
    here.publish(ONE)
    objects.files.rm_file(objects.path(f"{ONE}/ids.json"))
    with pytest.raises(CheckpointError, match=r"ids\.json .* damaged"):
        there.fetch(ONE, checksum)
    assert nothing_came(there)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "ids.json"])
def test_a_damaged_object_is_refused(
    objects: ObjectStore, here: RemoteCheckpointStore, there: RemoteCheckpointStore, name: str
) -> None:
    checksum = write(here, ONE)
    here.publish(ONE)
    whole = objects.flip(f"{ONE}/{name}")
    with pytest.raises(CheckpointError, match="damaged"):
        there.fetch(ONE, checksum)
    objects.files.pipe_file(objects.path(f"{ONE}/{name}"), whole[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        there.fetch(ONE, checksum)
    assert nothing_came(there)
    objects.files.pipe_file(objects.path(f"{ONE}/{name}"), whole)
    load_checkpoint(there.fetch(ONE, checksum))


@pytest.mark.slow
@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {"../up": {"bytes": 1, "sha256": "0"}},
        {"/etc/x": {"bytes": 1, "sha256": "0"}},
        {"..": {"bytes": 1, "sha256": "0"}},
        {"": {"bytes": 1, "sha256": "0"}},
        {"manifest.json": {"bytes": 1, "sha256": "0"}},
        {"a": {"bytes": -1, "sha256": "0"}},
        {"a": {"bytes": 2**60, "sha256": "0"}},
        {"a": {"bytes": "many", "sha256": "0"}},
        {"a": {"bytes": 1}},
        {f"f{n}": {"bytes": 1, "sha256": "0"} for n in range(99)},
    ],
)
def test_a_manifest_with_bad_names_or_sizes_is_refused(
    objects: ObjectStore, there: RemoteCheckpointStore, files: Any
) -> None:
    manifest = json.dumps({"format": "ncr-checkpoint/1", "files": files}).encode()
    objects.files.pipe_file(objects.path(f"{ONE}/{MANIFEST}"), manifest)
    with pytest.raises(CheckpointError, match="manifest"):
        there.fetch(ONE)
    assert nothing_came(there)


@pytest.mark.slow
def test_a_manifest_beyond_the_limit_is_not_downloaded(
    objects: ObjectStore, there: RemoteCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_MANIFEST_BYTES", 100)
    objects.files.pipe_file(objects.path(f"{ONE}/{MANIFEST}"), b" " * 101)
    with pytest.raises(CheckpointError, match="too large"):
        there.fetch(ONE)


@pytest.mark.slow
def test_a_large_file_is_downloaded_in_blocks(
    here: RemoteCheckpointStore, there: RemoteCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "BLOCK_BYTES", 100)
    checksum = write(here, ONE)
    here.publish(ONE)
    check_files(there.fetch(ONE, checksum), checksum)


@pytest.mark.slow
def test_a_damaged_copy_is_fetched_again_but_not_from_a_damaged_store(
    objects: ObjectStore, here: RemoteCheckpointStore
) -> None:
    checksum = write(here, ONE)
    here.publish(ONE)
    whole = contents(here.folder(ONE))
    (here.folder(ONE) / "ids.json").write_bytes(b"{}")
    assert here.fetch_again(ONE, checksum) == here.folder(ONE)
    assert contents(here.folder(ONE)) == whole
    (here.folder(ONE) / "ids.json").unlink()
    objects.flip(f"{ONE}/ids.json")
    with pytest.raises(CheckpointError, match="damaged in the store"):
        here.fetch_again(ONE, checksum)
    assert {path.name for path in here.folder(ONE).parent.iterdir()} == {ONE}


@pytest.mark.slow
def test_other_objects_in_the_bucket_stay(
    objects: ObjectStore, here: RemoteCheckpointStore
) -> None:
    objects.files.pipe_file(objects.path("notes/read.me"), b"somebody else's")
    objects.files.pipe_file(f"{objects.bucket}/checkpoints-2/{ONE}/{MANIFEST}", b"another store")
    before = objects.names()
    write(here, TWO)
    here.publish(TWO)
    assert here.list_old(time.time() + 3600) == [TWO]
    here.remove(TWO)
    assert objects.names() == before


@pytest.mark.slow
def test_local_copies_are_pruned_by_last_use(
    here: RemoteCheckpointStore, there: RemoteCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MIN_COPIES", 2)
    versions = [f"2026110{day}-120000-00aa" for day in range(1, 8)]
    there.mark("a-database")
    for version in versions:
        write(here, version)
        if version != versions[1]:
            here.publish(version)
    write(there, versions[1])  # its only copy: the store has none
    for version in (versions[0], *versions[2:6]):
        os.utime(there.fetch(version), (0, 0))
    there.fetch(versions[3])  # used
    there.fetch(versions[6])
    left = {path.name for path in there.folder(ONE).parent.iterdir()}
    assert left == {versions[1], versions[3], versions[6], MARK}


@pytest.mark.slow
def test_an_unreachable_store_is_one_line_without_secrets(
    objects: ObjectStore, here: RemoteCheckpointStore, there: RemoteCheckpointStore
) -> None:
    checksum = write(here, ONE)
    objects.stop()
    calls: list[Callable[[], object]] = [
        lambda: here.publish(ONE),
        lambda: there.fetch(ONE, checksum),
        lambda: there.fetch_candidates(ONE),
        lambda: there.remove(ONE),
        lambda: there.list_old(0),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="cannot be reached") as caught:
            call()
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
    objects.start()
    here.publish(ONE)
    load_checkpoint(there.fetch(ONE, checksum))


@pytest.mark.slow
def test_a_missing_bucket_and_missing_credentials_are_named(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = RemoteCheckpointStore("s3://no-such-bucket/x", tmp_path / "a")
    write(nowhere, ONE)
    with pytest.raises(CheckpointError, match="the bucket or file does not exist"):
        nowhere.publish(ONE)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(CheckpointError, match="set AWS_ACCESS_KEY_ID"):
        RemoteCheckpointStore(objects.url, tmp_path / "b").fetch(ONE)


@pytest.mark.slow
def test_a_hanging_store_times_out(
    objects: ObjectStore, there: RemoteCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.stop()
    with socket.create_server(("127.0.0.1", objects.port)):  # takes calls, never answers
        monkeypatch.setattr(object_files, "CALL_SECONDS", 0.5)
        with pytest.raises(CheckpointError, match="does not answer"):
            there.fetch(ONE)
        monkeypatch.setattr(object_files, "CALL_SECONDS", 60.0)
        threading.Timer(0.5, there.close).start()  # as when the server is told to stop
        with pytest.raises(CheckpointError, match="does not answer"):
            there.fetch(ONE)
