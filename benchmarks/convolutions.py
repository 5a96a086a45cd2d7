"""Convolutions of many models at once: cuDNN's grouped kernels beside ours, layer by layer, on one
GPU.

python benchmarks/convolutions.py --out results/convolutions.md [--tf32] [--layers residual]

The layers are those of the paper's CNN at batch 64, of pfl-research's network (50 models, batch
10), of ResNet-18 on images of 64x64 at batch 32, and of FedCOG's generator for 32x32. Times are by
the GPU's own clock, medians of five graphs of ten calls each, float32 without TF32 unless asked
for. The column "chosen" is what `fedcog.models.ops.autotune` would use; "error" is the distance
from a float64 reference, relative to its length.
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

ONE = (1, 1)
NONE = (0, 0)
TWO = (2, 2)
LAYERS = {
    "the paper's first": Shape(10, 64, 3, 32, 32, 6, 5, 5, ONE, NONE, ONE),
    "the paper's second": Shape(10, 64, 6, 14, 14, 16, 5, 5, ONE, NONE, ONE),
    "pfl's first": Shape(50, 10, 3, 32, 32, 32, 3, 3, ONE, NONE, ONE),
    "pfl's second": Shape(50, 10, 32, 30, 30, 64, 3, 3, ONE, NONE, ONE),
    "a residual block's": Shape(10, 64, 64, 16, 16, 64, 3, 3, ONE, ONE, ONE),
    "residual, 64 channels": Shape(10, 32, 64, 16, 16, 64, 3, 3, ONE, ONE, ONE),
    "residual, 64 to 128": Shape(10, 32, 64, 16, 16, 128, 3, 3, TWO, ONE, ONE),
    "residual, 128": Shape(10, 32, 128, 8, 8, 128, 3, 3, ONE, ONE, ONE),
    "residual, 256": Shape(10, 32, 256, 4, 4, 256, 3, 3, ONE, ONE, ONE),
    "residual, 256 to 512": Shape(10, 32, 256, 4, 4, 512, 3, 3, TWO, ONE, ONE),
    "residual, 512": Shape(10, 32, 512, 2, 2, 512, 3, 3, ONE, ONE, ONE),
    "residual, first": Shape(10, 32, 3, 64, 64, 64, 7, 7, TWO, (3, 3), ONE),
    "residual, 64 to 128, shortcut": Shape(10, 32, 64, 16, 16, 128, 1, 1, TWO, NONE, ONE),
    "generator, 128": Shape(10, 256, 128, 16, 16, 128, 3, 3, ONE, ONE, ONE),
    "generator, 128 to 64": Shape(10, 256, 128, 32, 32, 64, 3, 3, ONE, ONE, ONE),
}
Arguments = tuple[Tensor, Tensor]


def arguments(
    shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, Arguments]:
    """What each kind is computed of: (x, w), (g, w) and (g, x)."""
    draw = torch.Generator().manual_seed(0)
    sizes = {
        "x": shape[:5],
        "w": (shape.models, shape.outputs, shape.channels, shape.rows, shape.columns),
        "g": (shape.models, shape.batch, shape.outputs, *shape.out),
    }
    x, w, g = (torch.randn(size, generator=draw).to(device, dtype) for size in sizes.values())
    return {"output": (x, w), "input": (g, w), "weight": (g, x)}


def apart(found: Tensor, exact: Tensor) -> float:
    """How far a result lies from the reference."""
    return float((found.double() - exact).norm() / exact.norm())


def foresee(shape: Shape, device: torch.device, tf32: bool) -> None:
    """Have a layer's kernels compiled beside."""
    for kind, given in arguments(shape, device).items():
        for blocks in block_choices(kind, shape):
            ahead_of_time.start_compiling(device, LAUNCHERS[kind], *given, shape, blocks, tf32)
        if matmul.fits_in_memory(kind, shape):
            ahead_of_time.start_compiling(device, matmul.convolve_by_matmul, kind, *given, shape)


def row(
    name: str, kind: str, shape: Shape, device: torch.device, tf32: bool
) -> tuple[list[str], dict[str, float]]:
    """A line of the table."""
    one, other = arguments(shape, device)[kind]
    exact = grouped_convolution(kind, *arguments(shape, device, torch.float64)[kind], shape)
    ways = {"cuDNN": functools.partial(grouped_convolution, kind, one, other, shape)}
    for blocks in block_choices(kind, shape):
        ways[str(tuple(blocks))] = functools.partial(
            LAUNCHERS[kind], one, other, shape, blocks, tf32
        )
    if matmul.fits_in_memory(kind, shape):
        ways["product"] = functools.partial(matmul.convolve_by_matmul, kind, one, other, shape)
    errors = {
        way: apart(compute(), exact) for way, compute in ways.items()
    }  # first: libraries begin at a first call
    times = {way: 1e6 * measure_seconds(compute) for way, compute in ways.items()}
    best = min(times, key=lambda way: times[way])
    ours = min((way for way in times if way != "cuDNN"), key=lambda way: times[way])
    cells = [
        name,
        kind,
        f"{times['cuDNN']:.1f}",
        f"{times[ours]:.1f}",
        f"{times['cuDNN'] / times[ours]:.1f} x",
        best,
    ]
    return [*cells, f"{errors['cuDNN']:.0e}", f"{errors[ours]:.0e}"], times


def main() -> None:
    """Time every layer's three kernels."""
    parser = common.parser(__doc__, "results/convolutions.md")
    parser.add_argument(
        "--tf32", action="store_true", help="products of one term in TF32, not of three"
    )
    parser.add_argument("--layers", nargs="+", default=[""], help="only those whose names begin so")
    options: argparse.Namespace = parser.parse_args()
    device = find_device(options.device)
    if device.type != "cuda":
        parser.error("these are kernels for a GPU, and there is none.")
    rows = []
    found = dict[str, dict[str, float]]()
    chosen = {
        name: shape for name, shape in LAYERS.items() if name.startswith(tuple(options.layers))
    }
    with torch_settings(Experiment(tf32=options.tf32)):
        for shape in chosen.values():
            foresee(shape, device, options.tf32)
        ahead_of_time.wait_for_compilations()
        for name, shape in chosen.items():
            for kind in LAUNCHERS:
                if kind == "input" and shape.channels == 3 and shape.models == 50:
                    continue  # nobody asks for the gradient by pfl's images
                cells, found[f"{name}, {kind}"] = row(name, kind, shape, device, options.tf32)
                rows.append(cells)
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
    common.write(
        options.out,
        "Convolutions",
        common.about(device, None),
        [common.table(head, rows)],
        {"times": found},
    )
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
