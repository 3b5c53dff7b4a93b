"""Downloads of public data sets: verified, unpacked safely, all or nothing."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import stat
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from ncr_core.atomic_files import atomic_folder
from ncr_core.errors import NcrError

BASE_URL = "https://files.grouplens.org/datasets/movielens"
MAX_BYTES = 4 << 30
"""Limit of an archive, and of its unpacked content, in bytes."""
MAX_FILES = 10_000
TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 1 << 20

OnProgress = Callable[[int, int | None], None]
"""Called with the bytes received, and with the total if the server states it."""

_MD5 = re.compile(r"\b[0-9a-fA-F]{32}\b")
_COMMON = (
    "For research, with acknowledgement in publications (F. Maxwell Harper and Joseph A. Konstan. "
    "2015. The MovieLens Datasets: History and Context. ACM TiiS 5, 4, Article 19. "
    "https://doi.org/10.1145/2827872) and without implying endorsement by the University of "
    "Minnesota or GroupLens. No commercial use without permission from GroupLens. "
)
_NOT_PASSED_ON = _COMMON + "No redistribution without permission."
_PASSED_ON_ALIKE = _COMMON + "Redistribution only under these same conditions."


class DownloadError(NcrError):
    """A data set could not be fetched, and no part of the data set stays on disk."""


@dataclass(frozen=True)
class PublicDataset:
    """A data set that `download` can fetch."""

    name: str
    licence: str
    """A summary of the publisher's conditions; the archive has the full text."""
    md5: str | None = None
    """The MD5 of an archive that never changes; None: the server publishes the current MD5."""


DATASETS: dict[str, PublicDataset] = {
    dataset.name: dataset
    for dataset in (
        PublicDataset("ml-100k", _NOT_PASSED_ON, "0e33842e24a9c977be4e0107933c0723"),
        PublicDataset("ml-1m", _NOT_PASSED_ON, "c4d9eecfca2ab87c1945afe126590906"),
        PublicDataset("ml-latest-small", _PASSED_ON_ALIKE),  # updated now and then
        PublicDataset("ml-20m", _PASSED_ON_ALIKE, "cd245b17a1ae2cc31bb14903e1204af3"),
        PublicDataset("ml-25m", _PASSED_ON_ALIKE, "6b51fb2759a8657d3bfcbfc42b592ada"),
        PublicDataset("ml-32m", _PASSED_ON_ALIKE, "d472be332d4daa821edc399621853b57"),
    )
}


def find_dataset(name: str) -> PublicDataset:
    """The data set of a name. Raises DownloadError for an unknown name."""
    try:
        return DATASETS[name]
    except KeyError:
        known = ", ".join(DATASETS)
        raise DownloadError(f"unknown data set {name!r}; the data sets are {known}") from None


def is_downloaded(name: str, directory: Path) -> bool:
    """Whether the folder of the data set has files already, so that `download` does nothing."""
    target = directory / find_dataset(name).name
    return target.is_dir() and any(target.iterdir())


