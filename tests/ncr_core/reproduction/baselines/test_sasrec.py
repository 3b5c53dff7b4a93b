"""SASRec and gSASRec against attention and losses by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from ncr_core.data.interactions import Interactions
from ncr_core.data.splits import Split
from ncr_core.errors import ConfigError, DataError
from ncr_core.reproduction.baselines.sasrec import (
    SASRec,
    SASRecConfig,
    SASRecEncoder,
    _Negatives,
    fit_sasrec,
    loss_of,
    padded,
)

SMALL = SASRecConfig(factors=8, window=6, heads=2, blocks=2, batch_size=16, epochs=3, dropout=0.1)


def _split(users: int = 60, items: int = 12) -> Split:
    """Everybody takes one item after the other, round and round."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, users)
    first = rng.integers(items, size=users)
    rows = np.repeat(np.arange(users), lengths)
    steps = np.concatenate([np.arange(n) for n in lengths])
    names = [str(n) for n in range(max(users, items))]
    train = Interactions.from_arrays(
        rows, (first[rows] + steps) % items, user_ids=names[:users], item_ids=names[:items]
    )
    validation = (first + lengths) % items
    return Split(train, validation, (validation + 1) % items)


def _encoder(config: SASRecConfig = SMALL, n_items: int = 12) -> SASRecEncoder:
    torch.manual_seed(3)
    encoder = SASRecEncoder(n_items, config).eval()
    for parameter in encoder.parameters():  # far from zero, so that every part tells
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    encoder.items.weight.data[n_items] = 0.0
    return encoder


def _layer_norm(x: np.ndarray, norm: torch.nn.LayerNorm) -> np.ndarray:
    scaled = (x - x.mean()) / math.sqrt(x.var() + 1e-8)
    return scaled * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def _linear(x: np.ndarray, layer: torch.nn.Linear) -> np.ndarray:
    return layer.weight.detach().numpy() @ x + layer.bias.detach().numpy()


def _literal(encoder: SASRecEncoder, sequence: list[int], heads: int) -> np.ndarray:
    """The paper's equations, one item and one head after the other."""
    table, places = encoder.items.weight.detach().numpy(), encoder.places.weight.detach().numpy()
    n, size = len(sequence), table.shape[1]
    x = [table[item] * math.sqrt(size) + places[i] for i, item in enumerate(sequence)]
    width = size // heads
    for block in encoder.blocks:
        normed = [_layer_norm(one, block.attention_norm) for one in x]
        query = [_linear(one, block.query) for one in normed]
        key = [_linear(one, block.key) for one in x]
        value = [_linear(one, block.value) for one in x]
        after = []
        for i in range(n):
            mixed = []
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                scores = [query[i][part] @ key[j][part] / math.sqrt(width) for j in range(i + 1)]
                shares = np.exp(scores) / np.exp(scores).sum()
                mixed.append(sum(share * value[j][part] for j, share in enumerate(shares)))
            y = _layer_norm(
                normed[i] + _linear(np.concatenate(mixed), block.output), block.dense_norm
            )
            after.append(y + _linear(np.maximum(_linear(y, block.first), 0), block.second))
        x = after
    return np.array([_layer_norm(one, encoder.last_norm) for one in x])


@pytest.mark.parametrize("sequence", [[3], [3, 1, 7], [0, 1, 2, 3, 4, 5]])
def test_the_encoder_is_the_papers_equations(sequence: list[int]) -> None:
    encoder = _encoder()
    found = encoder(torch.tensor([sequence]))[0].detach().numpy()
    np.testing.assert_allclose(found, _literal(encoder, sequence, 2), atol=1e-5)


def test_padding_changes_nothing() -> None:
    encoder = _encoder()
    alone = encoder(torch.tensor([[3, 1, 7]]))[0]
    together = encoder(torch.tensor([[12, 12, 3, 1, 7], [5, 4, 3, 2, 1]]))[0, 2:]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_no_later_item_changes_an_earlier_vector() -> None:
    encoder = _encoder()
    for at in range(5):
        one, other = torch.tensor([[0, 1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 3, 4, 5]])
        other[0, at + 1 :] = torch.tensor([9, 8, 7, 6, 11])[: 5 - at]
        a, b = encoder(one)[0], encoder(other)[0]
        torch.testing.assert_close(a[: at + 1], b[: at + 1], atol=0, rtol=0)
        assert not torch.allclose(a[at + 1], b[at + 1])


