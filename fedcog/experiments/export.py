"""A run's global model for use elsewhere: its weights in a file, or the whole of it as one graph."""

import contextlib
import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import fedcog
from fedcog import pictures
from fedcog.algorithms import Algorithm
from fedcog.experiments.config import name_of
from fedcog.experiments.record import RecordError, RunDirectory, packed, write_file
from fedcog.experiments.run import trained
from fedcog.fitness import ModelError
from fedcog.settings import ConfigError

Format = Literal["safetensors", "torch", "onnx"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}
TOLD = ("dataset", "classes", "several", "mean", "std")
"""What a record says of the data that matters to who uses the model."""


class Exported(NamedTuple):
    """A model's file, and what is known of the model."""

    path: Path
    about: dict[str, Any]


class Whole(nn.Module):
    """A network with the normalisation before it: from examples as they are stored to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of stored examples: images of bytes, or numbers used as they are."""
        logits: Tensor = self.network(pictures.inputs(x, self.mean, self.std))
        return logits


def export(
    run: str | Path,
    out: str | Path | None = None,
    format: Format = "safetensors",
    *,
    model: nn.Module | None = None,
    algorithm: Algorithm | None = None,
) -> Exported:
    """Write the global model of a run's last checkpoint to `out` (by default model.* in the run's directory).

    safetensors: its weights by name, and as JSON under "about" what it is. torch: its weights as a state_dict, for
    `torch.load(..., weights_only=True)`. onnx: a graph from any number of examples as the data set holds them (images
    as bytes, for normalising is part of it) to logits. `model` and `algorithm` are your own, where the run had any.
    """
    if format not in SUFFIXES:
        raise ConfigError([f"format needs one of {', '.join(SUFFIXES)}, not {format!r}."])
    if format == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise ConfigError(["the format onnx needs two packages more: pip install 'fedcog[onnx]'."])
    directory = RunDirectory(run)
    network, checkpoint = trained(directory, copy.deepcopy(model), algorithm)
    experiment = directory.experiment()
    try:
        told = directory.tensors("federation.safetensors")[1]
    except RecordError as error:
        raise RecordError(
            f"{directory.path / 'federation.safetensors'} is missing or damaged. It is written anew by: fedcog run "
            f"--resume {directory.path}"
        ) from error
    about: dict[str, Any] = {key: told[key] for key in TOLD if key in told} | {
        "model": checkpoint.about["model"],
        "input_shape": checkpoint.about["input_shape"],
        "algorithm": name_of(experiment.algorithm),
        "round": checkpoint.round,
        "rounds": experiment.rounds,
        "fedcog": fedcog.__version__,
    }
    if format == "onnx":
        content = graph(directory, network, about)
    else:
        weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
        content = packed(weights, about) if format == "safetensors" else _saved(weights)
    path = Path(out or directory.path / f"model{SUFFIXES[format]}")
    write_file(path, content)
    return Exported(path, about)


def graph(directory: RunDirectory, network: nn.Module, about: dict[str, Any]) -> bytes:
    """A network and the normalisation before it as an ONNX file, for a batch of any size."""
    shape = tuple(about["input_shape"])
    try:
        mean, std = (torch.tensor(about[name], dtype=torch.float32) for name in ("mean", "std"))
        whole = Whole(network.float(), *(one.reshape(-1, *[1] * (len(shape) - 1)) for one in (mean, std))).eval()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RecordError(
            f"{directory.path / 'federation.safetensors'} does not tell what inputs are normalised by, as older "
            f"versions did not: fedcog run --resume {directory.path} writes it down."
        ) from error
    examples = torch.zeros(2, *shape, dtype=torch.uint8 if mean.numel() else torch.float32)
    try:
        with _hushed():
            program = torch.onnx.export(
                whole,
                (examples,),
                input_names=["images" if mean.numel() else "inputs"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("examples")},),
                dynamo=True,
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ModelError(f"the network cannot be made an ONNX graph: {reason}. Choose another format.") from error
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose sources it came from
    program.model.metadata_props["about"] = json.dumps(about, sort_keys=True)
    content: bytes = program.model_proto.SerializeToString()
    return content


def _saved(weights: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Without what the exporter says of packages it does without, and prints of graphs it cannot make."""
    log = logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)
