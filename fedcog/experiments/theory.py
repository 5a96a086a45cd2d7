"""The paper's theorem as numbers: its constants, its bound and its largest step, beside the gradient that is measured.

All is as the theorem has it: every client distils the same inputs, generated from the global model alone with one seed
for all, with a weight of one beside its task loss, and takes plain steps on batches drawn anew each time. What it calls
Phi_k is F_k, the mean task loss, + Q, the mean divergence from the round's global model on those inputs. Q and its
gradient vanish at that model, so what is bounded is the task loss's own gradient.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from fedcog import generation, streams, tree
from fedcog.data import Dataset, partition
from fedcog.data.rules import Rule
from fedcog.federation.course import autograd
from fedcog.models import Model
from fedcog.task import SingleLabel
from fedcog.tree import Params

Network = Literal["linear", "mlp"]
HIDDEN, POWER = 16, 12  # units of the small network; steps of the power method


class Plan(NamedTuple):
    """What is run: so many rounds of so many local steps on batches of so many, real and generated each."""

    clients: int = 10
    rounds: int = 30
    steps: int = 5
    batch: int = 16
    made: int = 64  # generated inputs
    repeats: int = 3  # runs that an expectation is the mean of
    seed: int = 0


class Constants(NamedTuple):
    """What the theorem assumes to exist: the largest that was met on the way or, of L where it can be had, a bound."""

    smoothness: float  # L
    variance: float  # sigma^2
    kappa: float  # kappa^2, with beta^2 = 1
    gap: float  # Phi(theta_0; D_0) - Phi_inf, which is 0 or more
    spread: float  # sum of p_k^2
    beta: float = 1.0  # beta^2

    def largest_step(self, steps: int) -> float:
        """The largest learning rate that the theorem admits for so many local steps."""
        drift = math.inf if steps == 1 else 1 / math.sqrt(2 * steps * (steps - 1) * (2 * self.beta + 1))
        return min(1 / (2 * steps), drift) / self.smoothness

    def bound(self, steps: int, lr: float, rounds: int) -> float:
        """What min_t E|grad Phi(theta_t; D_t)|^2 is at most, after so many rounds."""
        noise = self.variance * (4 * lr * self.smoothness * self.spread + 3 * (steps - 1) * (lr * self.smoothness) ** 2)
        drift = 6 * steps * (steps - 1) * (lr * self.smoothness) ** 2 * self.kappa
        return 4 * self.gap / (steps * lr * rounds) + noise + drift


class Finding(NamedTuple):
    """What came of it."""

    network: Network
    constants: Constants
    lr: float
    bound: float
    smallest: float  # min over rounds of the mean over runs of |grad Phi|^2
    mean: float  # its mean over rounds
    distilled: float  # the largest Q(theta_t; D_t), which the lemma has at zero
    rises: int  # how often renewing D made Phi larger, which the lemma forbids


def measure(network: Network, dataset: Dataset, plan: Plan = Plan(), lr: float = 0.0) -> Finding:  # noqa: B008
    """The theorem on a data set shared out by label, two classes a client; `lr` 0: four fifths of the largest step.

    L is only known after the way has been gone: the step goes by a short first run, and may turn out too large after
    all. The bound is that of the constants met in the runs that are measured.
    """
    problem = Problem(network, dataset, plan)
    first = problem.run(0, _first_step(problem, plan), plan._replace(rounds=2)).constants
    step = lr or 0.8 * first.largest_step(plan.steps)
    runs = [problem.run(repeat, step, plan) for repeat in range(plan.repeats)]
    met = [run.constants for run in runs]
    most = Constants(*(max(values) for values in zip(*met, strict=True)))
    norms = torch.tensor([run.norms for run in runs], dtype=torch.float64).mean(0)
    return Finding(
        network,
        most,
        step,
        most.bound(plan.steps, step, plan.rounds),
        float(norms.min()),
        float(norms.mean()),
        max(run.distilled for run in runs),
        sum(run.rises for run in runs),
    )


def _first_step(problem: "Problem", plan: Plan) -> float:
    """A step that is small enough to look around with."""
    return 0.1 / (plan.steps * problem.smoothness(problem.start, problem.generated(problem.start, 0)))


class Run(NamedTuple):
    """One run of it."""

    constants: Constants
    norms: list[float]
    distilled: float
    rises: int


class Made(NamedTuple):
    """A round's generated inputs, and the outputs of the model they were generated from."""

    x: Tensor
    logits: Tensor


