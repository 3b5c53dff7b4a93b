"""The resumable scan of one user after another as compiled code, for towers on a CPU.

The kernel computes the margins of ``LANES`` challengers over the champion at once, in both orders.
``torch_ranker.resumable_scan`` describes the pairs and their order. numba compiles at the first
call, in some seconds, and keeps the code on disk if possible.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ncr_core.ranking.backends.dense_kernel import (
    BOTH,
    LANES,
    RELU,
    TANH,
    TANH_BY_EXPONENTIALS,
    activate,
    compiled,
    compiled_fast,
    dense,
)


@compiled_fast
def _first_layer(first: Any, second: Any, at: int, champion: int, y: Any, kind: int) -> None:
    """Fills y with the first layer: before its activation, or after a tanh by exponentials.

    tanh(a + b) = 1 − 2 / (1 + e^2a·e^2b): with the exponentials of both sides at hand, a tanh is a
    product and a quotient.
    """
    one, two = np.float32(1.0), np.float32(2.0)
    for f in range(first.shape[0]):
        own, other = first[f, champion], second[f, champion]
        if kind == TANH_BY_EXPONENTIALS:
            for lane in range(LANES):
                y[f, lane] = one - two / (one + first[f, at + lane] * other)
            for lane in range(LANES):
                y[f, LANES + lane] = one - two / (one + own * second[f, at + lane])
        else:
            for lane in range(LANES):
                y[f, lane] = first[f, at + lane] + other
            for lane in range(LANES):
                y[f, LANES + lane] = own + second[f, at + lane]


@compiled_fast
def _element_wise(products: Any, at: int, champion: int, y: Any) -> None:
    """Adds [U⊙V_i; −U⊙V_j] to the last layer (eq. 24): products (e, ·) are U⊙V."""
    e = products.shape[0]
    for f in range(e):
        own = products[f, champion]
        for lane in range(LANES):
            y[f, lane] += products[f, at + lane]
            y[f, LANES + lane] += own
            y[e + f, lane] -= own
            y[e + f, LANES + lane] -= products[f, at + lane]


@compiled_fast
def _block(
    first: Any,
    second: Any,
    products: Any,
    tower: Any,
    at: int,
    champion: int,
    kind: int,
    buffers: Any,
    margins: Any,
) -> None:
    """Fills margins (2, LANES) of the positions from ``at`` on over the champion.

    The first row is the tower's part of the margins. The second row is the size of the last sum's
    terms, with which rounding errors grow.
    """
    widths, weights, biases, last = tower
    x, y = buffers[0], buffers[1]
    _first_layer(first, second, at, champion, x, kind)
    n_layers = len(widths) - 1
    inner = TANH if kind == TANH_BY_EXPONENTIALS else kind
    if n_layers == 0 and len(products):
        _element_wise(products, at, champion, x)
    if kind != TANH_BY_EXPONENTIALS:
        activate(x, widths[0], inner)
    w_at, b_at = 0, 0
    for layer in range(n_layers):
        n_in, n_out = widths[layer], widths[layer + 1]
        matrix = weights[w_at : w_at + n_in * n_out].reshape(n_out, n_in)
        dense(matrix, biases[b_at : b_at + n_out], x, y, n_in, n_out)
        if layer == n_layers - 1 and len(products):
            _element_wise(products, at, champion, y)
        activate(y, n_out, inner)
        w_at += n_in * n_out
        b_at += n_out
        x, y = y, x
    margins[:] = 0.0
    for o in range(widths[n_layers]):
        w, size = last[o], abs(last[o])
        for lane in range(LANES):
            margins[0, lane] += w * (x[o, lane] - x[o, LANES + lane])
            margins[1, lane] += size * (abs(x[o, lane]) + abs(x[o, LANES + lane]))


@compiled
def _deep(
    user: Any, own: Any, i: int, j: int, first: Any, second: Any, items: Any, tower: Any, relu: bool
) -> Any:
    """w·tower of one pair in float64, and the size of the terms of this sum."""
    widths, weights, biases, last = tower
    n_layers = len(widths) - 1
    x = user + first[i] + second[j]
    w_at, b_at = 0, 0
    for layer in range(n_layers + 1):
        if layer == n_layers and len(items):
            e = items.shape[1]
            for f in range(e):
                x[f] += own[f] * items[i, f]
                x[e + f] -= own[f] * items[j, f]
        for f in range(len(x)):
            x[f] = max(x[f], 0.0) if relu else np.tanh(x[f])
        if layer == n_layers:
            break
        n_in, n_out = widths[layer], widths[layer + 1]
        y = np.empty(n_out)
        for o in range(n_out):
            total = biases[b_at + o]
            for f in range(n_in):
                total += weights[w_at + o * n_in + f] * x[f]
            y[o] = total
        w_at += n_in * n_out
        b_at += n_out
        x = y
    total, size = 0.0, 0.0
    for o in range(len(x)):
        total += last[o] * x[o]
        size += abs(last[o] * x[o])
    return total, size


@compiled_fast
def _gather(rows: Any, n: int, table: Any, user: Any, out: Any, times: bool) -> None:
    """Fills out (h, ≥ n), by feature, with rows of a table (n_items, h) times or plus user (h,)."""
    for start in range(0, n, LANES):
        stop = min(start + LANES, n)
        for f in range(table.shape[1]):
            if times:
                for m in range(start, stop):
                    out[f, m] = table[rows[m], f] * user[f]
            else:
                for m in range(start, stop):
                    out[f, m] = table[rows[m], f] + user[f]


@compiled_fast
def _columns(
    rows: Any, n: int, single: Any, b: int, by_first: Any, by_second: Any, products: Any
) -> None:
    """Fills the inputs of ``_block`` for user b and these items, feature by feature."""
    kinds, users, users_exp, own, first, second, first_exp, second_exp, vectors, _ = single
    if kinds[b] == TANH_BY_EXPONENTIALS:
        _gather(rows, n, first_exp, users_exp[b], by_first, True)
        _gather(rows, n, second_exp, np.ones(len(by_second), dtype=np.float32), by_second, True)
    else:
        _gather(rows, n, first, users[b], by_first, False)
        _gather(rows, n, second, np.zeros(len(by_second), dtype=np.float32), by_second, False)
    if len(vectors):
        _gather(rows, n, vectors, own[b], products, True)


@compiled_fast
def _workspace(single: Any, n: int) -> Any:
    """New arrays for ``_columns`` of n items, and for the layers and results of ``_block``."""
    h, vectors, widths = single[4].shape[1], single[8], single[9][0]
    return (
        np.zeros((h, n + LANES), dtype=np.float32),
        np.zeros((h, n + LANES), dtype=np.float32),
        np.zeros((vectors.shape[1], n + LANES), dtype=np.float32),
        np.zeros((2, widths.max(), BOTH), dtype=np.float32),
        np.zeros((2, LANES), dtype=np.float32),
    )


@compiled
def _ready(
    rows: Any,
    b: int,
    users: Any,
    linear: Any,
    single: Any,
    n_items: int,
    boost: Any,
    scores: Any,
    by_first: Any,
    by_second: Any,
    products: Any,
) -> Any:
    """Fills the inputs of the margins between user b's items; returns the result of ``_length``."""
    n, good = _length(rows, n_items)
    if good:
        _linear(users[b], rows, n, linear, scores)
        if len(boost):
            for m in range(n):
                scores[m] += boost[rows[m]]
        _columns(rows, n, single, b, by_first, by_second, products)
    return n, good