def download(
    name: str,
    directory: Path,
    *,
    base_url: str | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Fetches a data set into `directory/name`, unless that folder has files already.

    Args:
        name: one of `DATASETS`.
        directory: the parent of the data set's folder, created if necessary.
        base_url: another server with the same archives.
        on_progress: called for each block received.

    Returns:
        The data set's folder, which appears whole or not at all.

    Raises:
        DownloadError: the data set cannot be fetched, is damaged, or cannot be unpacked safely.
    """
    dataset = find_dataset(name)
    target = directory / dataset.name
    url = f"{_checked_url(base_url or BASE_URL).rstrip('/')}/{dataset.name}.zip"
    try:
        if is_downloaded(name, directory):
            return target
        if target.exists() and not target.is_dir():
            raise DownloadError(f"{target} already exists and is not a folder")
        directory.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryFile(dir=directory) as archive,  # on the disk that has the room
            atomic_folder(target, existing="keep") as unpacked,
        ):
            expected = dataset.md5 or _published_md5(url)
            actual = _fetch(url, archive, on_progress)
            if actual != expected:
                raise DownloadError(f"{url} is damaged: its MD5 is {actual} instead of {expected}")
            _unpack(archive, unpacked, dataset.name, url)
    except OSError as error:
        raise DownloadError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to HTTP or HTTPS, and never from HTTPS to HTTP."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(_checked_url(newurl)).scheme == "http" and req.type == "https":
            raise DownloadError(f"{req.full_url} redirects to {newurl}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable():
            return url
    except ValueError:
        pass
    raise DownloadError(f"not an http or https address: {url[:200]!r}")


@contextmanager
def _response(url: str) -> Iterator[Any]:
    """A response; any failure of reading becomes an error of one line that names the address."""
    opener = urllib.request.build_opener(_Redirects)
    opener.addheaders = [("User-Agent", "ncr-download"), ("Accept-Encoding", "identity")]
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS) as response:
            yield response
    except urllib.error.HTTPError as error:
        error.close()
        reason = " ".join(str(error.reason).split())  # the server's text may have line breaks
        raise DownloadError(f"{url}: the server answered {error.code} {reason}") from None
    except urllib.error.URLError as error:
        raise DownloadError(f"{url} cannot be reached: {error.reason}") from None
    except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        raise DownloadError(f"{url} stopped: {error or type(error).__name__}") from None


def _published_md5(url: str) -> str:
    """The MD5 that the server publishes, which detects damage and not a malicious server."""
    with _response(f"{url}.md5") as response:
        text = response.read(4096).decode(errors="replace")
    lines = [line for line in text.splitlines() if _MD5.search(line)]
    # The line of this archive first, if the file lists several.
    lines.sort(key=lambda line: url.rpartition("/")[2] not in line)
    if not lines or (match := _MD5.search(lines[0])) is None:
        raise DownloadError(f"{url}.md5 has no MD5 in it")
    return match[0].lower()


def _fetch(url: str, file: IO[bytes], on_progress: OnProgress | None) -> str:
    """Writes the content of an address to a file and returns its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    received = 0
    with _response(url) as response:
        length = response.headers.get("Content-Length") or ""
        total = int(length) if length.isdecimal() else None
        while block := response.read(BLOCK_BYTES):
            received += len(block)
            if received > MAX_BYTES:
                raise DownloadError(f"{url} is larger than {MAX_BYTES} bytes")
            file.write(block)
            digest.update(block)
            if on_progress is not None:
                on_progress(received, total)
    if total is not None and received != total:  # http.client does not check it
        raise DownloadError(f"{url} stopped after {received} of {total} bytes")
    return digest.hexdigest()


def _unpack(archive: IO[bytes], folder: Path, top: str, url: str) -> None:
    """Unpacks the regular files of an archive, without a common parent folder ``top``."""
    try:
        with zipfile.ZipFile(archive) as unzipped:
            members = [
                (_safe_path(one, url), one) for one in unzipped.infolist() if not one.is_dir()
            ]
            if not members or len(members) > MAX_FILES:
                raise DownloadError(f"{url} has {len(members)} files in it")
            if all(len(path.parts) > 1 and path.parts[0] == top for path, _ in members):
                members = [(path.relative_to(top), member) for path, member in members]
            remaining = MAX_BYTES
            for path, member in members:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with unzipped.open(member) as source, target.open("xb") as file:
                    # Counted here: the sizes that an archive states may be wrong.
                    while block := source.read(BLOCK_BYTES):
                        remaining -= len(block)
                        if remaining < 0:
                            raise DownloadError(f"{url} unpacks to over {MAX_BYTES} bytes")
                        file.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise DownloadError(f"{url} is not a whole zip archive: {error}") from None


def _safe_path(member: zipfile.ZipInfo, url: str) -> PurePosixPath:
    """A member's path, checked to lie below the target folder."""
    path = PurePosixPath(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)
    outside = path.is_absolute() or ".." in path.parts or not path.parts
    # A backslash or a colon would be a separator or a drive on other systems.
    if outside or re.search(r"[\\:\0]", member.filename) or kind not in (0, stat.S_IFREG):
        raise DownloadError(f"{url} has a member that is not safe to unpack: {member.filename!r}")
    return path
