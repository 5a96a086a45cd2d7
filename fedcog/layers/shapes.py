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


class Blocks(NamedTuple):
    """The block of a matrix product that one program makes, the terms it adds at a time, its warps and loads in flight.

    Rows are positions and columns channels; of a weight gradient rows are outputs and columns the weights of each.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def _power(number: int, least: int, most: int) -> int:
    """The next power of two, within bounds."""
    return min(most, max(least, 1 << (number - 1).bit_length()))


def choices(kind: str, shape: Shape) -> list[Blocks]:
    """Ways to cut a convolution, its input gradient or its weight gradient that have proved worth trying."""
    if kind == "weight":
        weights = shape.channels * shape.rows * shape.columns
        rows, columns = _power(shape.outputs, 16, 64), _power(weights, 16, 128)
        return [
            Blocks(rows, columns, 32, 4, 3),
            Blocks(rows, min(64, columns), 64, 4, 3),
            Blocks(rows, columns, 64, 8, 2),
        ]
    columns = _power(shape.outputs if kind == "output" else shape.channels, 8, 64)
    return [Blocks(128, columns, 32, 4, 3), Blocks(64, columns, 32, 4, 4), Blocks(256, columns, 16, 8, 3)]
