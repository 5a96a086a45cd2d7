"""FedCOG (Ye et al., ICLR 2024): clients complement their data with inputs the global model is sure of."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcog import generation, generators, tree
from fedcog.algorithms.base import Batch, Draw, Effort, Extra, Site
from fedcog.algorithms.wrapper import Wrapper
from fedcog.fitness import ModelError
from fedcog.models import Model
from fedcog.settings import setting
from fedcog.task import Labels
from fedcog.tree import Params, State


@dataclass(frozen=True)
class FedCOG(Wrapper):
    """Any algorithm, with each client's data complemented by generated inputs that it distils the global model on.

    Each round a client optimises noise into inputs that the global model gives the labels it lacks (task loss) and on
    which its own model of its last round disagrees (Jensen-Shannon divergence, eqs. 1 and 2), then trains on its data
    while it distils the global model's outputs on those inputs (eq. 3). Shares are `balanced` by how much is missing,
    the paper's way without a hyper-parameter, or `fixed`, as where examples have several labels: what is distilled is
    summed over labels there, and as the larger share it undoes what was learnt. Labels are shared out by largest
    remainder, and inputs and teacher's outputs are both those of the last step (published code floors the one and mixes
    up the other). Only the inner data term is scaled, no penalty. It sends what the inner algorithm sends.

    Beyond the paper, `lambda_bn` weighs DeepInversion's term (Yin et al., CVPR 2020), whose statistics are those of the
    inputs that are optimised at a time, and `norms` has a network with BatchNorm distil as it is used: normalised by
    their own batch, inputs have other outputs than the teacher's before the first step already. A generator begins
    every round anew: the paper's with random weights or those of a file, one of your own with its own.
    """

    optimises_inputs: ClassVar[bool] = True
    local: ClassVar[tuple[str, ...]] = (
        *("count", "steps", "lambda_dis", "lambda_bn", "lr", "source", "labels", "supervision", "weighting"),
        *("lambda_kd", "norms", "generator", "noise", "start_round", "generation_batch"),
    )

    count: int = setting(256, "inputs generated per client and round", "> 0")
    steps: int = setting(100, "optimisation steps of the inputs", ">= 0")
    lambda_dis: float = setting(0.1, "weight of the disagreement between global and previous local model", ">= 0")
    lambda_bn: float = setting(
        0.0, "weight of how far the inputs' statistics are from the global model's in its BatchNorm layers", ">= 0"
    )
    lr: float = setting(0.01, "learning rate of the inputs", "> 0")
    beta1: float = setting(0.5, "Adam's decay of the mean, for the inputs", ">= 0", "< 1")
    beta2: float = setting(0.9, "Adam's decay of the square, for the inputs", ">= 0", "< 1")
    source: Literal["global+local", "global", "noise", "nothing"] = setting(
        "global+local", "what shapes the inputs: both models, the global one alone, or neither; nothing: there are none"
    )
    labels: Labels = setting("complementary", "which labels are asked for: those the client lacks, or all alike")
    supervision: Literal["soft", "hard"] = setting(
        "soft", "what is learnt on them: the global model's outputs, or its decisions"
    )
    weighting: Literal["auto", "balanced", "fixed"] = setting(
        "auto",
        "shares of real and generated loss: by how much is missing, or 1 and lambda_kd; auto: the first, but where "
        "examples may have several labels the second",
    )
    lambda_kd: float = setting(0.01, "weight of the generated loss under fixed weighting", ">= 0")
    norms: Literal["batch", "running"] = setting(
        "batch",
        "what BatchNorm normalises inputs by while they are learnt on: their batch, or running statistics, as the "
        "teacher did",
    )
    generator: Literal["none", "conv", "custom"] = setting(
        "none", "what learns to be inputs: these themselves, or noise and a network that makes them, ours or your own"
    )
    noise: int = setting(generators.NOISE, "random numbers that a generator makes an input of", "> 0")
    control: Literal["off", "loss", "lr"] = setting(
        "off", "nothing generated, to compare with: the real share on the loss alone, or on the learning rate"
    )
    start_round: int = setting(50, "rounds of the inner algorithm before generation begins", ">= 0")
    generation_batch: int = setting(
        0, "inputs optimised at a time, batch after batch, to save memory; 0: all, as always with a generator", ">= 0"
    )

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Noise, once awake: without it the rest of this class lies dormant."""
        self._refuse(model)
        awake = {"noise": Draw((self.count, *model.input_shape))}
        asked = {"asked": Draw((self.count, 1 + model.classes), kind="uniform")}
        if self.generator != "none":
            awake = {"noise": Draw((self.count, self.noise))}
            if model.generator is None:
                size = sum(map(math.prod, generators.conv_sizes(model.input_shape, self.noise)))
                awake |= {"generator": Draw((size,))}
        return self.inner.draws(round, model, batch_size) | (awake | asked if self._awake(round) else {})

    def client_init(self, shared: State) -> State:
        """A client that never took part has the global model for its previous one."""
        return self.inner.client_init(shared) | {"previous": shared["params"] | shared["buffers"]}

    def draft(self, site: Site, draws: State) -> State:
        """The noise with the labels it is to get, at rest."""
        draft = self.inner.draft(site, draws)
        if "noise" not in draws:
            return draft
        labels = site.task.targets(site.counts, site.sizes, self.labels, draws["asked"])
        learnt = {"x": draws["noise"]}
        if self.generator != "none":
            learnt = generators.begin(site.model, draws["noise"], draws.get("generator"))
        return draft | {"made": generation.begin(learnt, labels, self.recipe, self._render(site))}

    def redrafts(self, round: int) -> int:
        """The steps of the optimisation, once awake."""
        return max(self.inner.redrafts(round), self._length if self._awake(round) else 0)

    def redraft(self, draft: State, site: Site) -> State:
        """The inputs one step of Adam on (eq. 1)."""
        draft = self.inner.redraft(draft, site)
        if "made" not in draft or not self.recipe.steps:
            return draft
        made = generation.improve(self._objective(site, draft), draft["made"], site.step, self.recipe, site.gradient)
        due = site.step < self._length  # an algorithm inside may ask for more
        kept = tree.apply(lambda new, old: torch.where(due, new, old), made, draft["made"])
        return draft | {"made": kept}

    def extra_data(self, site: Site, draft: State) -> Extra:
        """Generated inputs with their labels and the teacher's outputs; eight of them are shown on their way."""
        extra = self.inner.extra_data(site, draft)
        if "made" not in draft:
            return extra
        drafted = generation.end(draft["made"], self._render(site)(draft["made"]["learnt"]), self.recipe)
        x, labels = drafted["x"], drafted["y"]
        made = {"x": x, "y": labels, "logits": site.model.predict(self._teacher(site), x)}
        exhibit = {"images": drafted["trail"], "labels": labels[drafted["shown"]], "steps": drafted["marks"]}
        return Extra(extra.groups | {"made": made}, extra.exhibit | exhibit)

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """Inner's, and those on the generated inputs, which leave running statistics alone."""
        outputs = self.inner.outputs(params, batch, site)
        if "made" in batch and self.control == "off":
            x = batch["made"]["x"]
            running = self.norms == "running"
            logits = site.model.predict(params | site.buffers, x) if running else site.still.logits(params, x)
            outputs = outputs | {"made": logits}
        return outputs

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """real_share * the inner data term + made_share * KL(p_G || p_theta) on the generated inputs (eq. 3)."""
        real = self.inner.data_loss(outputs, batch, site)
        if "made" not in batch:
            return real
        real_share, made_share = self._shares(site)
        if self.control != "off":
            return real_share * real if self.control == "loss" else real
        teacher = batch["made"]["logits"]
        if self.supervision == "soft":
            made = site.task.distil(teacher, outputs["made"]).mean()
        else:
            made = site.task.loss(outputs["made"], site.task.decide(teacher)).mean()
        return real_share * real + made_share * made

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Inner's; as a control, only the real share of the way."""
        after = self.inner.after_step(before, after, batch, site)
        if "made" not in batch or self.control != "lr":
            return after
        share = self._shares(site)[0]
        return {name: value + share * (after[name] - value) for name, value in before.items()}

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Inner's; the local model is kept as the next round's previous one, and nothing more is sent."""
        own, payload = self.inner.client_update(params, site, effort)
        return own | {"previous": site.local(params)}, payload

    @property
    def recipe(self) -> generation.Recipe:
        """How inputs are made."""
        steps = 0 if self.source == "noise" or self.control != "off" else self.steps
        return generation.Recipe(
            steps=steps,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            disagreement=self.lambda_dis if self.source == "global+local" else 0.0,
            statistics=self.lambda_bn,
            batch=self.generation_batch,
            marks=tuple(sorted({steps * quarter // 4 for quarter in range(5)})),
            shown=tuple(sorted({(self.count - 1) * eighth // 7 for eighth in range(8)})),
        )

    def _refuse(self, model: Model) -> None:
        """Say at once what cannot be done with a network."""
        if self.lambda_bn and not model.batch_norms:
            raise ModelError(
                "fedcog.lambda_bn weighs running statistics of BatchNorm layers, and this network has none: set it to "
                "0, or choose a network with BatchNorm, such as resnet18."
            )
        if self.lambda_bn and self.generation_batch and self.generator == "none" and self.count % self.generation_batch:
            raise ModelError(
                f"fedcog.lambda_bn weighs statistics of a batch, and {self.count} inputs are no whole batches of "
                f"{self.generation_batch}: choose a fedcog.generation_batch that divides fedcog.count."
            )
        if self.generator == "custom" and model.generator is None:
            raise ModelError(
                "fedcog.generator 'custom' is a network of your own: give it from Python, fedcog.run(..., "
                "generator=MyGenerator()), also to continue a run."
            )
        if self.generator == "custom" and model.generator is not None and self.count == 1:
            try:  # BatchNorm may have one value a channel then, which is nothing to normalise
                model.generator(next(model.generator.parameters(), torch.zeros(())).new_zeros(1, self.noise))
            except ValueError as error:
                raise ModelError(f"the generator makes no input alone: {error}. Set fedcog.count to 2.") from error

    @property
    def _length(self) -> int:
        """How often inputs are improved; a generator's all at once."""
        return self.recipe.length(self.count if self.generator == "none" else 1)

    def _awake(self, round: int) -> bool:
        return round >= self.start_round and self.source != "nothing"

    def _objective(self, site: Site, draft: State) -> generation.Loss:
        """What inputs are optimised for (eqs. 1 and 2)."""
        teacher, recipe = self._teacher(site), self.recipe
        student, render = teacher | site.own["previous"], self._render(site)
        models = site.task, site.model, teacher, student
        return generation.objective(*models, recipe.disagreement, self.count, render, recipe.statistics)

    def _render(self, site: Site) -> generation.Render:
        """What makes inputs of what is learnt."""
        if self.generator == "none":
            return generation.as_they_are
        return functools.partial(generators.inputs, site.model)

    def _teacher(self, site: Site) -> Params:
        """The model the client would start from."""
        return self.inner.client_start(site) | self.inner.client_buffers(site)

    def _balanced(self, site: Site) -> bool:
        return self.weighting == "balanced" or (self.weighting == "auto" and not site.task.several)

    def _shares(self, site: Site) -> tuple[Tensor | float, Tensor | float]:
        if not self._balanced(site):
            return 1.0, self.lambda_kd
        there, missing = site.counts.sum().to(site.lr.dtype), site.task.missing(site.counts).sum()
        whole = there + missing  # none, if none of the client's examples has a label
        return torch.where(whole > 0, there / whole.clamp(min=1), 1), missing / whole.clamp(min=1)
