"""Files and folders appear whole or not at all, and never in the place of others."""

# ruff: noqa: PT012 - what fails is the end of the block

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from ncr_core import atomic_files
from ncr_core.atomic_files import (
    LEFTOVER_SECONDS,
    PRIVATE,
    atomic_file,
    atomic_folder,
    atomic_write,
    scratch_folder,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_written_file_appears_with_its_parents_and_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    with atomic_file(path, mode=PRIVATE) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" whole")
    assert path.read_bytes() == b"half whole"
    assert path.stat().st_mode & 0o777 == PRIVATE
    assert names(path.parent) == ["file"]


def test_an_existing_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"first")
    with pytest.raises(FileExistsError):
        atomic_write(path, b"second")
    assert path.read_bytes() == b"first"
    atomic_write(path, b"second", replace=True)
    assert path.read_bytes() == b"second"
    assert names(tmp_path) == ["file"]


def test_a_link_to_nothing_counts_as_taken(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "file", b"x")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_that_another_process_wrote_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:

        def refused(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(Path, "hardlink_to", refused)
        atomic_write(tmp_path / "free", b"x")
        assert (tmp_path / "free").read_bytes() == b"x"
    path = tmp_path / "file"
    with pytest.raises(FileExistsError), atomic_file(path) as file:
        file.write(b"mine")
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_fails_leaves_what_was_there(tmp_path: Path, replace: bool) -> None:
    path = tmp_path / "file"
    if replace:
        path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path, replace=replace) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == (["file"] if replace else [])
    assert not replace or path.read_bytes() == b"old"


def test_a_folder_appears_whole_and_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "folder"
    synced: list[str] = []
    sync = atomic_files.sync

    def recorded(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(atomic_files, "sync", recorded)
    with atomic_folder(folder) as staging:
        (staging / "in").mkdir()
        (staging / "in" / "file").write_bytes(b"x")
        assert names(folder.parent) == [staging.name]
        assert staging.name.startswith(".folder-")
    assert (folder / "in" / "file").read_bytes() == b"x"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert names(folder.parent) == ["folder"]
    assert synced == ["in", "file", staging.name, "a"]  # content first, the rename last


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "folder") as staging:
        (staging / "file").write_bytes(b"x")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("existing", "content"), [("refuse", b"old"), ("keep", b"old"), ("replace", b"new")]
)
@pytest.mark.parametrize("meanwhile", [True, False])
def test_an_existing_folder_is_refused_kept_or_replaced(
    tmp_path: Path,
    existing: Literal["refuse", "keep", "replace"],
    content: bytes,
    meanwhile: bool,
) -> None:
    folder = tmp_path / "folder"

    def occupy() -> None:
        folder.mkdir()
        (folder / "file").write_bytes(b"old")

    def write() -> None:
        with atomic_folder(folder, existing=existing) as staging:
            (staging / "file").write_bytes(b"new")
            if meanwhile:
                occupy()

    if not meanwhile:
        occupy()
    if existing == "refuse":
        with pytest.raises(FileExistsError):
            write()
    else:
        write()
    assert (folder / "file").read_bytes() == content
    assert names(tmp_path) == ["folder"]


def test_a_replacement_that_cannot_be_renamed_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target == folder and not path.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with (
        pytest.raises(OSError, match="Input/output"),
        atomic_folder(folder, existing="replace") as staging,
    ):
        (staging / "file").write_bytes(b"new")
    assert (folder / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["folder"]


def test_an_empty_folder_is_filled_and_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with atomic_folder(tmp_path / "folder", existing="keep") as staging:
        (staging / "file").write_bytes(b"new")
    assert names(tmp_path / "folder") == ["file"]
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(OSError), atomic_folder(tmp_path / "taken", existing="keep"):
        pass
    assert (tmp_path / "taken").read_bytes() == b"mine"


def test_a_file_in_the_place_of_a_parent_is_told_apart_from_a_taken_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(NotADirectoryError, match="taken"):
        atomic_write(tmp_path / "taken" / "file", b"x")


def test_a_scratch_folder_goes_at_the_end(tmp_path: Path) -> None:
    parent = tmp_path / "new" / "parent"
    with pytest.raises(ZeroDivisionError), scratch_folder(parent, ".work-") as folder:
        (folder / "file").write_text("x")
        raise ZeroDivisionError
    assert list(parent.iterdir()) == []


def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from ncr_core.atomic_files import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1]), '.work-') as folder:\n"
        "    (folder / 'file').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    other = tmp_path / ".work-by-somebody-else"
    other.mkdir()
    long_ago = (time.time() - LEFTOVER_SECONDS - 60,) * 2
    os.utime(other, long_ago)
    for name in (b"another machine", b"", b"\xff"):
        for is_old in (False, True):
            folder = tmp_path / f".work-{len(name)}-{is_old}"
            folder.mkdir()
            (folder / ".owner").write_bytes(name)  # nothing: the lock was refused
            if is_old:
                os.utime(folder / ".owner", long_ago)
                os.utime(folder, long_ago)
    with scratch_folder(tmp_path, ".work-") as mine:
        assert {path.name for path in tmp_path.iterdir()} == {
            other.name,
            mine.name,
            *(f".work-{len(name)}-False" for name in (b"another machine", b"", b"\xff")),
        }
        os.utime(mine / ".owner", long_ago)
        os.utime(mine, long_ago)
        with scratch_folder(tmp_path, ".work-") as second:  # an old one is in use all the same
            assert mine.is_dir()
            assert second.is_dir()


def test_a_removal_that_was_killed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
        scratch_folder(tmp_path, ".work-") as folder,
    ):
        (folder / "file").write_text("x")
        patch.setattr(Path, "unlink", killed)
    assert folder.is_dir()
    with scratch_folder(tmp_path, ".work-"):
        assert not folder.exists()
