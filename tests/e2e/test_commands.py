"""Commands as a user runs them: help for each, answers on stdout, errors in one line."""

from __future__ import annotations

import gzip
import hashlib
import re
import sqlite3
import subprocess
import threading
import zipfile
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.core.migrations import head_revision, known_revisions
from app.registry.checkpoint_store import MARK, LocalCheckpointStore
from ncr_core.data.synthetic import synthetic_catalogue
from tests.e2e.support import ncr

pytestmark = pytest.mark.slow

COMMANDS = (
    "demo", "serve", "worker", "import", "download", "train", "evaluate", "db upgrade",
    "db downgrade",
    "backup", "restore", "export", "jobs list", "models list", "models activate", "models rollback",
    "trials list", "trials start", "trials stop",
)  # fmt: skip


def fails(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 1, (done.stdout, done.stderr)
    progress = ("read ", "import ", "verify ")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, done.stderr
    for text in says:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_has_help() -> None:
    for command in ("", *COMMANDS):
        done = ncr(*command.split(), "--help")
        assert done.returncode == 0, done.stderr
        assert "Usage: " in done.stdout


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ratings") / "ratings.csv.gz"
    rows = synthetic_catalogue(80, 130, 20).interactions
    text = "who,what,position\n" + "".join(f"{u},{i},{p}\n" for u, i, p in rows)
    path.write_bytes(gzip.compress(text.encode()))
    return path


@pytest.fixture(scope="module")
def checkpoint(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "deep" / "down"
    done = ncr(
        "train", "--data", ratings, "--user-column", "who", "--item-column", "what",
        "--model", "dncr", "--factors", 4, "--epochs", 2, "--min-interactions", 2, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"80 users, \d+ items, [\d,]+ interactions", done.stderr)
    assert "train dncr 2/2" in done.stderr
    return out


def test_train_and_evaluate(ratings: Path, checkpoint: Path) -> None:
    columns = ("--user-column", "who", "--item-column", "what")
    done = ncr("evaluate", checkpoint, "--data", ratings, *columns)
    assert done.returncode == 0, done.stderr
    sampled, full = done.stdout.splitlines()
    figure = r"HR@10 0\.\d{4} NDCG@10 0\.\d{4} \(80 users, \d+ items\)"
    assert re.fullmatch(f"sampled {figure}", sampled)
    assert re.fullmatch(f"full {figure}", full)


def test_a_checkpoint_is_not_overwritten_and_other_data_is_noticed(
    ratings: Path, checkpoint: Path, tmp_path: Path
) -> None:
    columns = ("--user-column", "who", "--item-column", "what")
    fails(ncr("train", "--data", ratings, *columns, "--out", checkpoint), "exists already")
    other = tmp_path / "other.csv"
    other.write_text("user,item\n" + "".join(f"u{n % 7},i{n}\n" for n in range(70)))
    done = ncr("evaluate", checkpoint, "--data", other)
    assert done.returncode == 1
    weights = (checkpoint / "model.safetensors").read_bytes()
    try:
        (checkpoint / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        fails(ncr("evaluate", checkpoint, "--data", ratings, *columns), "damaged", "SHA-256")
    finally:
        (checkpoint / "model.safetensors").write_bytes(weights)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--factors", "0"), "factors must be 1 to"),
        (("--layers", "9"), "layers must be 1 to 6"),
        (("--alpha", "2"), "alpha must be between"),
        (("--device", "cuda:7"), "does not exist"),
        (("--data", "/no/such/file"), "no/such/file"),
    ],
)
def test_bad_training_options_fail_before_time_is_spent(
    ratings: Path, tmp_path: Path, arguments: tuple[str, str], says: str
) -> None:
    fails(ncr("train", "--data", ratings, "--out", tmp_path / "x", *arguments), says)
    assert not (tmp_path / "x").exists()


def test_bad_rows_of_an_import_are_named_and_the_good_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("user,item,rating,timestamp\na,x,5,100\n,y,1,5\nb,y,nan,7\nc,z,1,2\n")
    done = ncr("import", path, data_dir=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("2 events added")
    assert "2 bad rows" in done.stdout
    assert "events.csv line 3" in done.stderr
    assert "events.csv line 4" in done.stderr
    path.write_text("user,item\n,x\nb,\n")  # nothing but bad rows
    done = ncr("import", path, data_dir=tmp_path)
    assert done.returncode == 1
    assert "events.csv line 2" in done.stderr
    assert "the import added nothing" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.csv", "", "empty"),
        ("other.csv", "a,b\n1,2\n", "user"),
        ("folder", None, "folder"),
        ("missing", None, "missing"),
    ],
)
def test_importing_what_cannot_be_read(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    elif name == "folder":
        path.mkdir()
        (path / "readme.txt").write_text("nothing here")
    fails(ncr("import", path, data_dir=tmp_path), says)


def test_backup_restore_and_export(tmp_path: Path) -> None:
    """What cannot be done is said in one line."""
    ratings = tmp_path / "ratings.csv"
    ratings.write_text("user,item,rating,timestamp\nann,a,5,100\nann,b,,200\nbob,a,1,300\n")
    old, new = tmp_path / "old", tmp_path / "new"
    file, folder = tmp_path / "backups" / "one.zip", tmp_path / "export"
    assert ncr("import", ratings, data_dir=old).returncode == 0

    done = ncr("backup", file, data_dir=old)
    assert done.returncode == 0, done.stderr
    assert "3 events, 2 users, 2 items, 0 models" in done.stdout
    assert [path.name for path in file.parent.iterdir()] == ["one.zip"]
    fails(ncr("backup", file, data_dir=old), "exists already")

    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(file.read_bytes()[:-100])
    done = ncr("restore", damaged, data_dir=new)
    fails(done, "cut short")
    assert not new.exists()  # nothing was begun
    fails(ncr("restore", tmp_path / "none.zip", data_dir=new), "none.zip", "No such file")
    done = ncr("restore", file, data_dir=new)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 events, 2 users, 2 items and 0 models restored")

    done = ncr("export", folder, data_dir=new)
    assert done.returncode == 0, done.stderr
    assert "3 events and 2 items" in done.stdout
    assert (folder / "events.csv").read_text().count("\n") == 4
    fails(ncr("export", tmp_path / "eve", "--user", "eve", data_dir=new), "the user does not exist")


def test_lists_and_activation(tmp_path: Path) -> None:
    assert "version" in ncr("models", "list", data_dir=tmp_path).stdout
    assert "status" in ncr("jobs", "list", data_dir=tmp_path).stdout
    fails(ncr("models", "activate", "nope", data_dir=tmp_path), "the model version does not exist")
    fails(ncr("models", "pin", "nope", data_dir=tmp_path), "the model version does not exist")
    fails(ncr("models", "rollback", data_dir=tmp_path), "no earlier version")
    assert "not pinned" in ncr("models", "unpin", data_dir=tmp_path).stderr
    assert "reason" in ncr("models", "history", data_dir=tmp_path).stdout
    assert "beside it" in ncr("trials", "list", data_dir=tmp_path).stdout
    fails(ncr("trials", "start", "nope", data_dir=tmp_path), "the model version does not exist")
    assert ncr("trials", "start", "nope", "--share", "2", data_dir=tmp_path).returncode == 2
    fails(ncr("trials", "stop", "nope", data_dir=tmp_path), "the trial does not exist")


def test_the_models_of_another_database_are_refused_at_the_start(tmp_path: Path) -> None:
    """As when a new database is tried on an old data folder."""
    for version in ("20261101-120000-00aa", "20261102-120000-00bb"):
        (tmp_path / "models" / version).mkdir(parents=True)
    marked = tmp_path / "marked"
    LocalCheckpointStore(marked).mark("another")
    for store in ({}, {"NCR_CHECKPOINT_STORE": str(marked)}):
        for command in (("serve", "--port", 0), ("worker",)):
            done = ncr(*command, data_dir=tmp_path, NCR_LOG_LEVEL="warning", **store)
            fails(done, "set another NCR_DATA_DIR or NCR_CHECKPOINT_STORE")
        assert ncr("models", "list", data_dir=tmp_path, **store).returncode == 0
    assert not (tmp_path / "models" / MARK).exists()
    assert len(list((tmp_path / "models").iterdir())) == 2


def test_unusable_settings_are_named_without_their_secrets(tmp_path: Path) -> None:
    fails(ncr("jobs", "list", data_dir=tmp_path, NCR_ADMIN_KEY="sh0rt"), "NCR_ADMIN_KEY")
    fails(ncr("worker", data_dir=tmp_path, NCR_TRAIN_SCHEDULE="at 3"), "NCR_TRAIN_SCHEDULE", "five")
    fails(
        ncr("serve", "--port", 0, data_dir=tmp_path, NCR_DEVICE="cuda:7"),
        "cuda:7",
        "does not exist",
    )
    absent = "postgresql://me:hunter2@127.0.0.1:1/x"
    for arguments, url, says in (
        (("jobs", "list"), "oracle://me:hunter2@db/x", "NCR_DATABASE_URL"),
        (("jobs", "list"), absent, "database"),
        (("serve", "--port", 0), absent, "database"),
    ):
        done = ncr(*arguments, NCR_DATABASE_URL=url)
        fails(done, says)
        assert "hunter2" not in done.stderr


def test_an_old_schema_on_postgresql_says_what_to_do(empty_database_url: str) -> None:
    done = ncr("jobs", "list", NCR_DATABASE_URL=empty_database_url)
    if empty_database_url.startswith("sqlite"):
        assert done.returncode == 0  # embedded databases migrate by themselves
        return
    fails(done, "ncr db upgrade")
    fails(ncr("serve", "--port", 0, NCR_DATABASE_URL=empty_database_url), "ncr db upgrade")
    fails(ncr("worker", NCR_DATABASE_URL=empty_database_url), "ncr db upgrade")
    assert ncr("db", "upgrade", NCR_DATABASE_URL=empty_database_url).returncode == 0
    assert ncr("jobs", "list", NCR_DATABASE_URL=empty_database_url).returncode == 0


def test_commands_that_only_read_migrate_nothing(tmp_path: Path) -> None:
    ncr_here = partial(ncr, data_dir=tmp_path)
    *older, before, head = sorted(known_revisions())
    fails(ncr_here("db", "downgrade"), "empty")
    assert f"at {head}" in ncr_here("db", "upgrade").stderr
    assert f"at {before}" in ncr_here("db", "downgrade").stderr
    for command in (
        *(("jobs", "list"), ("models", "list"), ("models", "history"), ("trials", "list")),
        *(("keys", "list"), ("backup", tmp_path / "b.zip"), ("export", tmp_path / "out")),
    ):
        fails(
            ncr_here(*command),
            f"is at {before}, but this version needs {head}: run `ncr db upgrade`",
        )
    for target in (head, "base"):
        fails(ncr_here("db", "downgrade", target), f"is at {before}", ", ".join(older))
    assert "at 0003" in ncr_here("db", "downgrade", "0003").stderr
    assert ncr_here("keys", "create", "shop").returncode == 0  # writes, and so migrates
    assert "shop" in ncr_here("keys", "list").stdout
    assert len(list(tmp_path.glob("ncr.db.00*"))) == 2


def test_a_newer_schema_that_is_compatible_is_used_and_kept(tmp_path: Path) -> None:
    assert ncr("keys", "create", "shop", data_dir=tmp_path).returncode == 0
    for oldest in (head_revision(), "9999"):
        with closing(sqlite3.connect(tmp_path / "ncr.db")) as database, database:
            database.execute("UPDATE alembic_version SET version_num = '9999'")
            database.execute("UPDATE instance SET compatible_from = ?", (oldest,))
        if oldest != "9999":
            assert "shop" in ncr("keys", "list", data_dir=tmp_path).stdout
            assert "at 9999" in ncr("db", "upgrade", data_dir=tmp_path).stderr
            fails(
                ncr("backup", tmp_path / "b.zip", data_dir=tmp_path),
                "at 9999",
                f"only the schema {head_revision()}",
            )
        else:
            fails(ncr("keys", "list", data_dir=tmp_path), "a newer version wrote it")
            fails(ncr("db", "upgrade", data_dir=tmp_path), "a newer version wrote it")
        fails(ncr("db", "downgrade", data_dir=tmp_path), "a newer version wrote it")


def test_download_from_a_local_server(tmp_path: Path) -> None:
    site, name = tmp_path / "site", "ml-latest-small"
    site.mkdir()
    with zipfile.ZipFile(site / f"{name}.zip", "w") as archive:
        archive.writestr(f"{name}/ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,4\n")
    checksum = hashlib.md5((site / f"{name}.zip").read_bytes()).hexdigest()
    (site / f"{name}.zip.md5").write_text(f"MD5 ({name}.zip) = {checksum}\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        done = ncr("download", name, tmp_path / "data", NCR_DOWNLOAD_BASE_URL=base)
        assert done.returncode == 0, done.stderr
        assert "acknowledge" in done.stderr.lower()
        assert done.stdout.strip() == str(tmp_path / "data" / name)
        (site / f"{name}.zip.md5").write_text(f"{'0' * 32}  {name}.zip\n")
        done = ncr("download", name, tmp_path / "other", NCR_DOWNLOAD_BASE_URL=base)
        assert done.returncode == 1
        assert "checksum" in done.stderr.lower() or "md5" in done.stderr.lower()
        server.shutdown()
    imported = ncr("import", tmp_path / "data" / name, data_dir=tmp_path / "var")
    assert imported.stdout.startswith("1 events added")
    fails(ncr("download", "netflix", tmp_path), "netflix")
