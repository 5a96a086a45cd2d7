"""Networks as pure functions of their parameters, and the paper's own networks."""

import contextlib
import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedcog.fitness import ModelError, copied, federable, takes_channels_last, usable
from fedcog.layers import Layers
from fedcog.resnet import resnet18, resnet18_gn
from fedcog.tree import Params
from fedcog.widths import Uncuttable, held


class Model:
    """A network as a pure function of its trainable parameters and its running statistics.

    Any `nn.Module` from a batch of inputs to a batch of logits will do. `params` are its trainable parameters by name;
    `buffers` are the floating tensors that training moves otherwise (BatchNorm's running statistics). Both travel; what
    stands still (frozen weights, tables) stays in the network. `head` is the name of the linear layer whose outputs are
    the logits, and features are what goes into it; None where there is no such layer. Weights handed in may hold more
    than the network's: what others have added is let lie. `batch` is the smallest batch it will be trained on.
    `generator` is a network that makes its inputs of noise, if one is at hand. One that is not `trained` here may do in
    training what it likes.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: tuple[int, ...],
        classes: int,
        batch: int = 4,
        generator: nn.Module | None = None,
        trained: bool = True,
    ) -> None:
        module = copied(module)
        moving, self.head = (
            federable(module, input_shape, classes, min(batch, 4)) if trained else usable(module, input_shape, classes)
        )
        self.input_shape, self.classes, self.generator = tuple(input_shape), classes, generator
        self._channels_last = trained and takes_channels_last(module, input_shape, min(batch, 4))
        for part in module.modules():
            if "num_batches_tracked" in part._buffers:  # a counter no result depends on; vmap cannot write to it
                part._buffers["num_batches_tracked"] = None
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._tied = len({id(value) for _, value in named}) < len(named)  # looking for ties at every call costs 5%
        # In order of their names, as files give them back: sums over a model are then the same after a resume.
        learnt = {
            name: value for name, value in sorted(module.named_parameters()) if value.requires_grad or not trained
        }
        # Contiguous, as files and messages give them back: otherwise the last bit would hang on where they come from.
        self.params: Params = {name: value.detach().contiguous() for name, value in learnt.items()}
        moved = {name: value for name, value in sorted(module.named_buffers()) if name in moving}
        self.buffers: Params = {name: value.contiguous() for name, value in moved.items()}
        self._train = copy.deepcopy(module).requires_grad_(False).train()
        self._eval = copy.deepcopy(module).requires_grad_(False).eval()
        self._side_by_side = self._steady = False
        self._reduced: torch.dtype | None = None
        self._held: dict[float, Params] = {}

    def forward(self, params: Params, buffers: Params, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(logits, features) while training; running statistics in `buffers` are brought up to date."""
        logits, features, renewed = self._call(self._train, params | buffers, x)
        for name, value in buffers.items():
            buffers[name] = renewed.get(id(value), value)
        return logits, features

    def predict(self, weights: Params, x: Tensor) -> Tensor:
        """The logits in use; `weights` are parameters and buffers together, and none is written."""
        return self._call(self._eval, weights, x)[0]

    def strangeness(self, weights: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits in use, and how unlike the data the inputs are: R_feature (DeepInversion, Yin et al., CVPR 2020).

        It is the sum over BatchNorm layers of |mean - running mean| + |variance - running variance|: lengths of vectors
        with a number for each channel, whose mean and variance are over the batch and all places.
        """
        found = list[Tensor]()

        def compare(layer: nn.Module, inputs: tuple[Tensor]) -> None:
            features = inputs[0].to(x.dtype)
            over = [dim for dim in range(features.dim()) if dim != 1]
            mean, variance = features.mean(over), features.var(over, unbiased=False)
            found.append((mean - layer.get_buffer("running_mean")).norm())
            found.append((variance - layer.get_buffer("running_var")).norm())

        with contextlib.ExitStack() as around:
            for layer in self.batch_norms:
                around.callback(layer.register_forward_pre_hook(compare).remove)
            logits = self.predict(weights, x)
        return logits, torch.stack(found).sum()

    @property
    def batch_norms(self) -> list[_BatchNorm]:
        """The layers with running statistics."""
        layers = [part for part in self._eval.modules() if isinstance(part, _BatchNorm)]
        return [layer for layer in layers if layer.running_mean is not None]

    def features(self, weights: Params, x: Tensor) -> Tensor:
        """What goes into the head, in use."""
        features = self._call(self._eval, weights, x)[1]
        assert features is not None, "algorithms that need features are refused where the network has no head"
        return features

    def classify(self, weights: Params, features: Tensor) -> Tensor:
        """The logits that the head makes of features."""
        assert self.head is not None, "algorithms that need a head are refused where the network has none"
        layer = self._eval.get_submodule(self.head)
        logits: Tensor = functional_call(layer, self.head_of(weights), (features,))
        return logits

    def head_of(self, weights: Params) -> Params:
        """The head's own weights, by their names in the layer: weight and bias."""
        return {name.rpartition(".")[2]: weights[name] for name in self.head_names}

    @property
    def head_names(self) -> list[str]:
        """The names of the head's trainable parameters."""
        return [name for name in self.params if self.head is not None and name.rpartition(".")[0] == self.head]

    @property
    def width(self) -> int:
        """How many features go into the head."""
        assert self.head is not None, "algorithms that need a head are refused where the network has none"
        return int(self._eval.get_submodule(self.head).in_features)  # type: ignore[arg-type]

    def held(self, width: float) -> Params:
        """1 where a network of that share of the hidden channels has a number, else 0, by parameter and buffer."""
        assert self.head is not None, "algorithms that need a head are refused where the network has none"
        if width not in self._held:
            weights = self.params | self.buffers
            try:
                masks = held(self._eval, self.head, self.input_shape, width, set(weights)) if width < 1 else {}
            except Uncuttable as error:
                raise ModelError(f"the network cannot be made narrower: {error} Set heterofl.width to 1.") from error
            self._held[width] = {
                name: masks[name] if masks else torch.ones_like(value) for name, value in weights.items()
            }
        return self._held[width]

    @property
    def smooth(self) -> bool:
        """Do its outputs have a gradient with respect to its inputs? Those of a network of tokens have none."""
        inputs = next(iter(self.params.values())).new_zeros(2, *self.input_shape).requires_grad_()
        weights = {name: value.detach() for name, value in (self.params | self.buffers).items()}
        with torch.enable_grad():
            total = self.predict(weights, inputs).sum()
        return total.requires_grad and torch.autograd.grad(total, inputs, allow_unused=True)[0] is not None

    @property
    def cost(self) -> int:
        """Multiplications and additions that an input takes on its way through convolutions and linear layers."""
        found = list[int]()

        def note(layer: nn.Linear | _ConvNd, _: object, output: Tensor) -> None:
            found.append(2 * output.numel() * layer.weight[0].numel())

        with contextlib.ExitStack() as around:
            for layer in self._eval.modules():
                if isinstance(layer, nn.Linear | _ConvNd):
                    around.callback(layer.register_forward_hook(note).remove)
            some = next(iter(self.params.values()))
            self.predict(self.params | self.buffers, some.new_zeros(1, *self.input_shape))
        return sum(found)

    def _call(self, module: nn.Module, weights: Params, x: Tensor) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        seen = list[Tensor]()
        known = {name: weights[name] for name in (*self.params, *self.buffers)}
        if self._channels_last and not self._side_by_side and x.device.type == "cpu" and x.dtype == torch.float32:
            x = x.contiguous(memory_format=torch.channels_last)
        with contextlib.ExitStack() as around:
            layers = around.enter_context(self.layers())
            if self._reduced is not None:
                around.enter_context(torch.autocast(x.device.type, self._reduced, cache_enabled=False))
            if self.head is not None:
                last = module.get_submodule(self.head)
                around.callback(last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])).remove)
            logits: Tensor = functional_call(module, known, (x,), tie_weights=self._tied)
        features = seen[-1].to(x.dtype) if seen else None
        return logits.to(x.dtype), features, layers.renewed if layers else {}

    def layers(self) -> contextlib.AbstractContextManager[Layers | None]:
        """Within it, layers of any network are as those of this one: made for many models at once, or torch's own."""
        return Layers(self._steady) if self._side_by_side or self._steady else contextlib.nullcontext()

    @property
    def side_by_side(self) -> "Model":
        """The same network with layers made for many models at once: for use under vmap."""
        other = copy.copy(self)
        other._side_by_side = True
        return other

    @property
    def steady(self) -> "Model":
        """The same network, in which an example's numbers do not hang on how many there are beside it."""
        other = copy.copy(self)
        other._steady = True
        return other

    def to(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """The same network elsewhere, or in another precision.

        In bfloat16 only products are made, of convolutions and linear layers: parameters, sums over them, statistics,
        losses and all else stay float32.
        """
        other = copy.copy(self)
        if dtype == torch.bfloat16:
            other._reduced, dtype = dtype, torch.float32
        other._held = {}
        other._train = copy.deepcopy(self._train).to(device, dtype)
        other._eval = copy.deepcopy(self._eval).to(device, dtype)
        if self.generator is not None:
            other.generator = copy.deepcopy(self.generator).to(device, dtype)
        other.params = {name: value.to(device, dtype) for name, value in self.params.items()}
        other.buffers = {name: value.to(device, dtype) for name, value in self.buffers.items()}
        return other


def _pooled(side: int, kernel: int, times: int) -> int:
    """The side of an image after `times` unpadded convolutions, each followed by a 2x2 pooling."""
    for _ in range(times):
        side = (side - kernel + 1) // 2
    if side < 1:
        raise ValueError("the images are too small for its convolutions")
    return side


def cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The paper's network for Fashion-MNIST and CIFAR-10: two 5x5 convolutions, two poolings, three linear layers."""
    channels, height, width = input_shape
    flat = 16 * _pooled(height, 5, 2) * _pooled(width, 5, 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def cnn3(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The paper's network for CIFAR-100: three 3x3 convolutions, each pooled, and two linear layers."""
    channels, height, width = input_shape
    flat = 64 * _pooled(height, 3, 3) * _pooled(width, 3, 3)
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, classes)),
    )


def small(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A little convolutional network for 8x8 digits."""
    channels, height, width = input_shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (height // 4) * (width // 4), 32), nn.ReLU(), nn.Linear(32, classes)),
    )


def mlp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 128, for inputs of any shape."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 128), nn.ReLU(), nn.Linear(128, classes))


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": cnn,
    "cnn3": cnn3,
    "small": small,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
}


def build(name: str, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The network called `name`, initialised from `seed` and from nothing else."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the user's GPUs, too
            return MODELS[name](input_shape, classes)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"model '{name}' cannot be built for inputs of shape {input_shape}: {error}. "
            f"Choose another: {', '.join(other for other in MODELS if other != name)}."
        ) from error
