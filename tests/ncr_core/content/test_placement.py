"""The ridge from attributes to vectors is the one that linear algebra gives, literally."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ncr_core.content import AttributeEncoder, ContentPlacement, placement, select_attributes
from ncr_core.content.placement import errors_left_out
from ncr_core.errors import DataError

M, F = 120, 4


def described(seed: int = 0, missing: float = 0.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    every = [
        {"genre": f"g{rng.integers(4)}", "year": float(rng.normal()), "flag": bool(rng.integers(2))}
        for _ in range(M)
    ]
    return [
        {name: value for name, value in each.items() if rng.random() >= missing} for each in every
    ]


def lies_at(objects: list[dict[str, Any]], noise: float = 0.3, seed: int = 1) -> torch.Tensor:
    """Vectors that genre and year tell, and the flag does not."""
    rng = np.random.default_rng(seed)
    genres = {f"g{i}": rng.normal(size=F) for i in range(4)}
    of_year = rng.normal(size=F)
    vectors = [
        5 + genres.get(each.get("genre", ""), np.zeros(F)) + each.get("year", 0.0) * of_year
        for each in objects
    ]
    return torch.from_numpy(np.array(vectors) + noise * rng.normal(size=(len(objects), F)))


def weights_of(m: int = M) -> torch.Tensor:
    weights = np.random.default_rng(2).uniform(0.2, 3.0, size=m)
    weights[5] = 0.0
    return torch.from_numpy(weights)


def ridge(x: np.ndarray, y: np.ndarray, weights: np.ndarray, penalty: float) -> tuple[Any, ...]:
    """The mean of x and of y, and (XᵀSX + λI)⁻¹XᵀSY of what is left."""
    of_x, of_y = weights @ x / weights.sum(), weights @ y / weights.sum()
    x, y = x - of_x, y - of_y
    gram = x.T @ (weights[:, None] * x) + penalty * np.eye(x.shape[1])
    return of_x, of_y, np.linalg.solve(gram, x.T @ (weights[:, None] * y))


def test_predictions_are_those_of_the_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PENALTIES", np.array([3.0]))
    objects, weights = described(), weights_of()
    vectors = lies_at(objects)
    encoder = AttributeEncoder.fit(objects)
    fitted = ContentPlacement.fit(encoder, objects, vectors, weights)
    x, share = encoder.encode(objects).toarray().astype(np.float64), weights.numpy()
    of_x, of_y, w = ridge(x, vectors.numpy(), share / share.mean(), 3.0)
    assert fitted.predict(objects).numpy() == pytest.approx((x - of_x) @ w + of_y, rel=1e-5)
    assert fitted.predict([{}])[0].numpy() == pytest.approx(of_y, rel=1e-6)


def test_errors_left_out_are_those_of_fits_without_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "PENALTIES", np.array([3.0]))
    objects, weights = described(), weights_of()
    vectors = lies_at(objects).numpy()
    encoder = AttributeEncoder.fit(objects)
    x, share = encoder.encode(objects).toarray().astype(np.float64), weights.numpy()
    share = share / share.mean()
    expected = []
    for row in np.flatnonzero(share):
        others = np.arange(M) != row
        of_x, of_y, w = ridge(x[others], vectors[others], share[others], 3.0)
        error = vectors[row] - ((x[row] - of_x) @ w + of_y)
        expected.append(share[row] * error @ error)
    errors = errors_left_out(encoder, objects, torch.from_numpy(vectors), weights)
    assert errors == pytest.approx(np.array(expected), rel=1e-8)
    fitted = ContentPlacement.fit(encoder, objects, torch.from_numpy(vectors), weights)
    assert float(fitted.residual.trace()) == pytest.approx(sum(expected) / share.sum(), rel=1e-8)


def test_each_coordinate_has_the_penalty_of_its_own_least_error() -> None:
    objects = described()
    vectors = lies_at(objects, noise=0.1)
    vectors[:, 0] = torch.from_numpy(np.random.default_rng(5).normal(size=M))
    encoder = AttributeEncoder.fit(objects)
    chosen = ContentPlacement.fit(encoder, objects, vectors).residual.diag()
    for penalty in placement.PENALTIES[::6]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "PENALTIES", np.array([penalty]))
            one = ContentPlacement.fit(encoder, objects, vectors).residual.diag()
        assert (chosen <= one + 1e-12).all()
    predicted = ContentPlacement.fit(encoder, objects, vectors).predict(objects)
    assert float(predicted[:, 0].std()) < 0.2 * float(predicted[:, 1].std())


def test_what_an_object_does_not_have_contributes_nothing() -> None:
    objects = described(missing=0.4)
    encoder = AttributeEncoder.fit(objects)
    fitted = ContentPlacement.fit(encoder, objects, lies_at(objects), weights_of())
    nothing = fitted.predict([{}])[0]
    parts = [{"genre": "g1"}, {"year": 0.7}, {"flag": True}]
    whole = {name: value for part in parts for name, value in part.items()}
    moved = sum(fitted.predict([part])[0] - nothing for part in parts)
    assert (nothing + moved).numpy() == pytest.approx(fitted.predict([whole])[0].numpy(), rel=1e-4)
    unknown = {"genre": "never seen", "year": float("nan"), "flag": None, "other": 1}
    assert fitted.predict([unknown])[0].equal(nothing)
    mean = (weights_of()[:, None] * lies_at(objects)).sum(0) / weights_of().sum()
    assert nothing.numpy() == pytest.approx(mean.numpy(), rel=1e-6)


def test_more_objects_than_are_left_out_take_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = described()
    encoder = AttributeEncoder.fit(objects)
    of_all = ContentPlacement.fit(encoder, objects, lies_at(objects))
    monkeypatch.setattr(placement, "MAX_LEFT_OUT", 40)
    monkeypatch.setattr(placement, "MAX_CELLS", 64)
    assert len(errors_left_out(encoder, objects, lies_at(objects))) == 40
    of_part = ContentPlacement.fit(encoder, objects, lies_at(objects))
    assert of_part.explained == pytest.approx(of_all.explained, abs=0.2)


def test_round_trip() -> None:
    objects = described(missing=0.2)
    fitted = ContentPlacement.fit(AttributeEncoder.fit(objects), objects, lies_at(objects))
    again = ContentPlacement.load(fitted.config(), fitted.arrays())
    assert again.predict([*objects, {}]).equal(fitted.predict([*objects, {}]))
    assert again.residual.equal(fitted.residual)
    assert again.explained == fitted.explained
    for name, value in fitted.arrays().items():
        for wrong in (value[1:], torch.full_like(value, torch.nan)):
            with pytest.raises(DataError, match="does not fit"):
                ContentPlacement.load(fitted.config(), {**fitted.arrays(), name: wrong})
    with pytest.raises(DataError, match="is not a placement"):
        ContentPlacement.load({}, fitted.arrays())


def test_an_encoder_without_columns_predicts_the_mean() -> None:
    objects: list[dict[str, Any]] = [{}] * M
    vectors = torch.randn(M, F, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fitted = ContentPlacement.fit(AttributeEncoder.fit(objects), objects, vectors)
    assert fitted.predict([{}, {"a": 1}]).numpy() == pytest.approx(
        vectors.mean(0).expand(2, -1).numpy(), rel=1e-5
    )
    assert fitted.explained <= 0


@pytest.mark.parametrize(
    ("vectors", "weights"),
    [
        (torch.zeros(M - 1, F), None),
        (torch.zeros(M), None),
        (torch.full((M, F), torch.nan), None),
        (torch.zeros(M, F), torch.ones(M - 1)),
        (torch.zeros(M, F), -torch.ones(M)),
        (torch.zeros(M, F), torch.zeros(M)),
    ],
)
def test_what_does_not_fit_is_refused(vectors: torch.Tensor, weights: torch.Tensor | None) -> None:
    objects = described()
    with pytest.raises(DataError):
        ContentPlacement.fit(AttributeEncoder.fit(objects), objects, vectors, weights)


def test_attributes_that_tell_are_chosen_and_others_are_not() -> None:
    objects = described(missing=0.1)
    for row, each in enumerate(objects):
        each["code"] = row * 7919 % 13
    assert set(select_attributes(objects, lies_at(objects), weights_of())) == {"genre", "year"}
    noise = torch.from_numpy(np.random.default_rng(3).normal(size=(M, F)))
    assert select_attributes(objects, noise) == ()
    wide = torch.cat([lies_at(objects)] * 20, dim=1)
    assert set(select_attributes(objects, wide)) == {"genre", "year"}
