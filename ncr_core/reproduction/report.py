"""Tables and plots of stored results: the page docs/results.md, and a table for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ncr_core.errors import DataError
from ncr_core.evaluation.significance import holm
from ncr_core.optional_imports import require
from ncr_core.recipes import SIZES
from ncr_core.reproduction import choice_report, item_set_report, next_item_report, suites
from ncr_core.reproduction.datasets import ITEM_SETS, TEMPORAL
from ncr_core.reproduction.results_store import ResultsStore, RunResult
from ncr_core.reproduction.suites import Selection
from ncr_core.reproduction.tables import (
    Comparison,
    bold_figure,
    figure_text,
    label_of,
    make_section,
    make_table,
    results_of,
    row_label,
    with_interval,
)

Figures = tuple[float, float]


def _paper_table(text: str) -> dict[str, dict[int, Figures]]:
    """Parses lines of a method with its HR@10 and NDCG@10 at each of ``SIZES``."""
    table: dict[str, dict[int, Figures]] = {}
    for line in text.strip().splitlines():
        method, *columns = re.split(r"\s{2,}", line)
        pairs = [tuple(map(float, column.split())) for column in columns]
        table[method] = {d: (hr, ndcg) for d, (hr, ndcg) in zip(SIZES, pairs, strict=True)}
    return table


# The figures the paper prints (Tables 1 and 3), MovieLens 1M, by factors. Of ItemPop, to which
# factors do not apply, it prints other values for each size, and 0.1815 beside 0.4227.
PAPER = {"ItemPop": {0: (0.4227, 0.1815)}} | _paper_table("""
eALS                        .4861 .2503  .5156 .2691  .5227 .2759  .5344 .2833  .5386 .2891
BPR                         .5096 .2724  .5234 .2756  .5419 .2876  .5513 .2895  .5478 .2903
NeuMF                       .5480 .2921  .5515 .2989  .5495 .2960  .5493 .2912  .5400 .2987
NBPR                        .5402 .2854  .5492 .2935  .5478 .3002  .5435 .2973  .5258 .2885
DNCR                        .5664 .3037  .5672 .3076  .5690 .3082  .5652 .3089  .5753 .3116
NeuPR without pre-training  .5661 .2997  .5692 .3124  .5724 .3104  .5740 .3096  .5801 .3158
NeuPR                       .5702 .3024  .5750 .3085  .5776 .3127  .5793 .3122  .5840 .3125
""")
# Table 2: users, items, interactions.
PAPER_COUNTS = {"ml-1m": (6040, 3260, 998539), "Amusic": (5729, 9267, 65344)}


Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Name → x and y."""

