"""Triton programs for convolutions with many channels, for many models at once, as in `programs`.

A term of the matrix product is a tap and a channel, and a block of terms lies within one tap. The
source position, and whether it is inside the image, is then computed once per position instead of
once per term. Weights are packed accordingly, with channels innermost. For the names of sizes, see
`programs`.
"""

import triton
import triton.language as tl


@triton.jit
def convolve(
    x, w, y, x_model, w_model, y_model, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolve images.

    Args:
        x, w, y: Images, weights `(models, outputs, taps, channels)` and output.
        x_model, w_model, y_model: Their model strides.
        batch: Batch size.
        BM, BN, BK, PRECISION: Block sizes, and the precision of products.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    y += model * y_model
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * P * Q
    example = place // (P * Q)
    row = (place // Q) % P
    column = place % Q
    top = row * SH - PH
    left = column * SW - PW
    base = example * (C * H * W) + top * W + left
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    weights = w + model * w_model + output[None, :] * (R * S * C) + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    N: tl.constexpr = C // BK
    for turn in range(R * S * N):
        tap = turn // N
        first = (turn % N) * BK
        r = tap // S
        s = tap % S
        down = top + r * DH
        across = left + s * DW
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
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient with respect to images, without dilation.

    With strides, positions that the same taps reach form a class, SH rows and SW columns apart.

    Args:
        g, x: Gradient with respect to the output, and result.
        w: Weights `(models, channels, taps, outputs)`.
        g_model, w_model, x_model: Their model strides.
        batch: Batch size.
        blocks: Number of blocks per class.
        BM, BN, BK, PRECISION: Block sizes, and the precision of products.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    kind = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first_row = kind // SW
    first_column = kind % SW
    ROWS: tl.constexpr = (H + SH - 1) // SH  # of the largest class, a constant
    COLUMNS: tl.constexpr = (W + SW - 1) // SW
    # First tap that reaches the class.
    top = (first_row + PH) % SH
    left = (first_column + PW) % SW
    # Number of taps that reach it.
    down = (R - top + SH - 1) // SH
    across = (S - left + SW - 1) // SW
    place = block * BM + tl.arange(0, BM)
    example = place // (ROWS * COLUMNS)
    row = (place // COLUMNS) % ROWS
    column = place % COLUMNS
    inside = (example < batch) & (first_row + row * SH < H) & (first_column + column * SW < W)
    low = row + (first_row + PH - top) // SH
    right = column + (first_column + PW - left) // SW
    base = example * (O * P * Q) + low * Q + right
    channel = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    g += model * g_model
    weights = w + model * w_model + channel[None, :] * (R * S * O) + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    N: tl.constexpr = O // BK
    for turn in range(down * across * N):
        tap = turn // N
        first = (turn % N) * BK
        i = tap // across
        j = tap % across
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
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, SHARE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient with respect to weights; each program sums a part of the positions.

    Args:
        g, x, w: Gradient with respect to the output, images and result, one per part.
        g_model, x_model: Model strides.
        parts: Number of parts, which are added afterwards, in order.
        batch: Batch size.
        SHARE: Positions per part.
        BM, BN, BK, PRECISION: Block sizes, and the precision of products.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts
    N: tl.constexpr = C // BM
    tap = (block // N) % (R * S)
    c = (block % N) * BM + tl.arange(0, BM)
    r = tap // S
    s = tap % S
    output = (block // (N * R * S)) * BN + tl.arange(0, BN)
    places = batch * P * Q
    g += model * g_model
    x += model * x_model
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, SHARE, BK):
        place = part * SHARE + start + tl.arange(0, BK)
        inside = place < places
        example = place // (P * Q)
        row = (place // Q) % P
        column = place % Q
        down = row * SH - PH + r * DH
        across = column * SW - PW + s * DW
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
    tl.store(
        w + output[None, :] * (C * R * S) + (c * (R * S) + tap)[:, None],
        total,
        mask=(output < O)[None, :],
    )
