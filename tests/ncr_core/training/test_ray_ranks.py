"""Ranks of a Ray cluster of this machine: they train, and go on after one is killed."""

from __future__ import annotations

import copy
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from ncr_core.data import Split
from ncr_core.errors import TrainingError
from ncr_core.evaluation.protocols import full_ranks
from ncr_core.evaluation.vector_ranks import VectorRanks
from ncr_core.models import ModelConfig
from ncr_core.recipes import tuned
from ncr_core.training import Progress, rank_engine, ray_ranks
from ncr_core.training.pretraining import start_model
from ncr_core.training.ray_ranks import RayEngine
from ncr_core.training.trainer import TrainingPhase, train_loop
from tests.cluster.process import children_of, free_port, wait_until
from tests.ncr_core.conftest import wild_model

# Not imported here: Ray reads its token when it is imported, and the token is ours to set.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCR_ADMIN_KEY", "secret")
        ranks = RayEngine(2, "replicated", tmp_path_factory.mktemp("ray"), None)
        yield ranks
        ranks.close()


def _ray_ranks() -> list[int]:
    """The processes of Ray's workers that train, below this process."""
    found, looked = [], [os.getpid()]
    while looked:
        for pid in children_of(looked.pop()):
            looked.append(pid)
            with suppress(OSError):
                if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def test_training_goes_on_from_the_last_epoch_after_a_rank_is_killed(
    phases: RayEngine, split: Split
) -> None:
    split = split.with_validation_in_train()  # all epochs are run, and the last is kept
    recipe = tuned("NBPR history").with_(
        epochs=4, device="cpu", dropout=0.0, learning_rate=1e-5, optimizer="sparse", batch_size=64
    )
    model = start_model(recipe.model, recipe.training, split)
    alone = copy.deepcopy(model)
    phase = TrainingPhase("train", 4, 1e-5)
    epochs: list[int] = []
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        epochs.append(progress.epoch)
        if not killed:
            killed.extend(_ray_ranks()[-1:])
            os.kill(killed[0], signal.SIGKILL)

    history = phases(model, split, recipe.training, phase, kill_once)
    assert killed
    assert 1 not in epochs[1:]
    assert len(history.loss) == 4
    train_loop(alone, split, recipe.training, phase)
    pairs = zip(alone.state_dict().values(), model.state_dict().values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-6


def test_a_loss_that_is_not_finite_is_not_tried_again(phases: RayEngine, split: Split) -> None:
    recipe = tuned("NBPR").with_(epochs=2, device="cpu", learning_rate=1e30)
    model = start_model(recipe.model, recipe.training, split)
    with pytest.raises(TrainingError, match="try a smaller rate"):
        phases(model, split, recipe.training, TrainingPhase("train", 2, 1e30))


def test_ranks_that_never_reach_the_folder_are_told_which(
    phases: RayEngine, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.torch import TorchTrainer

    monkeypatch.setattr(TorchTrainer, "fit", lambda self: None)  # they ended without an outcome
    recipe = tuned("NBPR").with_(epochs=1, device="cpu")
    model = start_model(recipe.model, recipe.training, split)
    with pytest.raises(TrainingError, match="no rank of the Ray cluster can write to") as raised:
        phases(model, split, recipe.training, TrainingPhase("train", 1, 1e-3))
    assert "\n" not in str(raised.value)


def test_ranks_find_the_positions_of_held_out_items(
    phases: RayEngine, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_engine, "MIN_COMPARISONS", 1)
    model = wild_model(
        ModelConfig(kind="neupr", factors=3), split.train.n_users, split.train.n_items
    )
    ranks = VectorRanks.as_trained(model, np.flatnonzero(split.test >= 0))
    monkeypatch.setattr(rank_engine, "full_ranks", None)  # of this process
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = phases.full_ranks(ranks, split, split.test, 0)
    expected = full_ranks(ranks, split, split.test, 0)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1] == expected[1]


def test_a_cluster_of_another_version_is_named(phases: RayEngine) -> None:
    from ray._private.utils import check_version_info

    theirs = {"ray_version": "2.9.0", "python_version": "3.10.1"}
    with pytest.raises(RuntimeError) as raised:
        check_version_info(theirs, "node 10.0.0.2")
    words = ray_ranks.problem_of(raised.value, "10.0.0.1:6379")
    assert "the Ray cluster at 10.0.0.1:6379 has Ray 2.9.0 and Python 3.10.1" in words
    assert f"this worker has Ray {version('ray')} and Python {platform.python_version()}" in words
    assert "token" in ray_ranks.problem_of(ConnectionError("refused"), None)


def test_a_worker_without_a_token_is_told_so() -> None:
    """In a process of its own, because Ray reads the token when it is imported."""
    code = (
        "from pathlib import Path; from ncr_core.errors import TrainingError\n"
        "from ncr_core.training.ray_ranks import RayEngine\n"
        "engine = RayEngine(2, 'replicated', Path('.'), '10.0.0.1:6379')\n"
        "try: engine._connect()\n"
        "except TrainingError as error: print(error)\n"
    )
    secrets = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME")
    own = {name: value for name, value in os.environ.items() if name not in secrets}
    own |= {"RAY_AUTH_MODE": "token", "HOME": "/nonexistent"}
    own["PYTHONPATH"] = str(Path(ray_ranks.__file__).parents[2])
    found = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False
    )
    assert found.stdout == (
        "the Ray cluster at 10.0.0.1:6379 needs a token, and the worker has none: set "
        "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH for the worker\n"
    ), found.stderr


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_that_asks_for_no_token_is_found_out(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Path(sys.executable).with_name("ray")
    own = os.environ | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "7" * 64}
    own |= {"RAY_USAGE_STATS_ENABLED": "0"}
    address = f"127.0.0.1:{free_port()}"
    head = [str(ray), "start", "--head", "--block", "--num-cpus=1", "--include-dashboard=false"]
    head += ["--min-worker-port=0", "--max-worker-port=0"]  # any, so that none is the head's
    head += ["--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "7" * 64)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets have short names
        process = subprocess.Popen(
            [*head, f"--temp-dir={folder}"],
            env=own,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: answers(address), 60, "the head answers")
            assert ray_ranks.is_open(address) is (mode == "disabled")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def answers(address: str) -> bool:
    """Whether a cluster's head answers a client with the token of the environment."""
    code = (
        "import sys; from ray._raylet import GcsClient\n"
        "GcsClient(address=sys.argv[1]).internal_kv_get(b'key', b'ncr', timeout=2)"
    )
    command = [sys.executable, "-c", code, address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_an_open_cluster_beyond_loopback_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray_ranks, "is_open", lambda address: True)
    engine = RayEngine(2, "replicated", tmp_path, "10.0.0.1:6379")
    ended: list[bool] = []
    monkeypatch.setattr(engine._ray, "is_initialized", lambda: False)
    monkeypatch.setattr(engine._ray, "init", lambda **named: None)
    monkeypatch.setattr(engine._ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(TrainingError, match="runs code from any client, also without a token"):
        engine._connect()
    assert ended


def test_a_probe_that_fails_for_another_reason_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_ranks, "PROBE_SECONDS", 20.0)
    with pytest.raises(TrainingError, match="cannot find out whether the Ray cluster at 127"):
        ray_ranks.is_open(f"127.0.0.1:{free_port()}")


def test_ranks_get_no_setting_and_no_password(phases: RayEngine, split: Split) -> None:
    found: list[set[str]] = []
    recipe = tuned("NBPR history").with_(epochs=4, device="cpu", patience=4)
    model = start_model(recipe.model, recipe.training, split)

    def look(progress: Progress) -> None:
        for pid in _ray_ranks():
            with suppress(OSError):  # it has just ended
                names = Path(f"/proc/{pid}/environ").read_text().split("\0")
                found.append({name.partition("=")[0] for name in names if name})

    phases(model, split, recipe.training, TrainingPhase("train", 4, 1e-3), look)
    found = [names for names in found if names]
    assert found
    assert all("PATH" in names and "NCR_ADMIN_KEY" not in names for names in found)
    assert os.environ["NCR_ADMIN_KEY"] == "secret"


def test_a_lost_rank_is_named_with_the_reason() -> None:
    from ray.train import WorkerGroupError

    killed, full = ValueError("it is gone"), MemoryError()
    assert ray_ranks.loss_of(WorkerGroupError("lost", {0: killed, 3: full})).startswith(
        "rank 3 has too little memory: use a machine with more memory"
    )
    assert (
        ray_ranks.loss_of(WorkerGroupError("lost", {2: killed})) == "rank 2 at last by ValueError"
    )
    assert ray_ranks.loss_of(MemoryError()).startswith("a rank has too little memory")
    assert ray_ranks.loss_of(KeyError("x")) == "at last by KeyError"
