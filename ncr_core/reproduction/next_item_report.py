"""Sections of docs/results.md on next items: SASRec's protocol, one cut in time, seeds, cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ncr_core.optional_imports import require
from ncr_core.reproduction import suites
from ncr_core.reproduction.datasets import SEQUENCES, TEMPORAL
from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import Selection
from ncr_core.reproduction.tables import (
    Comparison,
    figure_text,
    label_of,
    make_section,
    make_table,
    results_of,
    row_label,
    with_interval,
)

TITLES = {
    "ml-1m-sasrec": "MovieLens 1M, the split of the SASRec papers",
    "beauty-s3rec": "Amazon Beauty, the subset of S3-Rec",
    "sports-s3rec": "Amazon Sports, the subset of S3-Rec",
}
# HR@10 and NDCG@10 as others print them for these splits, all items ranked.
PUBLISHED: Mapping[str, Sequence[tuple[str, float, float]]] = {
    "ml-1m-sasrec": (
        ("SASRec, BCE (Klenitskiy & Vasilev 2023)", 0.2500, 0.1341),
        ("BERT4Rec (the same)", 0.2843, 0.1537),
        ("gSASRec (Petrov & Macdonald, gSASRec-pytorch)", 0.3003, 0.1726),
        ("SASRec+, cross-entropy (Klenitskiy & Vasilev 2023)", 0.3152, 0.1821),
        ("SASRec+, 3,000 negatives (the same, 769 s on a GPU)", 0.3159, 0.1857),
        ("FuXi-α (transformer_benchmark, all ratings)", 0.3164, 0.1813),
        ("HSTU (RecTools, other order, with the time of the test event)", 0.3226, 0.1880),
        ("HSTU-large (the same)", 0.3642, 0.2164),
    ),
    "beauty-s3rec": (
        ("SASRec, sampled softmax (transformer_benchmark)", 0.0921, 0.0531),
        ("eSASRec (the same)", 0.0928, 0.0523),
        ("SASRec (as later papers report it)", 0.0605, 0.0318),
    ),
    "sports-s3rec": (
        ("SASRec, sampled softmax (transformer_benchmark)", 0.0569, 0.0314),
        ("eSASRec (the same)", 0.0560, 0.0323),
    ),
}
_TRAINED_HERE: Mapping[str, Mapping[str, str]] = {
    "ml-1m-sasrec": {
        "SASRec CE": "SASRec+, cross-entropy (Klenitskiy & Vasilev 2023)",
        "SASRec": "SASRec, BCE (Klenitskiy & Vasilev 2023)",
    },
    "beauty-s3rec": {"SASRec": "SASRec (as later papers report it)"},
}
_TRAINED_AGAIN: Mapping[str, str] = {
    "ml-1m-sasrec": (
        "- Another training of SASRec CE, on a GPU, has 0.3114 / 0.1819 without stored ranks "
        "([figures](../benchmarks/results/cuda.json)). Against it, NBPR next-item with start is "
        "not ahead, and NBPR attention is about equal.\n"
    )
}
SEEDS = range(5)
HEADLINES = (
    "NBPR from ALS", "DNCR from ALS", "NeuPR from ALS",
    "NBPR next-item", "NBPR next-item with start", "DNCR from NBPR", "NeuPR next-item",
    "NBPR attention", "NBPR two-layer attention",
)  # fmt: skip
_SEEDED = {
    "ml-1m": "P1",
    "ml-1m-sasrec": "split of the SASRec papers",
    "beauty-s3rec": "Amazon Beauty",
    "sports-s3rec": "Amazon Sports",
}


def sequential_results(store: ResultsStore) -> dict[str, list[RunResult]]:
    """The results of the target ``sequential`` by data set, where there are any."""
    found = {data: results_of(store, suites.sequential(Selection(data))) for data in SEQUENCES}
    return {data: results for data, results in found.items() if results}


def sequential(
    by_data: Mapping[str, Sequence[RunResult]], comparisons: Mapping[str, Sequence[Comparison]]
) -> str:
    """The section on SASRec's protocol; empty without results.

    ``comparisons`` are by the name of a run.
    """
    texts = []
    for data, results in by_data.items():
        left_out = int(results[0].payload["data"]["untrained_test_items"])
        head = ["method", "validation NDCG@10", "HR@10", "NDCG@10"]
        head += ["HR@10 / NDCG@10 of all users"] if left_out else []
        head += ["NDCG@10 against the best baseline", "training, s", "processor, s"]
        lines = []
        for result in results:
            cells = [row_label(result)]
            cells += [figure_text(result.validation)]
            cells += [with_interval(result, "full", name) for name in ("hr", "ndcg")]
            if left_out:
                cells.append(_of_all(result, left_out))
            cells.append("; ".join(c.text() for c in comparisons.get(result.name, ())))
            seconds = result.payload["seconds"]
            cells += [result.seconds_text, f"{seconds['cpu']:.0f}" if "cpu" in seconds else ""]
            lines.append(cells)
        for name, hr, ndcg in PUBLISHED[data]:
            cells = [f"*{name}*", "", "", "", *([""] if left_out else []), "", "", ""]
            cells[4 if left_out else 2] = f"{hr:.4f} / {ndcg:.4f}" if left_out else f"{hr:.4f}"
            if not left_out:
                cells[3] = f"{ndcg:.4f}"
            lines.append(cells)
        note = ""
        if left_out:
            note = (
                f"The test items of {left_out:,} users occur in no training sequence. These users "
                "are left out. The column *of all users* counts each of them as a miss, as the "
                "published figures do.\n\n"
            )
        note += _beside_published(data, results, left_out)
        texts.append(f"### {TITLES[data]}\n\n{make_table(head, lines)}{note}")
    if not texts:
        return ""
    intro = (
        "The protocol is leave-one-out, as the authors of SASRec and later papers publish it:\n\n"
        "- The last item is for test, and the item before it for validation.\n"
        "- At test time the validation item is the latest item of the input. No model trains on "
        "the validation item.\n"
        "- All items are ranked, except those that the user has had.\n"
        "- The validation items of 2,000 users choose the epochs, and those of fewer users for "
        "towers: 693 on Beauty and 456 on Sports. Validation figures of a tower are therefore of "
        "other users.\n"
        "- The settings are those of P1 and of the recipes. Validation items of this split of "
        "MovieLens 1M chose some of them, see [the settings](#how-to-read-the-tables). Those of "
        "Beauty and Sports chose settings of our models for small data, see the "
        "[experiments](experiments.md#the-next-item-model-on-small-data). SASRec has settings that "
        "were published for MovieLens 1M on all sets, with a window of 50 items on Beauty and "
        "Sports.\n"
        "- P1 has the same data in another order. Some validation items of P1 are test items "
        "here.\n"
        "- Rows in italics have the figures that their authors print.\n"
        "- Training times were measured while other work used the machine. Processor times are "
        "those of both cores, with validation.\n\n"
    )
    return "## Next items: the protocol of SASRec\n\n" + intro + "\n".join(texts)


def _beside_published(data: str, results: Sequence[RunResult], left_out: int) -> str:
    """Says what our trainings of published methods reach, and who is ahead of our models.

    The published figures count each of the users who are left out as a miss.
    """
    printed = {name: ndcg for name, _, ndcg in PUBLISHED[data]}
    reached = {result.method: _values_of_all(result, left_out)[1] for result in results}
    lines = [
        f"- {method}, as trained here, has {100 * found / printed[name]:.0f} % of the published "
        "NDCG@10. The comparisons are with this training.\n"
        for method, name in _TRAINED_HERE.get(data, {}).items()
        if (found := reached.get(method))
    ]
    if lines and data in _TRAINED_AGAIN:
        lines.append(_TRAINED_AGAIN[data])
    best = max(results, key=lambda result: result.metric("full", "ndcg") or 0.0)
    if not best.is_ours:
        lines.append(
            f"- By NDCG@10 no model that we trained with the seed 0 is above {label_of(best)} on "
            "these data. Another [seed](#training-seeds) may give a higher figure.\n"
        )
    return "".join(lines) + "\n" if lines else ""


def _of_all(result: RunResult, left_out: int) -> str:
    """The text of `_values_of_all`."""
    return " / ".join(f"{value:.4f}" for value in _values_of_all(result, left_out))


def _values_of_all(result: RunResult, left_out: int) -> list[float]:
    """HR@10 and NDCG@10 if each user whose test item is in no training counts as a miss."""
    users = int(result.payload["metrics"]["full"]["users"])
    share = users / (users + left_out)
    return [(result.metric("full", name) or 0.0) * share for name in ("hr", "ndcg")]


def temporal(store: ResultsStore) -> str:
    """The section on users' first items after one cut, by the time since the item before."""
    texts = []
    for data in TEMPORAL:
        results = results_of(store, suites.temporal(Selection(data)))
        if not results:
            continue
        described, gaps = results[0].payload["data"], results[0].payload["metrics"]["gaps"]
        columns = [f"{name}, {gap['users']:,} users" for name, gap in gaps.items()]
        head = ["method", *columns, "processor, s"]
        lines = []
        for result in results:
            found = result.payload["metrics"]["gaps"]
            cells = [f"{found[name]['hr']:.3f} / {found[name]['ndcg']:.3f}" for name in gaps]
            cpu = result.payload["seconds"].get("cpu")
            name = row_label(result)
            lines.append([name, *cells, "" if cpu is None else f"{cpu:.0f}"])
        note = (
            f"The table leaves out {described['untrained_test_items']} users whose item occurs in "
            f"no training, and {described['newcomers']} users who came after the cut. With so few "
            f"users, a standard error of the HR@10 of all is about {_error(gaps['all']):.2f}.\n"
        )
        texts.append(f"### {data}\n\n{make_table(head, lines)}{note}")
    if not texts:
        return ""
    intro = (
        "The cut is the time before which 90 % of the interactions lie. The models learn nothing "
        "from later interactions. The held-out item is a user's first item after the cut, for each "
        "user with items on both sides.\n\n"
        "The cells are HR@10 / NDCG@10 over all items, by the time since the user's previous item. "
        "The settings are those of MovieLens 1M or of the recipes. Those of small data were partly "
        "chosen on these data, by users' latest items at any time, see the "
        "[experiments](experiments.md#the-next-item-model-on-small-data). The models are not told "
        "the time since the previous item.\n\n"
    )
    return "## One time for all users\n\n" + intro + "\n".join(texts)


