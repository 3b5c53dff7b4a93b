"""The configuration of a training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ncr_core.errors import ConfigError
from ncr_core.parameters import check_parameters, parameter

if TYPE_CHECKING:
    import torch

Loss = Literal["bce", "bpr", "listwise"]
Schedule = Literal["one-cycle", "constant"]
Stopping = Literal["validation", "paper"]
Validation = Literal["sampled", "full"]
Optimizer = Literal["auto", "dense", "sparse"]
Start = Literal["random", "spectral", "als", "next-item"]
TowerStart = Literal["random", "product"]

MAX_SHARED_NEGATIVES = 65_536


@dataclass(frozen=True)
class TrainConfig:
    """Choices of the training loop. Raises ConfigError if a value is out of bounds."""

    epochs: int = parameter(
        15,
        "The maximum number of passes over the data. 0 keeps the start.",
        ge=0,
        request={"ge": 1, "le": 1000},
    )

    batch_size: int = parameter(
        0,
        "The number of positives per step (paper: 256). 0 chooses by the size of the data.",
        ge=0,
        request={"le": 1_000_000},
    )
    """0 takes 256 to 4,096 positives, by the number of positives in the data."""

    negatives: int = parameter(
        4, "The number of negatives per positive (paper: 1).", ge=1, request={"le": 100}
    )
    """Each epoch draws new negatives."""

    shared_negatives: int = parameter(
        0,
        "The number of items that all positives of a batch are compared with. 0 uses "
        "negatives instead.",
        ge=0,
        le=MAX_SHARED_NEGATIVES,
    )
    """Above 0, all positives of a batch are compared with the same items, drawn anew each batch,
    in place of ``negatives`` of their own. Products of matrices then replace look-ups. Shared
    negatives are for nbpr, for the nbpr part of a pre-trained neupr, and for a dncr whose
    ``tower_start`` is the product. A catalogue of no more items is used whole."""

    start: Start = parameter(
        "random",
        "The start of the embeddings. spectral: leading singular vectors. als: the factors of "
        "implicit ALS (nbpr). next-item: the factors of the linear next-item model (history).",
    )

    tower_start: TowerStart = parameter("random", option=False)
    """The start of the tower of a dncr: ``random`` layers, or the ``product`` of a trained NBPR.

    For ``product`` an NBPR is trained first, as ``start`` and ``epochs`` say. Then the tower is
    trained for ``fine_tune_epochs`` at ``fine_tune_rate``. Its loss is ``listwise``: each positive
    against ``negatives`` items that the NBPR draws from the ``shared_negatives`` of the batch."""

    learning_rate: float = parameter(
        1e-2, "The peak learning rate of Adam.", gt=0, request={"le": 10}
    )

    schedule: Schedule = parameter("one-cycle", "The schedule of the learning rate.")
    """``one-cycle`` warms up and cools down over ``epochs``; ``constant`` is the paper's."""

    loss: Loss = parameter(
        "bce",
        "The loss. bce: eq. 15. bpr: eq. 3. listwise: each positive against all its "
        "negatives at once.",
    )
    """``bce`` over both orders of each pair (eq. 15); ``bpr`` is −log σ(z_uij) alone (eq. 3);
    ``listwise`` is −log of the probability that the positive beats all its negatives."""

    stated_weight: float = parameter(1.0, ge=0, option=False)
    """The weight of a stated preference, or of a positive against a disliked item, relative to a
    positive against all its negatives. 0 leaves both out."""

    early_weight: float = parameter(1.0, gt=0, option=False)
    """The weight of each of a user's first ten positives, relative to a later one. Only models of
    ordered histories learn newcomers' next items from early positives."""

    l2: float = parameter(0.0, "The L2 regularisation λ on the embeddings of each batch.", ge=0)
    """λ of λ‖Θ‖² (eq. 3)."""

    dropout: float = parameter(0.0, "The dropout rate of user vectors in training.", ge=0, lt=1)
    """The share of each user vector's coordinates that training leaves out at random."""

    optimizer: Optimizer = parameter("auto", option=False)
    """Adam on whole tables (``dense``) or on a batch's rows (``sparse``). ``auto`` chooses for each
    table."""

    stopping: Stopping = parameter(
        "validation", "The stopping rule: the validation NDCG@10, or the 0.1 % rule of the paper."
    )
    """``validation``: NDCG@10 with ``patience``; ``paper``: the loss falls by less than 0.1 %."""

    validation: Validation = parameter("sampled", option=False)
    """The items that a validation item is ranked among: ``sampled``, or the ``full`` catalogue."""

    patience: int = parameter(4, ge=1, option=False)
    """Epochs in a row without a new best validation NDCG@10; the start is no epoch."""

    pretrain: bool = parameter(
        True, "Start NeuPR from a trained NBPR and DNCR.", negation="--no-pretrain", request={}
    )
    """NeuPR starts from the two parts by eq. 26."""

    alpha: float = parameter(0.5, "The share α of the NBPR part in eq. 26.", ge=0, le=1, request={})

    fine_tune_epochs: int = parameter(8, ge=0, option=False)
    """The maximum number of passes over a NeuPR after its two pre-trained parts are joined, or over
    a tower that starts as a product."""

    fine_tune_rate: float = parameter(1e-3, gt=0, option=False)
    """The learning rate of the fine-tuning, which begins with converged parts."""

    seed: int = parameter(0, "The seed of all random choices.", ge=0, request={"lt": 2**31})
    """The seed of initialisation, shuffling and sampling."""

    device: str = parameter("auto", "The device: auto, cpu, cuda or cuda:N.")

    def __post_init__(self) -> None:
        """Checks the values."""
        check_parameters(self)
        if self.epochs == 0 and self.start == "random":
            raise ConfigError("epochs must be at least 1 for a random start")

    def batch_size_for(self, positives: int) -> int:
        """The batch size for a number of positives; by default for about 80 steps an epoch."""
        return self.batch_size or min(4096, max(256, positives // 80))

    def torch_device(self) -> torch.device:
        """The device to train on. Raises ConfigError for an unknown or missing device."""
        return resolve_device(self.device)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint keeps them."""
        return asdict(self)


def resolve_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is CUDA if available, else the CPU.

    Raises ConfigError for an unknown or missing device.
    """
    import torch  # the configurations are read where nothing is trained

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not (
        torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    ):
        raise ConfigError(
            f"device {name!r} does not exist: torch finds no such GPU on this machine"
        )
    return device
