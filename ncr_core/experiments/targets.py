"""Which cells each of the paper's tables and figures is made of, and those that go beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ncr_core.errors import ConfigError
from ncr_core.experiments.cell import Cell
from ncr_core.experiments.chosen import LARGE, METHODS, PARTS, SIZELESS, SIZES, merged, settings_of
from ncr_core.experiments.grids import GRIDS

PAPER_METHODS = ("ItemPop", "eALS", "BPR", "NeuMF", "NBPR", "DNCR", "NeuPR")
STRONG = ("cornac BPR", "iALS", "EASE", "EASE by recency")
BEYOND = ("NBPR pooled", "NBPR from ALS", "NBPR history", "DNCR history", "NeuPR history")
ORDERED = ("EASE by recency", "NBPR history", "DNCR history", "NeuPR history")
WITHOUT_TIMES = ("amusic-deepcf",)
FORMS = ("two towers", "two towers shared", "NeuPR shared embeddings")
FIGURE_FACTORS = 8
NEGATIVES = tuple(range(1, 11))
ALPHAS = tuple(round(0.1 * step, 1) for step in range(11))
DEPTHS = tuple(range(1, 7))
LOSS_EPOCHS = 100


@dataclass(frozen=True)
class Choice:
    """What of a target is run; an empty sequence is all of it."""

    data: str = "ml-1m"
    factors: Sequence[int] = ()
    methods: Sequence[str] = ()
    full: bool = True
    seed: int = 0

    def sizes(self, of: Sequence[int]) -> Sequence[int]:
        return self.factors or of

    def names(self, of: Sequence[str]) -> list[str]:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ConfigError(f"unknown method {unknown[0]!r}: {', '.join(METHODS)}")
        return [name for name in of if not self.methods or name in self.methods]


def cell_of(
    method: str,
    choice: Choice,
    factors: int,
    *,
    variant: str = "",
    refit: bool | None = None,
    over: Mapping[str, Any] | None = None,
    **more: Any,
) -> Cell:
    """A method with its chosen settings, and what ``over`` says in place of some of them.

    NeuPR gets the cells of the two parts that it starts from, with the same changes.
    """
    settings = merged(settings_of(method, factors, choice.data), over or {})
    cell = Cell(
        choice.data,
        method,
        0 if method in SIZELESS else factors,
        settings,
        variant=variant,
        seed=choice.seed,
        refit=choice.data != "ml-1m" if refit is None else refit,
        full=choice.full,
        **more,
    )
    if method not in PARTS or not settings["training"].get("pretrain", True):
        return cell
    if cell.group == "tuning":  # only what follows the parts is under trial
        named, own, more = "", {}, {}
    else:
        own = {section: dict(values) for section, values in (over or {}).items()}
        own.get("training", {}).pop("alpha", None)  # α is no matter of the parts
        named = "" if variant.startswith("alpha") else variant
    first, second = (
        cell_of(part, choice, factors, variant=named, refit=refit, over=own, **more)
        for part in PARTS[method]
    )
    return cell.with_parts(first, second)


def table1(choice: Choice) -> list[Cell]:
    """HR@10 and NDCG@10 of every method by the number of predictive factors."""
    names = choice.names(PAPER_METHODS)
    once = [cell_of(name, choice, 0) for name in names if name in SIZELESS]
    sized = [name for name in names if name not in SIZELESS]
    return once + [cell_of(name, choice, d) for d in choice.sizes(SIZES) for name in sized]


def table2(choice: Choice) -> list[Cell]:
    """Counts of the data: ItemPop's cell holds them."""
    return [cell_of(name, choice, 0) for name in choice.names(("ItemPop",))]


def table3(choice: Choice) -> list[Cell]:
    """NeuPR with and without pre-training."""
    names = choice.names(("NeuPR without pre-training", "NeuPR"))
    return [cell_of(name, choice, d) for d in choice.sizes(SIZES) for name in names]


def figure3(choice: Choice) -> list[Cell]:
    """Top-1…10, of the ranks that Table 1's cells hold."""
    sizes = choice.sizes((FIGURE_FACTORS,))
    return table1(Choice(choice.data, sizes, choice.methods, choice.full, choice.seed))


def figure4(choice: Choice) -> list[Cell]:
    """1 to 10 negatives a positive."""
    cells = []
    for d in choice.sizes((FIGURE_FACTORS,)):
        for name in choice.names(("NeuMF", "NBPR", "DNCR", "NeuPR")):
            for n in NEGATIVES:
                section = {"negatives": n}
                over = section if name == "NeuMF" else {"training": section}
                cells.append(_varied(name, choice, d, f"negatives={n}", over))
    return cells


def figure5(choice: Choice) -> list[Cell]:
    """α of eq. 26 from 0 to 1."""
    return [
        _varied(name, choice, d, f"alpha={alpha}", {"training": {"alpha": alpha}})
        for name in choice.names(("NeuPR",))
        for d in choice.sizes((FIGURE_FACTORS,))
        for alpha in ALPHAS
    ]


def figure6(choice: Choice) -> list[Cell]:
    """DNCR with 1 to 6 hidden layers."""
    return [
        _varied(name, choice, d, f"layers={n}", {"model": {"layers": n}})
        for name in choice.names(("DNCR",))
        for d in choice.sizes((FIGURE_FACTORS,))
        for n in DEPTHS
    ]


def loss(choice: Choice) -> list[Cell]:
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
        cell_of(name, choice, d, variant="loss", over={"training": training}, test=False)
        for d in choice.sizes((FIGURE_FACTORS,))
        for name in choice.names(("NBPR", "DNCR", "NeuPR"))
    ]


def best(choice: Choice) -> list[Cell]:
    """Our models beside the strongest baselines: as the protocol has it, and on P1 also refitted
    with the validation items."""
    names = choice.names(("ItemPop", "eALS", "NeuMF", *STRONG, "NBPR", "NeuPR", *BEYOND))
    if choice.data in WITHOUT_TIMES:
        names = [name for name in names if name not in ORDERED]
    cells = []
    for name in names:
        for d in choice.sizes((LARGE.get(name, 64),)):
            cells.append(cell_of(name, choice, d))
            if choice.data == "ml-1m":
                cells.append(cell_of(name, choice, d, refit=True))
    return cells


def forms(choice: Choice) -> list[Cell]:
    """The forms that the paper names and does not measure: eq. 7–9 and eq. 24."""
    return [
        cell_of(name, choice, d)
        for d in choice.sizes((FIGURE_FACTORS,))
        for name in choice.names(FORMS)
    ]


def tuning(choice: Choice) -> list[Cell]:
    """The grids the settings were chosen from, on validation items alone."""
    cells = []
    grids = GRIDS[choice.data]
    for name in choice.names(tuple(grids)):
        size, grid = grids[name]
        for d in choice.sizes((size,)):
            for number, over in enumerate(grid, 1):
                cells.append(
                    _varied(
                        name,
                        choice,
                        d,
                        f"grid{number}",
                        over,
                        refit=False,
                        test=False,
                        group="tuning",
                    )
                )
    return cells


def _varied(
    name: str, choice: Choice, factors: int, variant: str, over: Mapping[str, Any], **more: Any
) -> Cell:
    return cell_of(name, choice, factors, variant=variant, over=over, **more)


TARGETS: dict[str, Callable[[Choice], list[Cell]]] = {
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
    "tuning": tuning,
}