class Problem:
    """A network and its clients' data, in float64."""

    def __init__(self, network: Network, dataset: Dataset, plan: Plan) -> None:
        self.network, self.plan, classes = network, plan, len(dataset.classes)
        rule = Rule(plan.clients, classes_per_client=2)
        shares = partition.split("label-skew", dataset.train_y.numpy(), None, rule, plan.seed)
        x = (dataset.train_x.double() / 255).flatten(1)
        self.x = [x[share] for share in shares]
        self.y = [dataset.train_y[share] for share in shares]
        size = torch.tensor([len(own) for own in self.y], dtype=torch.float64)
        self.p = (size / size.sum()).tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(plan.seed)
            module: nn.Module = nn.Linear(x.shape[1], HIDDEN if network == "mlp" else classes)
            if network == "mlp":
                module = nn.Sequential(module, nn.Tanh(), nn.Linear(HIDDEN, classes))
        self.task, self.model = SingleLabel(classes), Model(module.double(), (x.shape[1],), classes)
        self.start = self.model.params

    def task_loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """F on some examples."""
        return self.task.loss(self.model.predict(params, x), y).mean()

    def distance(self, params: Params, x: Tensor, logits: Tensor) -> Tensor:
        """Q on some generated inputs."""
        return self.task.distil(logits, self.model.predict(params, x)).mean()

    def objective(self, params: Params, client: int, made: Made) -> Tensor:
        """Phi_k on all that the client has."""
        return self.task_loss(params, self.x[client], self.y[client]) + self.distance(params, *made)

    def whole(self, params: Params, made: Made) -> Tensor:
        """Phi."""
        each = [share * self.objective(params, client, made) for client, share in enumerate(self.p)]
        return torch.stack(each).sum()

    def generated(self, params: Params, round: int) -> Made:
        """Inputs that the model gives labels to, all classes alike; the noise they begin as is every client's."""
        nobody = torch.zeros(1, dtype=torch.int64)
        shape = (self.plan.made, *self.model.input_shape)
        noise = streams.normal(self.plan.seed, "theory", round, nobody, shape)[0].double()
        labels = torch.arange(self.plan.made) % self.task.classes
        recipe = generation.Recipe(steps=20, lr=0.01, betas=(0.5, 0.9), disagreement=0.0)
        made = generation.generate(self.task, self.model, params, params, labels, noise, recipe, autograd)
        return Made(made["x"], self.model.predict(params, made["x"]))

    def smoothness(self, params: Params, made: Made) -> float:
        """L: of the linear model a bound for all parameters, else the largest curvature of a client's loss here.

        The Hessian of cross-entropy in the logits is at most 1/2, also against soft labels.
        """
        if self.network == "linear":
            return max(_largest(own) + _largest(made.x) for own in self.x) / 2
        return max(self._curvature(params, client, made) for client in range(len(self.p)))

    def _curvature(self, params: Params, client: int, made: Made) -> float:
        """The largest eigenvalue of a client's Hessian, by the power method."""
        slope = grad(self.objective)
        draw = torch.Generator().manual_seed(0)
        way = {name: torch.randn(value.shape, generator=draw, dtype=value.dtype) for name, value in params.items()}
        length = tree.norm(way)
        for _ in range(POWER):
            way = tree.scale(1 / length, way)
            way = jvp(lambda at: slope(at, client, made), (params,), (way,))[1]
            length = tree.norm(way)
        return float(length)

    def variance(self, params: Params, client: int, made: Made) -> float:
        """sigma^2 here: of a batch's gradient, real and generated examples drawn one by one."""

        def one(loss: Callable[[Params, Tensor, Tensor], Tensor], x: Tensor, told: Tensor) -> float:
            slopes = vmap(grad(lambda at, x, told: loss(at, x[None], told[None])), (None, 0, 0))(params, x, told)
            flat = torch.cat([value.flatten(1) for value in slopes.values()], 1)
            return float((flat - flat.mean(0)).square().sum(1).mean())

        real = one(self.task_loss, self.x[client], self.y[client])
        return (real + one(self.distance, *made)) / self.plan.batch

    def run(self, repeat: int, lr: float, plan: Plan) -> Run:
        """So many rounds, and the largest constants met on the way."""
        draw = torch.Generator().manual_seed((1000 * plan.seed + repeat) % 2**63)
        params, norms, distilled, rises = self.start, list[float](), 0.0, 0
        smoothness = variance = kappa = 0.0
        made = self.generated(params, 0)
        gap = float(self.whole(params, made))
        for round in range(plan.rounds):
            slopes = [grad(self.objective)(params, client, made) for client in range(len(self.p))]
            mean = tree.zeros(params)
            for share, slope in zip(self.p, slopes, strict=True):
                mean = tree.add(mean, tree.scale(share, slope))
            norms.append(float(tree.norm(mean)) ** 2)
            apart = sum(share * float(tree.norm(slope)) ** 2 for share, slope in zip(self.p, slopes, strict=True))
            kappa = max(kappa, apart - norms[-1])
            smoothness = max(smoothness, self.smoothness(params, made))
            distilled = max(distilled, float(self.distance(params, *made)))
            after = tree.zeros(params)
            for client, share in enumerate(self.p):
                own = params
                for _ in range(plan.steps):
                    variance = max(variance, self.variance(own, client, made))
                    own = self._step(own, client, made, lr, draw)
                after = tree.add(after, tree.scale(share, own))
            renewed = self.generated(after, round + 1)
            rises += bool(self.whole(after, renewed) > self.whole(after, made) + 1e-12)
            params, made = after, renewed
        spread = sum(share**2 for share in self.p)
        return Run(Constants(smoothness, variance, kappa, gap, spread), norms, distilled, rises)

    def _step(self, params: Params, client: int, made: Made, lr: float, draw: torch.Generator) -> Params:
        real = torch.randint(len(self.y[client]), (self.plan.batch,), generator=draw)
        some = torch.randint(len(made.x), (self.plan.batch,), generator=draw)

        def loss(at: Params) -> Tensor:
            fit = self.task_loss(at, self.x[client][real], self.y[client][real])
            return fit + self.distance(at, made.x[some], made.logits[some])

        return tree.add(params, tree.scale(-lr, grad(loss)(params)))


def _largest(x: Tensor) -> float:
    """The largest eigenvalue of the mean of x x^T, with a one added to every x for the bias."""
    wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return float(torch.linalg.matrix_norm(wide, 2)) ** 2 / len(x)