@compiled
def _decided(
    deep: float,
    size: float,
    of_linear: float,
    i: int,
    j: int,
    b: int,
    double: Any,
    relu: bool,
    ties: Any,
) -> Any:
    """The margin of item i over j for user b: in float32 if certain, otherwise in float64."""
    users, own, uncertain, first, second, vectors, tower = double
    margin = deep + of_linear
    if not abs(margin) >= uncertain[b] * max(1.0, size):  # or not a number, as float64 may have it
        one, of_one = _deep(users[b], own[b], i, j, first, second, vectors, tower, relu)
        other, of_other = _deep(users[b], own[b], j, i, first, second, vectors, tower, relu)
        margin = of_linear + (one - other)
        if abs(margin) < max(ties[0], ties[1] * (of_one + of_other)) or i == j:
            return 0.0
    return margin


@compiled_fast
def _project(user: Any, start: int, weight: Any, bias: Any, out: Any) -> None:
    """Fills out (h,) with C_u of a user vector, whose part for the tower begins at ``start``."""
    for o in range(len(out)):
        total = bias[o]
        for f in range(weight.shape[1]):
            total += weight[o, f] * user[start + f]
        out[o] = total


@compiled
def _linear(user: Any, rows: Any, n: int, table: Any, out: Any) -> None:
    """Fills out (≥ n,) with s_ui of the first n item rows, in float64.

    The code writes out four partial sums. Partial sums by the compiler would round an item's score
    differently by the item's place.
    """
    start, items, bias = table
    d = items.shape[1]
    whole = d - d % 4
    for m in range(n):
        row = rows[m]
        a, b, c, e = 0.0, 0.0, 0.0, 0.0
        for f in range(0, whole, 4):
            a += user[start + f] * items[row, f]
            b += user[start + f + 1] * items[row, f + 1]
            c += user[start + f + 2] * items[row, f + 2]
            e += user[start + f + 3] * items[row, f + 3]
        for f in range(whole, d):
            a += user[start + f] * items[row, f]
        out[m] = (a + b) + (c + e) + (bias[row] if len(bias) else 0.0)