_KINDS = ("sampled", "full")
# The sections that compare.
_BEST, _NEUMF, _SEQUENTIAL, _SEEDS = "best", "NeuMF", "sequential", "seeds"
_BEST_TITLES = {
    "ml-1m": "Our models and the strongest baselines: MovieLens 1M, P1",
    "ncf-ml-1m": "The published NCF split of MovieLens 1M, P2 (refitted)",
    "amusic-deepcf": "Amazon Music, the subset of DeepCF (refitted, without times)",
}
PANELS = {"hr": "HR@10", "ndcg": "NDCG@10"}
FIGURES_TITLE = {
    "figure4": ("Figure 4: negatives per positive", "negatives"),
    "figure5": ("Figure 5: α of the pre-training", "α"),
    "figure6": ("Figure 6: hidden layers of DNCR", "hidden layers"),
}
INTRO = """# Results

*For researchers who want to check, compare or reproduce the figures.*

`ncr reproduce page` makes this page from the JSON Lines files in `benchmarks/results`. Those files
come from `ncr reproduce`. One section comes from `gaps.json` in the same folder.

- A program computed the figures of all tables, except those of the paper and of other authors. The
  numbers in *Settings* were typed in, and in notes below tables those of 63 users after a break, of
  users for validation, of other trainings of SASRec CE and of NeuPR, and of times that differ.
- Each line of a JSON Lines file holds one run: configuration, seed, data fingerprint, machine,
  versions, commit, seconds and the rank of every user.
- [Measure a model](how-to/measure.md) describes the commands and the protocols.
- [What MovieLens shows](explanation/movielens.md) explains what the figures of MovieLens mean.

## How to read the tables

Metrics:

- **Sampled** metrics rank the held-out item among 100 items that the user did not interact with.
  The figures are means over three seeds of negatives.
- The published splits give the negatives. Their figures are means over three random positions of
  the held-out item.
- **Full** metrics rank the held-out item among all items that the user did not interact with.
- Sampled metrics mislead when models are compared (Krichene & Rendle, KDD'20). The page therefore
  has both kinds where both are stored.
- A column without the word *full* is sampled, unless its section says that all items are ranked.

Statistics:

- Intervals are 95 % bootstrap intervals over users.
- Each p is the result of a paired t-test over users. Holm's method adjusts p for all comparisons
  of this page.
- Every row is one training with the seed 0. Intervals and p say nothing about another training.
  [One section](#training-seeds) has several seeds of some rows, and says where the seed 0 is the
  best of them.

Methods:

- Names in bold are our models, and d is the number of factors.
- `spectral start`, `ALS start` and `next-item start` are the untrained starts of our models. The
  tables count them as baselines.
- Seconds cover the whole training, including the models that a NeuPR or DNCR starts from. *(GPU)*
  marks a training on a GPU, of which up to 17 ran at once.

Settings:

- Validation items chose the settings, most of them by sampled NDCG@10. The [grids](#the-grids)
  below have a part of what was tried, by sampled and by full NDCG@10.
- Where full NDCG@10 of a grid is more than 1 % higher with other settings, and the grid has as many
  factors as the comparison of models, a second row of the method, *(full choice)*, has these
  settings. It was measured after the other row. NeuPR starts from the NBPR and the DNCR of the
  other rows. P2 has the rows of P1, but for NeuMF. Its own grids, of iALS and of NeuMF, have no
  such settings.
- The linear next-item model and the recipes of `auto` were chosen by full NDCG@10, as the
  [experiments](experiments.md) say. SASRec has the settings of the published code, and full NDCG@10
  chose its epoch. Sampled and full figures do not always agree: DNCR history is above EASE by
  recency in the first, and below it in the second.
- Validation and test items do not always agree either:
  [one section](#validation-against-test) has the pairs.
- On MovieLens 1M the grid of BPR has 8 factors, those of NBPR and NeuPR have 8 and 64, and that of
  DNCR has 8, 24, 32 and 64.
  With other numbers of factors than those of a grid most methods have settings from trials on
  validation items that the repository does not store. The settings of NBPR and DNCR with 64
  factors were chosen by such trials too. Their grids have better ones, by sampled and by full
  NDCG@10: those of the rows *(full choice)*.
- Of settings within 0.002 of each other any was taken. With 8 factors, NBPR and DNCR do not have
  the best λ of their grids. NeuPR history has a lower rate than the best of its grid, whose sampled
  NDCG@10 is 0.0045 higher and whose full NDCG@10 is 0.0008 higher.
- On Amazon Music the repository stores no grid of DNCR, NeuPR, DNCR from ALS and NeuPR from ALS.
- On MovieLens 1M the repository stores no grid of these methods: DNCR from ALS,
  NeuPR from ALS, the forms of equations 7–9 and 24, NBPR next-item, DNCR from NBPR, NBPR
  attention, NBPR two-layer attention, NeuPR next-item and NBPR next-item with start.
- DNCR from NBPR is the recipe `next-item-dncr`, whose tower starts as the product of an NBPR with a
  next-item start. DNCR from ALS has the recipe `als-nbpr` in its place. Both NBPRs learn from 4,096
  shared items. The [experiments](experiments.md#a-tower-that-starts-as-a-product) have the
  trials, all of them on validation items.
- Trials on the validation items of the SASRec papers' split chose settings of three methods: the
  [layers](experiments.md#self-attention), passes and dropout of NBPR two-layer attention, the layer
  of NBPR attention and on that split its weight of a user's first items, and
  [the start](experiments.md#a-start-beside-the-trained-factors) of NBPR next-item with start.
- NBPR two-layer attention was trained on a GPU. The [experiments](experiments.md#self-attention)
  have trainings of it on one core of a CPU. They took 15 minutes of the processor each, and have
  about the same figures.
- NBPR two-layer attention was trained on the two splits of MovieLens 1M that hold out by order, and
  on no other data.
- The training of NBPR two-layer attention has no weight of a user's first items, which NBPR
  attention has on P1.
- NBPR next-item with start, NBPR attention and NeuPR next-item are the recipes `next-item-nbpr`,
  `next-item-attention` and `next-item-neupr`. The recipe `auto` tries the first two of these
  recipes.
- *With start* means up to 1,024 factors of the untrained next-item start beside the d trained ones,
  as the [experiments](experiments.md#a-start-beside-the-trained-factors) say. NBPR next-item is the
  same training without them.
- P2 has the settings of P1, except for iALS and NeuMF. On Amazon Music cornac's BPR has its default
  settings.
- The tests hold HR@10 and NDCG@10 against `success.10` and `ndcg_cut.10` of trec_eval.
- No choice used the test items of its own split. Two splits of MovieLens 1M have the same data in
  another order: 958 validation items of the SASRec papers' split are test items of P1, and 1,074
  validation items of P1, which chose most settings, are test items of that split. Without these
  users [all models have lower figures](experiments.md#two-splits-of-the-same-data), and our leads
  are smaller. On the SASRec papers' split HR@10 / NDCG@10 are then 0.2749 / 0.1595 for SASRec CE,
  0.2763 / 0.1633 for NBPR next-item with start and 0.3024 / 0.1797 for NBPR two-layer attention.
- During development, some results were measured on test items with other settings before: 23 of
  the first 146, all of NeuPR next-item, SASRec on MovieLens 1M, cornac's BPR on P1 and P2, NBPR
  from ALS on Gowalla, and ALS start, NBPR from ALS and NeuPR from ALS on Amazon Music. Four of the
  23 are DNCR and NeuPR with 24 and 32 factors, whose settings changed once more after that.
- The experiments have the aims that
  [were not reached](experiments.md#aims-that-were-not-reached-on-two-cores), how near the models
  come, and what limits them. gSASRec has no row of ours for such a reason.

Protocols:

- **P1** is the paper's protocol. P1 holds out each user's second latest item for validation. No
  model trains on that item, and the item is no candidate.
- **Refit** rows are trained once more with the validation items, for as many rounds as validation
  chose. Of a model with parts this holds for the last phase, and the parts have all their rounds.
"""


