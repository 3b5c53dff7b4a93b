"""Settings: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.common import logged_settings, quiet_settings
from app.core.errors import SettingsError
from app.core.settings import (
    Settings,
    load_settings,
    normalise_database_url,
    unknown_variables,
)

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"),
        ("sqlite:////a/x.db", "sqlite+aiosqlite:////a/x.db"),
        ("postgres://u:p@h:5/d", "postgresql+psycopg://u:p@h:5/d"),
        ("postgresql://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+psycopg://h/d?sslmode=require", "postgresql+psycopg://h/d?sslmode=require"),
    ],
)
def test_database_urls_get_asynchronous_drivers(given: str, used: str) -> None:
    assert normalise_database_url(given) == used


@pytest.mark.parametrize(
    "url", ["mysql://u:hunter22@h/d", "hunter22", "sqlite://", "sqlite:///:memory:"]
)
def test_refused_database_urls_are_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(database_url=url)
    assert "hunter22" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_is_a_file_in_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCR_DATA_DIR", "/data")
    assert load_settings().effective_database_url == "sqlite+aiosqlite:////data/ncr.db"


def test_settings_errors_are_one_line_without_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCR_ADMIN_KEY", "hunter22")
    monkeypatch.setenv("NCR_CANDIDATES", "many")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    message = str(caught.value)
    assert "NCR_ADMIN_KEY" in message
    assert "16 characters" in message
    assert "NCR_CANDIDATES" in message
    assert "hunter22" not in message
    assert "\n" not in message


def test_settings_hide_secrets() -> None:
    assert KEY not in repr(load_settings(admin_key=KEY))


def test_variables_that_are_no_setting_are_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCR_TEST_POSTGRES_URL", "NCR_DOWNLOAD_BASE_URL", "NCR_DATA_DIR", "ncr_device"):
        monkeypatch.setenv(name, "cpu")
    assert unknown_variables() == {}
    monkeypatch.setenv("NCR_ADMINKEY", KEY)
    monkeypatch.setenv("NCR_ZZZ", "x")
    assert unknown_variables() == {"NCR_ADMINKEY": "NCR_ADMIN_KEY", "NCR_ZZZ": None}


@pytest.mark.parametrize("settings_of", [logged_settings, quiet_settings])
def test_a_command_warns_of_a_misspelt_variable_without_its_value(
    settings_of: Callable[[], Settings],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NCR_ADMINKEY", KEY)
    settings_of()
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["level"], said["variable"], said["nearest"]) == (
        "warning", "NCR_ADMINKEY", "NCR_ADMIN_KEY",
    )  # fmt: skip
    assert KEY not in line


def test_every_setting_has_a_description() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ADMIN_KEY", KEY), ("DATABASE_URL", "postgresql://u:pw@h/d")):
        (tmp_path / name).write_text(f"{value}\n")
        monkeypatch.setenv(f"NCR_{name}_FILE", str(tmp_path / name))
    settings = load_settings()
    assert settings.admin_key is not None
    assert settings.admin_key.get_secret_value() == KEY
    assert settings.effective_database_url == "postgresql+psycopg://u:pw@h/d"
    assert load_settings(database_url="sqlite:///x.db").database_url == "sqlite+aiosqlite:///x.db"
    assert unknown_variables() == {}
    monkeypatch.setenv("NCR_ADMIN_KEY", KEY)
    with pytest.raises(SettingsError, match="NCR_ADMIN_KEY and NCR_ADMIN_KEY_FILE are both set"):
        load_settings()
    monkeypatch.delenv("NCR_ADMIN_KEY")
    (tmp_path / "ADMIN_KEY").write_text("hunter2")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)
    (tmp_path / "ADMIN_KEY").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings()
    (tmp_path / "ADMIN_KEY").unlink()
    with pytest.raises(SettingsError, match="No such file"):
        load_settings()
