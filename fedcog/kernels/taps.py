"""Triton programs for convolutions of many channels, tap by tap; many models side by side, as in `programs`.

A term of the matrix product is a tap and a channel, and a block of terms lies within one tap: where it is taken from,
and whether it is inside the image, is then told once a position and not once a term. Weights are packed to fit, with
channels innermost.
"""

import triton
import triton.language as tl


@triton.jit
def convolve(
    x, w, y, x_model, w_model, y_model, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution; w is [models, outputs, taps, channels]."""
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    y += model * y_model
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * P * Q
    example, row, column = place // (P * Q), (place // Q) % P, place % Q
    top, left = row * SH - PH, column * SW - PW
    base = example * (C * H * W) + top * W + left
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    weights = w + model * w_model + output[None, :] * (R * S * C) + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    N: tl.constexpr = C // BK
    for turn in range(R * S * N):
        tap, first = turn // N, (turn % N) * BK
        r, s = tap // S, tap % S
        down, across = top + r * DH, left + s * DW
        there = inside & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        seen = x + (base + first * (H * W) + r * (DH * W) + s * DW)
        left_part = tl.load(seen[:, None] + (k * (H * W))[None, :], mask=there[:, None], other=0.0)
        right_part = tl.load(weights + turn * BK, mask=(output < O)[None, :], other=0.0)
        total = tl.dot(left_part, right_part, total, input_precision=PRECISION)
    where = example * (O * P * Q) + row * Q + column
    tl.store(
        y + where[:, None] + output[None, :] * (P * Q),
        total.to(y.dtype.element_ty),
        mask=inside[:, None] & (output < O)[None, :],
    )


@triton.jit
def convolve_input(
    g, w, x, g_model, w_model, x_model, batch, blocks,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The input's gradient, without dilation; w is [models, channels, taps, outputs].

    Positions that the same taps reach, every so many rows and columns where there are strides, are a class; each has
    so many blocks.
    """
    model = tl.program_id(1).to(tl.int64)
    kind, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first_row, first_column = kind // SW, kind % SW
    ROWS: tl.constexpr = (H + SH - 1) // SH  # of the largest class: what the compiler knows is fast
    COLUMNS: tl.constexpr = (W + SW - 1) // SW
    top, left = (first_row + PH) % SH, (first_column + PW) % SW  # the first tap that reaches the class
    down, across = (R - top + SH - 1) // SH, (S - left + SW - 1) // SW  # how many do
    place = block * BM + tl.arange(0, BM)
    example, row, column = place // (ROWS * COLUMNS), (place // COLUMNS) % ROWS, place % COLUMNS
    inside = (example < batch) & (first_row + row * SH < H) & (first_column + column * SW < W)
    low, right = row + (first_row + PH - top) // SH, column + (first_column + PW - left) // SW
    base = example * (O * P * Q) + low * Q + right
    channel = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    g += model * g_model
    weights = w + model * w_model + channel[None, :] * (R * S * O) + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    N: tl.constexpr = O // BK
    for turn in range(down * across * N):
        tap, first = turn // N, (turn % N) * BK
        i, j = tap // across, tap % across
        there = inside & (low >= i) & (low - i < P) & (right >= j) & (right - j < Q)
        seen = g + (base + first * (P * Q) - i * Q - j)
        left_part = tl.load(seen[:, None] + (k * (P * Q))[None, :], mask=there[:, None], other=0.0)
        at = ((top + i * SH) * S + left + j * SW) * O + first
        right_part = tl.load(weights + at, mask=(channel < C)[None, :], other=0.0)
        total = tl.dot(left_part, right_part, total, input_precision=PRECISION)
    where = example * (C * H * W) + (first_row + row * SH) * W + first_column + column * SW
    tl.store(
        x + model * x_model + where[:, None] + channel[None, :] * (H * W),
        total.to(x.dtype.element_ty),
        mask=inside[:, None] & (channel < C)[None, :],
    )


@triton.jit
def convolve_weight(
    g, x, w, g_model, x_model, parts, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, SHARE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weight's gradient, each program summing a part of the positions; parts are added up afterwards, in order."""
    model, part, block = tl.program_id(1).to(tl.int64), tl.program_id(0) % parts, tl.program_id(0) // parts
    N: tl.constexpr = C // BM
    tap, c = (block // N) % (R * S), (block % N) * BM + tl.arange(0, BM)
    r, s = tap // S, tap % S
    output = (block // (N * R * S)) * BN + tl.arange(0, BN)
    places = batch * P * Q
    g += model * g_model
    x += model * x_model
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, SHARE, BK):
        place = part * SHARE + start + tl.arange(0, BK)
        inside = place < places
        example, row, column = place // (P * Q), (place // Q) % P, place % Q
        down, across = row * SH - PH + r * DH, column * SW - PW + s * DW
        there = inside & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        base = example * (C * H * W) + down * W + across
        seen = tl.load(x + base[None, :] + (c * (H * W))[:, None], mask=there[None, :], other=0.0)
        slope = tl.load(
            g + (example * (O * P * Q) + row * Q + column)[:, None] + output[None, :] * (P * Q),
            mask=inside[:, None] & (output < O)[None, :],
            other=0.0,
        )
        total = tl.dot(seen, slope, total, input_precision=PRECISION)
    w += (model * parts + part) * (O * C * R * S)
    tl.store(w + output[None, :] * (C * R * S) + (c * (R * S) + tap)[:, None], total, mask=(output < O)[None, :])
