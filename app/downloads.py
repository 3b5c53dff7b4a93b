"""Fetching public data sets to try things on: checked, unpacked with care, all or nothing."""

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

from ncr_core.errors import NcrError

BASE_URL = "https://files.grouplens.org/datasets/movielens"
MAX_BYTES = 4 << 30
"""The most an archive, or what comes out of it, may take."""
MAX_FILES = 10_000
_TIMEOUT_S = 30.0
_CHUNK = 1 << 20
_MD5 = re.compile(r"\b[0-9a-fA-F]{32}\b")

OnProgress = Callable[[int, int | None], None]
"""Told the bytes that have come, and how many there will be if the server says so."""

_COMMON = (
    "For research, with acknowledgement in publications (F. Maxwell Harper and Joseph A. Konstan. "
    "2015. The MovieLens Datasets: History and Context. ACM TiiS 5, 4, Article 19. "
    "https://doi.org/10.1145/2827872) and without implying endorsement by the University of "
    "Minnesota or GroupLens. No commercial use without permission from GroupLens. "
)
_NOT_PASSED_ON = _COMMON + "No redistribution without permission."
_PASSED_ON_ALIKE = _COMMON + "Redistribution only under these same conditions."


class DownloadError(NcrError):
    """A data set that could not be fetched. Nothing of it is left behind."""


@dataclass(frozen=True)
class Dataset:
    """A data set that `download` knows."""

    name: str
    licence: str
    """What its publisher allows, in short; the archive has the full words."""
    md5: str | None = None
    """Known for archives that never change. It goes before what the server says."""

    @property
    def archive(self) -> str:
        """The archive's file name; its checksum is published beside it, under `.md5`."""
        return f"{self.name}.zip"


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset("ml-100k", _NOT_PASSED_ON, "0e33842e24a9c977be4e0107933c0723"),
        Dataset("ml-1m", _NOT_PASSED_ON, "c4d9eecfca2ab87c1945afe126590906"),
        # Brought up to date now and then: only the server knows its checksum.
        Dataset("ml-latest-small", _PASSED_ON_ALIKE),
        Dataset("ml-20m", _PASSED_ON_ALIKE, "cd245b17a1ae2cc31bb14903e1204af3"),
        Dataset("ml-25m", _PASSED_ON_ALIKE, "6b51fb2759a8657d3bfcbfc42b592ada"),
        Dataset("ml-32m", _PASSED_ON_ALIKE, "d472be332d4daa821edc399621853b57"),
    )
}


def dataset_named(name: str) -> Dataset:
    """Look a data set up.

    Raises:
        DownloadError: there is none of that name.
    """
    try:
        return DATASETS[name]
    except KeyError:
        known = ", ".join(DATASETS)
        raise DownloadError(f"no data set is called {name!r}; known are {known}") from None


def is_downloaded(name: str, directory: Path) -> bool:
    """Whether `download` would find the data set there already and do nothing."""
    target = directory / dataset_named(name).name
    return target.is_dir() and any(target.iterdir())


