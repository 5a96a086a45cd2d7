"""Triton programs, for many models side by side. Tensors have a leading model axis, of stride 0 where models share one.

Convolutions are x [G, B, C, H, W] with w [G, O, C, R, S] to y [G, B, O, P, Q]: implicit matrix products, gathered on
the way, on tensor cores; or, of few channels, sums in each thread's registers.
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
    """A convolution."""
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    K: tl.constexpr = C * R * S
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * P * Q
    example, row, column = place // (P * Q), (place // Q) % P, place % Q
    top, left = row * SH - PH, column * SW - PW
    base = example * (C * H * W) + top * W + left
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        c, r, s = k // (R * S), (k // S) % R, k % S
        there = inside[:, None] & (k < K)[None, :]
        if PH > 0 or PW > 0:
            down, across = top[:, None] + (r * DH)[None, :], left[:, None] + (s * DW)[None, :]
            there &= (down >= 0) & (down < H) & (across >= 0) & (across < W)
        shift = c * (H * W) + r * (DH * W) + s * DW
        left_part = tl.load(x + base[:, None] + shift[None, :], mask=there, other=0.0)
        right_part = tl.load(
            w + output[None, :] * K + k[:, None], mask=(k < K)[:, None] & (output < O)[None, :], other=0.0
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
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The input's gradient."""
    model = tl.program_id(1).to(tl.int64)
    g += model * g_model
    w += model * w_model
    x += model * x_model
    K: tl.constexpr = O * R * S
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = place < batch * H * W
    example, row, column = place // (H * W), (place // W) % H, place % W
    low, right = row + PH, column + PW
    base = example * (O * P * Q)
    channel = tl.program_id(2) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        o, r, s = k // (R * S), (k // S) % R, k % S
        down, across = low[:, None] - (r * DH)[None, :], right[:, None] - (s * DW)[None, :]
        there = inside[:, None] & (k < K)[None, :] & (down >= 0) & (across >= 0)
        if SH > 1 or SW > 1:
            there &= (down % SH == 0) & (across % SW == 0)
            down, across = down // SH, across // SW
        there &= (down < P) & (across < Q)
        left_part = tl.load(g + base[:, None] + (o * (P * Q))[None, :] + down * Q + across, mask=there, other=0.0)
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
    C: tl.constexpr, N: tl.constexpr, O: tl.constexpr, T: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights as `direct` wants them: [models, channels, taps, outputs], zero where there is no such output."""
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, tap, output = at // (T * N), (at // N) % T, at % N
    place = channel * w_channel + output * w_output + (T - 1 - tap if REVERSED else tap)
    value = tl.load(w + model * w_model + place, mask=(at < C * T * N) & (output < O), other=0.0)
    tl.store(packed + model * size + at, value.to(tl.float32), mask=at < C * T * N)


@triton.jit
def direct(
    x, w, y, x_model, w_model, y_model, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A convolution of few channels: tap by tap, one load of a position for all outputs; w is packed."""
    model = tl.program_id(1).to(tl.int64)
    x += model * x_model
    w += model * w_model
    y += model * y_model
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    output = tl.program_id(2) * BN + tl.arange(0, BN)
    stored = (place < batch * P * Q)[None, :] & (output < O)[:, None]
    place = tl.minimum(place, batch * P * Q - 1)  # no need to ask below
    example, row, column = place // (P * Q), (place // Q) % P, place % Q
    top, left = row * SH - PH, column * SW - PW
    base = example * (C * H * W) + top * W + left
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for c in range(C):
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                weight = tl.load(w + (c * (R * S) + r * S + s) * N + output)
                shift = c * (H * W) + r * DH * W + s * DW
                if PH > 0 or PW > 0:
                    down, across = top + r * DH, left + s * DW
                    there = (down >= 0) & (down < H) & (across >= 0) & (across < W)
                    seen = tl.load(x + base + shift, mask=there, other=0.0)
                else:
                    seen = tl.load(x + base + shift)
                total += weight[:, None] * seen.to(tl.float32)[None, :]
    where = example * (O * P * Q) + row * Q + column
    tl.store(y + where[None, :] + output[:, None] * (P * Q), total.to(y.dtype.element_ty), mask=stored)


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
    K: tl.constexpr = C * R * S
    blocks: tl.constexpr = (K + BM - 1) // BM
    g += model * g_model
    x += model * x_model
    w += (model * parts + part) * (O * K)
    k = (block % blocks) * BM + tl.arange(0, BM)
    c, r, s = k // (R * S), (k // S) % R, k % S
    shift = c * (H * W) + r * (DH * W) + s * DW
    output = (block // blocks) * BN + tl.arange(0, BN)
    places = batch * P * Q
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, SHARE, BK):
        place = part * SHARE + start + tl.arange(0, BK)
        inside = place < places
        example, row, column = place // (P * Q), (place // Q) % P, place % Q
        top, left = row * SH - PH, column * SW - PW
        there = (k < K)[:, None] & inside[None, :]
        if PH > 0 or PW > 0:
            down, across = top[None, :] + (r * DH)[:, None], left[None, :] + (s * DW)[:, None]
            there &= (down >= 0) & (down < H) & (across >= 0) & (across < W)
        base = example * (C * H * W) + top * W + left
        seen = tl.load(x + base[None, :] + shift[:, None], mask=there, other=0.0)
        slope = tl.load(
            g + (example * (O * P * Q) + row * Q + column)[:, None] + output[None, :] * (P * Q),
            mask=inside[:, None] & (output < O)[None, :],
            other=0.0,
        )
        total = tl.dot(seen, slope, total, input_precision=PRECISION)
    tl.store(w + output[None, :] * K + k[:, None], total, mask=(output < O)[None, :] & (k < K)[:, None])


