"""Triton programs for many models at once.

Tensors have a leading model axis, with stride 0 where all models have the same tensor. Convolutions
map images x `(G, B, C, H, W)` and weights w `(G, O, C, R, S)` to y `(G, B, O, P, Q)`. SH and SW are
strides, PH and PW paddings, and DH and DW dilations. They are implicit matrix products on tensor
cores, or, for few channels, sums in the registers of each thread.
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
        x, w, y: Images, weights and output.
        x_model, w_model, y_model: Their model strides.
        batch: Batch size.
        BM, BN, BK, PRECISION: Block sizes, and the precision of products.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    K: tl.constexpr = C * R * S
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * P * Q
    example = place // (P * Q)
    row = (place // Q) % P
    column = place % Q
    top = row * SH - PH
    left = column * SW - PW
    base = example * (C * H * W) + top * W + left
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        c = k // (R * S)
        r = (k // S) % R
        s = k % S
        there = inside[:, None] & (k < K)[None, :]
        if PH > 0 or PW > 0:
            down = top[:, None] + (r * DH)[None, :]
            across = left[:, None] + (s * DW)[None, :]
            there &= (down >= 0) & (down < H) & (across >= 0) & (across < W)
        shift = c * (H * W) + r * (DH * W) + s * DW
        left_part = tl.load(x + base[:, None] + shift[None, :], mask=there, other=0.0)
        right_part = tl.load(
            w + output[None, :] * K + k[:, None],
            mask=(k < K)[:, None] & (output < O)[None, :],
            other=0.0,
        )
        total = tl.dot(left_part, right_part, total, input_precision=PRECISION)
    where = example * (O * P * Q) + row * Q + column
    tl.store(
        y + where[:, None] + output[None, :] * (P * Q),
        total.to(y.dtype.element_ty),
        mask=inside[:, None] & (output < O)[None, :],
    )


@triton.jit
def convolve_input(
    g, w, x, g_model, w_model, x_model, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient with respect to images.

    Args:
        g, w, x: Gradient with respect to the output, weights and result.
        g_model, w_model, x_model: Their model strides.
        batch: Batch size.
        BM, BN, BK, PRECISION: Block sizes, and the precision of products.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    g += model * g_model
    w += model * w_model
    x += model * x_model
    K: tl.constexpr = O * R * S
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * H * W
    example = place // (H * W)
    row = (place // W) % H
    column = place % W
    low = row + PH
    right = column + PW
    base = example * (O * P * Q)
    channel = tl.program_id(2) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        o = k // (R * S)
        r = (k // S) % R
        s = k % S
        down = low[:, None] - (r * DH)[None, :]
        across = right[:, None] - (s * DW)[None, :]
        there = inside[:, None] & (k < K)[None, :] & (down >= 0) & (across >= 0)
        if SH > 1 or SW > 1:
            there &= (down % SH == 0) & (across % SW == 0)
            down = down // SH
            across = across // SW
        there &= (down < P) & (across < Q)
        left_part = tl.load(
            g + base[:, None] + (o * (P * Q))[None, :] + down * Q + across, mask=there, other=0.0
        )
        right_part = tl.load(
            w + (o * (C * R * S) + r * S + s)[:, None] + channel[None, :] * (R * S),
            mask=(k < K)[:, None] & (channel < C)[None, :],
            other=0.0,
        )
        total = tl.dot(left_part, right_part, total, input_precision=PRECISION)
    where = example * (C * H * W) + row * W + column
    tl.store(
        x + where[:, None] + channel[None, :] * (H * W),
        total.to(x.dtype.element_ty),
        mask=inside[:, None] & (channel < C)[None, :],
    )


@triton.jit
def pack(
    w, packed, w_model, w_output, w_channel, size,
    C: tl.constexpr, N: tl.constexpr, O: tl.constexpr, T: tl.constexpr,
    REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack weights for `direct`: `(models, channels, taps, outputs)`, padded with zeros.

    Args:
        w, packed: Weights and result.
        w_model, w_output, w_channel: Strides of the weights.
        size: Model stride of the result.
        C, N, O, T: Channels, outputs with padding, outputs, and taps.
        REVERSED: Whether to reverse the order of taps.
        BLOCK: Elements per program.
    """
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = at // (T * N)
    tap = (at // N) % T
    output = at % N
    place = channel * w_channel + output * w_output + (T - 1 - tap if REVERSED else tap)
    value = tl.load(w + model * w_model + place, mask=(at < C * T * N) & (output < O), other=0.0)
    tl.store(packed + model * size + at, value.to(tl.float32), mask=at < C * T * N)


@triton.jit
def direct(
    x, w, y, x_model, w_model, y_model, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Convolve few channels tap by tap; a position is loaded once for all outputs.

    Args:
        x, w, y: Images, packed weights and output.
        x_model, w_model, y_model: Their model strides.
        batch: Batch size.
        N: Outputs with padding.
        BM, BN: Block sizes.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    stored = (place < batch * P * Q)[None, :] & (output < O)[:, None]
    place = tl.minimum(place, batch * P * Q - 1)  # later loads then need no mask
    example = place // (P * Q)
    row = (place // Q) % P
    column = place % Q
    top = row * SH - PH
    left = column * SW - PW
    base = example * (C * H * W) + top * W + left
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for c in range(C):
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                weight = tl.load(w + (c * (R * S) + r * S + s) * N + output)
                shift = c * (H * W) + r * DH * W + s * DW
                if PH > 0 or PW > 0:
                    down = top + r * DH
                    across = left + s * DW
                    there = (down >= 0) & (down < H) & (across >= 0) & (across < W)
                    seen = tl.load(x + base + shift, mask=there, other=0.0)
                else:
                    seen = tl.load(x + base + shift)
                total += weight[:, None] * seen.to(tl.float32)[None, :]
    where = example * (O * P * Q) + row * Q + column
    tl.store(
        y + where[None, :] + output[:, None] * (P * Q), total.to(y.dtype.element_ty), mask=stored
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
    K: tl.constexpr = C * R * S
    blocks: tl.constexpr = (K + BM - 1) // BM
    g += model * g_model
    x += model * x_model
    w += (model * parts + part) * (O * K)
    k = (block % blocks) * BM + tl.arange(0, BM)
    c = k // (R * S)
    r = (k // S) % R
    s = k % S
    shift = c * (H * W) + r * (DH * W) + s * DW
    output = (block // blocks) * BN + tl.arange(0, BN)
    places = batch * P * Q
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, SHARE, BK):
        place = part * SHARE + start + tl.arange(0, BK)
        inside = place < places
        example = place // (P * Q)
        row = (place // Q) % P
        column = place % Q
        top = row * SH - PH
        left = column * SW - PW
        there = (k < K)[:, None] & inside[None, :]
        if PH > 0 or PW > 0:
            down = top[None, :] + (r * DH)[:, None]
            across = left[None, :] + (s * DW)[:, None]
            there &= (down >= 0) & (down < H) & (across >= 0) & (across < W)
        base = example * (C * H * W) + top * W + left
        seen = tl.load(x + base[None, :] + shift[:, None], mask=there, other=0.0)
        slope = tl.load(
            g + (example * (O * P * Q) + row * Q + column)[:, None] + output[None, :] * (P * Q),
            mask=inside[:, None] & (output < O)[None, :],
            other=0.0,
        )
        total = tl.dot(seen, slope, total, input_precision=PRECISION)
    tl.store(
        w + output[None, :] * K + k[:, None], total, mask=(output < O)[None, :] & (k < K)[:, None]
    )


@triton.jit
def unfold(
    x, columns, x_model, batch, K,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Unfold images into columns `(models, terms, positions)`.

    Args:
        x, columns: Images and result.
        x_model: Model stride of the images.
        batch: Batch size.
        K: Number of terms: weights per output.
        BK, BM: Block sizes.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    places = batch * P * Q
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    example = place // (P * Q)
    row = (place // Q) % P
    column = place % Q
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    c = k // (R * S)
    r = (k // S) % R
    s = k % S
    down = (row * SH - PH)[None, :] + (r * DH)[:, None]
    across = (column * SW - PW)[None, :] + (s * DW)[:, None]
    stored = (k < K)[:, None] & (place < places)[None, :]
    there = stored & (down >= 0) & (down < H) & (across >= 0) & (across < W)
    at = example[None, :] * (C * H * W) + (c * (H * W))[:, None] + down * W + across
    seen = tl.load(x + model * x_model + at, mask=there, other=0.0)
    tl.store(columns + (model * K + k[:, None]) * places + place[None, :], seen, mask=stored)


@triton.jit
def fold(
    columns, x, batch, K,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Undo `unfold`: add the elements of columns to their positions, in a fixed order.

    Args:
        columns, x: Columns and result.
        batch: Batch size.
        K: Number of terms: weights per output.
        BLOCK: Elements per program.
        C, H, W, O, R, S, P, Q, SH, SW, PH, PW, DH, DW: Sizes; see the module's docstring.
    """
    model = tl.program_id(1).to(tl.int64)
    places = batch * P * Q
    columns += model * K * places
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < batch * (C * H * W)
    example = at // (C * H * W)
    c = (at // (H * W)) % C
    row = (at // W) % H
    column = at % W
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            low = row + PH - r * DH
            right = column + PW - s * DW
            there = inside & (low >= 0) & (right >= 0) & (low % SH == 0) & (right % SW == 0)
            down = low // SH
            across = right // SW
            there &= (down < P) & (across < Q)
            place = (example * P + down) * Q + across
            k = (c * R + r) * S + s
            total += tl.load(columns + k.to(tl.int64) * places + place, mask=there, other=0.0).to(
                tl.float32
            )
    tl.store(x + model * batch * (C * H * W) + at, total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def moved_images(
    stored, index, moves, mean, std, made, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PADDING: tl.constexpr, NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gather, crop, flip and normalize images; each program makes a block of one image.

    Args:
        stored, index, moves: Stored images, positions, and (row offset, column offset, flip).
        mean, std, made: Mean and standard deviation per channel, and result.
        C, H, W: Channels, height and width.
        PADDING: Width of the black border.
        NORMAL: Whether to normalize.
        BLOCK: Pixels per program.
    """
    image = tl.program_id(0)
    which = tl.load(index + image).to(tl.int64)
    down = tl.load(moves + image * 3).to(tl.int32)
    right = tl.load(moves + image * 3 + 1).to(tl.int32)
    flip = tl.load(moves + image * 3 + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = at // (H * W)
    row = (at // W) % H
    column = at % W
    row = row + down - PADDING
    column = tl.where(flip == 1, W - 1 - column, column) + right - PADDING
    there = (at < C * H * W) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(
        stored + which * (C * H * W) + channel * (H * W) + row * W + column, mask=there, other=0
    )
    value = value.to(tl.float32) / 255
    if NORMAL:
        value = (value - tl.load(mean + channel, mask=at < C * H * W)) / tl.load(
            std + channel, mask=at < C * H * W
        )
    tl.store(made + image.to(tl.int64) * (C * H * W) + at, value, mask=at < C * H * W)
