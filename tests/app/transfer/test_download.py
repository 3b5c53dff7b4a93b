"""Downloads, from a server in this process that answers well, badly or not at all."""

from __future__ import annotations

import hashlib
import http.client
import io
import socket
import stat
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.transfer import download as module
from app.transfer.download import DATASETS, DownloadError, download, is_downloaded

NAME = "ml-latest-small"  # has no checksum of its own, so the server's counts
ZIP = f"/sets/{NAME}.zip"


@dataclass
class Site:
    """What the server has, and what it was asked for."""

    url: str
    pages: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def publish(self, data: bytes, name: str = NAME) -> None:
        """Put an archive there with its checksum."""
        self.pages[f"/sets/{name}.zip"] = data
        line = f"MD5 ({name}.zip) = {hashlib.md5(data).hexdigest()}\n"
        self.pages[f"/sets/{name}.zip.md5"] = line.encode()


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.asked.append(self.path)
            if self.path in here.redirects:
                self.send_response(302)
                self.send_header("Location", here.redirects[self.path])
                self.end_headers()
            elif self.path in here.pages:
                data = here.pages[self.path]
                self.send_response(200)
                length = here.claimed.get(self.path, len(data))
                if length >= 0:
                    self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(data)
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here = Site(f"http://127.0.0.1:{server.server_port}/sets")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield here
    server.shutdown()
    server.server_close()
    thread.join()


def zipped(files: dict[str, str | bytes], mode: int = 0) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    return data.getvalue()


GOOD = zipped({f"{NAME}/": "", f"{NAME}/ratings.csv": "userId\n" * 99, f"{NAME}/a/b.txt": "b"})


def refused(site: Site | str, directory: Path, name: str = NAME) -> str:
    """The message with which a download fails, leaving nothing behind."""
    with pytest.raises(DownloadError) as caught:
        download(name, directory, base_url=site if isinstance(site, str) else site.url)
    assert "\n" not in str(caught.value)
    assert not directory.exists() or list(directory.iterdir()) == []
    return str(caught.value)


def test_a_download_is_verified_and_unpacked(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD)
    steps: list[tuple[int, int | None]] = []
    directory = tmp_path / "made" / "for it"
    assert not is_downloaded(NAME, directory)
    folder = download(
        NAME, directory, base_url=f"{site.url}/", on_progress=lambda *step: steps.append(step)
    )
    assert folder == directory / NAME
    assert (folder / "ratings.csv").read_text() == "userId\n" * 99
    assert (folder / "a" / "b.txt").read_text() == "b"
    assert list(directory.iterdir()) == [folder]
    assert steps[-1] == (len(GOOD), len(GOOD))
    assert is_downloaded(NAME, directory)


def test_a_data_set_that_is_there_is_not_fetched(site: Site, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "mine").write_text("mine")
    assert download(NAME, tmp_path, base_url=site.url) == tmp_path / NAME
    assert site.asked == []
    assert [path.name for path in (tmp_path / NAME).iterdir()] == ["mine"]


def test_an_empty_folder_is_filled_and_a_file_is_not_overwritten(
    site: Site, tmp_path: Path
) -> None:
    site.publish(GOOD)
    (tmp_path / NAME).mkdir()
    assert (download(NAME, tmp_path, base_url=site.url) / "ratings.csv").exists()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / NAME).write_text("mine")
    with pytest.raises(DownloadError, match="already exists and is not a folder"):
        download(NAME, tmp_path / "x", base_url=site.url)
    with pytest.raises(DownloadError, match="cannot be written"):
        download(NAME, tmp_path / "x" / NAME / "below", base_url=site.url)


def test_an_archive_without_the_folder_around_it(site: Site, tmp_path: Path) -> None:
    site.publish(zipped({"ratings.csv": "x", f"{NAME}/more.csv": "y"}))
    folder = download(NAME, tmp_path, base_url=site.url)
    assert (folder / "ratings.csv").read_text() == "x"
    assert (folder / NAME / "more.csv").read_text() == "y"


def test_a_checksum_file_may_list_several_archives(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD)
    right = hashlib.md5(GOOD).hexdigest().upper()
    site.pages[f"{ZIP}.md5"] = f"{'0' * 32}  other.zip\n{right} *{NAME}.zip\n".encode()
    download(NAME, tmp_path, base_url=site.url)


def test_a_wrong_or_missing_checksum_is_refused(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD)
    site.pages[ZIP] = GOOD + b"x"
    assert "damaged" in refused(site, tmp_path)
    site.pages[f"{ZIP}.md5"] = b"<html>hello</html>"
    assert "no MD5" in refused(site, tmp_path)