def _error(metrics: Mapping[str, float]) -> float:
    typical = max(metrics["hr"], 0.1)
    return float((typical * (1 - typical) / metrics["users"]) ** 0.5)


def seeded_results(store: ResultsStore) -> Iterator[tuple[str, list[RunResult]]]:
    """Data sets and the results of a method's training seeds, where there are several."""
    for data in _SEEDED:
        target = suites.sequential if data in SEQUENCES else suites.best
        for method in HEADLINES:
            of_seeds = (target(Selection(data, methods=(method,), seed=seed)) for seed in SEEDS)
            results = results_of(store, [run for runs in of_seeds for run in runs if not run.refit])
            if len(results) > 1:
                yield data, results


def seeds(store: ResultsStore, comparisons: Mapping[str, Sequence[Comparison]]) -> str:
    """The section on the spread of the metrics over training seeds, on P1 and by SASRec's protocol.

    The table has a row for each method and data set with the results of several seeds.
    ``comparisons`` are by the name of a run.
    """
    lines = []
    for data, results in seeded_results(store):
        cells = [_SEEDED[data], label_of(results[0]), str(len(results))]
        for kind in ("full", "sampled"):
            for name in ("hr", "ndcg"):
                values = [result.metric(kind, name) for result in results]
                cells.append(_spread([value for value in values if value is not None]))
        compared = [c for result in results for c in comparisons.get(result.name, ())]
        lines.append([*cells, _least(compared)])
    note = (
        "The cells are mean ± standard deviation (smallest–largest) over training seeds. "
        "The other tables have seed 0. The protocol of SASRec has no sampled items. The last "
        "column has the seed with the smallest difference of NDCG@10. For models without order it "
        "is the sampled NDCG@10, against their start and against NeuMF. For others it is the full "
        "NDCG@10, against the best stored baseline. A baseline has one training.\n"
        + _best_seeds(seeded_results(store))
    )
    head = ["data set", "method", "seeds", "full HR@10", "full NDCG@10", "HR@10", "NDCG@10"]
    head.append("smallest difference")
    return make_section("Training seeds", head, lines, note)