@compiled
def _length(rows: Any, n_items: int) -> Any:
    """The number of rows before the padding, and whether the model has all of these rows."""
    n = 0
    while n < len(rows) and rows[n] != -1:
        if rows[n] < 0 or rows[n] >= n_items:
            return n, False
        n += 1
    return n, True


@compiled
def bind(users: Any, tower: Any, width: int, tanh: bool, fits: bool, sizes: Any) -> Any:
    """The arrays of (B, E) user vectors for the functions below: in float32, and in float64.

    ``tower`` is the first layer of the user's side: the start of its part of the vector, weights
    (h, e) and biases (h,). ``sizes`` are five numbers: the bound of 2·C_u for tanh by exponentials,
    the largest input by an item, the usual largest input, the usual bound of uncertain margins, and
    the factor of this bound for these weights.
    """
    start, weight, bias = tower
    largest, of_items, usual, close, more = sizes
    n, h, e = len(users), len(bias), weight.shape[1]
    kinds = np.empty(n, dtype=np.int64)
    single, by_exp = np.zeros((n, width), np.float32), np.ones((n, width), np.float32)
    double, own, uncertain = np.empty((n, h)), np.empty((n, e)), np.empty(n)
    for b in range(n):
        _project(users[b], start, weight, bias, double[b])
        size = 0.0
        for o in range(h):
            x = double[b, o]
            size = max(size, abs(x)) if x == x else np.inf
            single[b, o], by_exp[b, o] = x, np.exp(2.0 * x)
        for f in range(e):  # to numba, a loop is seconds quicker to compile than a slice
            own[b, f] = users[b, start + f]
        kinds[b] = TANH if tanh else RELU
        if fits and 2.0 * size < largest:
            kinds[b] = TANH_BY_EXPONENTIALS
        uncertain[b] = close * max(1.0, (size + of_items) / usual) * more
    return (kinds, single, by_exp, own.astype(np.float32)), (double, own, uncertain)


