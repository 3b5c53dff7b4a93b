"""What a GPU gives: ranking, the catalogue, training and the service, beside a CPU.

    python -m benchmarks.cuda ranker ROOT [FACTORS ...]
    python -m benchmarks.cuda catalogue [ITEMS]
    python -m benchmarks.cuda training ROOT
    python -m benchmarks.cuda epochs ROOT
    python -m benchmarks.cuda recipes ROOT [RECIPE ...]
    python -m benchmarks.cuda service DATA

Every form compares the GPU and the CPU in one run, and needs a GPU that torch can use.

``ranker`` trains NeuPR on MovieLens 1M (ROOT holds ml-1m) for few epochs, and ranks 1,000
candidates in the service's order for random users. Times of the GPU include the copies of vectors
and candidates to it and of the lists back. The kernel's own time is from torch's profiler. The
lists equal those of the CPU, which is checked. A step is a block of candidates that the kernel
compares with one champion; the steps of a user follow one another, so the slowest user of a batch
bounds its time.

``catalogue`` takes the ten best of all items by products of 64 factors, beside a product of
matrices and ``topk`` of torch alone.

``training`` counts triples a second as `benchmarks.training` does. ``epochs`` has the seconds of an
epoch of the recipe `default`, with and without a CUDA graph, and of its parts. ``recipes`` trains
the recipes of the service on MovieLens 1M.

``service`` imports DATA, trains two versions through the service's own jobs, and asks for lists
that are ranked anew, over 64 connections: from a server with the GPU and from one without, and
while the versions take turns. DATA may also be the data folder of a service with two versions.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import publish, run_command
from benchmarks.load import Report, closed_loop, requests_for, server_in_place
from benchmarks.recommend import PARAMS, prepare
from benchmarks.training import SPEEDS, epoch_of
from ncr_core.data import Split
from ncr_core.evaluation.protocols import K
from ncr_core.inference.retrieval import CandidateGenerator
from ncr_core.models import ModelConfig, PairwiseRanker, build_model
from ncr_core.ranking import ExactRanker, anchors_of
from ncr_core.ranking.backends.triton_ranker import EAGER_PASSES, LANES, TritonRanker
from ncr_core.ranking.candidates import spread_over_popularity
from ncr_core.recipes import recipe, tuned
from ncr_core.reproduction.datasets import load_dataset
from ncr_core.train_config import TrainConfig
from ncr_core.training import train_model
from ncr_core.training.batches import Batches, Rows, SharedRows
from ncr_core.training.captured_gradients import EAGER_STEPS, CapturedGradients
from ncr_core.training.selection import select_recipe
from ncr_core.training.trainer import Adam, make_batches, train_epoch
from ncr_core.training.validation import candidates_ahead, validation_candidates

M = 1_000
BATCHES = (1, 32, 256)
REPEATS = 30
HEAD = [
    "batch",
    "GPU ms a batch",
    "of it kernel ms",
    "GPU users/s",
    "CPU ms a batch",
    "CPU users/s",
    "GPU / CPU",
]


def rank_on_devices(root: Path, sizes: tuple[int, ...] = (8, 64)) -> None:
    split = load_dataset("ml-1m", root).split
    for factors in sizes or (8, 64):
        model = _trained_tower(split, factors)
        rows, more = _ranking_rows(model, split)
        publish(
            f"ranker-neupr-{factors}",
            HEAD,
            rows,
            model=model.config.as_dict(),
            candidates=M,
            k=K,
            **more,
        )


def _trained_tower(split: Split, factors: int) -> PairwiseRanker:
    """NeuPR after few epochs of each phase."""
    few = {"epochs": 2, "negatives": 2, "fine_tune_epochs": 1, "device": "cuda"}
    chosen = tuned("NeuPR", factors).with_(**few)
    started = time.perf_counter()
    result = train_model(chosen.model, chosen.training, split)
    print(f"NeuPR {factors} trained in {time.perf_counter() - started:.1f} s", flush=True)
    return result.model.requires_grad_(False).eval()


@torch.inference_mode()
def _ranking_rows(model: PairwiseRanker, split: Split) -> tuple[list[list[Any]], dict[str, Any]]:
    on_cpu = _copy(model, "cpu")
    gpu, cpu = ExactRanker(model), ExactRanker(on_cpu)
    if not isinstance(gpu.backend, TritonRanker):
        raise TypeError("the GPU does not take the kernel")
    counts = torch.from_numpy(split.train.item_counts())
    picker = CandidateGenerator(cpu, anchors_of(spread_over_popularity(counts, 16).tolist()), 0)
    users = on_cpu.user_vectors(torch.randperm(model.n_users)[: max(BATCHES)])
    scores = picker.scores(users)
    candidates = picker.pick(scores, torch.ones_like(scores, dtype=torch.bool), M)
    expected = cpu.rank(users, candidates, K)
    if not gpu.rank(users, candidates, K).cpu().equal(expected):
        raise AssertionError("the lists of the two devices differ")
    rows: list[list[Any]] = []
    for batch in BATCHES:
        some = slice(0, batch)

        def call(ranker: ExactRanker, some: slice = some) -> Tensor:
            return ranker.rank(users[some], candidates[some], K).cpu()

        for _ in range(EAGER_PASSES):
            call(gpu)
        on_gpu = _median_ms(partial(call, gpu))
        of_cpu = _median_ms(partial(call, cpu), 5)
        if not call(gpu).equal(expected[some]):
            raise AssertionError("the lists of the two devices differ")
        kernel, by_name = _kernel_ms(partial(call, gpu))
        rows.append(
            [
                batch,
                on_gpu,
                kernel,
                round(batch / on_gpu * 1e3),
                of_cpu,
                round(batch / of_cpu * 1e3),
                round(of_cpu / on_gpu, 1),
            ]
        )
        print(f"batch {batch}: {by_name}", flush=True)
    steps, most, pairs = _steps(gpu, users[:64], candidates[:64], LANES)
    tower = gpu.margins.single.tower
    assert tower is not None
    work = sum(weight.numel() for weight, _ in tower.layers)
    return rows, {
        "lanes": LANES,
        "steps_of_a_user": steps,
        "most_steps_of_a_user": most,
        "pairs_of_a_user": pairs,
        "multiply_adds_of_a_pair": 2 * work,
        "copy_bytes_per_s": _copy_rate(),
    }


def _steps(
    ranker: ExactRanker, users: Tensor, candidates: Tensor, lanes: int
) -> tuple[float, int, float]:
    """Blocks that the kernel takes for a user, on average and at most, and pairs: by hand."""
    steps: list[int] = []
    pairs: list[int] = []
    for user, items in zip(users, candidates, strict=True):
        won = (ranker.all_margins(user.unsqueeze(0), items.unsqueeze(0))[0] > 0).cpu().numpy()
        n, taken, at = len(items), np.zeros(len(items), dtype=bool), 0
        stack: list[int] = []
        done = step = pair = 0
        while done < K:
            if not stack:
                at = int(np.argmin(taken))
                stack.append(at)
                at += 1
            champion, challenger = stack[-1], -1
            while at < n and challenger < 0:
                step += 1
                block = np.arange(at, min(n, at + lanes))
                beats = won[block, champion] & ~taken[block]
                if beats.any():
                    challenger = int(block[np.argmax(beats)])
                    pair += int((~taken[at : challenger + 1]).sum())
                else:
                    pair += int((~taken[block]).sum())
                    at += lanes
            if challenger >= 0:
                stack.append(challenger)
                at = challenger + 1
            else:
                taken[champion] = True
                stack.pop()
                done += 1
                at = champion + 1
        steps.append(step)
        pairs.append(pair)
    return float(np.mean(steps)), max(steps), float(np.mean(pairs))


def _copy(model: PairwiseRanker, device: str) -> PairwiseRanker:
    copy = build_model(model.config, model.n_users, model.n_items)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return copy.requires_grad_(False).eval().to(device)


def _median_ms(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Milliseconds of a call and everything it started, after two that warm up."""
    times = []
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(time.perf_counter() - started)
    return round(median(times) * 1e3, 3)


