"""FedCOG (Ye et al., ICLR 2024): clients complement their data with generated inputs."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcog.algorithms import generation
from fedcog.algorithms.types import (
    Batch,
    ClientContext,
    Draw,
    ExtraData,
    GeneratorConfig,
    LocalWork,
)
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tasks import LabelChoice
from fedcog.core.tree import Params, State
from fedcog.models import generators
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model

NUM_RECORDED_STEPS = 5
"""How many stages of the optimization a report shows."""
NUM_RECORDED_INPUTS = 8
"""How many generated inputs a report shows."""


@dataclass(frozen=True)
class FedCOG(Wrapper):
    """Any algorithm, with generated inputs on which each client distills the global model.

    Each round a client optimizes noise into inputs. The global model classifies them as the labels
    that the client lacks (task loss), and the client's own model of its last round disagrees
    (Jensen-Shannon divergence, eqs. 1 and 2). The client then trains on its data while it distills
    the global model's outputs on those inputs (eq. 3).

    The two losses are weighted by how much the client lacks (`balanced`, the paper's rule without a
    hyperparameter) or by 1 and lambda_kd (`fixed`, the default for multi-label examples, where the
    distillation loss is a sum over labels and would dominate). `Task.targets` allocates the target
    labels by largest remainder; the published code rounds label counts down. Inputs and teacher
    outputs both belong to the last generation step; the published code mixes two steps. Only the
    inner data loss is rescaled, never a penalty. Clients send exactly what the inner algorithm
    sends.

    Two settings go beyond the paper. `lambda_bn` weights DeepInversion's BatchNorm loss (Yin et
    al., CVPR 2020), with the statistics of the inputs that are optimized together. `norms` makes
    BatchNorm use running statistics while distilling. With batch statistics, student and teacher
    outputs differ even before the first step. A generator starts anew in every round: from random
    weights, from a file, or from the user's network.
    """

    needs_input_gradients: ClassVar[bool] = True
    per_device_settings: ClassVar[tuple[str, ...]] = (
        "count",
        "steps",
        "lambda_dis",
        "lambda_bn",
        "lr",
        "source",
        "labels",
        "supervision",
        "weighting",
        "lambda_kd",
        "norms",
        "generator",
        "noise",
        "start_round",
        "generation_batch",
    )

    count: int = setting(256, "number of inputs generated per client and round", "> 0")
    steps: int = setting(100, "number of optimization steps of the inputs", ">= 0")
    lambda_dis: float = setting(
        0.1, "weight of the disagreement between global and previous local model", ">= 0"
    )
    lambda_bn: float = setting(
        0.0, "weight of the distance to the global model's BatchNorm statistics", ">= 0"
    )
    lr: float = setting(0.01, "learning rate of the inputs", "> 0")
    beta1: float = setting(0.5, "Adam's decay of the first moment, for the inputs", ">= 0", "< 1")
    beta2: float = setting(0.9, "Adam's decay of the second moment, for the inputs", ">= 0", "< 1")
    source: Literal["global+local", "global", "noise", "nothing"] = setting(
        "global+local",
        "models that shape the inputs: both, the global one, or none (noise); nothing: no inputs",
    )
    labels: LabelChoice = setting(
        "complementary", "target labels: those that the client lacks, or all alike"
    )
    supervision: Literal["soft", "hard"] = setting(
        "soft", "distillation target: the global model's outputs, or its decisions"
    )
    weighting: Literal["auto", "balanced", "fixed"] = setting(
        "auto",
        "weights of real and generated loss: by how much is missing (balanced), or 1 and lambda_kd "
        "(fixed); auto: balanced, but fixed for multi-label examples",
    )
    lambda_kd: float = setting(0.01, "weight of the generated loss under fixed weighting", ">= 0")
    norms: Literal["batch", "running"] = setting(
        "batch",
        "BatchNorm statistics for generated inputs in training: their batch's, or the running ones",
    )
    generator: Literal["none", "conv", "custom"] = setting(
        "none", "what is optimized: the inputs (none), or a generator network (conv, custom)"
    )
    noise: int = setting(generators.DEFAULT_NOISE_SIZE, "size of a generator's noise input", "> 0")
    control: Literal["off", "loss", "lr"] = setting(
        "off",
        "ablation without generated inputs: the real weight on the loss, or on the learning rate",
    )
    start_round: int = setting(50, "rounds of the inner algorithm before generation starts", ">= 0")
    generation_batch: int = setting(
        0, "inputs optimized at a time, to save memory; 0: all; ignored with a generator", ">= 0"
    )

    @property
    def generator_config(self) -> GeneratorConfig:
        """The generator network that generates inputs, if any."""
        return GeneratorConfig(self.generator, self.noise)

    @property
    def generation_start(self) -> int | None:
        """The first round, from 0, in which clients generate inputs."""
        return self.start_round

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request noise, once generation has started; all other hooks depend on it.

        Returns:
            Requests by name.
        """
        self._check_model(model)
        inner = self.inner.request_draws(round, model, batch_size)
        if not self._is_active(round):
            return inner
        draws = {"noise": Draw((self.count, *model.continuous_shape))}
        if self.generator != "none":
            draws = {"noise": Draw((self.count, self.noise))}
            if model.generator is None:
                sizes = generators.conv_shapes(model.continuous_shape, self.noise)
                draws["generator"] = Draw((sum(map(math.prod, sizes)),))
        draws["asked"] = Draw((self.count, 1 + model.num_classes), kind="uniform")
        return inner | draws

    def client_init(self, broadcast: State) -> State:
        """Use the global model as the previous local one."""
        previous = broadcast["params"] | broadcast["buffers"]
        return self.inner.client_init(broadcast) | {"previous": previous}

    def generation_init(self, client: ClientContext, draws: State) -> State:
        """Start from noise, with the target labels.

        Returns:
            The generation state.
        """
        gen_state = self.inner.generation_init(client, draws)
        if "noise" not in draws:
            return gen_state
        labels = client.task.targets(
            client.class_counts, client.label_set_sizes, self.labels, draws["asked"]
        )
        optimized = {"x": draws["noise"]}
        if self.generator != "none":
            optimized = generators.init_generator(
                client.model, draws["noise"], draws.get("generator")
            )
        made = generation.begin(optimized, labels, self.generation_config, self._render(client))
        return gen_state | {"made": made}

    def num_generation_steps(self, round: int) -> int:
        """Return the number of optimization steps, once generation has started."""
        num_steps = self._num_steps if self._is_active(round) else 0
        return max(self.inner.num_generation_steps(round), num_steps)

    def generation_step(self, gen_state: State, client: ClientContext) -> State:
        """Take one Adam step on the inputs (eq. 1).

        Returns:
            The generation state after the step.
        """
        gen_state = self.inner.generation_step(gen_state, client)
        config = self.generation_config
        if "made" not in gen_state or not config.steps:
            return gen_state
        before = gen_state["made"]
        loss = self._objective(client, gen_state)
        after = generation.adam_step(loss, before, client.step, config, client.gradient)
        is_due = client.step < self._num_steps  # the inner algorithm may take more steps
        made = tree.apply(lambda new, old: torch.where(is_due, new, old), after, before)
        return gen_state | {"made": made}

    def extra_data(self, client: ClientContext, gen_state: State) -> ExtraData:
        """Return the generated inputs with their labels and the global model's outputs.

        Returns:
            Batches by group, and artifacts.
        """
        inner = self.inner.extra_data(client, gen_state)
        if "made" not in gen_state:
            return inner
        made = gen_state["made"]
        inputs = self._render(client)(made["optimized"])
        final = generation.end(made, inputs, self.generation_config)
        x = final["x"]
        labels = final["y"]
        group = {"x": x, "y": labels, "logits": client.model.predict(self._teacher(client), x)}
        artifacts = {
            "images": final["trail"],
            "labels": labels[final["shown"]],
            "steps": final["marks"],
        }
        return ExtraData(inner.groups | {"made": group}, inner.artifacts | artifacts)

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        """Add the outputs on generated inputs, which leave running statistics unchanged.

        Returns:
            Outputs by name.
        """
        outputs = self.inner.outputs(params, batch, client)
        if "made" not in batch or self.control != "off":
            return outputs
        x = batch["made"]["x"]
        if self.norms == "running":
            logits = client.model.predict(params | outputs["buffers"], x)
        else:
            logits = client.logits(params, x)
        return outputs | {"made": logits}

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Return real_weight * inner data loss + made_weight * KL(p_G || p_theta) (eq. 3).

        Returns:
            A 0-d tensor.
        """
        real = self.inner.data_loss(outputs, batch, client)
        if "made" not in batch:
            return real
        real_weight, made_weight = self._loss_weights(client)
        if self.control == "loss":
            return real_weight * real
        if self.control == "lr":
            return real
        teacher_logits = batch["made"]["logits"]
        if self.supervision == "soft":
            made = client.task.distillation_loss(teacher_logits, outputs["made"]).mean()
        else:
            made = client.task.loss(outputs["made"], client.task.decide(teacher_logits)).mean()
        return real_weight * real + made_weight * made

    def after_step(
        self, before: Params, after: Params, batch: Batch, client: ClientContext
    ) -> Params:
        """As an ablation, take only the real weight's fraction of the step.

        Returns:
            The parameters that the step ends with.
        """
        after = self.inner.after_step(before, after, batch, client)
        if "made" not in batch or self.control != "lr":
            return after
        fraction, _ = self._loss_weights(client)
        return {name: value + fraction * (after[name] - value) for name, value in before.items()}

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep the local model as the next round's previous one.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        return state | {"previous": client.transmitted(params)}, payload

    @property
    def generation_config(self) -> generation.GenerationConfig:
        """How inputs are generated."""
        steps = self.steps
        if self.source == "noise" or self.control != "off":
            steps = 0
        last_stage = NUM_RECORDED_STEPS - 1
        last_input = NUM_RECORDED_INPUTS - 1
        marks = {steps * stage // last_stage for stage in range(NUM_RECORDED_STEPS)}
        shown = {(self.count - 1) * k // last_input for k in range(NUM_RECORDED_INPUTS)}
        return generation.GenerationConfig(
            steps=steps,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            disagreement=self.lambda_dis if self.source == "global+local" else 0.0,
            batchnorm_weight=self.lambda_bn,
            batch=self.generation_batch,
            marks=tuple(sorted(marks)),
            shown=tuple(sorted(shown)),
        )

    @property
    def _num_steps(self) -> int:
        """Number of Adam steps of a round; a generator is optimized on all inputs at once."""
        return self.generation_config.num_steps(self.count if self.generator == "none" else 1)

    def _is_active(self, round: int) -> bool:
        return round >= self.start_round and self.source != "nothing"

    def _objective(self, client: ClientContext, gen_state: State) -> generation.Loss:
        """Return the loss that inputs are optimized for (eqs. 1 and 2)."""
        teacher = self._teacher(client)
        student = teacher | client.state["previous"]
        models = generation.Models(client.task, client.model, teacher, student)
        return generation.objective(
            models, self.generation_config, self.count, self._render(client)
        )

    def _render(self, client: ClientContext) -> generation.Render:
        """Return what turns optimized tensors into inputs."""
        if self.generator == "none":
            return generation.identity
        return functools.partial(generators.generate_inputs, client.model)

    def _teacher(self, client: ClientContext) -> Params:
        """Return the weights that the client's local training starts from."""
        return self.inner.start_params(client) | self.inner.start_buffers(client)

    def _is_balanced(self, client: ClientContext) -> bool:
        if self.weighting == "auto":
            return not client.task.multi_label
        return self.weighting == "balanced"

    def _loss_weights(self, client: ClientContext) -> tuple[Tensor | float, Tensor | float]:
        """Return the weights of the real and of the generated loss."""
        if not self._is_balanced(client):
            return 1.0, self.lambda_kd
        num_present = client.class_counts.sum().to(client.lr.dtype)
        num_missing = client.task.missing(client.class_counts).sum()
        total = num_present + num_missing  # 0 if none of the client's examples has a label
        real_weight = torch.where(total > 0, num_present / total.clamp(min=1), 1)
        return real_weight, num_missing / total.clamp(min=1)

    def _check_model(self, model: Model) -> None:
        """Refuse networks and generators that these settings do not work with."""
        if self.lambda_bn and not model.batch_norms:
            raise ModelError(
                "fedcog.lambda_bn needs the running statistics of BatchNorm layers, but this "
                "network has none: set it to 0, or use a network with BatchNorm such as resnet18."
            )
        uses_batches = self.generation_batch and self.generator == "none"
        if self.lambda_bn and uses_batches and self.count % self.generation_batch:
            raise ModelError(
                f"fedcog.lambda_bn needs full batches, but {self.count} inputs do not divide into "
                f"batches of {self.generation_batch}: choose a fedcog.generation_batch "
                "that divides fedcog.count."
            )
        if self.generator != "custom":
            return
        if model.generator is None:
            raise ModelError(
                "fedcog.generator 'custom' needs your network: pass it from Python with "
                "fedcog.run(..., generator=MyGenerator()), also to resume a run."
            )
        if self.count == 1:
            like = next(model.generator.parameters(), torch.zeros(()))
            try:  # with one value per channel, BatchNorm cannot normalize
                model.generator(like.new_zeros(1, self.noise))
            except ValueError as error:
                raise ModelError(
                    f"the generator cannot make a single input: {error}. Set fedcog.count to 2."
                ) from error
