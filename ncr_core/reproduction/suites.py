"""Runs of one method, and the runs behind the tables and figures of the paper and the project."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ncr_core.errors import ConfigError
from ncr_core.recipes import SIZES, merge_sections
from ncr_core.reproduction.datasets import ITEM_SETS, SEQUENCES, TEMPORAL
from ncr_core.reproduction.hyperparameters import (
    CHOSEN_IN_FULL,
    GRIDS,
    METHODS,
    PARTS,
    SIZELESS,
    Settings,
    settings_of,
    size_of,
)


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run: one method on one data set."""

    data: str
    """The name of the data set."""

    method: str
    factors: int
    settings: Mapping[str, Any]

    variant: str = ""
    """The part of the run's name that separates runs of the same method and size."""

    seed: int = 0

    refit: bool = False
    """Train with the validation items, for as many rounds as the run without them chose."""

    full: bool = True
    """Rank over all unseen items too."""

    test: bool = True
    """Measure on test items; a run that only tunes or records the loss leaves them out."""

    parts: tuple[RunSpec, RunSpec] | None = field(default=None, repr=False)
    """The runs whose NBPR and DNCR a NeuPR starts from."""

    group: str = "cells"
    """``cells`` of the paper's tables and figures, or ``tuning``."""

    @property
    def name(self) -> str:
        """Group, data set, method, factors, variant, refit, seed, such as ``cells/ml-1m/ease``."""
        words = [self.method, f"d{self.factors}" if self.factors else "", self.variant]
        if self.refit:
            words.append("refit")
        if self.seed:
            words.append(f"seed{self.seed}")
        slug = "-".join(re.sub(r"[^a-z0-9.=+]+", "-", w.lower()).strip("-") for w in words if w)
        return f"{self.group}/{self.data}/{slug}"

    @property
    def validates_in_full(self) -> bool:
        """Whether the run ranks each user's validation item over all unseen items too."""
        return self.group == "tuning" and self.full

    def with_parts(self, nbpr: RunSpec, dncr: RunSpec) -> RunSpec:
        """The run of a NeuPR that starts from the models of these two runs."""
        return replace(self, parts=(nbpr, dncr))

    def before_refit(self) -> RunSpec:
        """The run whose validation items choose the rounds of this refit.

        The run measures on test items only where the page reports its figures beside the refit's.
        """
        parts = self.parts and (self.parts[0].before_refit(), self.parts[1].before_refit())
        return replace(self, refit=False, parts=parts, test=self.test and self.data == "ml-1m")

    def configuration(self) -> dict[str, Any]:
        """The configuration that a stored result of this run must have."""
        configuration: dict[str, Any] = {
            "data": self.data,
            "method": self.method,
            "factors": self.factors,
            "settings": json.loads(json.dumps(self.settings)),
            "seed": self.seed,
            "refit": self.refit,
        }
        if self.parts is not None:
            configuration["parts"] = [part.configuration() for part in self.parts]
        return configuration


