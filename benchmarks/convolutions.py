"""Convolutions of many models at once, layer by layer: cuDNN's grouped kernels and ours, on a GPU.

python benchmarks/convolutions.py --out results/convolutions.md [--tf32] [--layers residual]

The layers are those of the paper's CNN at batch 64, of pfl-research's network (50 models, batch
10), of ResNet-18 on images of 64x64 at batch 32, and of FedCOG's generator for 32x32. Times come
from the GPU's clock: medians of five graphs of ten calls each, in float32 without TF32 unless
--tf32 is given. The column "chosen" is the kernel that `fedcog.models.ops.autotune` would use.
"Error" is the L2 distance from a float64 reference, relative to its norm.
"""

import argparse
import functools

import common
import torch
from torch import Tensor

from fedcog import Experiment
from fedcog.models.ops.autotune import measure_seconds
from fedcog.models.ops.kernels import ahead_of_time, matmul
from fedcog.models.ops.kernels.launchers import LAUNCHERS
from fedcog.models.ops.kernels.shapes import Shape, block_choices
from fedcog.models.ops.operators import grouped_convolution
from fedcog.runs.environment import find_device, torch_settings

ZERO = (0, 0)
ONE = (1, 1)
TWO = (2, 2)
LAYERS = {
    "the paper's first": Shape(10, 64, 3, 32, 32, 6, 5, 5, ONE, ZERO, ONE),
    "the paper's second": Shape(10, 64, 6, 14, 14, 16, 5, 5, ONE, ZERO, ONE),
    "pfl's first": Shape(50, 10, 3, 32, 32, 32, 3, 3, ONE, ZERO, ONE),
    "pfl's second": Shape(50, 10, 32, 30, 30, 64, 3, 3, ONE, ZERO, ONE),
    "a residual block's": Shape(10, 64, 64, 16, 16, 64, 3, 3, ONE, ONE, ONE),
    "residual, 64 channels": Shape(10, 32, 64, 16, 16, 64, 3, 3, ONE, ONE, ONE),
    "residual, 64 to 128": Shape(10, 32, 64, 16, 16, 128, 3, 3, TWO, ONE, ONE),
    "residual, 128": Shape(10, 32, 128, 8, 8, 128, 3, 3, ONE, ONE, ONE),
    "residual, 256": Shape(10, 32, 256, 4, 4, 256, 3, 3, ONE, ONE, ONE),
    "residual, 256 to 512": Shape(10, 32, 256, 4, 4, 512, 3, 3, TWO, ONE, ONE),
    "residual, 512": Shape(10, 32, 512, 2, 2, 512, 3, 3, ONE, ONE, ONE),
    "residual, first": Shape(10, 32, 3, 64, 64, 64, 7, 7, TWO, (3, 3), ONE),
    "residual, 64 to 128, shortcut": Shape(10, 32, 64, 16, 16, 128, 1, 1, TWO, ZERO, ONE),
    "generator, 128": Shape(10, 256, 128, 16, 16, 128, 3, 3, ONE, ONE, ONE),
    "generator, 128 to 64": Shape(10, 256, 128, 32, 32, 64, 3, 3, ONE, ONE, ONE),
}
Operands = tuple[Tensor, Tensor]


def make_operands(
    shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Operands]:
    """Draw the operands of each kind of convolution.

    Args:
        shape: Shape of the layer.
        device: Device of the tensors.
        dtype: Data type of the tensors.

    Returns:
        "output": inputs and weights; "input": output gradients and weights; "weight": output
        gradients and inputs.
    """
    rng = torch.Generator().manual_seed(0)
    input_size = shape[:5]
    weight_size = (shape.models, shape.outputs, shape.channels, shape.rows, shape.columns)
    output_size = (shape.models, shape.batch, shape.outputs, *shape.out)
    inputs, weights, output_gradients = (
        torch.randn(size, generator=rng).to(device, dtype)
        for size in (input_size, weight_size, output_size)
    )
    return {
        "output": (inputs, weights),
        "input": (output_gradients, weights),
        "weight": (output_gradients, inputs),
    }


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return the L2 distance of a result from the reference, relative to the reference's norm."""
    return float((result.double() - reference).norm() / reference.norm())


