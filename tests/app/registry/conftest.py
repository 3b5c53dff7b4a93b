"""An object store of a test's own, and small checkpoints to keep in it."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import torch

from app.registry.checkpoint_store import CheckpointStore
from app.registry.schemas import Status
from app.registry.service import ModelRegistry
from app.wiring import Services
from ncr_core.checkpoint import save_checkpoint
from ncr_core.models import ModelConfig, build_model
from tests.app.conftest import add_small_data, publish_model

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

SECRET = "not-to-be-shown-4711"


class ObjectStore:
    """moto's S3 on a port of 127.0.0.1; can be stopped and started again.

    One serves all tests of a process: its end takes 0.4 s, and a client's start 0.3 s.
    """

    def __init__(self) -> None:
        self._server: ThreadedMotoServer | None = None
        self.port = 0
        self.files: Any = None
        self.start()

    def open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes a bucket for a test, and the environment that leads to it."""
        for name, value in {
            "AWS_ACCESS_KEY_ID": SECRET,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        self.bucket = f"ncr-{secrets.token_hex(6)}"
        if self.files is None:
            self.files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        self.files.mkdir(self.bucket)
        self.url = f"s3://{self.bucket}/checkpoints"

    def start(self) -> None:
        from moto.server import ThreadedMotoServer  # a second to import, for few tests

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def path(self, name: str) -> str:
        return f"{self.bucket}/checkpoints/{name}"

    def names(self) -> set[str]:
        """Everything in the store, by its name."""
        return {path.removeprefix(self.path("")) for path in self.files.find(self.bucket)}

    def flip(self, name: str) -> bytes:
        """Damages an object; what it was."""
        content: bytes = self.files.cat_file(self.path(name))
        damaged = bytearray(content)
        damaged[len(content) // 2] ^= 0x10
        self.files.pipe_file(self.path(name), bytes(damaged))
        return content

    def clear(self) -> None:
        if self._server is None:
            self.start()
        self.files.rm(self.bucket, recursive=True)


def write(store: CheckpointStore, version: str, seed: int = 0) -> str:
    """A small checkpoint where the store wants it; its checksum."""
    torch.manual_seed(seed)
    model = build_model(ModelConfig.from_dict({"kind": "nbpr", "factors": 2}), 3, 4)
    return save_checkpoint(
        store.folder(version),
        model,
        user_ids=["a", "b", "c"],
        item_ids=["w", "x", "y", "z"],
        item_counts=np.array([4, 3, 2, 1]),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def copies(services: Services, n: int, status: Status = "published") -> list[str]:
    """``n`` versions of one model, each published after the other."""
    registry = services.models
    await add_small_data(services)
    first = await publish_model(services)
    row = await registry.get(first)
    versions = [first]
    for number in range(1, n):
        version = registry.new_version()
        copy_folder(registry, first, version)
        other = row._replace(
            version=version,
            path=registry.stored_path(version),
            status=status,
            created_at=row.created_at + number,
        )
        await registry.publish(other)
        versions.append(version)
    return versions


def copy_folder(registry: ModelRegistry, version: str, to: str) -> None:
    shutil.copytree(registry.folder(version), registry.folder(to))
