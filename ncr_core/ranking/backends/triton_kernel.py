"""The resumable scan on a GPU: one program a user, all of a pass in one launch (Triton).

``torch_ranker.resumable_scan`` describes the pairs and their order. The kernel compares a block of
``LOOK`` challengers with the champion at once, in float32. Uncertain margins before the first
certain winner are computed again in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """1 − 2 / (e^2x + 1): within 3e-7 of tanh in float32; infinities come out as ±1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _tower(
    x, weights, biases, last, cols, L: tl.constexpr, H: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """(LOOK, H) inputs of the first activation → (LOOK,) w·tower, and the size of its terms."""
    x = tl.maximum(x, 0.0) if RELU else _tanh(x)
    for layer in tl.static_range(L):
        y = tl.zeros_like(x)
        # Unit by unit: exact in the type of x, where the tensor cores would round.
        for o in range(H):
            row = tl.load(weights + (layer * H + o) * H + cols)
            total = tl.sum(x * row[None, :], axis=1) + tl.load(biases + layer * H + o)
            y = tl.where((cols == o)[None, :], total[:, None], y)
        x = tl.maximum(y, 0.0) if RELU else _tanh(y)
    products = x * tl.load(last + cols)[None, :]
    return tl.sum(products, axis=1), tl.sum(tl.abs(products), axis=1)


@triton.jit
def _margins(
    own, rows, champion, live, first, second, weights,
    biases, last, cols, L: tl.constexpr, H: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """The tower's part of the margins of (LOOK,) item rows over the champion's, and their sizes."""
    # In 64 bits: a large table has more numbers than 32 bits count.
    at = rows.to(tl.int64)[:, None] * H + cols[None, :]
    champion = champion.to(tl.int64)
    a = tl.load(first + at, mask=live[:, None], other=0.0)
    b = tl.load(second + at, mask=live[:, None], other=0.0)
    own_a = tl.load(first + champion * H + cols)
    own_b = tl.load(second + champion * H + cols)
    one, of_one = _tower(own[None, :] + a + own_b[None, :], weights, biases, last, cols, L, H, RELU)
    other, of_other = _tower(
        own[None, :] + own_a[None, :] + b, weights, biases, last, cols, L, H, RELU
    )
    return one - other, of_one + of_other


@triton.jit(do_not_specialize=["K"])
def scan(
    items, lengths, linear, close, users, users_double,
    first, second, weights, biases, last,
    first_double, second_double, weights_double, biases_double,
    last_double, stack, taken, ranked, pairs, M, K,
    tie: tl.constexpr, rounding: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    LOOK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Writes each user's best rows to ``ranked`` (B, K), which holds −1, and counts ``pairs`` (B,).

    ``items`` (B, M) and ``lengths`` (B,) are int32. ``linear`` (B, M) is s_ui in float64. ``close``
    (B,) in float64 is the bound of uncertain margins, times the size of the margin's terms if that
    is above 1. ``users`` (B, H) is C_u. ``first``, ``second`` (n_items, H), ``weights`` (L, H, H),
    ``biases`` (L, H) and ``last`` (H,) are the tower, padded with zeros to one width. C_u and the
    tower are in float32 and again in float64. ``stack`` (B, M) int32 and ``taken`` (B, M) int8 are
    workspace; ``taken`` holds zeros.
    """
    b = tl.program_id(0)
    n = tl.load(lengths + b)
    cols = tl.arange(0, H)
    lanes = tl.arange(0, LOOK)
    own = tl.load(users + b * H + cols)
    own_double = tl.load(users_double + b * H + cols)
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
                own, rows, champion_row, live, first, second, weights, biases, last, cols, L, H,
                RELU,
            )  # fmt: skip
            margin = deep.to(tl.float64) + of_linear
            least = uncertain * tl.maximum(size.to(tl.float64), 1.0)
            sure = tl.abs(margin) >= least
            winner = tl.min(tl.where(live & sure & (margin > 0), lanes, LOOK))
            asked = live & (sure == 0) & (lanes < winner)
            if tl.max(asked.to(tl.int32)) == 1:
                exact, of = _margins(
                    own_double, rows, champion_row, asked, first_double, second_double,
                    weights_double, biases_double, last_double, cols, L, H, RELU,
                )  # fmt: skip
                exact += of_linear
                ties = (tl.abs(exact) < tl.maximum(rounding * of, tie)) | (rows == champion_row)
                exact = tl.where(ties, 0.0, exact)
                winner = tl.minimum(winner, tl.min(tl.where(asked & (exact > 0), lanes, LOOK)))
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