def start_compiling(shape: Shape, device: torch.device, tf32: bool) -> None:
    """Compile all kernels of a layer in the background.

    Args:
        shape: Shape of the layer.
        device: The GPU.
        tf32: Whether products are computed in TF32.
    """
    for kind, operands in make_operands(shape, device).items():
        for blocks in block_choices(kind, shape):
            ahead_of_time.start_compiling(device, LAUNCHERS[kind], *operands, shape, blocks, tf32)
        if matmul.fits_in_memory(kind, shape):
            ahead_of_time.start_compiling(device, matmul.convolve_by_matmul, kind, *operands, shape)


def measure_layer(
    name: str, kind: str, shape: Shape, device: torch.device, tf32: bool
) -> tuple[list[str], dict[str, float]]:
    """Measure all kernels for one kind of convolution of a layer.

    Args:
        name: Name of the layer.
        kind: "output", "input" or "weight".
        shape: Shape of the layer.
        device: The GPU.
        tf32: Whether products are computed in TF32.

    Returns:
        The row of the table, and microseconds by kernel.
    """
    left, right = make_operands(shape, device)[kind]
    exact_left, exact_right = make_operands(shape, device, torch.float64)[kind]
    reference = grouped_convolution(kind, exact_left, exact_right, shape)
    kernels = {"cuDNN": functools.partial(grouped_convolution, kind, left, right, shape)}
    for blocks in block_choices(kind, shape):
        kernels[str(tuple(blocks))] = functools.partial(
            LAUNCHERS[kind], left, right, shape, blocks, tf32
        )
    if matmul.fits_in_memory(kind, shape):
        kernels["product"] = functools.partial(matmul.convolve_by_matmul, kind, left, right, shape)
    # Errors come before times, because libraries initialize in their first call.
    errors = {key: relative_error(kernel(), reference) for key, kernel in kernels.items()}
    kernel_times = {key: 1e6 * measure_seconds(kernel) for key, kernel in kernels.items()}
    fastest = min(kernel_times, key=lambda key: kernel_times[key])
    ours = min((key for key in kernel_times if key != "cuDNN"), key=lambda key: kernel_times[key])
    row = [
        name,
        kind,
        f"{kernel_times['cuDNN']:.1f}",
        f"{kernel_times[ours]:.1f}",
        f"{kernel_times['cuDNN'] / kernel_times[ours]:.1f} x",
        fastest,
        f"{errors['cuDNN']:.0e}",
        f"{errors[ours]:.0e}",
    ]
    return row, kernel_times


def main() -> None:
    """Measure the three convolutions of every layer."""
    parser = common.make_parser(__doc__, "results/convolutions.md")
    parser.add_argument(
        "--tf32", action="store_true", help="products of one term in TF32, not of three"
    )
    parser.add_argument(
        "--layers", nargs="+", default=[""], help="only layers whose names begin with one of these"
    )
    options: argparse.Namespace = parser.parse_args()
    device = find_device(options.device)
    if device.type != "cuda":
        parser.error("these kernels need a GPU, and there is none.")
    rows = []
    times = dict[str, dict[str, float]]()
    prefixes = tuple(options.layers)
    layers = {name: shape for name, shape in LAYERS.items() if name.startswith(prefixes)}
    with torch_settings(Experiment(tf32=options.tf32)):
        for shape in layers.values():
            start_compiling(shape, device, options.tf32)
        ahead_of_time.wait_for_compilations()
        for name, shape in layers.items():
            for kind in LAUNCHERS:
                if kind == "input" and shape.channels == 3 and shape.models == 50:
                    continue  # training needs no gradient with respect to pfl's images
                row, kernel_times = measure_layer(name, kind, shape, device, options.tf32)
                rows.append(row)
                times[f"{name}, {kind}"] = kernel_times
    head = [
        "layer",
        "kind",
        "cuDNN, us",
        "ours, us",
        "ratio",
        "chosen",
        "cuDNN's error",
        "our error",
    ]
    facts = common.describe_environment(device, None)
    table = common.markdown_table(head, rows)
    common.write_report(options.out, "Convolutions", facts, [table], {"times": times})
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
