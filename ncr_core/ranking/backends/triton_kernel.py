"""The resumable scan on a GPU: one program a user, all of a pass in one launch (Triton).

``torch_ranker.resumable_scan`` describes the pairs and their order. The kernel compares a block of
``LOOK`` challengers with the champion at once, in float32: the dense layers are products on the
tensor cores, in three parts of TF32 that together are as exact as float32. The uncertain margins
before the first certain winner are computed again in float64, one after the other, because most
blocks have none and the others hardly more than one.

The weights of the dense layers above the first lie in one buffer: for each layer (in, out) weights
and (out,) biases, padded with zeros to powers of two. N1 to N4 are the layers' widths, 0 for a
layer that is not there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(x, RELU: tl.constexpr):
    """The activation; tanh is 1 − 2 / (e^2x + 1), within 3e-7 in float32, ±1 at infinities."""
    if RELU:
        return tl.maximum(x, 0.0)
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _layer(x, at, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr):
    """(LOOK, IN) inputs of an activation → (LOOK, OUT) inputs of the next."""
    ins = tl.arange(0, IN)
    outs = tl.arange(0, OUT)
    w = tl.load(at + ins[:, None] * OUT + outs[None, :])
    b = tl.load(at + IN * OUT + outs)
    return tl.dot(_activated(x, RELU), w, input_precision="tf32x3") + b[None, :]


@triton.jit
def _last(x, last, N: tl.constexpr, RELU: tl.constexpr):
    """(LOOK, N) inputs of the last activation → (LOOK,) w·tower, and the sizes of its terms."""
    products = _activated(x, RELU) * tl.load(last + tl.arange(0, N))[None, :]
    return tl.sum(products, axis=1), tl.sum(tl.abs(products), axis=1)


@triton.jit
def _upper_layers(
    x, weights, last, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """(LOOK, N1) → (LOOK,) w·tower, and the sizes of its terms; ``weights`` are those after N1."""
    if N2 == 0:
        total, size = _last(x, last, N1, RELU)
    else:
        x2 = _layer(x, weights, N1, N2, RELU)
        if N3 == 0:
            total, size = _last(x2, last, N2, RELU)
        else:
            weights += N1 * N2 + N2
            x3 = _layer(x2, weights, N2, N3, RELU)
            if N4 == 0:
                total, size = _last(x3, last, N3, RELU)
            else:
                weights += N2 * N3 + N3
                total, size = _last(_layer(x3, weights, N3, N4, RELU), last, N4, RELU)
    return total, size


@triton.jit
def _exact_layer(x, at, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr):
    """``_layer`` of one vector in float64: (IN,) → (OUT,)."""
    ins = tl.arange(0, IN)
    outs = tl.arange(0, OUT)
    w = tl.load(at + ins[:, None] * OUT + outs[None, :])
    b = tl.load(at + IN * OUT + outs)
    return tl.sum(_activated(x, RELU)[:, None] * w, axis=0) + b


@triton.jit
def _exact_last(x, last, N: tl.constexpr, RELU: tl.constexpr):
    """``_last`` of one vector: two numbers."""
    products = _activated(x, RELU) * tl.load(last + tl.arange(0, N))
    return tl.sum(products, axis=0), tl.sum(tl.abs(products), axis=0)


@triton.jit
def _exact_upper_layers(
    x, weights, last, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """``_upper_layers`` of one vector: two numbers."""
    if N2 == 0:
        total, size = _exact_last(x, last, N1, RELU)
    else:
        x2 = _exact_layer(x, weights, N1, N2, RELU)
        if N3 == 0:
            total, size = _exact_last(x2, last, N2, RELU)
        else:
            weights += N1 * N2 + N2
            x3 = _exact_layer(x2, weights, N2, N3, RELU)
            if N4 == 0:
                total, size = _exact_last(x3, last, N3, RELU)
            else:
                weights += N2 * N3 + N3
                total, size = _exact_last(
                    _exact_layer(x3, weights, N3, N4, RELU), last, N4, RELU
                )  # fmt: skip
    return total, size


@triton.jit
def _margins(
    own, rows, champion, live, first, second, weights, last, H: tl.constexpr, CHUNK: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    LOOK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """The tower's part of the margins of (LOOK,) item rows over the champion's, and their sizes."""
    # In 64 bits: a large table has more numbers than 32 bits count.
    starts = rows.to(tl.int64)[:, None] * H
    champion_start = champion.to(tl.int64) * H
    if N1 == 0:
        margin = tl.zeros((LOOK,), dtype=tl.float32)
        size = tl.zeros((LOOK,), dtype=tl.float32)
    else:
        outs = tl.arange(0, N1)
        bias = tl.load(weights + H * N1 + outs)
        one = tl.zeros((LOOK, N1), dtype=tl.float32) + bias[None, :]
        other = tl.zeros((LOOK, N1), dtype=tl.float32) + bias[None, :]
    for start in range(0, H, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        c = tl.load(own + cols)
        own_a = tl.load(first + champion_start + cols)
        own_b = tl.load(second + champion_start + cols)
        a = tl.load(first + starts + cols[None, :], mask=live[:, None], other=0.0)
        b = tl.load(second + starts + cols[None, :], mask=live[:, None], other=0.0)
        x = _activated(c[None, :] + a + own_b[None, :], RELU)
        y = _activated((c + own_a)[None, :] + b, RELU)
        if N1 == 0:
            w = tl.load(last + cols)[None, :]
            margin += tl.sum(x * w, axis=1) - tl.sum(y * w, axis=1)
            size += tl.sum(tl.abs(x * w), axis=1) + tl.sum(tl.abs(y * w), axis=1)
        else:
            w = tl.load(weights + cols[:, None] * N1 + outs[None, :])
            one = tl.dot(x, w, one, input_precision="tf32x3")
            other = tl.dot(y, w, other, input_precision="tf32x3")
    if N1 > 0:
        upper = weights + H * N1 + N1
        of_one, one_size = _upper_layers(one, upper, last, N1, N2, N3, N4, RELU)
        of_other, other_size = _upper_layers(other, upper, last, N1, N2, N3, N4, RELU)
        margin = of_one - of_other
        size = one_size + other_size
    return margin, size


@triton.jit
def _exact_margin(
    own, row, champion, first, second, weights, last, H: tl.constexpr, CHUNK: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """``_margins`` of one item row in float64: two numbers."""
    row = row.to(tl.int64) * H
    champion = champion.to(tl.int64) * H
    if N1 == 0:
        cols = tl.arange(0, H)
        c = tl.load(own + cols)
        one = c + tl.load(first + row + cols) + tl.load(second + champion + cols)
        other = c + tl.load(first + champion + cols) + tl.load(second + row + cols)
        of_one, one_size = _exact_last(one, last, H, RELU)
        of_other, other_size = _exact_last(other, last, H, RELU)
    else:
        outs = tl.arange(0, N1)
        one = tl.load(weights + H * N1 + outs)
        other = one
        for start in range(0, H, CHUNK):
            cols = start + tl.arange(0, CHUNK)
            c = tl.load(own + cols)
            w = tl.load(weights + cols[:, None] * N1 + outs[None, :])
            x = c + tl.load(first + row + cols) + tl.load(second + champion + cols)
            one += tl.sum(_activated(x, RELU)[:, None] * w, axis=0)
            x = c + tl.load(first + champion + cols) + tl.load(second + row + cols)
            other += tl.sum(_activated(x, RELU)[:, None] * w, axis=0)
        upper = weights + H * N1 + N1
        of_one, one_size = _exact_upper_layers(one, upper, last, N1, N2, N3, N4, RELU)
        of_other, other_size = _exact_upper_layers(other, upper, last, N1, N2, N3, N4, RELU)
    return of_one - of_other, one_size + other_size


@triton.jit(do_not_specialize=["K"])
def scan(
    items, lengths, linear, close, users, users_double,
    first, second, weights, last, first_double, second_double, weights_double, last_double,
    stack, taken, ranked, pairs, M, K,
    tie: tl.constexpr, rounding: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    LOOK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Writes each user's best rows to ``ranked`` (B, K), which holds −1, and counts ``pairs`` (B,).

    ``items`` (B, M) and ``lengths`` (B,) are int32. ``linear`` (B, M) is s_ui in float64. ``close``
    (B,) in float64 is the bound of uncertain margins, times the size of the margin's terms if that
    is above 1. ``users`` (B, H) is C_u. ``first`` and ``second`` (n_items, H) are A and B,
    ``weights`` the dense layers and ``last`` w, padded with zeros. C_u and the tower are in float32
    and again in float64. ``stack`` (B, M) int32 and ``taken`` (B, M) int8 are workspace; ``taken``
    holds zeros.
    """
    b = tl.program_id(0)
    n = tl.load(lengths + b)
    lanes = tl.arange(0, LOOK)
    own = users + b * H
    own_double = users_double + b * H
    uncertain = tl.load(close + b)
    wanted = tl.minimum(K, n)
    items += b * M
    linear += b * M
    stack += b * M
    taken += b * M
    found = 0
    depth = 0
    at = 0
    compared = 0
    while found < wanted:
        if depth == 0:  # an empty chain begins with the first candidate that is still there
            while tl.load(taken + at) != 0:
                at += 1
            tl.store(stack, at)
            tl.debug_barrier()
            depth = 1
            at += 1
        champion = tl.load(stack + depth - 1)
        champion_row = tl.load(items + champion)
        champion_linear = tl.load(linear + champion)
        challenger = -1
        while (at < n) & (challenger < 0):
            positions = at + lanes
            inside = positions < n
            live = inside & (tl.load(taken + positions, mask=inside, other=1) == 0)
            rows = tl.load(items + positions, mask=live, other=0)
            of_linear = tl.load(linear + positions, mask=live, other=0.0) - champion_linear
            deep, size = _margins(
                own, rows, champion_row, live, first, second, weights, last, H, CHUNK,
                N1, N2, N3, N4, LOOK, RELU,
            )  # fmt: skip
            margin = deep.to(tl.float64) + of_linear
            least = uncertain * tl.maximum(size.to(tl.float64), 1.0)
            sure = tl.abs(margin) >= least
            winner = tl.min(tl.where(live & sure & (margin > 0), lanes, LOOK))
            asked = live & (sure == 0) & (lanes < winner)
            lane = tl.min(tl.where(asked, lanes, LOOK))
            while lane < winner:
                row = tl.load(items + at + lane)
                exact, of = _exact_margin(
                    own_double, row, champion_row, first_double, second_double, weights_double,
                    last_double, H, CHUNK, N1, N2, N3, N4, RELU,
                )  # fmt: skip
                exact += tl.load(linear + at + lane) - champion_linear
                is_tie = (tl.abs(exact) < tl.maximum(rounding * of, tie)) | (row == champion_row)
                winner = tl.where((exact > 0) & (is_tie == 0), lane, winner)
                lane = tl.min(tl.where(asked & (lanes > lane), lanes, LOOK))
            compared += tl.sum((live & (lanes <= winner)).to(tl.int32))
            if winner < LOOK:
                challenger = at + winner
            else:
                at += LOOK
        if challenger >= 0:
            tl.store(stack + depth, challenger)
            tl.debug_barrier()
            depth += 1
            at = challenger + 1
        else:
            tl.store(ranked + b * K + found, champion_row)
            tl.store(taken + champion, 1)
            tl.debug_barrier()
            found += 1
            depth -= 1
            at = champion + 1
    tl.store(pairs + b, compared)