def _best_seeds(seeded: Iterable[tuple[str, Sequence[RunResult]]]) -> str:
    """Says of how many rows the first seed, which the other tables have, is the best or worst."""
    best: list[str] = []
    worst: list[str] = []
    for data, results in seeded:
        values = [result.metric("full", "ndcg") for result in results]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue  # of some seeds only the sampled figures are stored
        for extreme, names in ((max(known), best), (min(known), worst)):
            if known[0] == extreme:
                names.append(f"{label_of(results[0])} ({_SEEDED[data]})")
    return (
        "\nBy full NDCG@10 the seed 0 is the best of its row for "
        f"{', '.join(best) or 'no method'}. It is the worst for {', '.join(worst) or 'no method'}. "
        "The other tables and their tests then have figures above or below the mean over seeds. "
        "Most trials that chose settings had the seed 0, which may favour it. The mean over seeds "
        "says more about another training.\n"
    )


def _least(comparisons: Sequence[Comparison]) -> str:
    """The text of the smallest difference from each rival; empty without comparisons."""
    least: dict[str, Comparison] = {}
    for comparison in comparisons:
        known = least.get(comparison.rival)
        if known is None or comparison.difference < known.difference:
            least[comparison.rival] = comparison
    return "; ".join(comparison.text() for comparison in least.values())