def test_bce_by_hand() -> None:
    vectors, catalogue = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0], [-1, 0], [3, 5]])
    found = loss_of(SASRecConfig(), vectors, catalogue, torch.tensor([0]), torch.tensor([[2]]))
    expected = -math.log(1 / (1 + math.exp(-2))) - math.log(1 - 1 / (1 + math.exp(-3)))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_cross_entropy_by_hand() -> None:
    vectors, catalogue = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0], [-1, 0], [3, 5]])
    none = torch.zeros(1, 0, dtype=torch.long)
    found = loss_of(SASRecConfig(loss="ce"), vectors, catalogue, torch.tensor([0]), none)
    expected = math.log(math.exp(2) + math.exp(-1) + math.exp(3)) - 2
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_gbce_by_hand() -> None:
    """Of 5 items, 2 negatives: α = 2/4, and with t = .75 β = .5 (.75 (1 − 2) + 2) = .625."""
    vectors = torch.tensor([[1.0, 0.0]])
    catalogue = torch.tensor([[2.0, 0], [-1, 0], [3, 5], [0, 0], [1, 1]])
    config = SASRecConfig(loss="gbce", negatives=2, calibration=0.75)
    found = loss_of(config, vectors, catalogue, torch.tensor([0]), torch.tensor([[2, 1]]))

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    expected = -(0.625 * log_sigmoid(2.0) + log_sigmoid(-3.0) + log_sigmoid(1.0))
    assert float(found) == pytest.approx(expected, rel=1e-6)
    plain = loss_of(
        replace(config, calibration=0.0),
        vectors,
        catalogue,
        torch.tensor([0]),
        torch.tensor([[2, 1]]),
    )
    assert float(plain) == pytest.approx(
        -(log_sigmoid(2.0) + log_sigmoid(-3.0) + log_sigmoid(1.0)), rel=1e-6
    )


@pytest.mark.parametrize("loss", ["bce", "gbce"])
def test_each_epoch_has_negatives_of_its_own(loss: Literal["bce", "gbce"]) -> None:
    config, train = replace(SMALL, loss=loss, negatives=5), _split().train
    users = np.arange(train.n_users)

    def drawn(epoch: int) -> torch.Tensor:
        rng = np.random.default_rng((config.seed, epoch))
        return _Negatives(config, train, rng, epoch, torch.device("cpu")).of(users)

    assert drawn(0).equal(drawn(0))
    assert not drawn(0).equal(drawn(1))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["bce", "gbce", "ce"])
def test_each_loss_learns_what_comes_next(loss: str) -> None:
    config = replace(SMALL, loss=loss, epochs=40, patience=40, learning_rate=1e-2, dropout=0.0)
    fitted = fit_sasrec(_split(), replace(config, negatives=3 if loss == "gbce" else 1))
    assert fitted.history.loss[-1] < 0.7 * fitted.history.loss[0]
    assert fitted.validation is not None
    assert fitted.validation.ndcg > 0.8
    assert fitted.validation.ndcg == max(fitted.history.ndcg)


def test_the_latest_items_of_a_long_sequence_count() -> None:
    encoder = _encoder()
    long = Interactions.from_arrays(
        np.zeros(9, dtype=np.int64), np.arange(9), user_ids=["u"], item_ids=list("abcdefghijkl")
    )
    latest = long.select(np.arange(9) >= 3)
    np.testing.assert_array_equal(
        SASRec(encoder, 6, long).user_factors, SASRec(encoder, 6, latest).user_factors
    )


def test_a_user_without_items_has_a_vector_of_zeros() -> None:
    none = Interactions.from_arrays(
        np.zeros(1, dtype=np.int64),
        np.array([2]),
        user_ids=["u", "v"],
        item_ids=list("abcdefghijkl"),
    )
    vectors = SASRec(_encoder(), 6, none).user_factors
    assert vectors[0].any()
    assert not vectors[1].any()


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    split, path = _split(), tmp_path / "progress.pt"
    whole = fit_sasrec(split, SMALL)
    stopped = fit_sasrec(split, SMALL, None, path, "f1", lambda: True)
    assert len(stopped.history.loss) == 1
    resumed = fit_sasrec(split, SMALL, None, path, "f1")
    assert resumed.history.loss == whole.history.loss
    np.testing.assert_array_equal(resumed.model.user_factors, whole.model.user_factors)


def test_going_on_with_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "progress.pt"
    fit_sasrec(_split(), SMALL, None, path, "f1", lambda: True)
    with pytest.raises(DataError, match=r"other data \(fingerprint f1, here f2\)"):
        fit_sasrec(_split(), SMALL, None, path, "f2")
    other = fit_sasrec(_split(), replace(SMALL, epochs=1, factors=4), None, path, "f1")
    assert len(other.history.loss) == 1  # other settings begin anew
    path.write_bytes(b"no")
    with pytest.raises(DataError, match="damaged"):
        fit_sasrec(_split(), SMALL, None, path, "f1")


def test_histories_of_one_item_give_nothing_to_learn() -> None:
    names = ["a", "b"]
    train = Interactions.from_arrays(np.arange(2), np.arange(2), user_ids=names, item_ids=names)
    none = np.full(2, -1)
    with pytest.raises(DataError, match="no user has two training items"):
        fit_sasrec(Split(train, none, none), SMALL)


def test_sequences_are_padded_on_the_left() -> None:
    rows = padded([np.array([1]), np.array([2, 3])], 9)
    assert rows.tolist() == [[9, 1], [2, 3]]


@pytest.mark.parametrize(
    "wrong", [{"loss": "mse"}, {"heads": 3}, {"window": 0}, {"dropout": 1.0}, {"calibration": 2.0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SASRecConfig(**wrong)  # type: ignore[arg-type]