def write_page(results: Path, page: Path) -> None:
    """Writes the page, and its plots into ``plots`` beside it.

    Raises DataError if the folder ``results`` holds no results or a damaged file, and ConfigError
    if matplotlib is not installed.
    """
    store = ResultsStore(results)
    if next(iter(store), None) is None:
        raise DataError(f"{results} holds no results: run `ncr reproduce` first")
    plots = page.parent / "plots"
    tables = _best_tables(store)
    by_sequences = next_item_report.sequential_results(store)
    pairs = [
        *_best_pairs(tables),
        *_neumf_pairs(store),
        *_sequential_pairs(by_sequences),
        *_seed_pairs(store, {**by_sequences, "ml-1m": _p1(tables)}),
    ]
    comparisons = _compare(pairs)
    by_section = _by_section(store, tables, by_sequences)
    sections = [
        INTRO,
        *_best(tables, comparisons),
        next_item_report.cost([*_p1(tables), *_p1_on_a_cpu(store)], plots / "cost.svg"),
        next_item_report.seeds(store, _by_run(pairs, comparisons, _SEEDS)),
        next_item_report.sequential(by_sequences, _by_run(pairs, comparisons, _SEQUENTIAL)),
        next_item_report.temporal(store),
        item_set_report.item_sets(store),
        _beyond_accuracy(by_section),
        _gaps(store.folder / "gaps.json"),
        _table1(store),
        _by_the_paper(store),
        _neumf(pairs, comparisons),
        _table2(store),
        _table3(store),
        _figure3(store, plots),
        *(_figure(store, plots, name) for name in FIGURES_TITLE),
        _loss(store, plots),
        _forms(store),
        choice_report.reversals(by_section),
        choice_report.grids(store),
        _machines(store),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(section for section in sections if section))


_Pair = tuple[str, RunResult, str, RunResult]
"""A section of the page, one of our results, the kind of ranking (sampled or full), a baseline."""
_Comparisons = Mapping[tuple[str, str, str], Sequence[Comparison]]
"""Comparisons by section, name of the run, and kind of ranking (sampled or full)."""


def _best_tables(store: ResultsStore) -> dict[str, list[list[RunResult]]]:
    """The tables of each data set: results without refit, then results with refit."""
    tables = {}
    for data in _BEST_TITLES:
        results = results_of(store, suites.best(Selection(data)))
        by_refit = [[r for r in results if r.refit == refit] for refit in (False, True)]
        tables[data] = [rows for rows in by_refit if rows]
    return tables


def _best(tables: Mapping[str, list[list[RunResult]]], comparisons: _Comparisons) -> list[str]:
    """The comparisons with the strongest baselines, a section for each data set."""
    sections = []
    for data, of_data in tables.items():
        texts = []
        for rows in of_data:
            refit = rows[0].refit and data == "ml-1m"
            note = "The next rows are refit with the validation items:\n\n" if refit else ""
            note += _untrained_note(rows)
            if below := _with_reasons(_below_start(rows)):
                below += "\n"
            texts.append(note + _compared(rows, comparisons) + below)
        if texts:
            sections.append(f"## {_BEST_TITLES[data]}\n\n" + "\n".join(texts))
    return sections


def _untrained_note(rows: Sequence[RunResult]) -> str:
    """Says how many test items occur in no training, where a split publishes such items."""
    counted = [row.payload["data"].get("untrained_test_items", 0) for row in rows]
    untrained, users = max(counted), rows[0].payload["data"]["test_users"]
    if not untrained:
        return ""
    return (
        f"The test items of {untrained:,} of the {users:,} test users occur in no training. The "
        "table has these users, as the published split does. No method can learn such an item, and "
        "its place in a list is one of many ties or the effect of a random start.\n\n"
    )