@triton.jit
def unfold(
    x, columns, x_model, batch, K,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """What every weight meets at every position: [models, weights of an output, positions]."""
    model = tl.program_id(1).to(tl.int64)
    places = batch * P * Q
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    example, row, column = place // (P * Q), (place // Q) % P, place % Q
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    c, r, s = k // (R * S), (k // S) % R, k % S
    down, across = (row * SH - PH)[None, :] + (r * DH)[:, None], (column * SW - PW)[None, :] + (s * DW)[:, None]
    stored = (k < K)[:, None] & (place < places)[None, :]
    there = stored & (down >= 0) & (down < H) & (across >= 0) & (across < W)
    at = example[None, :] * (C * H * W) + (c * (H * W))[:, None] + down * W + across
    seen = tl.load(x + model * x_model + at, mask=there, other=0.0)
    tl.store(columns + (model * K + k[:, None]) * places + place[None, :], seen, mask=stored)


@triton.jit
def fold(
    columns, x, batch, K,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The reverse: what lies in the columns, added up where it was taken from; sums are made in one order."""
    model = tl.program_id(1).to(tl.int64)
    places = batch * P * Q
    columns += model * K * places
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < batch * (C * H * W)
    example, c, row, column = at // (C * H * W), (at // (H * W)) % C, (at // W) % H, at % W
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            low, right = row + PH - r * DH, column + PW - s * DW
            there = inside & (low >= 0) & (right >= 0) & (low % SH == 0) & (right % SW == 0)
            down, across = low // SH, right // SW
            there &= (down < P) & (across < Q)
            place = (example * P + down) * Q + across
            k = (c * R + r) * S + s
            total += tl.load(columns + k.to(tl.int64) * places + place, mask=there, other=0.0).to(tl.float32)
    tl.store(x + model * batch * (C * H * W) + at, total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def moved_images(
    stored, index, moves, mean, std, made, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PADDING: tl.constexpr, NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a block of an image's pixels."""
    image = tl.program_id(0)
    which = tl.load(index + image).to(tl.int64)
    down = tl.load(moves + image * 3).to(tl.int32)
    right = tl.load(moves + image * 3 + 1).to(tl.int32)
    flip = tl.load(moves + image * 3 + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel, row, column = at // (H * W), (at // W) % H, at % W
    row = row + down - PADDING
    column = tl.where(flip == 1, W - 1 - column, column) + right - PADDING
    there = (at < C * H * W) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(stored + which * (C * H * W) + channel * (H * W) + row * W + column, mask=there, other=0)
    value = value.to(tl.float32) / 255
    if NORMAL:
        value = (value - tl.load(mean + channel, mask=at < C * H * W)) / tl.load(std + channel, mask=at < C * H * W)
    tl.store(made + image.to(tl.int64) * (C * H * W) + at, value, mask=at < C * H * W)
