"""`Model`: a network as a pure function of its parameters and running statistics."""

import contextlib
import copy
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from fedcog.core.tree import Params
from fedcog.models.checks import (
    CheckedNetwork,
    ModelError,
    all_tensors,
    check_trainable,
    check_usable,
    copy_network,
    have_equal_values,
    plain_attributes,
    supports_channels_last,
)
from fedcog.models.ops.dropout import KeyedDropout
from fedcog.models.ops.keyed_random import StepKey, trial_key
from fedcog.models.ops.layers import LayerOverrides
from fedcog.models.tokens import (
    accept_embeddings,
    continuous_shape,
    embeds_with_dropout,
    takes_tokens,
)
from fedcog.models.width_masks import WidthError, width_masks


class ForwardResult(NamedTuple):
    """Result of a forward pass in training mode.

    Attributes:
        logits: `(B, C)`.
        features: Inputs of the last linear layer, `(B, F)`; None if the network has no such layer.
        buffers: Running statistics after the pass, by name.
    """

    logits: Tensor
    features: Tensor | None
    buffers: Params


class Model:
    """A network as a pure function of its trainable parameters and its running statistics.

    Any `nn.Module` that maps a batch of inputs to a batch of logits will do. Frozen weights and
    constant buffers stay inside the network. Methods take weights by name and ignore further names,
    so algorithms can add tensors of their own.

    Attributes:
        params: Trainable parameters by name.
        constants: Frozen weights, constant buffers and plain tensor attributes by name.
        buffers: Floating buffers that training changes by other means than gradients: BatchNorm's
            running statistics.
        head: Name of the linear layer whose outputs are the logits; None if there is none. Features
            are the inputs of this layer.
        input_shape: Shape of one input, as stored.
        continuous_shape: Shape of one continuous input: `input_shape`, or that of an embedding if
            the network takes tokens. Generated inputs have this shape.
        num_classes: Number of classes.
        uses_dropout: Whether a pass in training mode drops values at random.
        generator: Network that makes inputs from noise, if the user gave one.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: tuple[int, ...],
        num_classes: int,
        batch_size: int = 4,
        generator: nn.Module | None = None,
        trained: bool = True,
    ) -> None:
        """Copy and check a network.

        Args:
            module: The network.
            input_shape: Shape of one input.
            num_classes: Number of classes.
            batch_size: Smallest batch size that the network will be trained with.
            generator: Network that makes inputs from noise.
            trained: Whether the network will be trained; if not, checks of training are skipped.

        Raises:
            ModelError: If the network cannot be federated.
        """
        module = copy_network(module)
        self.continuous_shape = continuous_shape(module, input_shape)
        if takes_tokens(module):
            accept_embeddings(module)
        trial_size = min(batch_size, 4)
        checked = _checked(module, input_shape, num_classes, trial_size if trained else 0)
        self.head = checked.head
        self.input_shape = tuple(input_shape)
        self.num_classes = num_classes
        self.uses_dropout = checked.uses_dropout
        self.generator = generator
        self._channels_last = trained and supports_channels_last(module, input_shape, trial_size)
        _remove_batch_counters(module)
        # functional_call's search for tied weights costs 5% of a call.
        self._has_tied_weights = _has_tied_weights(module)
        self._has_attention = any(
            isinstance(layer, nn.MultiheadAttention) for layer in module.modules()
        )
        self._has_recurrence = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
        # Tensors are sorted by name and contiguous, as files and messages return them. Otherwise,
        # sums over a model could differ in the last bit after a resume.
        self.params: Params = {
            name: value.detach().contiguous()
            for name, value in sorted(module.named_parameters())
            if value.requires_grad or not trained
        }
        self.buffers: Params = {
            name: value.contiguous()
            for name, value in sorted(module.named_buffers())
            if name in checked.buffer_names
        }
        self.constants = _without(all_tensors(module), self.params | self.buffers)
        self._train = copy.deepcopy(module).requires_grad_(False).train()
        self._eval = copy.deepcopy(module).requires_grad_(False).eval()
        self._is_vmappable = False
        self._is_batch_invariant = False
        self._autocast_dtype: torch.dtype | None = None
        self._width_masks: dict[float, Params] = {}

    def forward(
        self, params: Params, buffers: Params, x: Tensor, dropout: StepKey | None = None
    ) -> ForwardResult:
        """Run the network in training mode. Hooks call `ClientContext.forward` instead.

        Args:
            params: Trainable parameters by name; further names are ignored.
            buffers: Running statistics by name. They are not written to.
            x: Inputs `(B, *input_shape)`, or continuous ones, `(B, *continuous_shape)`.
            dropout: What dropout masks depend on; required if the network uses dropout.

        Returns:
            Logits `(B, C)`, features `(B, F)`, and the running statistics after the pass.

        Raises:
            ModelError: If the network uses dropout and `dropout` is None.
        """
        if self.uses_dropout and dropout is None:
            raise ModelError(
                "the network uses dropout, and this pass has no key for its masks: call "
                "client.forward(params, x) instead of client.model.forward(...)."
            )
        copies = {name: value.clone() for name, value in buffers.items()}  # layers write in place
        logits, features, renewed = self._call(self._train, params | copies, x, dropout)
        after = {}
        for name, copy_before in copies.items():
            value = renewed.get(name, copy_before)
            if value is not copy_before:  # the network has assigned another tensor
                value = value.detach().to(copy_before.dtype)
            after[name] = value
        return ForwardResult(logits, features, after)

    def predict(self, weights: Params, x: Tensor) -> Tensor:
        """Run the network in evaluation mode.

        Args:
            weights: Parameters and buffers by name. They are not written to.
            x: Inputs `(B, *input_shape)`.

        Returns:
            Logits `(B, C)`.
        """
        return self._call(self._eval, weights, x)[0]

    def embed(self, weights: Params, x: Tensor) -> Tensor:
        """Turn tokens into continuous inputs, in evaluation mode; others are returned unchanged.

        Args:
            weights: Parameters and buffers by name.
            x: Inputs `(B, *input_shape)`.

        Returns:
            Inputs `(B, *continuous_shape)`.
        """
        if x.is_floating_point():
            return x
        known = {name: weights[name] for name in (*self.params, *self.buffers)}
        with self.layers():
            embedded: Tensor = functional_call(self._eval, known, (x,), {"embed_only": True})
        return embedded

    def batchnorm_loss(self, weights: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute R_feature of DeepInversion (Yin et al., CVPR 2020), in evaluation mode.

        It is the sum over BatchNorm layers of |mean - running mean| + |variance - running
        variance|, where |.| is the L2 norm over channels. Mean and variance of a channel are over
        the batch and all positions.

        Args:
            weights: Parameters and buffers by name.
            x: Inputs `(B, *input_shape)`.

        Returns:
            Logits `(B, C)`, and the loss, 0-d.
        """
        distances: list[Tensor] = []

        def _compare(layer: nn.Module, inputs: tuple[Tensor]) -> None:
            features = inputs[0].to(x.dtype)
            dims = [dim for dim in range(features.dim()) if dim != 1]
            mean = features.mean(dims)
            variance = features.var(dims, unbiased=False)
            distances.append((mean - layer.get_buffer("running_mean")).norm())
            distances.append((variance - layer.get_buffer("running_var")).norm())

        with contextlib.ExitStack() as stack:
            for layer in self.batch_norms:
                stack.callback(layer.register_forward_pre_hook(_compare).remove)
            logits = self.predict(weights, x)
        return logits, torch.stack(distances).sum()

    @property
    def batch_norms(self) -> list[_BatchNorm]:
        """The layers with running statistics."""
        layers = [layer for layer in self._eval.modules() if isinstance(layer, _BatchNorm)]
        return [layer for layer in layers if layer.running_mean is not None]

    def features(self, weights: Params, x: Tensor) -> Tensor:
        """Compute the features in evaluation mode.

        Args:
            weights: Parameters and buffers by name.
            x: Inputs `(B, *input_shape)`.

        Returns:
            Inputs of the head, `(B, F)`.
        """
        features = self._call(self._eval, weights, x)[1]
        assert features is not None, "algorithms that need features are refused without a head"
        return features

    def classify(self, weights: Params, features: Tensor) -> Tensor:
        """Apply the head.

        Args:
            weights: Parameters and buffers by name.
            features: Features `(B, F)`.

        Returns:
            Logits `(B, C)`.
        """
        layer = self._eval.get_submodule(self._required_head)
        logits: Tensor = functional_call(layer, self.head_of(weights), (features,))
        return logits

    def head_of(self, weights: Params) -> Params:
        """Select the head's weights, by their names in the layer: weight and bias."""
        return {name.rpartition(".")[2]: weights[name] for name in self.head_names}

    @property
    def head_names(self) -> list[str]:
        """The names of the head's trainable parameters."""
        if self.head is None:
            return []
        return [name for name in self.params if name.rpartition(".")[0] == self.head]

    @property
    def _required_head(self) -> str:
        assert self.head is not None, "algorithms that need a head are refused without one"
        return self.head

    @property
    def num_features(self) -> int:
        """The number of inputs of the head."""
        layer = self._eval.get_submodule(self._required_head)
        return int(layer.in_features)  # type: ignore[arg-type]

    def width_mask(self, width: float) -> Params:
        """Compute the masks of a narrower network: 1 where it has a value, else 0.

        Args:
            width: Fraction of channels that hidden layers keep.

        Returns:
            Masks by parameter and buffer.

        Raises:
            ModelError: If the network contains no narrower network.
        """
        head = self._required_head
        if width not in self._width_masks:
            weights = self.params | self.buffers
            try:
                if width < 1:
                    masks = width_masks(
                        self._eval, head, self.continuous_shape, width, set(weights)
                    )
                else:
                    masks = {name: torch.ones_like(value) for name, value in weights.items()}
            except WidthError as error:
                raise ModelError(
                    f"the network cannot be made narrower: {error} Set heterofl.width to 1."
                ) from error
            self._width_masks[width] = {name: masks[name] for name in weights}
        return self._width_masks[width]

    @property
    def has_input_gradient(self) -> bool:
        """Whether outputs have a gradient with respect to inputs; not so for token networks."""
        inputs = (
            next(iter(self.params.values())).new_zeros(2, *self.continuous_shape).requires_grad_()
        )
        weights = {name: value.detach() for name, value in (self.params | self.buffers).items()}
        with torch.enable_grad():
            total = self.predict(weights, inputs).sum()
        if not total.requires_grad:
            return False
        return torch.autograd.grad(total, inputs, allow_unused=True)[0] is not None

    @property
    def flops_per_example(self) -> int:
        """Floating-point operations of convolutions and linear layers in one forward pass."""
        flops: list[int] = []

        def _count(layer: nn.Linear | _ConvNd, _: object, output: Tensor) -> None:
            flops.append(2 * output.numel() * layer.weight[0].numel())

        with contextlib.ExitStack() as stack:
            for layer in self._eval.modules():
                if isinstance(layer, nn.Linear | _ConvNd):
                    stack.callback(layer.register_forward_hook(_count).remove)
            parameter = next(iter(self.params.values()))
            zeros = parameter.new_zeros(1, *self.continuous_shape)
            self.predict(self.params | self.buffers, zeros)
        return sum(flops)

    def _call(
        self, module: nn.Module, weights: Params, x: Tensor, dropout: StepKey | None = None
    ) -> tuple[Tensor, Tensor | None, Params]:
        """Run the network; return logits, features, and the buffers after the call."""
        seen = list[Tensor]()
        known = {name: weights[name] for name in (*self.params, *self.buffers)}
        if (
            self._channels_last
            and not self._is_vmappable
            and x.device.type == "cpu"
            and x.dtype == torch.float32
        ):
            x = x.contiguous(memory_format=torch.channels_last)
        with contextlib.ExitStack() as around:
            layers = around.enter_context(self.layers())
            if self._is_vmappable and self._has_attention:
                # vmap maps torch's fused kernels one model at a time.
                around.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self._has_recurrence and x.is_cuda:
                # cuDNN's layers have no gradient in evaluation mode, and no rule for vmap.
                around.enter_context(torch.backends.cudnn.flags(enabled=False))
            if dropout is not None and self.uses_dropout:
                around.enter_context(KeyedDropout(dropout, is_mapped=self._is_vmappable))
            if self._autocast_dtype is not None:
                around.enter_context(
                    torch.autocast(x.device.type, self._autocast_dtype, cache_enabled=False)
                )
            if self.head is not None:
                last = module.get_submodule(self.head)
                around.callback(
                    last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])).remove
                )
            logits: Tensor = functional_call(
                module, known, (x,), tie_weights=self._has_tied_weights
            )
        dtype = x.dtype if x.is_floating_point() else self._dtype
        features = seen[-1].to(dtype) if seen else None
        updated = layers.updated_buffers if layers else {}
        # functional_call has put what the network assigned into `known`.
        buffers = {name: updated.get(id(known[name]), known[name]) for name in self.buffers}
        return logits.to(dtype), features, buffers

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.params.values())).dtype

    def batching_error(self, batch_size: int) -> str:
        """Train two of this network at once, on trial inputs.

        Args:
            batch_size: Smallest batch size of training.

        Returns:
            Why torch cannot map the network over clients with vmap; empty if it can.
        """
        model = self.vmappable
        like = next(iter(self.params.values()))
        x = torch.linspace(-1, 1, 4, dtype=like.dtype, device=like.device)[:batch_size]
        shape = self.continuous_shape
        x = x.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
        weights = self.params | self.buffers
        key = trial_key(like.device)

        def _loss(weights: Params, x: Tensor, client_id: Tensor) -> tuple[Tensor, Params]:
            own_key = key._replace(client_id=client_id)
            result = model.forward(weights, weights, x, own_key)
            return result.logits.square().mean(), result.buffers

        def _teacher_loss(x: Tensor) -> Tensor:  # the weights are the same for all clients
            return model.predict(weights, x).square().mean()

        both = {name: torch.stack([value, value]) for name, value in weights.items()}
        inputs = torch.stack([x, x])
        try:
            with warnings.catch_warnings(action="ignore"):  # about missing batching rules
                train = torch.func.vmap(torch.func.grad(_loss, has_aux=True))
                grads, buffers = train(both, inputs, torch.arange(2, device=like.device))
                if self.has_input_gradient:
                    torch.func.vmap(torch.func.grad(_teacher_loss))(inputs)
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error).strip().splitlines()[0].rstrip(".")
        values = [*grads.values(), *buffers.values()]
        if not all(bool(value.isfinite().all()) for value in values):
            return "its gradients are not finite then"
        return ""

    def layers(self) -> contextlib.AbstractContextManager[LayerOverrides | None]:
        """Return a context in which any network uses the same layer implementations as this one."""
        if self._is_vmappable or self._is_batch_invariant:
            return LayerOverrides(self._is_batch_invariant)
        return contextlib.nullcontext()

    def has_same_constants(self, other: "Model") -> bool:
        """Return whether all but trained weights equals that of another network.

        Frozen weights, constant buffers, and numbers that layers keep as attributes count.

        Args:
            other: The same network, initialized from another seed.

        Returns:
            True if clients of both can train in one stack, which shares what is not trained.
        """
        return have_equal_values(self.constants, other.constants) and (
            plain_attributes(self._train) == plain_attributes(other._train)
        )

    @property
    def vmappable(self) -> "Model":
        """The same network with layers that are efficient under vmap over models."""
        other = copy.copy(self)
        other._is_vmappable = True
        return other

    @property
    def batch_invariant(self) -> "Model":
        """The same network, with outputs for an example that do not depend on the batch size."""
        other = copy.copy(self)
        other._is_batch_invariant = True
        return other

    def to(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """Return the same network on another device or in another precision.

        Args:
            device: The device.
            dtype: The floating type. With bfloat16, only the products of convolutions and linear
                layers are in bfloat16; parameters, sums, statistics and losses stay float32.

        Returns:
            The converted network.
        """
        other = copy.copy(self)
        if dtype == torch.bfloat16:
            other._autocast_dtype = dtype
            dtype = torch.float32
        other._width_masks = {}
        other._train = copy.deepcopy(self._train).to(device, dtype)
        other._eval = copy.deepcopy(self._eval).to(device, dtype)
        if self.generator is not None:
            other.generator = copy.deepcopy(self.generator).to(device, dtype)
        other.params = {name: value.to(device, dtype) for name, value in self.params.items()}
        other.buffers = {name: value.to(device, dtype) for name, value in self.buffers.items()}
        return other


def _without(tensors: Params, others: Params) -> Params:
    return {name: value for name, value in tensors.items() if name not in others}


def _checked(
    module: nn.Module, input_shape: tuple[int, ...], num_classes: int, trial_size: int
) -> CheckedNetwork:
    """Check a network for training with batches of `trial_size`, or for evaluation if it is 0."""
    shape = continuous_shape(module, input_shape)
    if not trial_size:
        return check_usable(module, shape, num_classes)
    checked = check_trainable(module, shape, num_classes, trial_size)
    if takes_tokens(module) and embeds_with_dropout(module, input_shape, trial_size):
        return checked._replace(uses_dropout=True)
    return checked


def _remove_batch_counters(module: nn.Module) -> None:
    """Remove BatchNorm's counters: no result depends on them, and vmap cannot write to them."""
    for layer in module.modules():
        if isinstance(layer, _NormBase) and "num_batches_tracked" in layer._buffers:
            layer._buffers["num_batches_tracked"] = None


def _has_tied_weights(module: nn.Module) -> bool:
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return len({id(value) for _, value in tensors}) < len(tensors)