_STARTS = {
    "spectral start": ("NBPR", "DNCR", "NeuPR", "NBPR pooled"),
    "ALS start": ("NBPR from ALS", "DNCR from ALS", "NeuPR from ALS"),
}


_AT_RANDOM = (
    "NBPR, and with it a part of NeuPR, starts at random. DNCR starts with the embeddings of "
    "`spectral start` and with random layers, and is then far below that start. On P1 "
    "[more passes](experiments.md#towers-of-64-factors-trained-to-the-end) bring it nearer. "
)
_AT_START = (
    "at the start itself. Where the figures of start and passes are stored, the best pass is at "
    "most 0.005 above the start on the validation items. The refit is not compared with its start."
)


def _below_start(rows: Sequence[RunResult], where: str = "") -> dict[str, str]:
    """A line for each label of a model that is below an untrained start with as many factors."""
    below: dict[str, str] = {}
    for start, methods in _STARTS.items():
        untrained = next((row for row in rows if row.method == start), None)
        for trained in (row for method in methods for row in rows if row.method == method):
            if untrained is None or untrained.factors != trained.factors:
                continue
            figures = []
            for kind in _KINDS:
                ours, begun = trained.metric(kind, "ndcg"), untrained.metric(kind, "ndcg")
                if ours is not None and begun is not None and ours < begun:
                    figures.append(
                        f"{kind} NDCG@10 {figure_text(ours)} against {figure_text(begun)}"
                    )
            if figures:
                figures_text = ", ".join(figures)
                label = f"{trained.label}{where}"
                below[label] = f"- {label} is below `{start}` ({figures_text}).\n"
    return below


def _with_reasons(below: Mapping[str, str]) -> str:
    """The lines of `_below_start` after the reasons for its models; empty without any."""
    if not below:
        return ""
    text = "These trained models are below an untrained start with as many factors. "
    begun = sorted(label for label in below if label.endswith((" pooled", " from ALS")))
    if len(begun) < len(below):
        text += _AT_RANDOM
    if begun:
        text += f"{', '.join(begun)}: the training begins {_AT_START}"
    return f"{text.rstrip()}\n\n{''.join(below.values())}"


def _by_section(
    store: ResultsStore,
    tables: Mapping[str, list[list[RunResult]]],
    by_sequences: Mapping[str, Sequence[RunResult]],
) -> list[tuple[str, Sequence[RunResult]]]:
    """The results of each data set and protocol, with its name."""
    groups: list[tuple[str, Sequence[RunResult]]] = []
    for data, of_data in tables.items():
        for rows in of_data:
            refit = ", refit" if rows[0].refit and data == "ml-1m" else ""
            groups.append((data + refit, rows))
    groups += by_sequences.items()
    groups += [(data, results_of(store, suites.temporal(Selection(data)))) for data in TEMPORAL]
    groups += [(data, results_of(store, suites.recall(Selection(data)))) for data in ITEM_SETS]
    return groups


def _beyond_accuracy(by_section: Sequence[tuple[str, Sequence[RunResult]]]) -> str:
    """The section on coverage, novelty and popularity of the lists over all unseen items."""
    lines, differences = [], []
    for name, results in by_section:
        for result in results:
            statistics = result.list_statistics
            if statistics is None:
                continue
            mark, again, ndcg = "", result.lists_ndcg, result.metric("full", "ndcg")
            if again is not None and ndcg is not None:
                mark = " †"
                differences.append(abs(again - ndcg))
            figures = [statistics[name] for name in ("coverage", "gini", "novelty")]
            figures.append(statistics["popularity_lift"])
            texts = (f"{figure:.2f}" for figure in figures)
            lines.append([name, label_of(result) + mark, *texts])
    note = (
        "The figures describe lists of ten over all unseen items, with one list per test user:\n\n"
        "- *Coverage* is the share of the catalogue that occurs in a list.\n"
        "- *Gini* is the Gini coefficient of the numbers of lists that items occur in. With 0, all "
        "items occur in equally many lists.\n"
        "- *Novelty* is the mean of log₂(users / users of the item), in bits.\n"
        "- *Popularity lift* is how much more popular the lists are than the users' own items. "
        "With 0, both are equally popular.\n\n"
        "`ncr_core/evaluation/beyond_accuracy.py` has the definitions. The tables of the paper "
        "below, and the trainings with other seeds, have no such lists.\n"
    )
    if differences:
        note += (
            "\n† These lists are of a second training with the same settings. Its full NDCG@10 "
            f"differs from that of the results above by at most {max(differences):.4f}.\n"
        )
    head = ["data set", "method", "coverage@10", "Gini", "novelty, bits", "popularity lift"]
    return make_section("Beyond accuracy", head, lines, note)