def test_a_known_checksum_goes_before_the_published_one(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD, "ml-1m")
    assert "c4d9eecfca2ab87c1945afe126590906" in refused(site, tmp_path, "ml-1m")
    assert site.asked == ["/sets/ml-1m.zip"]


def test_404_and_unknown_names_are_one_line(site: Site, tmp_path: Path) -> None:
    assert f"{site.url}/{NAME}.zip.md5: the server answered 404" in refused(site, tmp_path)
    assert "ml-1m.zip: the server answered 404" in refused(site, tmp_path, "ml-1m")
    message = refused(site, tmp_path, "ml-2")
    assert all(name in message for name in DATASETS)


def test_an_unreachable_server_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert f"127.0.0.1:{port}" in refused(f"http://127.0.0.1:{port}", tmp_path)


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        assert "timed out" in refused(f"http://127.0.0.1:{port}", tmp_path)


def test_a_truncated_response_is_refused(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD)
    site.claimed[ZIP] = len(GOOD) + 10
    assert f"stopped after {len(GOOD)} of" in refused(site, tmp_path)
    site.claimed[ZIP] = -1  # no length given: the checksum finds out
    site.pages[ZIP] = GOOD[:-5]
    assert "damaged" in refused(site, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../out.txt", f"{NAME}/../../out.txt", "/out.txt", "a\\..\\out.txt", "C:out.txt"],
)
def test_members_outside_the_folder_are_refused(site: Site, tmp_path: Path, name: str) -> None:
    site.publish(zipped({f"{NAME}/ratings.csv": "x", name: "x"}))
    assert "not safe" in refused(site, tmp_path / "in" / "here")
    assert not list(tmp_path.rglob("out.txt"))


def test_symbolic_links_are_refused(site: Site, tmp_path: Path) -> None:
    site.publish(zipped({f"{NAME}/link": "/etc/passwd"}, mode=stat.S_IFLNK | 0o777))
    assert "not safe" in refused(site, tmp_path)


def test_members_that_overlap_are_refused(site: Site, tmp_path: Path) -> None:
    site.publish(zipped({"a": "x", "a/b": "x"}))
    assert "cannot be written" in refused(site, tmp_path)


def test_archives_beyond_the_limits_are_refused(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(zipped({"a": b"\0" * 50_000, "b": b"\0" * 60_000}))
    monkeypatch.setattr(module, "MAX_BYTES", 100_000)
    assert "unpacks to over" in refused(site, tmp_path)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert "is larger than" in refused(site, tmp_path)
    monkeypatch.setattr(module, "MAX_FILES", 1)
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    assert "2 files" in refused(site, tmp_path)


def test_a_file_that_is_no_zip_is_refused(site: Site, tmp_path: Path) -> None:
    site.publish(b"hello")
    assert "not a whole zip" in refused(site, tmp_path)
    site.publish(zipped({}))
    assert "0 files" in refused(site, tmp_path)
    broken = bytearray(zipped({"a": bytes(range(256)) * 99}))
    broken[40:60] = b"\xff" * 20
    site.publish(bytes(broken))
    assert "not a whole zip" in refused(site, tmp_path)


@pytest.mark.parametrize(
    "address", ["file:///etc", "ftp://example.org", "example.org", "http://", "http://a\nb", "x:"]
)
def test_addresses_other_than_http_are_refused(tmp_path: Path, address: str) -> None:
    assert "not an http or https address" in refused(address, tmp_path)


def test_redirects_are_followed_but_not_to_files_or_in_circles(site: Site, tmp_path: Path) -> None:
    site.publish(GOOD)
    site.pages["/moved.zip"] = site.pages.pop(ZIP)
    site.redirects[ZIP] = "/moved.zip"
    assert is_downloaded(download(NAME, tmp_path / "a", base_url=site.url).name, tmp_path / "a")
    site.redirects[ZIP] = "file:///etc/passwd"
    assert "302" in refused(site, tmp_path / "b")
    site.redirects[ZIP] = f"{site.url}/{NAME}.zip"
    assert "302" in refused(site, tmp_path / "b")


def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = urllib.request.Request("https://example.org/a.zip")
    redirect = module._Redirects().redirect_request
    headers = http.client.HTTPMessage()
    target = "http://example.org/a.zip"
    with pytest.raises(DownloadError, match="not encrypted"):
        redirect(request, io.BytesIO(), 302, "Found", headers, target)
    assert redirect(request, io.BytesIO(), 302, "Found", headers, "https://example.org/b")


def test_each_data_set_says_its_licence() -> None:
    assert list(DATASETS) == [
        "ml-100k", "ml-1m", "ml-latest-small", "ml-20m", "ml-25m", "ml-32m",
    ]  # fmt: skip
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert "research" in dataset.licence
        assert "Harper" in dataset.licence