def _kernel_ms(call: Callable[[], Any]) -> tuple[float, str]:
    """Milliseconds of the scan on the GPU, and what else a call runs there, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    scan = sum(e.self_device_time_total for e in events if e.key == "scan")
    other = sum(e.self_device_time_total for e in events if e.key != "scan")
    count = sum(e.count for e in events)
    return round(scan / 5e3, 3), (
        f"scan {scan / 5e3:.3f} ms, {count // 5} launches and copies, others {other / 5e3:.3f} ms"
    )


def _copy_rate() -> float:
    """Bytes a second of a copy on the device, read and written."""
    x = torch.empty(2**28, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    return round(2 * x.nbytes / (_median_ms(lambda: y.copy_(x), 10) / 1e3))


@torch.inference_mode()
def catalogue(items: int = 1_000_000) -> None:
    model = build_model(ModelConfig(kind="nbpr", factors=64), 1_000, items)
    model = model.requires_grad_(False).eval()
    rows: list[list[Any]] = []
    rankers = {device: ExactRanker(_copy(model, device)) for device in ("cuda", "cpu")}
    table = rankers["cuda"].margins.single.linear
    assert table is not None
    for batch in BATCHES:
        users = model.user_vectors(torch.randperm(1_000)[:batch])
        on_gpu = users.cuda()
        vectors = on_gpu[:, table.columns].contiguous()

        def ours(device: str, users: Tensor = users, on_gpu: Tensor = on_gpu) -> Tensor:
            return rankers[device].top(on_gpu if device == "cuda" else users, K).cpu()

        def torch_alone(vectors: Tensor = vectors) -> Tensor:
            return torch.topk(vectors @ table.items.T, K, dim=1).indices.cpu()

        if not ours("cuda").equal(ours("cpu")):
            raise AssertionError("the lists of the two devices differ")
        torch.cuda.reset_peak_memory_stats()
        gpu = _median_ms(partial(ours, "cuda"))
        peak = torch.cuda.max_memory_allocated()
        alone, cpu = _median_ms(torch_alone), _median_ms(partial(ours, "cpu"), 3)
        rows.append(
            [batch, gpu, round(batch / gpu * 1e3), alone, cpu, round(cpu / gpu, 1), peak >> 20]
        )
    publish(
        f"catalogue-nbpr-64-{items}",
        ["batch", "GPU ms", "GPU users/s", "torch alone ms", "CPU ms", "CPU / GPU", "GPU MiB"],
        rows,
        items=items,
        k=K,
    )


GPU_STEPS, CPU_STEPS = 60, 3
WARM_UP = EAGER_STEPS + 2  # and the capture of a CUDA graph


def training(root: Path) -> None:
    split = load_dataset("ml-1m", root).split
    rows = []
    for factors in (8, 64):
        for name, model, settings in SPEEDS:
            gpu, cpu = (
                _triples(split, model, settings, factors, device, steps)
                for device, steps in (("cuda", GPU_STEPS), ("cpu", CPU_STEPS))
            )
            rows.append([name, factors, round(gpu[0]), gpu[1], round(cpu[0]), gpu[0] / cpu[0]])
            print(rows[-1], flush=True)
    publish(
        "training-speed",
        ["model", "d", "GPU triples/s", "GPU ms a step", "CPU triples/s", "GPU / CPU"],
        rows,
        data="ml-1m",
    )


def _triples(
    split: Split,
    model: dict[str, Any],
    settings: dict[str, Any],
    factors: int,
    device: str,
    steps: int,
) -> tuple[float, float]:
    """Triples a second, and milliseconds a step."""
    config = TrainConfig(**settings, device=device)
    ranker = build_model(
        ModelConfig.from_dict({**model, "factors": factors}),
        split.train.n_users,
        split.train.n_items,
    ).to(device)
    counted, started, seconds = [0, 0], 0.0, 0.0

    def some(rows: Iterator[Rows | SharedRows]) -> Iterator[Rows | SharedRows]:
        nonlocal started, seconds
        drawn = 0.0
        if device == "cuda":  # the first batch draws for the later ones, too
            began = time.perf_counter()
            rows = chain([next(rows)], rows)
            torch.cuda.synchronize()
            drawn = time.perf_counter() - began
        for number, batch in enumerate(islice(rows, steps + WARM_UP)):
            if number == WARM_UP:
                torch.cuda.synchronize()
                started = time.perf_counter()
            if number >= WARM_UP:
                scored = batch.valid if isinstance(batch, SharedRows) else batch.negatives
                counted[0] += scored.numel()
                counted[1] += 1
            yield batch
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started + drawn * counted[1] / (counted[1] + WARM_UP)

    epoch_of(ranker, split.train, config, some)
    return counted[0] / seconds, round(1e3 * seconds / counted[1], 2)


def epochs(root: Path) -> None:
    split = load_dataset("ml-1m", root).split
    config = recipe("default").with_(device="cuda").training
    rows = []
    for kind in ("nbpr", "dncr", "neupr"):
        model = build_model(
            ModelConfig(kind=kind, factors=8), split.train.n_users, split.train.n_items
        ).to("cuda")
        batches = make_batches(model, split.train, config, torch.device("cuda"))
        optimizer = Adam(model, config, config.learning_rate, None)
        captured = CapturedGradients(model)
        held_out = validation_candidates(split, config.seed)

        def epoch(
            graph: CapturedGradients | None = None,
            model: PairwiseRanker = model,
            batches: Batches = batches,
            optimizer: Adam = optimizer,
        ) -> None:
            train_epoch(model, batches, batches.n_items, config, optimizer, captured=graph)

        parts: tuple[Callable[[], Any], ...] = (
            partial(deque, batches, maxlen=0),
            epoch,
            partial(epoch, captured),
            partial(candidates_ahead, model, held_out),
        )
        seconds = [_median_ms(part, 3) / 1e3 for part in parts]
        rows.append([kind, len(batches), *seconds])
        print(rows[-1], flush=True)
    head = ["model", "batches", "draws s", "epoch s", "epoch with a graph s", "validation s"]
    publish("epochs", head, rows, data="ml-1m", factors=8, negatives=config.negatives)


RECIPES = (
    "default", "next-item-nbpr", "next-item-attention", "als-nbpr",
    "next-item-two-layer-attention", "auto",
)  # fmt: skip


def recipes(root: Path, names: tuple[str, ...] = RECIPES) -> None:
    split = load_dataset("ml-1m", root).split
    rows = []
    for name in names or RECIPES:
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        if name == "auto":
            chosen = select_recipe(split, device="cuda")
            history, tried = chosen.trained.history, [each.line() for each in chosen.tried]
            print("\n".join(tried), flush=True)
        else:
            one = recipe(name).with_(device="cuda")
            history = train_model(one.model, one.training, split).history
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        best = history[-1].best
        epochs = sum(sum(phase.seconds) for phase in history)
        peak = torch.cuda.max_memory_allocated() >> 20
        rows.append([name, seconds, epochs, None if best is None else best[0], peak])
        print(rows[-1], flush=True)
    publish(
        "recipes",
        ["recipe", "seconds", "of them epochs", "validation NDCG@10", "GPU MiB"],
        rows,
        data="ml-1m",
    )


CONNECTIONS = 64
USERS = 300
SECONDS = 5.0
SWAP_SECONDS = 3.0
SWAPS = 4


def service(data: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "var"
        if (data / "ncr.db").exists():
            shutil.copytree(data, folder)
        else:
            started = time.perf_counter()
            asyncio.run(prepare(data, folder, PARAMS))
            print(f"imported, trained twice in {time.perf_counter() - started:.1f} s", flush=True)
        rows = []
        for name, device in (("GPU", "cuda"), ("CPU", "cpu")):
            with server_in_place(folder, list_cache_bytes=0, device=device) as running:
                rows.append([name, *asyncio.run(_anew(running.url))])
        with server_in_place(folder, list_cache_bytes=0, device="cuda") as running:
            rows.append([f"GPU, {SWAPS} swaps", *asyncio.run(_swapped(running.url))])
    publish(
        "service",
        ["server", "200s/s", "p50 ms", "p99 ms", "503s/s", "errors"],
        rows,
        connections=CONNECTIONS,
        seconds=SECONDS,
        swap_seconds=SWAP_SECONDS,
    )


def _figures(report: Report) -> list[Any]:
    others = sum(n for status, n in report.statuses.items() if status not in (200, 503))
    return [
        report.rate(), report.quantile(0.5), report.quantile(0.99), report.rate(503), others
    ]  # fmt: skip


def _lists(base: str, users: list[str]) -> Iterator[bytes]:
    return cycle(requests_for(base, [f"/recommend/{user}" for user in users]))


async def _known_users(base: str) -> list[str]:
    """Users who get a list from the model. Their candidates are cached by then."""
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        users = [str(number) for number in range(1, USERS + 1)]
        for user in users:
            answer = (await client.get(f"/recommend/{user}")).json()
            if answer["items"][0]["source"] != "model":
                raise SystemExit(f"{user} has no list of the model: the users are 1, 2, 3 …")
    return users


async def _anew(base: str) -> list[Any]:
    requests = _lists(base, await _known_users(base))
    return _figures(await closed_loop(base, requests, CONNECTIONS, SECONDS, warm_up=1.5))


async def _swapped(base: str) -> list[Any]:
    """Versions take turns while lists are asked for."""
    requests = _lists(base, await _known_users(base))

    async def swap() -> None:
        async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
            for _ in range(SWAPS):
                versions = (await client.get("/admin/models")).json()["items"]
                other = next(row["version"] for row in versions if not row["active"])
                (await client.post(f"/admin/models/{other}/activate")).raise_for_status()
                await asyncio.sleep(SWAP_SECONDS)

    loop = closed_loop(base, requests, CONNECTIONS, SWAP_SECONDS * SWAPS, warm_up=1.5)
    report, _ = await asyncio.gather(loop, swap())
    return _figures(report)


def main() -> None:
    raise SystemExit(__doc__)


if __name__ == "__main__":
    run_command(
        main,
        ranker=rank_on_devices,
        catalogue=catalogue,
        training=training,
        epochs=epochs,
        recipes=recipes,
        service=service,
    )