_GAPS_DATA = {"ml-100k": "MovieLens 100K", "ml-1m": "MovieLens 1M"}


def _gaps(path: Path) -> str:
    """The section on the figures by the time since a user's last interaction."""
    results = json.loads(path.read_text()) if path.exists() else {}
    sections = []
    for data, name in _GAPS_DATA.items():
        result = results.get(f"gaps-return-{data}")
        if result is None:
            continue
        by_method: dict[str, list[str]] = {}
        gaps: list[str] = []
        for row in result["rows"]:
            gap = f"{row['gap']}, {row['users']:,} users"
            gaps += [gap] if gap not in gaps else []
            figures = f"{row['hr@10']:.3f} ± {row['hr_error']:.3f} / {row['ndcg@10']:.3f}"
            by_method.setdefault(row["method"], []).append(figures)
        lines = [[method, *cells] for method, cells in by_method.items()]
        sections.append(f"### {name}\n\n{make_table(['method', *gaps], lines)}")
    if not sections:
        return ""
    note = (
        "The cells are HR@10 ± a standard error / NDCG@10 over all items, by the time between the "
        "held-out item and the item before it ([figures](../benchmarks/results/gaps.json), "
        "`python -m benchmarks.gaps DATA`). Each figure comes from one training.\n\n"
        "- The held-out item is the first one after the user's latest break of more than an hour. "
        "For a user without such a break, it is the latest item.\n"
        "- MovieLens users rate many films in a sitting. A next item is therefore mostly an item "
        "of the same sitting.\n"
        "- In a sitting, the methods that know the order are ahead. After a break they are close "
        "to popularity.\n"
        "- In rows with `by gap` the model is told the time since the last interaction, as in the "
        "service.\n"
        "- `next-item-nbpr` stands here without the start beside its trained factors, as NBPR "
        "next-item in the other tables.\n"
        "- Another measurement does not confirm the gain of `by gap`. Of 63 users with a break "
        "before their latest item, popularity finds that item for 7, `next-item-nbpr` for 8, and "
        "`next-item-nbpr` told of the break for 3 ([after a break](explanation/breaks.md)).\n\n"
    )
    title = "## MovieLens by the time since the last interaction\n\n"
    return title + note + "\n".join(sections)


def _best_pairs(tables: Mapping[str, list[list[RunResult]]]) -> list[_Pair]:
    """Pairs of each of our results with the best baselines of its table."""
    return [
        (_BEST, row, kind, rival)
        for of_data in tables.values()
        for rows in of_data
        for row in rows
        if row.is_ours
        for kind in _KINDS
        for rival in _rivals(row, rows, kind)
    ]


def _neumf_pairs(store: ResultsStore) -> list[_Pair]:
    """Pairs of NeuPR and NeuMF by size: the paper claims that NeuPR is better."""
    by_size: dict[int, dict[str, RunResult]] = {}
    for result in results_of(store, suites.table1(Selection(methods=("NeuMF", "NeuPR")))):
        by_size.setdefault(result.factors, {})[result.method] = result
    return [
        (_NEUMF, of_size["NeuPR"], kind, of_size["NeuMF"])
        for of_size in by_size.values()
        if len(of_size) == 2
        for kind in _KINDS
        if all(result.metric(kind, "ndcg") is not None for result in of_size.values())
    ]


def _sequential_pairs(by_data: Mapping[str, Sequence[RunResult]]) -> list[_Pair]:
    """Pairs of each of our results with the best stored baseline of its data set."""
    pairs: list[_Pair] = []
    for results in by_data.values():
        others = [result for result in results if not result.is_ours]
        if others:
            rival = max(others, key=lambda other: other.metric("full", "ndcg") or 0.0)
            pairs += [(_SEQUENTIAL, ours, "full", rival) for ours in results if ours.is_ours]
    return pairs


def _seed_pairs(store: ResultsStore, by_data: Mapping[str, Sequence[RunResult]]) -> list[_Pair]:
    """Pairs of each training seed with the baselines of its method.

    For models without order these are their start and NeuMF among sampled items, and for others
    the best stored baseline of the data set among all items.
    """
    pairs: list[_Pair] = []
    for data, results in next_item_report.seeded_results(store):
        kind, of_data = "full", by_data.get(data, ())
        others = [result for result in of_data if not result.is_ours]
        best = max(others, key=lambda other: other.metric("full", "ndcg") or 0.0, default=None)
        rivals = [] if best is None else [best]
        if results[0].method not in suites.ORDERED and data == "ml-1m":
            kind, names = "sampled", ("ALS start", "NeuMF")
            rivals = [other for other in others if other.method in names]
        pairs += [
            (_SEEDS, ours, kind, rival)
            for ours in results
            for rival in rivals
            if ours.metric(kind, "ndcg") is not None
        ]
    return pairs


