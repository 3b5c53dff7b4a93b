"""docs/results.md: tables and plots made from stored results and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ncr_core.errors import DataError
from ncr_core.evaluation.significance import PairedTest
from ncr_core.experiments import targets
from ncr_core.experiments.cell import Cell
from ncr_core.experiments.datasets import DATA_SETS
from ncr_core.experiments.grids import GRIDS
from ncr_core.experiments.paper import PAPER, PAPER_COUNTS
from ncr_core.experiments.plots import Lines, plot
from ncr_core.experiments.stored import Result, Stored
from ncr_core.experiments.targets import Choice

PANELS = {"hr": "HR@10", "ndcg": "NDCG@10"}
FIGURES_TITLE = {
    "figure4": ("Figure 4: negatives a positive", "negatives"),
    "figure5": ("Figure 5: α of the pre-training", "α"),
    "figure6": ("Figure 6: hidden layers of DNCR", "hidden layers"),
}
INTRO = """# Results

Made by `ncr reproduce page` from the JSON files of `benchmarks/results`, which `ncr reproduce`
wrote; nothing on this page was typed in, the paper's own figures excepted. Each file holds its
configuration, seed, data fingerprint, machine, versions, commit, seconds and every user's rank.

- **Sampled**: the held-out item among 100 items that were not interacted with, the mean over
  three seeds of negatives (on the published splits: their given negatives, three places of the
  held-out item). **Full**: among all items that were not interacted with. Sampled metrics mislead
  when models are compared (Krichene & Rendle, KDD'20), so both are here.
- Intervals are 95 % bootstrap intervals over users; p is of a paired t-test over users.
- Every method is chosen on validation items, by sampled NDCG@10; test items are looked at once.
- **P1** (the paper's): the second latest item is held out for validation and is neither trained
  on nor a candidate. **Refit** rows were trained once more with it, as many rounds as validation
  chose.
"""


def write_page(results: Path, page: Path) -> None:
    """Writes the page, and its plots into ``plots`` beside it. Raises DataError without results."""
    stored = Stored(results)
    if next(stored.every(), None) is None:
        raise DataError(f"{results} holds no results: run `ncr reproduce` first")
    plots = page.parent / "plots"
    sections = [
        INTRO,
        *(_best(stored, data) for data in ("ml-1m", "ncf-ml-1m", "amusic-deepcf")),
        _table1(stored),
        _table2(stored),
        _table3(stored),
        _figure3(stored, plots),
        *(_figure(stored, plots, name) for name in FIGURES_TITLE),
        _loss(stored, plots),
        _forms(stored),
        _tuning(stored),
        _machines(stored),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(section for section in sections if section))


def _best(stored: Stored, data: str) -> str:
    titles = {
        "ml-1m": "Ours beside the strongest baselines: MovieLens 1M, P1",
        "ncf-ml-1m": "The published NCF split of MovieLens 1M, P2 (refitted)",
        "amusic-deepcf": "Amazon Music, DeepCF's cut (refitted; it has no times)",
    }
    found = _found(stored, targets.best(Choice(data)))
    if not found:
        return ""
    sections = []
    for refit in (False, True):
        rows = [result for result in found if result.refit == refit]
        if rows:
            note = "Refit with the validation items:\n\n" if refit and data == "ml-1m" else ""
            sections.append(note + _compared(rows))
    return f"## {titles[data]}\n\n" + "\n".join(sections)


def _compared(rows: list[Result]) -> str:
    """Every method with intervals, and p against the strongest method that is not ours."""
    lines = []
    theirs = [row for row in rows if "model" not in row.settings]
    for row in rows:
        ours = "model" in row.settings
        cells = [f"**{_named(row)}**" if ours else _named(row)]
        kinds = ("sampled", "full")
        cells += [_with_interval(row, kind, name) for kind in kinds for name in PANELS]
        cells += [_significance(row, theirs, kind) if ours else "" for kind in kinds]
        lines.append([*cells, f"{row.seconds:.0f}"])
    head = ["", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10"]
    return _table(
        [*head, "NDCG@10 against the best baselines, sampled", "full", "training s"], lines
    )


def _significance(row: Result, theirs: list[Result], kind: str) -> str:
    """The difference in NDCG@10 from the baseline with the highest, and its p: of those that know
    no order of a user's items, and of all."""
    measured = [other for other in theirs if other.metric(kind, "ndcg") is not None]
    if row.metric(kind, "ndcg") is None or not measured:
        return ""
    strongest = max(measured, key=lambda other: other.metric(kind, "ndcg") or 0.0)
    unordered = [other for other in measured if other.method not in targets.ORDERED]
    without_order = max(unordered, key=lambda other: other.metric(kind, "ndcg") or 0.0)
    rivals = [without_order] + ([strongest] if strongest is not without_order else [])
    return "; ".join(_difference(row.against(rival, kind, "ndcg"), rival) for rival in rivals)


def _difference(test: PairedTest, rival: Result) -> str:
    p = "p < .0001" if test.p < 1e-4 else f"p = {test.p:.4f}"
    return f"{test.mean_difference:+.4f} to {rival.method}, {p}"


def _table1(stored: Stored) -> str:
    lines = []
    for method in targets.PAPER_METHODS:
        found = _found(stored, targets.table1(Choice(methods=(method,))))
        lines += [_beside_paper(result) for result in found]
    return _section("Table 1: MovieLens 1M by predictive factors, P1", _BESIDE, lines)


_BESIDE = ["", "d", "HR@10", "paper", "NDCG@10", "paper", "full HR@10", "full NDCG@10", "s"]


def _beside_paper(result: Result) -> list[str]:
    paper = PAPER.get(result.method, {}).get(result.factors)
    cells = [result.method, str(result.factors or "")]
    for at, name in enumerate(PANELS):
        own = result.metric("sampled", name)
        ahead = own is not None and paper is not None and own > paper[at]
        cells += [_bold(own, ahead), f"{paper[at]:.4f}" if paper else ""]
    cells += [_figure_of(result.metric("full", name)) for name in PANELS]
    return [*cells, f"{result.seconds:.0f}"]


def _table2(stored: Stored) -> str:
    lines = []
    for data in ("ml-1m", "ncf-ml-1m", "amusic-deepcf"):
        for result in _found(stored, targets.table2(Choice(data))):
            counts = result.stored["data"]
            lines.append([data, *(f"{counts[k]:,}" for k in ("users", "items", "interactions"))])
    for name, counts in PAPER_COUNTS.items():
        lines.append([f"the paper's {name}", *(f"{n:,}" for n in counts)])
    note = (
        "The paper's Amazon cut is not to be had, and cannot be of items with 10 interactions as "
        "it says: 65,344 / 9,267 is 7.\n"
    )
    return _section("Table 2: the data", ["", "users", "items", "interactions"], lines, note)


def _table3(stored: Stored) -> str:
    lines = [_beside_paper(result) for result in _found(stored, targets.table3(Choice()))]
    lines.sort(key=lambda line: (int(line[1]), line[0] == "NeuPR"))
    return _section("Table 3: pre-training of NeuPR", _BESIDE, lines)


def _figure3(stored: Stored, plots: Path) -> str:
    found = [r for r in _found(stored, targets.figure3(Choice())) if r.method != "ItemPop"]
    if not found:
        return ""
    x = list(range(1, 11))
    panels: dict[str, Lines] = {
        label.replace("@10", "@k"): {result.method: (x, result.top(name)) for result in found}
        for name, label in PANELS.items()
    }
    plot(plots / "figure3.svg", panels, "k")
    lines = [[r.method, *(f"{y:.3f}" for y in r.top("hr"))] for r in found]
    table = _table(["HR@k", *(str(k) for k in x)], lines)
    return f"## Figure 3: top-1 to top-10, d = 8\n\n![Figure 3](plots/figure3.svg)\n\n{table}"


def _figure(stored: Stored, plots: Path, name: str) -> str:
    title, x_label = FIGURES_TITLE[name]
    by_method: dict[str, list[tuple[float, Result]]] = {}
    for cell in targets.TARGETS[name](Choice()):
        result = stored.of(cell)
        if result is not None:
            value = float(cell.variant.partition("=")[2])
            by_method.setdefault(cell.method, []).append((value, result))
    if not by_method:
        return ""
    panels: dict[str, Lines] = {
        label: {
            method: ([x for x, _ in points], [r.metric("sampled", key) or 0.0 for _, r in points])
            for method, points in by_method.items()
        }
        for key, label in PANELS.items()
    }
    plot(plots / f"{name}.svg", panels, x_label)
    lines = [
        [method, f"{x:g}", *(_figure_of(r.metric("sampled", key)) for key in PANELS)]
        for method, points in by_method.items()
        for x, r in points
    ]
    table = _table(["", x_label, *PANELS.values()], lines)
    return f"## {title}, d = 8\n\n![{title}](plots/{name}.svg)\n\n{table}"


def _loss(stored: Stored, plots: Path) -> str:
    found = _found(stored, targets.loss(Choice()))
    if not found:
        return ""
    curves = {r.method: r.stored["history"][-1]["loss"] for r in found}
    # A logit's cross-entropy is the mean over D_S and its mirror; ours sums the two orders.
    lines: Lines = {
        name: (list(range(1, len(loss) + 1)), [x / 2 for x in loss])
        for name, loss in curves.items()
    }
    plot(plots / "loss.svg", {"training loss": lines}, "iteration")
    last = _table(
        ["", "iterations", "last loss"],
        [[name, str(len(x)), f"{y[-1]:.4f}"] for name, (x, y) in lines.items()],
    )
    return (
        "## The training loss, d = 8\n\n"
        "Learning rate 5e-4, one negative, batches of 4,096, random start.\n\n"
        f"![Training loss](plots/loss.svg)\n\n{last}"
    )


def _forms(stored: Stored) -> str:
    found = _found(stored, [*targets.forms(Choice()), *targets.table1(Choice(factors=(8,)))])
    if not any(result.method in targets.FORMS for result in found):
        return ""
    kept = (*targets.FORMS, "DNCR", "NeuPR")
    lines = [_beside_paper(result) for result in found if result.method in kept]
    return _section("Forms that the paper names: eq. 7–9 and eq. 24, d = 8", _BESIDE, lines)


def _tuning(stored: Stored) -> str:
    sections = []
    for data, method in ((d, m) for d in DATA_SETS for m in GRIDS[d]):
        results = _found(stored, targets.tuning(Choice(data, methods=(method,))))
        if not results:
            continue
        best = max(results, key=lambda r: r.validation or 0.0)
        rows = [
            [_changes(r), _bold(r.validation, r is best), str(r.stored["rounds"] or ""),
             f"{r.seconds:.0f}"]
            for r in results
        ]  # fmt: skip
        size = f", d = {results[0].factors}" if results[0].factors else ""
        head = ["", "validation NDCG@10", "rounds", "s"]
        sections.append(f"### {method}{size}, {data}\n\n{_table(head, rows)}")
    if not sections:
        return ""
    note = (
        "Sampled NDCG@10 on the validation items, one seed. At most eight configurations a method; "
        "`rounds` is the epoch or iteration that the same items chose.\n\n"
    )
    return "## The grids\n\n" + note + "\n".join(sections)


def _machines(stored: Stored) -> str:
    seen = sorted(
        {
            (r.stored["machine"]["cpu"], r.stored["machine"]["threads"], r.stored["machine"]["gpu"],
             r.stored["software"]["torch"], r.stored["commit"])
            for r in stored.every()
        },
        key=str,
    )  # fmt: skip
    lines = [[cpu, str(threads), gpu or "none", torch, f"`{commit}`"] for cpu, threads, gpu, torch,
             commit in seen]  # fmt: skip
    head = ["processor", "threads", "GPU", "torch", "commit"]
    return _section("Made on", head, lines)


def _changes(result: Result) -> str:
    """The settings of a grid's configuration, flat."""
    flat: dict[str, object] = {}
    for key, value in result.settings.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return ", ".join(f"{k} {v}" for k, v in flat.items() if k != "kind")


def _found(stored: Stored, cells: Iterable[Cell]) -> list[Result]:
    """Results of those cells that were run."""
    return [result for cell in cells if (result := stored.of(cell)) is not None]


def _named(result: Result) -> str:
    return f"{result.method}, d = {result.factors}" if result.factors else result.method


def _with_interval(result: Result, kind: str, name: str) -> str:
    value, interval = result.metric(kind, name), result.interval(kind, name)
    if value is None or interval is None:
        return ""
    return f"{value:.4f} ({interval[0]:.3f}–{interval[1]:.3f})"


def _bold(value: float | None, bold: bool) -> str:
    text = _figure_of(value)
    return f"**{text}**" if bold else text


def _figure_of(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _section(title: str, head: Sequence[str], lines: list[list[str]], note: str = "") -> str:
    return f"## {title}\n\n{_table(head, lines)}{note}" if lines else ""


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows) + "\n"