@compiled
def scan_batch(
    items: Any,
    k: int,
    users: Any,
    linear: Any,
    single: Any,
    double: Any,
    ties: Any,
    boost: Any,
    ranked: Any,
    counts: Any,
) -> Any:
    """Writes the rows of each user's top ``k`` to ``ranked`` (B, k), which holds −1.

    ``items`` (B, M) are item rows, padded with −1. ``users`` (B, E) are in float64. ``linear`` is
    the start of its part of the user vector, vectors (n_items, d) and biases (n_items,) or (0,),
    all in float64.

    ``double`` is the tower in float64: users C (B, h), own U (B, e), the bounds of uncertain
    float32 margins (B,), first A and second B (n_items, h), items V (n_items, e) or (0, 0), and
    (widths, weights, biases, w). ``single`` is in float32 and padded: each user's kind of
    activation (B,), C, e^2C, U, A, B, e^2A, e^2B, V, and the padded tower.

    The bound of a margin is multiplied by the size of the last sum's terms if that is above 1.
    Uncertain margins are computed again in float64. These margins are ties below ``ties[0]``, or
    below ``ties[1]`` times the size of their terms. ``boost`` (n_items,) or (0,) is added to s_ui.

    ``counts`` (B, 2) become the numbers of compared pairs and of computed blocks. Returns whether
    the model has all rows, and a row that the model does not have. With such a row all outputs are
    invalid.
    """
    kinds, tower = single[0], single[9]
    n_users, width = items.shape
    by_first, by_second, products, buffers, margins = _workspace(single, width)
    stack, scores = np.zeros(width, dtype=np.int64), np.zeros(width)
    taken = np.zeros(width, dtype=np.bool_)
    for b in range(n_users):
        rows, kind = items[b], kinds[b]
        n, good = _ready(
            rows,
            b,
            users,
            linear,
            single,
            len(double[3]),
            boost,
            scores,
            by_first,
            by_second,
            products,
        )
        if not good:
            return False, rows[n]
        wanted = min(k, n)
        taken[:] = False
        depth, at, found = 0, 0, 0
        pairs, blocks = 0, 0
        while found < wanted:
            if depth == 0:  # an empty chain begins with the first candidate that is still there
                while taken[at]:
                    at += 1
                stack[0] = at
                depth = 1
                at += 1
            champion = stack[depth - 1]
            challenger = -1
            while at < n and challenger < 0:
                _block(by_first, by_second, products, tower, at, champion, kind, buffers, margins)
                blocks += 1
                for position in range(at, min(at + LANES, n)):
                    if taken[position]:
                        continue
                    pairs += 1
                    margin = _decided(
                        margins[0, position - at], margins[1, position - at],
                        scores[position] - scores[champion],
                        rows[position], rows[champion], b, double, kind == RELU, ties,
                    )  # fmt: skip
                    if margin > 0:
                        challenger = position
                        break
                if challenger < 0:
                    at += LANES
            if challenger >= 0:
                stack[depth] = challenger
                depth += 1
                at = challenger + 1
            else:
                ranked[b, found] = rows[champion]
                taken[champion] = True
                found += 1
                depth -= 1
                at = champion + 1
        counts[b, 0] = pairs
        counts[b, 1] = blocks
    return True, 0


@compiled
def mean_margins(
    rows: Any, n_anchors: int, users: Any, linear: Any, single: Any, margins_of: Any
) -> None:
    """Fills margins_of (B, T) with the mean margins of T items over the anchors, in float32.

    ``rows`` (n_anchors + T,) are the anchors, then the items, all rows of the model. The other
    arguments are as for ``scan_batch``. A user's means do not depend on the other users.
    """
    kinds, tower = single[0], single[9]
    n = len(rows)
    by_first, by_second, products, buffers, block = _workspace(single, n)
    totals, scores = np.zeros(LANES), np.zeros(n)
    for b in range(len(kinds)):
        kind = kinds[b]
        _linear(users[b], rows, n, linear, scores)
        _columns(rows, n, single, b, by_first, by_second, products)
        for at in range(n_anchors, n, LANES):
            count = min(LANES, n - at)
            totals[:] = 0.0
            for anchor in range(n_anchors):
                _block(by_first, by_second, products, tower, at, anchor, kind, buffers, block)
                for lane in range(count):
                    if rows[at + lane] != rows[anchor]:
                        of_linear = scores[at + lane] - scores[anchor]
                        totals[lane] += block[0, lane] + of_linear
            for lane in range(count):
                margins_of[b, at - n_anchors + lane] = totals[lane] / n_anchors


