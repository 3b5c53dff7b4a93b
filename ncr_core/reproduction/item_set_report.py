"""The section of docs/results.md on sets of test items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ncr_core.reproduction import suites
from ncr_core.reproduction.datasets import ITEM_SETS
from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import Selection
from ncr_core.reproduction.tables import (
    figure_text,
    label_of,
    make_table,
    results_of,
    row_label,
    with_interval,
)

TITLES = {"gowalla-lightgcn": "Gowalla, the split of LightGCN"}
# Recall@20 and NDCG@20 on these splits, as the papers in the names print them.
PUBLISHED: Mapping[str, Sequence[tuple[str, float, float]]] = {
    "gowalla-lightgcn": (
        ("NGCF (in He et al. 2020, LightGCN)", 0.1570, 0.1327),
        ("Mult-VAE (in the same)", 0.1641, 0.1335),
        ("LightGCN (He et al. 2020)", 0.1830, 0.1554),
        ("LightGCN (LightGCN-PyTorch, 3 layers)", 0.1824, 0.1547),
    ),
}


def item_sets(store: ResultsStore) -> str:
    """The section on Recall@20 and NDCG@20 of sets of test items; empty without results."""
    texts = []
    for data in ITEM_SETS:
        results = results_of(store, suites.recall(Selection(data)))
        if not results:
            continue
        lines = []
        for result in results:
            seconds = result.payload["seconds"]
            lines.append(
                [
                    row_label(result),
                    figure_text(result.validation),
                    *(with_interval(result, "sets", name) for name in ("recall", "ndcg")),
                    result.seconds_text,
                    f"{seconds['cpu']:.0f}" if "cpu" in seconds else "",
                ]
            )
        for name, recall, ndcg in PUBLISHED[data]:
            lines.append([f"*{name}*", "", f"{recall:.4f}", f"{ndcg:.4f}", "", ""])
        head = ["method", "validation NDCG@10", "Recall@20", "NDCG@20"]
        head += ["training, s", "processor, s"]
        note = _untrained(results[0]) + _ahead_of_ours(data, results)
        texts.append(f"### {TITLES[data]}\n\n{make_table(head, lines)}{note}")
    if not texts:
        return ""
    intro = (
        "A user has several test items, and the items have no order. A list has the best 20 of all "
        "items that the user's training does not have. Recall@20 is the share of a user's test "
        "items in the list.\n\n"
        "- A random training item of each user is for validation. The validation items choose the "
        "epochs, and a refit learns them.\n"
        "- The column *validation* is among 100 sampled items, and among all items for NBPR from "
        "ALS.\n"
        "- The settings are those of MovieLens 1M, except for iALS and GF-CF. ALS start and "
        "NBPR from ALS have those of the recipe `als-nbpr`.\n"
        "- Training times were measured while other work used the machine. The process of "
        "NBPR from ALS was stopped for some minutes. Processor times are those of both cores.\n"
        "- Rows in italics have published figures.\n\n"
    )
    return "## Sets of test items\n\n" + intro + "\n".join(texts)


def _untrained(result: RunResult) -> str:
    """Says how many test items occur in no training; empty if there is none."""
    data = result.payload["data"]
    n = data.get("untrained_test_items", 0)
    if not n:
        return ""
    return (
        f"{n:,} of the {data['test_items']:,} test items occur in no training. They count, as in "
        "the published figures, and no method can learn them.\n\n"
    )


def _ahead_of_ours(data: str, results: Sequence[RunResult]) -> str:
    """Names the methods whose NDCG@20 is above that of all our models; empty if there is none."""
    ours = [result.metric("sets", "ndcg") or 0.0 for result in results if result.is_ours]
    if not ours:
        return ""
    others = {
        label_of(result): result.metric("sets", "ndcg") or 0.0
        for result in results
        if not result.is_ours
    }
    others |= {name: ndcg for name, _, ndcg in PUBLISHED[data]}
    ahead = [name for name, ndcg in others.items() if ndcg > max(ours)]
    return f"Ahead of all our models by NDCG@20: {'; '.join(ahead)}.\n" if ahead else ""