def _spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (smallest–largest) of values; empty for fewer than two."""
    if len(values) < 2:
        return ""
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return f"{mean:.4f} ± {spread:.4f} ({min(values):.4f}–{max(values):.4f})"


def cost(results: Sequence[RunResult], plot: Path) -> str:
    """The section on full NDCG@10 by processor seconds; the function also writes the plot.

    Raises ConfigError if matplotlib is not installed.
    """
    measured = [result for result in results if result.metric("full", "ndcg") is not None]
    if not measured:
        return ""
    measured.sort(key=lambda result: (_cost(result), -(result.metric("full", "ndcg") or 0.0)))
    lines, best = [], 0.0
    front = []
    for result in measured:
        ndcg = result.metric("full", "ndcg") or 0.0
        leads = ndcg > best and not result.on_gpu
        if leads:
            best = ndcg
            front.append(result)
        most = "" if result.on_gpu or result.has_processor_seconds else "at most "
        on = " (GPU)" if result.on_gpu else ""
        seconds = f"{most}{_cost(result):.1f}{on}"
        lines.append([row_label(result), seconds, f"{ndcg:.4f}", "yes" if leads else ""])
    _scatter(plot, measured, front)
    head = ["method", "processor, s", "full NDCG@10", "best so far"]
    note = (
        "The rows are in the order of the processor seconds of one training. They include the "
        "model that a method starts from. *At most* marks those that are not stored: the time by "
        "the clock times the threads is the most that they can be. A method is *best so far* if no "
        "method with less time on a CPU is as good, by the figures of this table. Triangles and "
        "*(GPU)* mark trainings on a GPU, with their time by the clock. The row of NBPR two-layer "
        "attention on a CPU is of a second training, which no other table has. Another training of "
        "a method took up to 1.8 times as long, on another machine. SASRec was trained on the "
        "splits of [another section](#next-items-the-protocol-of-sasrec), which has its times.\n"
    )
    body = make_section("Quality by training time: MovieLens 1M, P1", head, lines, note)
    title, _, rest = body.partition("\n\n")
    return f"{title}\n\n![Full NDCG@10 by processor seconds](plots/{plot.name})\n\n{rest}"


def _cost(result: RunResult) -> float:
    """The processor seconds of a training on a CPU, or the seconds of one on a GPU."""
    return result.seconds if result.on_gpu else result.most_processor_seconds


def _scatter(path: Path, results: Sequence[RunResult], front: Sequence[RunResult]) -> None:
    """Draws the results as an SVG file, with black edges for the runs of ``front``.

    Raises ConfigError if matplotlib is not installed.
    """
    require("matplotlib", "research")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "ncr"  # the same results give the same bytes
    figure = Figure(figsize=(9.2, 5.2), layout="constrained")
    axes = figure.subplots()
    for result in results:
        x, y = max(_cost(result), 0.1), result.metric("full", "ndcg") or 0.0
        axes.scatter(
            [x], [y], s=28, c="tab:red" if result.is_ours else "tab:blue",
            marker="^" if result.on_gpu else "o",
            edgecolors="black" if result in front else "none",
        )  # fmt: skip
        axes.annotate(label_of(result), (x, y), (4, 3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("training, processor seconds (on a GPU: seconds)")
    axes.set_ylabel("full NDCG@10")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
