"""NBPR with tables that TorchRec shards by rows, beside the training of this package.

    python -m benchmarks.torchrec_tables ROOT [DATA [RANKS [EPOCHS [FACTORS]]]]

The model is NBPR with a vector for each user (eq. 7). Its loss is the cross-entropy of eq. 15. Each
interaction has one negative. DATA is a folder of ROOT with real interactions, ml-1m by default.
Each row has the test metrics over all items after so many epochs: the last one of TorchRec, and the
best one by validation of this package. The triples of a second are those of all processes together,
of one thread each; those of this package include its validation after each epoch.

TorchRec trains in RANKS processes that torchrun starts, 2 by default, on GPUs if there are any. Its
fused optimiser is Adam on GPUs and Adagrad on CPUs, because TorchRec has no Adam there. The result
is a checkpoint that `Recommender.load` reads. TorchRec needs the version of fbgemm-gpu that fits
torch; the page docs/how-to/cluster.md says which versions ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn

from benchmarks.harness import publish, run_command
from ncr_core.checkpoint import load_checkpoint, save_checkpoint
from ncr_core.data import Split
from ncr_core.data.interactions import IntArray
from ncr_core.evaluation.protocols import ModelRanks, evaluate_full
from ncr_core.models import ModelConfig, build_model
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.training import TrainConfig, train_model
from ncr_core.training.losses import bce_loss

COLUMNS = ["engine", "processes", "HR@10", "NDCG@10", "triples a second"]
TABLES = {"users": ["user"], "catalogue": ["preferred", "other"]}  # TorchRec reserves "items"
BATCH, RATE, WEIGHT_RATE = 1024, 0.05, 0.001


def main(
    root: Path, data: str = "ml-1m", ranks: int = 2, epochs: int = 20, factors: int = 64
) -> None:
    split = load_dataset(data, root).split
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--standalone", "-m", "benchmarks.torchrec_tables", "train"]
        arguments = [str(root), data, f"{folder}/model", str(epochs), str(factors)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        speed = json.loads(done.stdout.splitlines()[-1])
        model = load_checkpoint(Path(folder) / "model").model
        found = evaluate_full(ModelRanks(model), split, split.test, seed=0)
        rows.append(["TorchRec", ranks, found.hr, found.ndcg, speed])
    torch.set_num_threads(1)
    config = TrainConfig(
        epochs=epochs, patience=epochs, negatives=1, batch_size=BATCH * ranks, loss="bce"
    )
    started = time.perf_counter()
    trained = train_model(ModelConfig(kind="nbpr", factors=factors), config, split)
    speed = epochs * split.train.nnz / (time.perf_counter() - started)
    found = evaluate_full(ModelRanks(trained.model), split, split.test, seed=0)
    rows.append(["this package", 1, found.hr, found.ndcg, speed])
    publish(data, COLUMNS, rows, epochs=epochs, factors=factors, torchrec=_version())


def _version() -> str:
    import torchrec

    version: str = torchrec.__version__
    return version


class ShardedNBPR(nn.Module):
    """The logits of NBPR, with the embeddings of TorchRec."""

    def __init__(self, n_users: int, n_items: int, factors: int) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        self.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name,
                    embedding_dim=factors,
                    num_embeddings=rows,
                    feature_names=TABLES[name],
                    weight_init_min=-0.1,
                    weight_init_max=0.1,
                )
                for name, rows in (("users", n_users), ("catalogue", n_items))
            ],
            device=torch.device("meta"),
        )
        self.weight = nn.Parameter(torch.ones(2 * factors))  # as NBPR begins

    def forward(self, features: object) -> tuple[Tensor, Tensor]:
        """(z_uij, z_uji), (B,) each, of a KeyedJaggedTensor of users, items i and items j."""
        found = self.embeddings(features)
        user, i, j = (found[name].values() for names in TABLES.values() for name in names)
        first, second = self.weight.chunk(2)
        z_uij = (user * i) @ first - (user * j) @ second
        z_uji = (user * j) @ first - (user * i) @ second
        return z_uij, z_uji


def train(root: Path, data: str, folder: Path, epochs: int, factors: int) -> None:
    """A rank: trains its rows of the tables with its users. Rank 0 writes a checkpoint."""
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    on_gpu = torch.cuda.is_available()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    split = load_dataset(data, root).split
    torch.manual_seed(rank)
    model = ShardedNBPR(split.train.n_users, split.train.n_items, factors)
    fused = torch.optim.Adam if on_gpu else torch.optim.Adagrad
    apply_optimizer_in_backward(fused, model.embeddings.parameters(), {"lr": RATE})
    sharders = [EmbeddingCollectionSharder()]
    by_rows = ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
    planner = EmbeddingShardingPlanner(
        Topology(world_size=world, compute_device=device.type),
        constraints=dict.fromkeys(TABLES, by_rows),
    )
    plan = planner.collective_plan(model, sharders, distributed.GroupMember.WORLD)
    parallel = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    weight = parallel.module.weight
    optimizer = torch.optim.Adam([weight], lr=WEIGHT_RATE)
    generator = np.random.default_rng(rank)
    started = time.perf_counter()
    for _ in range(epochs):
        for rows in batches(split, rank, world, generator):
            values = torch.from_numpy(rows).to(device)
            names = [name for names in TABLES.values() for name in names]
            lengths = torch.ones(values.numel(), dtype=torch.int64, device=device)
            features = KeyedJaggedTensor(keys=names, values=values.flatten(), lengths=lengths)
            optimizer.zero_grad()
            bce_loss(*parallel(features)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    speed = epochs * split.train.nnz / (time.perf_counter() - started)
    tables = dict.fromkeys(TABLES, torch.empty(0))
    for name, value in parallel.state_dict().items():
        _, _, table = name.removesuffix(".weight").rpartition(".")
        if table in TABLES:
            whole = torch.empty(value.size(), device=device) if rank == 0 else None
            value.gather(dst=0, out=whole)
            tables[table] = torch.empty(0) if whole is None else whole.cpu()
    if rank == 0:
        save(split, factors, folder, tables, weight.detach().cpu())
        print(json.dumps(speed))
    distributed.destroy_process_group()


def batches(
    split: Split, rank: int, world: int, generator: np.random.Generator
) -> Iterator[IntArray]:
    """(3, B) users, items and negatives of an epoch: those of every ``world``-th user.

    All ranks have the same number of batches, which differ in size by some rows.
    """
    data = split.train
    shares = [int((data.users % world == each).sum()) for each in range(world)]
    mine = generator.permutation(np.flatnonzero(data.users % world == rank))
    for part in np.array_split(mine, -(-max(shares) // BATCH)):
        users, items = data.users[part], data.items[part]
        others = generator.integers(data.n_items, size=len(part))
        while (seen := data.contains(users, others)).any():
            others[seen] = generator.integers(data.n_items, size=int(seen.sum()))
        yield np.stack([users, items, others]).astype(np.int64)


def save(
    split: Split, factors: int, folder: Path, tables: dict[str, Tensor], weight: Tensor
) -> None:
    """Writes the checkpoint of NBPR with these tables."""
    data = split.train
    model = build_model(ModelConfig(kind="nbpr", factors=factors), data.n_users, data.n_items)
    model.load_state_dict(
        {"users.weight": tables["users"], "items.weight": tables["catalogue"], "weight": weight}
    )
    save_checkpoint(
        folder,
        model,
        user_ids=data.user_ids,
        item_ids=data.item_ids,
        item_counts=data.item_counts(),
    )


if __name__ == "__main__":
    run_command(main, train=train)