FULL_CHOICE = "full-choice"
"""The variant of a method with the settings of ``CHOSEN_IN_FULL``."""
PAPER_METHODS = ("ItemPop", "eALS", "BPR", "NeuMF", "NBPR", "DNCR", "NeuPR")
STRONG = (
    "cornac BPR", "PureSVD", "iALS", "EASE", "EASE by recency", "Markov", "linear next-item"
)  # fmt: skip
START = "spectral start"
STARTS = ("spectral start", "ALS start", "next-item start")
BEYOND = (
    "NBPR pooled", "NBPR from ALS", "DNCR from ALS", "NeuPR from ALS", "NBPR history",
    "DNCR history", "NeuPR history", "NBPR next-item", "NBPR next-item with start",
    "DNCR from NBPR", "NBPR attention", "NBPR two-layer attention",
    "NeuPR next-item"
)  # fmt: skip
ORDERED = (
    "EASE by recency", "Markov", "linear next-item", "next-item start", "NBPR history",
    "DNCR history", "NeuPR history", "NBPR next-item", "NBPR next-item with start",
    "DNCR from NBPR", "NBPR attention", "NBPR two-layer attention",
    "NeuPR next-item"
)  # fmt: skip
WITHOUT_TIMES = ("amusic-deepcf",)
SEQUENTIAL = (
    "ItemPop", "Markov", "linear next-item", "next-item start", "NBPR next-item",
    "NBPR next-item with start", "NBPR attention",
    "NBPR two-layer attention", "DNCR next-item",
    "NeuPR next-item", "SASRec CE", "SASRec", "gSASRec"  # hours on a CPU
)  # fmt: skip
IN_TIME = (
    "ItemPop", "EASE", "EASE by recency", "Markov", "linear next-item", "next-item start",
    "NBPR next-item", "NBPR next-item with start", "NBPR attention"
)  # fmt: skip
OF_SETS = (
    "ItemPop", "PureSVD", "iALS", "GF-CF", "spectral start", "ALS start", "NBPR", "NBPR from ALS"
)  # fmt: skip
BY_THE_PAPER = ("NBPR by the paper", "DNCR by the paper", "NeuPR by the paper")
FORMS = ("two towers", "two towers shared", "NeuPR shared embeddings")
FIGURE_FACTORS = 8
NEGATIVES = tuple(range(1, 11))
ALPHAS = tuple(round(0.1 * step, 1) for step in range(11))
DEPTHS = tuple(range(1, 7))
LOSS_EPOCHS = 100


@dataclass(frozen=True)
class Selection:
    """The part of a target to run; an empty sequence selects everything."""

    data: str = "ml-1m"
    factors: Sequence[int] = ()
    methods: Sequence[str] = ()
    full: bool = True
    seed: int = 0

    def sizes(self, default: Sequence[int]) -> Sequence[int]:
        """The numbers of factors to run; ``default`` where none was selected."""
        return self.factors or default

    def names(self, available: Sequence[str]) -> list[str]:
        """The selected methods among the available methods.

        Raises ConfigError if a selected method does not exist.
        """
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ConfigError(f"unknown method {unknown[0]!r}: {', '.join(METHODS)}")
        return [name for name in available if not self.methods or name in self.methods]