def _by_run(
    pairs: Sequence[_Pair], comparisons: _Comparisons, wanted: str
) -> dict[str, Sequence[Comparison]]:
    """A section's comparisons by the name of the run."""
    return {
        row.name: comparisons[section_name, row.name, kind]
        for section_name, row, kind, _ in pairs
        if section_name == wanted
    }


def _p1(tables: Mapping[str, list[list[RunResult]]]) -> list[RunResult]:
    """The results of P1 that were not refitted."""
    of_data = tables["ml-1m"]
    return [result for result in (of_data[0] if of_data else ()) if not result.refit]


def _p1_on_a_cpu(store: ResultsStore) -> list[RunResult]:
    """Results of P1 on a CPU of trainings that the other tables have from a GPU."""
    on_a_cpu = results_of(ResultsStore(store.folder / "cpu"), suites.best(Selection()))
    return [result for result in on_a_cpu if not result.refit]


def _compare(pairs: Sequence[_Pair]) -> _Comparisons:
    """Runs all tests of the page, and adjusts each p for their number.

    A test that several sections have counts once.
    """
    different = {(row.name, kind, rival.name): (row, rival) for _, row, kind, rival in pairs}
    tests = [ours.compare(rival, key[1], "ndcg") for key, (ours, rival) in different.items()]
    adjusted = holm([test.p for test in tests])
    found = {
        key: Comparison(rival.label, test.mean_difference, p)
        for (key, (_, rival)), test, p in zip(different.items(), tests, adjusted, strict=True)
    }
    comparisons: dict[tuple[str, str, str], list[Comparison]] = {}
    for section, row, kind, rival in pairs:
        comparison = found[row.name, kind, rival.name]
        comparisons.setdefault((section, row.name, kind), []).append(comparison)
    return comparisons


_LEVEL = 0.05  # of significance


def _neumf(pairs: Sequence[_Pair], comparisons: _Comparisons) -> str:
    lines: dict[int, list[str]] = {}
    sizes: dict[str, dict[str, list[str]]] = {kind: {} for kind in _KINDS}
    for section, row, kind, _ in pairs:
        if section == _NEUMF:
            compared = comparisons[section, row.name, kind]
            lines.setdefault(row.factors, [str(row.factors)]).extend(c.text() for c in compared)
            for c in compared:
                found = "above NeuMF" if c.difference > 0 else "below NeuMF"
                if c.p >= _LEVEL:
                    found = "not significantly different"
                sizes[kind].setdefault(found, []).append(str(row.factors))
    note = (
        "According to the paper, NeuPR is above NeuMF at every size. Here a p below "
        f"{_LEVEL} counts as significant, and NeuPR is\n\n"
    )
    for kind, by_finding in sizes.items():
        if not by_finding:
            continue
        texts = (f"{found} at d = {', '.join(of)}" for found, of in by_finding.items())
        note += f"- by {kind} NDCG@10 {'; '.join(texts)}.\n"
    note += (
        "\nAt d = 24 and 32 the settings of DNCR, a part of NeuPR, were chosen anew after a "
        "measurement on the test items. By that measurement the sampled NDCG@10 of NeuPR was "
        "0.0135 and 0.0036 above NeuMF, which is not significant at d = 32. NeuMF kept its "
        "settings, and no grid of it at these sizes is stored.\n"
    )
    head = ["d", "difference of sampled NDCG@10", "difference of full NDCG@10"]
    return make_section("NeuPR against NeuMF: MovieLens 1M, P1", head, list(lines.values()), note)


def _rivals(row: RunResult, rows: list[RunResult], kind: str) -> list[RunResult]:
    """The best baseline by NDCG@10.

    If the best baseline knows the order of a user's items, the best baseline without the order
    comes first.
    """
    measured = [x for x in rows if not x.is_ours and x.metric(kind, "ndcg") is not None]
    if row.metric(kind, "ndcg") is None or not measured:
        return []
    strongest = max(measured, key=lambda other: other.metric(kind, "ndcg") or 0.0)
    unordered = [other for other in measured if other.method not in suites.ORDERED]
    without_order = max(unordered, key=lambda other: other.metric(kind, "ndcg") or 0.0)
    return [without_order] + ([strongest] if strongest is not without_order else [])


