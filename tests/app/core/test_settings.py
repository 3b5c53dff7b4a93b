"""Settings: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

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
    logging_as_it_was: None,
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