@compiled
def all_margins(
    items: Any,
    users: Any,
    linear: Any,
    single: Any,
    double: Any,
    ties: Any,
    boost: Any,
    margins_of: Any,
) -> Any:
    """Fills margins_of (B, M, M) with the margins of a row's candidate over a column's candidate.

    Arguments and results are as for ``scan_batch``. Entries in the padding stay unchanged.
    """
    kinds, tower = single[0], single[9]
    n_users, width = items.shape
    by_first, by_second, products, buffers, block = _workspace(single, width)
    scores = np.zeros(width)
    for b in range(n_users):
        rows, kind = items[b], kinds[b]
        n, good = _ready(
            rows,
            b,
            users,
            linear,
            single,
            len(double[3]),
            boost,
            scores,
            by_first,
            by_second,
            products,
        )
        if not good:
            return False, rows[n]
        for j in range(n):
            for at in range(j + 1, n, LANES):
                _block(by_first, by_second, products, tower, at, j, kind, buffers, block)
                for i in range(at, min(at + LANES, n)):
                    margin = _decided(
                        block[0, i - at], block[1, i - at], scores[i] - scores[j],
                        rows[i], rows[j], b, double, kind == RELU, ties,
                    )  # fmt: skip
                    margins_of[b, i, j] = margin
                    margins_of[b, j, i] = -margin
    return True, 0


@compiled
def list_margins(
    items: Any,
    n_others: int,
    users: Any,
    linear: Any,
    single: Any,
    double: Any,
    ties: Any,
    boost: Any,
    over_others: Any,
    over_next: Any,
) -> Any:
    """Fills over_others (B, k, n_others) with the margins of lists' items over some other items.

    ``over_next`` (B, k) gets the margins over the next item of the list. ``items`` (B, n_others +
    k) are the other items, then the list. Further arguments and results are as for ``scan_batch``.
    Entries in the padding, or without a next item, stay unchanged.
    """
    kinds, tower = single[0], single[9]
    n_users, width = items.shape
    by_first, by_second, products, buffers, block = _workspace(single, width)
    scores = np.zeros(width)
    for b in range(n_users):
        rows, kind = items[b], kinds[b]
        n, good = _ready(
            rows,
            b,
            users,
            linear,
            single,
            len(double[3]),
            boost,
            scores,
            by_first,
            by_second,
            products,
        )
        if not good:
            return False, rows[n]
        for item in range(n_others, n):
            for start in range(0, n_others, LANES):
                _block(by_first, by_second, products, tower, start, item, kind, buffers, block)
                for other in range(start, min(start + LANES, n_others)):
                    over_others[b, item - n_others, other] = -_decided(
                        block[0, other - start], block[1, other - start],
                        scores[other] - scores[item],
                        rows[other], rows[item], b, double, kind == RELU, ties,
                    )  # fmt: skip
            if item + 1 < n:
                after = item + 1
                _block(by_first, by_second, products, tower, after, item, kind, buffers, block)
                over_next[b, item - n_others] = -_decided(
                    block[0, 0], block[1, 0], scores[after] - scores[item],
                    rows[after], rows[item], b, double, kind == RELU, ties,
                )  # fmt: skip
    return True, 0


def compile_all() -> None:
    """Compiles the functions that a ranker calls, for the types of these calls."""
    one, none = np.zeros((1, 4)), np.zeros((0, 0))
    single_one, single_none = one.astype(np.float32), none.astype(np.float32)
    widths, nothing = np.array([4]), np.zeros(0)
    double_tower = (widths, nothing, nothing, np.zeros(4))
    single_tower = (widths, *(x.astype(np.float32) for x in double_tower[1:]))
    bound = bind(one, (0, np.zeros((4, 4)), np.zeros(4)), 4, True, False, (1.0,) * 5)
    single = (*bound[0], *[single_one] * 4, single_none, single_tower)
    double = (*bound[1], one, one, none, double_tower)
    rows, pair, linear = np.zeros((1, 1), np.int64), np.zeros((1, 2), np.int64), (0, one, nothing)
    ties, cube = (0.0, 0.0), np.zeros((1, 1, 1), dtype=np.float32)
    scan_batch(rows, 1, one, linear, single, double, ties, nothing, rows.copy(), pair.copy())
    mean_margins(pair[0], 1, one, linear, single, np.zeros((1, 1)))
    all_margins(rows, one, linear, single, double, ties, nothing, cube)
    list_margins(pair, 1, one, linear, single, double, ties, nothing, cube, cube[0])