def download(
    name: str,
    directory: Path,
    *,
    base_url: str | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Fetch a data set into `directory/name`, unless it is there already.

    The folder appears whole or not at all.

    Args:
        name: one of `DATASETS`.
        directory: where its folder goes; made if need be.
        base_url: another server with the same archives.
        on_progress: told of each part that has come.

    Returns:
        the data set's folder.

    Raises:
        DownloadError: it could not be fetched, is damaged, or cannot be unpacked safely.
    """
    dataset = dataset_named(name)
    target = directory / dataset.name
    url = f"{_checked(base_url or BASE_URL).rstrip('/')}/{dataset.archive}"
    try:
        if is_downloaded(name, directory):
            return target
        if target.exists() and not target.is_dir():
            raise DownloadError(f"{target} is in the way: it is not a folder")
        directory.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{dataset.name}-", dir=directory) as scratch:
            part = Path(scratch, f"{dataset.archive}.part")
            expected = dataset.md5 or _published_md5(f"{url}.md5", dataset.archive)
            found = _fetch(url, part, on_progress)
            if found != expected:
                raise DownloadError(f"{url} is damaged: its MD5 is {found} instead of {expected}")
            unpacked = Path(scratch, dataset.name)
            _unpack(part, unpacked, dataset.name, url)
            if not is_downloaded(name, directory):  # another process may have been quicker
                unpacked.rename(target)
    except OSError as error:
        raise DownloadError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to the web, and never from HTTPS to HTTP."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(_checked(newurl)).scheme == "http" and req.type == "https":
            raise DownloadError(f"{req.full_url} redirects to {newurl}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable():
            return url
    except ValueError:
        pass
    raise DownloadError(f"not an http or https address: {url[:200]!r}")


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """A response; whatever goes wrong while it is read becomes one line that names the address."""
    opener = urllib.request.build_opener(_Redirects)
    opener.addheaders = [("User-Agent", "ncr-download"), ("Accept-Encoding", "identity")]
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            yield response
    except urllib.error.HTTPError as error:
        error.close()
        reason = " ".join(str(error.reason).split())  # the server's words, so of any shape
        raise DownloadError(f"{url}: the server answered {error.code} {reason}") from None
    except urllib.error.URLError as error:
        raise DownloadError(f"{url} cannot be reached: {error.reason}") from None
    except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        raise DownloadError(f"{url} broke off: {error or type(error).__name__}") from None


def _published_md5(url: str, archive: str) -> str:
    """The checksum that the server publishes.

    It guards against damage, not against the server: an archive that must be a certain one has its
    checksum in `DATASETS`.
    """
    with _opened(url) as response:
        text = response.read(4096).decode(errors="replace")
    lines = [line for line in text.splitlines() if _MD5.search(line)]
    lines.sort(key=lambda line: archive not in line)
    if not lines or (match := _MD5.search(lines[0])) is None:
        raise DownloadError(f"{url} has no MD5 in it")
    return match[0].lower()


def _fetch(url: str, part: Path, on_progress: OnProgress | None) -> str:
    """Write what an address has to a file, and return its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    done = 0
    with _opened(url) as response, part.open("wb") as file:
        length = response.headers.get("Content-Length") or ""
        total = int(length) if length.isdecimal() else None
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            if done > MAX_BYTES:
                raise DownloadError(f"{url} is larger than {MAX_BYTES} bytes")
            file.write(chunk)
            digest.update(chunk)
            if on_progress is not None:
                on_progress(done, total)
    if total is not None and done != total:  # http.client does not complain by itself
        raise DownloadError(f"{url} broke off after {done} of {total} bytes")
    return digest.hexdigest()


def _unpack(archive: Path, target: Path, top: str, url: str) -> None:
    """Unpack the regular files of an archive, without the one folder that holds them all."""
    try:
        with zipfile.ZipFile(archive) as unzipped:
            members = [(_safe(one, url), one) for one in unzipped.infolist() if not one.is_dir()]
            if not members or len(members) > MAX_FILES:
                raise DownloadError(f"{url} has {len(members)} files in it")
            if all(len(path.parts) > 1 and path.parts[0] == top for path, _ in members):
                members = [(path.relative_to(top), one) for path, one in members]
            left = MAX_BYTES
            target.mkdir()
            for path, member in members:
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                with unzipped.open(member) as source, file.open("xb") as sink:
                    # The sizes that an archive states are only a claim.
                    while chunk := source.read(_CHUNK):
                        left -= len(chunk)
                        if left < 0:
                            raise DownloadError(f"{url} unpacks to over {MAX_BYTES} bytes")
                        sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise DownloadError(f"{url} is not a whole zip archive: {error}") from None


def _safe(member: zipfile.ZipInfo, url: str) -> PurePosixPath:
    """Where a member goes, which is below the folder it is unpacked into."""
    path = PurePosixPath(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)
    outside = path.is_absolute() or ".." in path.parts or not path.parts
    # A backslash or a colon would be a separator or a drive on other systems.
    if outside or re.search(r"[\\:\0]", member.filename) or kind not in (0, stat.S_IFREG):
        raise DownloadError(f"{url} has a member that is not safe to unpack: {member.filename!r}")
    return path