def _compared(rows: list[RunResult], comparisons: _Comparisons) -> str:
    """The table of all methods with intervals, and our comparisons with the best baselines."""
    lines = []
    for row in rows:
        cells = [row_label(row)]
        cells += [with_interval(row, kind, name) for kind in _KINDS for name in PANELS]
        for kind in _KINDS:
            cells.append("; ".join(c.text() for c in comparisons.get((_BEST, row.name, kind), ())))
        lines.append([*cells, row.seconds_text])
    head = ["method", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10"]
    differences = [f"{kind} NDCG@10 against the best baselines" for kind in _KINDS]
    return make_table([*head, *differences, "training, s"], lines)


def _table1(store: ResultsStore) -> str:
    lines, every = [], []
    for method in (*suites.PAPER_METHODS, suites.START):
        results = results_of(store, suites.table1(Selection(methods=(method,))))
        lines += [_beside_paper(result) for result in results]
        every += results
    note = (
        "Bold figures are above those that the paper prints. All methods are above the paper's "
        "figures, popularity included, so bold does not compare methods.\n\n"
        "- NBPR, DNCR and NeuPR have our settings. Starts, schedules, batches and negatives differ "
        "from those of the paper, which the next section has.\n"
        "- NeuPR is the form with pre-training. The paper's Table 1 prints the form without "
        "pre-training. By the paper's Table 3 the HR@10 of that form is lower at each size, and "
        "its NDCG@10 at 8, 24 and 32 factors.\n"
    )
    by_size: dict[int, list[RunResult]] = {}
    for result in every:
        by_size.setdefault(result.factors, []).append(result)
    below: dict[str, str] = {}
    for size, rows in by_size.items():
        below |= _below_start(rows, f" at d = {size}")
    if below:
        note += f"\n{_with_reasons(below)}"
    return make_section("Table 1: MovieLens 1M by predictive factors, P1", _BESIDE, lines, note)


def _by_the_paper(store: ResultsStore) -> str:
    results = results_of(store, suites.paper(Selection()))
    rounds = {len(h["loss"]) for r in results for h in r.payload["history"]}
    limit = f"{min(rounds)} to {max(rounds)} iterations" if rounds else ""
    note = (
        "The settings are those of the paper's text and of the recipe `paper`: weights from "
        "N(0, 0.01²), Adam at the rate 1e-3, one negative for each positive, batches of 256, and "
        "an end when the loss falls by less than 0.1 %, or after 100 iterations. The paper names "
        "three rates, of which 1e-3 is the largest. NeuPR starts from the other two rows with "
        "α = 0.5, and its printed figures are those with pre-training. The trainings took "
        f"{limit}.\n"
    )
    lines = [_beside_paper(result) for result in results]
    return make_section("The paper's settings: MovieLens 1M, P1", _BESIDE, lines, note)


_BESIDE = [
    "method", "d", "HR@10", "HR@10 in the paper", "NDCG@10", "NDCG@10 in the paper", "full HR@10",
    "full NDCG@10", "training, s",
]  # fmt: skip


def _beside_paper(result: RunResult) -> list[str]:
    method = result.method.removesuffix(" by the paper")
    paper = PAPER.get(method, {}).get(result.factors)
    cells = [result.method, str(result.factors or "")]
    for column, name in enumerate(PANELS):
        value = result.metric("sampled", name)
        ahead = value is not None and paper is not None and value > paper[column]
        cells += [bold_figure(value, ahead), f"{paper[column]:.4f}" if paper else ""]
    cells += [figure_text(result.metric("full", name)) for name in PANELS]
    return [*cells, result.seconds_text]


def _table2(store: ResultsStore) -> str:
    lines = []
    for data in ("ml-1m", "ncf-ml-1m", "amusic-deepcf"):
        for result in results_of(store, suites.table2(Selection(data))):
            counts = result.payload["data"]
            lines.append([data, *(f"{counts[k]:,}" for k in ("users", "items", "interactions"))])
    for name, counts in PAPER_COUNTS.items():
        lines.append([f"the paper's {name}", *(f"{n:,}" for n in counts)])
    note = (
        "The paper's Amazon subset is not available. Its counts contradict the paper's minimum of "
        "10 interactions per item: 65,344 interactions of 9,267 items are 7 per item.\n"
    )
    head = ["data set", "users", "items", "interactions"]
    return make_section("Table 2: the data", head, lines, note)


def _table3(store: ResultsStore) -> str:
    lines = [_beside_paper(result) for result in results_of(store, suites.table3(Selection()))]
    lines.sort(key=lambda line: (int(line[1]), line[0] == "NeuPR"))
    note = (
        "At d = 24 and 32 the parts of NeuPR have more passes and negatives than NeuPR without "
        "pre-training. The difference there is not of pre-training alone.\n"
    )
    return make_section("Table 3: pre-training of NeuPR", _BESIDE, lines, note)


def _figure3(store: ResultsStore, plots: Path) -> str:
    without = ("ItemPop", suites.START)
    results = [r for r in results_of(store, suites.figure3(Selection())) if r.method not in without]
    if not results:
        return ""
    x = list(range(1, 11))
    panels: dict[str, Lines] = {
        label.replace("@10", "@k"): {
            result.method: (x, result.by_cutoff(name)) for result in results
        }
        for name, label in PANELS.items()
    }
    _plot(plots / "figure3.svg", panels, "k")
    lines = [[r.method, *(f"{y:.3f}" for y in r.by_cutoff("hr"))] for r in results]
    table = make_table(["method, HR@k", *(str(k) for k in x)], lines)
    return f"## Figure 3: top-1 to top-10, d = 8\n\n![Figure 3](plots/figure3.svg)\n\n{table}"


def _figure(store: ResultsStore, plots: Path, name: str) -> str:
    title, x_label = FIGURES_TITLE[name]
    by_method: dict[str, list[tuple[float, RunResult]]] = {}
    for run in suites.TARGETS[name](Selection()):
        result = store.result(run)
        if result is not None:
            value = float(run.variant.partition("=")[2])
            by_method.setdefault(run.method, []).append((value, result))
    if not by_method:
        return ""
    panels: dict[str, Lines] = {
        label: {
            method: ([x for x, _ in points], [r.metric("sampled", key) or 0.0 for _, r in points])
            for method, points in by_method.items()
        }
        for key, label in PANELS.items()
    }
    _plot(plots / f"{name}.svg", panels, x_label)
    lines = [
        [method, f"{x:g}", *(figure_text(r.metric("sampled", key)) for key in PANELS)]
        for method, points in by_method.items()
        for x, r in points
    ]
    table = make_table(["method", x_label, *PANELS.values()], lines)
    return f"## {title}, d = 8\n\n![{title}](plots/{name}.svg)\n\n{table}"


def _loss(store: ResultsStore, plots: Path) -> str:
    results = results_of(store, suites.loss(Selection()))
    if not results:
        return ""
    curves = {r.method: r.payload["history"][-1]["loss"] for r in results}
    # A logit's cross-entropy is the mean over D_S and its mirror; ours sums the two orders.
    lines: Lines = {
        name: (list(range(1, len(loss) + 1)), [x / 2 for x in loss])
        for name, loss in curves.items()
    }
    _plot(plots / "loss.svg", {"training loss": lines}, "iteration")
    last = make_table(
        ["method", "iterations", "last loss"],
        [[name, str(len(x)), f"{y[-1]:.4f}"] for name, (x, y) in lines.items()],
    )
    return (
        "## The training loss, d = 8\n\n"
        "All models have a learning rate of 5e-4, one negative per positive, batches of 4,096 and "
        "a random start.\n\n"
        f"![Training loss](plots/loss.svg)\n\n{last}"
    )


def _forms(store: ResultsStore) -> str:
    results = results_of(
        store, [*suites.forms(Selection()), *suites.table1(Selection(factors=(8,)))]
    )
    if not any(result.method in suites.FORMS for result in results):
        return ""
    shown = (*suites.FORMS, "DNCR", "NeuPR")
    lines = [_beside_paper(result) for result in results if result.method in shown]
    return make_section("Forms of the paper's equations 7–9 and 24, d = 8", _BESIDE, lines)


def _machines(store: ResultsStore) -> str:
    machines = set()
    for result in store:
        machine, software = result.payload["machine"], result.payload["software"]
        machines.add(
            (
                *(machine["cpu"], str(machine["threads"]), machine["gpu"] or "none"),
                *(software["torch"], f"`{result.payload['commit']}`"),
            )
        )
    lines = [list(machine) for machine in sorted(machines, key=str)]
    head = ["processor", "threads", "GPU", "torch", "commit"]
    return make_section("Machines", head, lines)


def _plot(path: Path, panels: Mapping[str, Lines], x_label: str) -> None:
    """Draws the panels side by side, each with its name at the y axis, as an SVG file.

    Raises ConfigError if matplotlib is not installed.
    """
    require("matplotlib", "research")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same results give the same bytes: no date, no random ids.
    mpl.rcParams["svg.hashsalt"] = "ncr"
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    for axes, (label, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, (x, y) in lines.items():
            axes.plot(x, y, marker="o" if len(x) <= 20 else None, markersize=3, label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


_TERMINAL_HEAD = ("run", "val NDCG@10", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", "train s")


def terminal_table(results: Iterable[Mapping[str, Any]]) -> str:
    """Formats results for a terminal, one line each, with aligned columns."""
    rows = [_TERMINAL_HEAD, *(_terminal_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TERMINAL_HEAD))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _terminal_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = result.get("metrics", {})
    figures = [
        metrics.get(kind, {}).get(name) for kind in ("sampled", "full") for name in ("hr", "ndcg")
    ]
    validation = (result["validation"] or {}).get("ndcg")
    return (
        result["cell"].partition("/")[2],
        figure_text(validation),
        *(figure_text(x) for x in figures),
        f"{result['seconds']['train']:.0f}",
    )
