"""A convolution of many models in numbers, and how its work is cut up."""

from typing import NamedTuple


class Shape(NamedTuple):
    """G models: x [G, batch, channels, height, width] with w [G, outputs, channels, rows, columns]."""

    models: int
    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    rows: int
    columns: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of what comes out."""
        sizes, kernel = (self.height, self.width), (self.rows, self.columns)
        down, across = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        return down, across

    @property
    def turnable(self) -> bool:
        """Is the gradient by the input a convolution, too?"""
        return self.stride == (1, 1) and min(self.turned.padding) >= 0

    @property
    def turned(self) -> "Shape":
        """The convolution, with the weight turned round, that the gradient by the input is if strides are one."""
        down, across = (
            d * (k - 1) - p for d, k, p in zip(self.dilation, (self.rows, self.columns), self.padding, strict=True)
        )
        sizes = self.outputs, *self.out, self.channels
        return Shape(*self[:2], *sizes, self.rows, self.columns, (1, 1), (down, across), self.dilation)


class Blocks(NamedTuple):
    """The block of a matrix product that one program makes, the terms it adds at a time, its warps and loads in flight.

    Rows are positions and columns channels; of a weight gradient rows are weights and columns the outputs they are for.
    With no loads in flight the product is not made on tensor cores, but tap by tap in each thread's registers.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def choices(kind: str, shape: Shape) -> list[Blocks]:
    """Ways to cut a convolution ("output"), its input or its weight gradient that have proved best."""
    taps = shape.rows * shape.columns
    if kind == "weight":
        columns = _power(shape.outputs, 8, 64)
        if columns >= 32 and shape.channels % 64 == 0:
            wide = [Blocks(64, 128, 32, 4, 4)] if shape.outputs >= 128 else []
            return [Blocks(64, columns, 64, 4, 3), Blocks(64, columns, 32, 4, 4), *wide]
        if columns >= 32:
            return [Blocks(64, columns, 64, 4, 3)]
        return [Blocks(128 if 64 < shape.channels * taps <= 128 else 32, columns, 64, 2, 3)]
    made = shape.outputs if kind == "output" else shape.channels
    terms = taps * (shape.channels if kind == "output" else shape.outputs)
    if made <= 8 and terms <= 1024 and taps <= 49 and (kind == "output" or shape.turnable):
        return [Blocks(256, _power(made, 4, 8), 1, 2, 0)]
    columns = _power(made, 8, 64)
    if columns >= 32 and terms % (32 * taps) == 0:
        wide = [Blocks(128, 128, 32, 8, 3)] if made >= 128 else []
        return [Blocks(128, columns, 32, 4, 3), Blocks(64, columns, 32, 4, 4), *wide]
    return [Blocks(128, columns, 32, 4, 3), *([Blocks(256, columns, 32, 8, 3)] if columns >= 32 else [])]


def _power(number: int, least: int, most: int) -> int:
    """The next power of two, within bounds."""
    return min(most, max(least, 1 << (number - 1).bit_length()))
