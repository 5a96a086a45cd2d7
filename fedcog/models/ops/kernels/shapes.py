"""The shape of a convolution of many models, and the block sizes of its kernels."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Shape of images `(models, batch, channels, height, width)` and of weights.

    Weights are `(models, outputs, channels, rows, columns)`.
    """

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
        """Height and width of the output."""
        sizes = (self.height, self.width)
        kernel = (self.rows, self.columns)
        height, width = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                sizes, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return height, width

    @property
    def is_transposable(self) -> bool:
        """Whether the gradient with respect to the input is a convolution, too."""
        return self.stride == (1, 1) and min(self.transposed.padding) >= 0

    @property
    def transposed(self) -> "Shape":
        """The convolution with flipped weights that gives the gradient with respect to the input.

        This holds for strides of one.
        """
        padding_rows, padding_columns = (
            d * (k - 1) - p
            for d, k, p in zip(self.dilation, (self.rows, self.columns), self.padding, strict=True)
        )
        return Shape(
            self.models,
            self.batch,
            self.outputs,
            *self.out,
            self.channels,
            self.rows,
            self.columns,
            (1, 1),
            (padding_rows, padding_columns),
            self.dilation,
        )


class Blocks(NamedTuple):
    """The block of a matrix product that one program computes.

    Rows are positions and columns are channels. For a weight gradient, rows are weights and columns
    are outputs.

    Attributes:
        rows: Rows of the block.
        columns: Columns of the block.
        terms: Terms that are added at a time.
        warps: Number of warps.
        stages: Number of loads in flight; with 0, the product is computed tap by tap in registers,
            without tensor cores.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def block_choices(kind: str, shape: Shape) -> list[Blocks]:
    """Return the block sizes that measured best for similar shapes.

    Args:
        kind: "output", "input" or "weight".
        shape: Shape of the convolution.

    Returns:
        Block sizes to try.
    """
    taps = shape.rows * shape.columns
    if kind == "weight":
        columns = _power_of_two(shape.outputs, 8, 64)
        if columns >= 32 and shape.channels % 64 == 0:
            wide = [Blocks(64, 128, 32, 4, 4)] if shape.outputs >= 128 else []
            return [Blocks(64, columns, 64, 4, 3), Blocks(64, columns, 32, 4, 4), *wide]
        if columns >= 32:
            return [Blocks(64, columns, 64, 4, 3)]
        return [Blocks(128 if 64 < shape.channels * taps <= 128 else 32, columns, 64, 2, 3)]
    is_output = kind == "output"
    num_columns = shape.outputs if is_output else shape.channels
    terms = taps * (shape.channels if is_output else shape.outputs)
    is_direct = is_output or shape.is_transposable
    if num_columns <= 8 and terms <= 1024 and taps <= 49 and is_direct:
        return [Blocks(256, _power_of_two(num_columns, 4, 8), 1, 2, 0)]
    columns = _power_of_two(num_columns, 8, 64)
    if columns >= 32 and terms % (32 * taps) == 0:
        wide = [Blocks(128, 128, 32, 8, 3)] if num_columns >= 128 else []
        return [Blocks(128, columns, 32, 4, 3), Blocks(64, columns, 32, 4, 4), *wide]
    if columns >= 32:
        return [Blocks(128, columns, 32, 4, 3), Blocks(256, columns, 32, 8, 3)]
    return [Blocks(128, columns, 32, 4, 3)]


def _power_of_two(number: int, minimum: int, maximum: int) -> int:
    """Round up to a power of two, within bounds."""
    return min(maximum, max(minimum, 1 << (number - 1).bit_length()))
