"""Export of the global model: its weights in a file, or the whole network as an ONNX graph."""

import contextlib
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
from fedcog.algorithms import Algorithm
from fedcog.core.settings import ConfigError
from fedcog.models.checks import ModelError
from fedcog.models.initialization import Network
from fedcog.models.ops import augmentation
from fedcog.models.tokens import takes_tokens
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.records.files import pack_tensors
from fedcog.runs.records.recorded_run import load_with_checkpoint
from fedcog.runs.records.run_directory import RecordError, RunDirectory, write_file

Format = Literal["safetensors", "torch", "onnx"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}
DATA_KEYS = ("dataset", "classes", "several", "mean", "std")
"""What the record says about the data that users of the model need."""


class Exported(NamedTuple):
    """An exported model.

    Attributes:
        path: The file.
        about: Data set, classes, normalization, algorithm, round.
    """

    path: Path
    about: dict[str, Any]


class NormalizedNetwork(nn.Module):
    """A network with normalization in front: from stored examples to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of stored examples: uint8 images, or numbers that are used as is."""
        logits: Tensor = self.network(augmentation.normalize(x, self.mean, self.std))
        return logits


def export(
    run: str | Path,
    out: str | Path | None = None,
    format: Format | None = None,
    *,
    model: Network | None = None,
    algorithm: Algorithm | None = None,
) -> Exported:
    """Write the global model of a run's last checkpoint to a file.

    Args:
        run: The run directory.
        out: The file; model.* in the run directory by default.
        format: By default what the suffix of `out` stands for: .safetensors, .pt (also .pth), or
            .onnx; without `out`, safetensors. `safetensors`: weights by name, and JSON metadata
            under "about". `torch`: a state_dict for `torch.load(..., weights_only=True)`. `onnx`: a
            graph from any number of examples as the data set stores them (normalization included)
            to logits.
        model: Your network, if the run trained one of yours: an instance, its class, or a function.
        algorithm: Your algorithm, if the run used one of yours.

    Returns:
        The file, and what is known about the model.

    Raises:
        ConfigError: If the format is unknown, lacks packages, or is not that of the suffix.
        RecordError: If the run has no checkpoint.
    """
    format = _chosen_format(out, format)
    if format == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))):
        raise ConfigError(["format onnx needs two packages: pip install 'fedcog[onnx]'."])
    directory = RunDirectory(run)
    network, checkpoint = load_with_checkpoint(directory, model, algorithm)
    experiment = directory.experiment()
    try:
        federation = directory.tensors("federation.safetensors")[1]
    except RecordError as error:
        raise RecordError(
            f"{directory.path / 'federation.safetensors'} is missing or damaged. "
            f"Write it again with: fedcog run --resume {directory.path}"
        ) from error
    about: dict[str, Any] = {key: federation[key] for key in DATA_KEYS if key in federation}
    about |= {
        "model": checkpoint.info["model"],
        "input_shape": checkpoint.info["input_shape"],
        "algorithm": algorithm_name(experiment.algorithm),
        "round": checkpoint.round,
        "rounds": experiment.rounds,
        "fedcog": fedcog.__version__,
    }
    if format == "onnx":
        content = to_onnx(directory, network, about)
    else:
        weights = {name: value.detach().clone() for name, value in network.state_dict().items()}
        content = (
            pack_tensors(weights, about) if format == "safetensors" else _to_state_dict(weights)
        )
    path = Path(out or directory.path / f"model{SUFFIXES[format]}")
    write_file(path, content)
    return Exported(path, about)


def _chosen_format(out: str | Path | None, format: Format | None) -> Format:
    """Return the format that was asked for, by name or by the suffix of the file."""
    if format is not None and format not in SUFFIXES:
        raise ConfigError([f"format needs one of {', '.join(SUFFIXES)}, not {format!r}."])
    if out is None or Path(out).is_dir():  # which is refused when it is written
        return format or "safetensors"
    suffix = Path(out).suffix.lower().replace(".pth", ".pt")
    found = next((name for name, own_suffix in SUFFIXES.items() if own_suffix == suffix), None)
    if found is None:
        raise ConfigError(
            [f"{out} is no model: choose a name that ends in {', '.join(SUFFIXES.values())}."]
        )
    if format not in (None, found):
        raise ConfigError(
            [f"{out} ends in {suffix}, which is {found}, not {format}: remove one of them."]
        )
    return found


def to_onnx(directory: RunDirectory, network: nn.Module, about: dict[str, Any]) -> bytes:
    """Convert a network and its normalization to an ONNX file, for batches of any size.

    Args:
        directory: The run directory, for errors.
        network: The network.
        about: Input shape and normalization; stored in the file.

    Returns:
        The content of the file.

    Raises:
        ModelError: If the network cannot be converted.
    """
    shape = tuple(about["input_shape"])
    try:
        mean = torch.tensor(about["mean"], dtype=torch.float32)
        std = torch.tensor(about["std"], dtype=torch.float32)
        channels = (-1, *[1] * (len(shape) - 1))
        normalized = NormalizedNetwork(
            network.float(), mean.reshape(channels), std.reshape(channels)
        ).eval()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RecordError(
            f"{directory.path / 'federation.safetensors'} lacks the normalization, as older "
            f"versions did not store it: fedcog run --resume {directory.path} writes it."
        ) from error
    examples = torch.zeros(2, *shape, dtype=torch.uint8 if mean.numel() else torch.float32)
    if takes_tokens(network):
        examples = examples.long()
    try:
        with _quiet_exporter():
            program = torch.onnx.export(
                normalized,
                (examples,),
                input_names=["images" if mean.numel() else "inputs"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("examples")},),
                dynamo=True,
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ModelError(
            f"the network cannot be converted to ONNX: {reason}. Choose another format."
        ) from error
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of source files
    program.model.metadata_props["about"] = json.dumps(about, sort_keys=True)
    content: bytes = program.model_proto.SerializeToString()
    return content


def _to_state_dict(weights: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence what the exporter logs and prints about optional packages and failed graphs."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