def make_run(
    method: str,
    selection: Selection,
    factors: int,
    *,
    variant: str = "",
    refit: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunSpec:
    """The run of a method with its chosen settings, some of them replaced by ``overrides``.

    NeuPR also gets the runs of its two parts. The parts have the same overrides, except α and the
    overrides of a grid.
    """
    settings = merge_sections(settings_of(method, factors, selection.data), overrides or {})
    run = RunSpec(
        selection.data,
        method,
        0 if method in SIZELESS else factors,
        settings,
        variant=variant,
        seed=selection.seed,
        refit=selection.data != "ml-1m" if refit is None else refit,
        full=selection.full,
        **more,
    )
    if method not in PARTS or not settings["training"].get("pretrain", True):
        return run
    if run.group == "tuning":  # only what follows the parts is under trial
        variant, part_overrides, more = "", {}, {}
    else:
        part_overrides = {section: dict(values) for section, values in (overrides or {}).items()}
        part_overrides.get("training", {}).pop("alpha", None)  # α is no matter of the parts
        variant = "" if variant.startswith("alpha") else variant
    first, second = (
        make_run(
            part, selection, factors, variant=variant, refit=refit, overrides=part_overrides, **more
        )
        for part in PARTS[method]
    )
    return run.with_parts(first, second)


def table1(selection: Selection) -> list[RunSpec]:
    """HR@10 and NDCG@10 of every method, and of a start, by the number of predictive factors."""
    names = selection.names((*PAPER_METHODS, START))
    once = [make_run(name, selection, 0) for name in names if name in SIZELESS]
    sized = [name for name in names if name not in SIZELESS]
    return once + [make_run(name, selection, d) for d in selection.sizes(SIZES) for name in sized]


def paper(selection: Selection) -> list[RunSpec]:
    """The paper's models with the paper's own settings (§5.1)."""
    return [
        make_run(name, selection, d)
        for d in selection.sizes((FIGURE_FACTORS,))
        for name in selection.names(BY_THE_PAPER)
    ]


def table2(selection: Selection) -> list[RunSpec]:
    """The counts of the data, which the run of ItemPop holds."""
    return [make_run(name, selection, 0) for name in selection.names(("ItemPop",))]


def table3(selection: Selection) -> list[RunSpec]:
    """NeuPR with and without pre-training."""
    names = selection.names(("NeuPR without pre-training", "NeuPR"))
    return [make_run(name, selection, d) for d in selection.sizes(SIZES) for name in names]


def figure3(selection: Selection) -> list[RunSpec]:
    """Top-1 to top-10, from the ranks of Table 1's runs."""
    sizes = selection.sizes((FIGURE_FACTORS,))
    return table1(
        Selection(selection.data, sizes, selection.methods, selection.full, selection.seed)
    )


def figure4(selection: Selection) -> list[RunSpec]:
    """NeuMF, NBPR, DNCR and NeuPR with 1 to 10 negatives for each positive."""
    runs = []
    for d in selection.sizes((FIGURE_FACTORS,)):
        for name in selection.names(("NeuMF", "NBPR", "DNCR", "NeuPR")):
            for n in NEGATIVES:
                section = {"negatives": n}
                overrides = section if name == "NeuMF" else {"training": section}
                runs.append(
                    make_run(name, selection, d, variant=f"negatives={n}", overrides=overrides)
                )
    return runs


def figure5(selection: Selection) -> list[RunSpec]:
    """NeuPR with α of eq. 26 from 0 to 1."""
    return [
        make_run(
            name, selection, d, variant=f"alpha={alpha}", overrides={"training": {"alpha": alpha}}
        )
        for name in selection.names(("NeuPR",))
        for d in selection.sizes((FIGURE_FACTORS,))
        for alpha in ALPHAS
    ]


def figure6(selection: Selection) -> list[RunSpec]:
    """DNCR with 1 to 6 hidden layers."""
    return [
        make_run(name, selection, d, variant=f"layers={n}", overrides={"model": {"layers": n}})
        for name in selection.names(("DNCR",))
        for d in selection.sizes((FIGURE_FACTORS,))
        for n in DEPTHS
    ]


def loss(selection: Selection) -> list[RunSpec]:
    """The training loss of 100 passes: learning rate 5e-4, one negative (§5.2)."""
    training = {
        "epochs": LOSS_EPOCHS,
        "patience": LOSS_EPOCHS,
        "negatives": 1,
        "learning_rate": 5e-4,
        "schedule": "constant",
        "l2": 0.0,
        "start": "random",
        "batch_size": 4096,
        "pretrain": False,
    }
    return [
        make_run(name, selection, d, variant="loss", overrides={"training": training}, test=False)
        for d in selection.sizes((FIGURE_FACTORS,))
        for name in selection.names(("NBPR", "DNCR", "NeuPR"))
    ]


def best(selection: Selection) -> list[RunSpec]:
    """Our models and the strongest baselines.

    On P1 each method also has a refit with the validation items. The other protocols have the refit
    alone. Methods of ``CHOSEN_IN_FULL`` have runs with these settings too.
    """
    names = selection.names(
        ("ItemPop", "eALS", "NeuMF", *STRONG, *STARTS, "NBPR", "DNCR", "NeuPR", *BEYOND)
    )
    if selection.data in WITHOUT_TIMES:
        names = [name for name in names if name not in ORDERED]
    runs = []
    for name in names:
        for d in selection.sizes((size_of(name, selection.data),)):
            choices: dict[str, Settings] = {"": {}}
            if (name, selection.data) in CHOSEN_IN_FULL:
                choices[FULL_CHOICE] = CHOSEN_IN_FULL[name, selection.data]
            for variant, overrides in choices.items():
                runs += [
                    make_run(name, selection, d, variant=variant, overrides=overrides, refit=refit)
                    for refit in ((False, True) if selection.data == "ml-1m" else (None,))
                ]
    return runs


def sequential(selection: Selection) -> list[RunSpec]:
    """Next items by the protocol of SASRec: the validation item is input and no training item.

    Raises ConfigError if the data set does not have this split, or if the ranking over all items is
    off.
    """
    return _over_all_items("sequential", SEQUENTIAL, SEQUENCES, selection)


def temporal(selection: Selection) -> list[RunSpec]:
    """Users' first items after one cut in time, by the time since the item before.

    Raises ConfigError if the data set is not one of ``TEMPORAL``, or if the ranking over all items
    is off.
    """
    return _over_all_items("temporal", IN_TIME, TEMPORAL, selection)


def recall(selection: Selection) -> list[RunSpec]:
    """Recall@20 and NDCG@20 of users' sets of test items, trained with the validation items.

    Raises ConfigError if the data set is not one of ``ITEM_SETS``, or if the ranking over all items
    is off.
    """
    return _over_all_items("recall", OF_SETS, ITEM_SETS, selection, refit=True)


def _over_all_items(
    target: str,
    methods: Sequence[str],
    data_sets: Collection[str],
    selection: Selection,
    refit: bool = False,
) -> list[RunSpec]:
    """The runs of a target that ranks over all items, and only on these data sets."""
    if selection.data not in data_sets:
        raise ConfigError(
            f"{target} is not for {selection.data}: give --set {' or '.join(data_sets)}"
        )
    if not selection.full:
        raise ConfigError(f"{target} ranks over all items: --no-full leaves nothing to measure")
    return [
        make_run(name, selection, d, refit=refit)
        for name in selection.names(methods)
        for d in selection.sizes((size_of(name, selection.data),))
    ]


def forms(selection: Selection) -> list[RunSpec]:
    """The forms that the paper names and does not measure: eq. 7–9 and eq. 24."""
    return [
        make_run(name, selection, d)
        for d in selection.sizes((FIGURE_FACTORS,))
        for name in selection.names(FORMS)
    ]


def tuning(selection: Selection) -> list[RunSpec]:
    """The configurations of the grids, measured on validation items alone."""
    runs = []
    grids = GRIDS.get(selection.data, {})
    for name in selection.names(tuple(grids)):
        for d, grid in grids[name].items():
            if d not in selection.sizes((d,)):
                continue
            for number, overrides in enumerate(grid, 1):
                runs.append(
                    make_run(
                        name,
                        selection,
                        d,
                        variant=f"grid{number}",
                        overrides=overrides,
                        refit=False,
                        test=False,
                        group="tuning",
                    )
                )
    return runs


TARGETS: dict[str, Callable[[Selection], list[RunSpec]]] = {
    "paper": paper,
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "figure6": figure6,
    "loss": loss,
    "best": best,
    "forms": forms,
    "sequential": sequential,
    "temporal": temporal,
    "recall": recall,
    "tuning": tuning,
}


def runs_of(target: str, selection: Selection) -> list[RunSpec]:
    """The runs of a target.

    Raises ConfigError if the target is not for the selected data set.
    """
    only = dict.fromkeys(SEQUENCES, "sequential") | dict.fromkeys(TEMPORAL, "temporal")
    only |= dict.fromkeys(ITEM_SETS, "recall")
    if only.get(selection.data, target) != target:
        own = only[selection.data]
        raise ConfigError(f"{target} is not for {selection.data}: its target is {own}")
    return TARGETS[target](selection)
