"""Student's t and the sign test: probabilities to twelve digits, in the tails too."""

from __future__ import annotations

import math

_TINY = 1e-300
_MOST_TERMS = 100_000
_STIRLING_FROM = 20.0
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)


def student_t_p(t: float, degrees: float) -> float:
    """P(|T| ≥ |t|) for Student's t with ``degrees`` of freedom: I_x(ν/2, 1/2), x = ν/(ν + t²).

    (Abramowitz & Stegun 26.7.1; DLMF 8.17.) The relative error is below 1e-12 up to 10⁴ degrees and
    below 1e-10 up to 10⁶, in the tails too. Raises ValueError where there is no such distribution.
    """
    if math.isnan(t) or not 0 < degrees < math.inf:
        raise ValueError(f"t = {t} with {degrees} degrees of freedom has no p")
    ratio = abs(t) / math.sqrt(degrees)
    # x and y = 1 − x each from what is small, so that neither cancels nor overflows.
    if ratio > 1:
        small = (1 / ratio) ** 2
        x, y = small / (1 + small), 1 / (1 + small)
    else:
        small = ratio**2
        x, y = 1 / (1 + small), small / (1 + small)
    return _regularised_beta(degrees / 2, 0.5, x, y)


def student_t_quantile(p: float, degrees: float) -> float:
    """The t with P(T ≤ t) = ``p`` for Student's t, by bisection to 1e-12 of it.

    Raises ValueError unless 1/2 ≤ ``p`` < 1.
    """
    if not 0.5 <= p < 1:
        raise ValueError(f"{p} is not a probability from 1/2 to below 1")
    low, high = 0.0, 1.0
    while student_t_p(high, degrees) > 2 * (1 - p):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_p(middle, degrees) > 2 * (1 - p) else (low, middle)
    return high


def sign_test_p(above: int, below: int) -> float:
    """The exact two-sided sign test (Arbuthnot 1710): min(1, 2 P(X ≥ max(above, below))), where X
    is binomial with n = above + below and 1/2; ties take no part.
    """
    if min(above, below) < 0:
        raise ValueError(f"{above} above and {below} below cannot be")
    most, n = max(above, below), above + below
    if 2 * most == n:
        return 1.0
    return min(1.0, 2 * _regularised_beta(most, n - most + 1, 0.5, 0.5))


def _regularised_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) with y = 1 − x, by the continued fraction of DLMF 8.17.22.

    The fraction converges fast for x < (a + 1)/(a + b + 2); beyond, I_x(a, b) = 1 − I_y(b, a).
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularised_beta(b, a, y, x)
    log_x = math.log1p(-y) if x > 0.5 else math.log(x)
    log_y = math.log1p(-x) if y > 0.5 else math.log(y)
    front = math.exp(a * log_x + b * log_y - _log_beta(a, b)) / a
    return min(1.0, front / _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)) by the modified method of Lentz (Thompson & Barnett 1986)."""
    value, upper, lower = 1.0, 1.0, 0.0
    for term in range(1, _MOST_TERMS):
        m = term // 2
        if term % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / ((1 + d * lower) or _TINY)
        upper = (1 + d / upper) or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return value


def _log_beta(a: float, b: float) -> float:
    """ln B(a, b), without the cancellation of large ln Γ (Stirling's series, DLMF 5.11.1)."""
    p, q = min(a, b), max(a, b)
    if q < _STIRLING_FROM:
        return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)
    # ln Γ(q) − ln Γ(p + q), their leading terms subtracted by hand.
    leading = p - (q - 0.5) * math.log1p(p / q) - p * math.log(p + q)
    return math.lgamma(p) + leading + _stirling_tail(q) - _stirling_tail(p + q)


def _stirling_tail(z: float) -> float:
    return sum(c / z ** (2 * i + 1) for i, c in enumerate(_STIRLING))
