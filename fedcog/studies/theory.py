"""The paper's convergence theorem as numbers: constants, bound, largest step, measured gradient.

The setting is the theorem's. All clients distil the same inputs, generated from the global model
alone with one seed. Distillation has the weight of the task loss. Clients take plain SGD steps on
batches drawn with replacement. The theorem's Phi_k is F_k + Q: F_k is the mean task loss, and Q is
the mean divergence from the round's global model on the generated inputs. Q and its gradient are
zero at that model, so the theorem bounds the gradient of the task loss.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from fedcog.algorithms import generation
from fedcog.core import rng, tree
from fedcog.core.tasks import SingleLabel
from fedcog.core.tree import Params
from fedcog.data import Dataset
from fedcog.data.partitions import schemes
from fedcog.data.partitions.base import PartitionConfig
from fedcog.engine.local_training import autograd_gradient
from fedcog.models.functional import Model

Network = Literal["linear", "mlp"]
HIDDEN_UNITS = 16
POWER_ITERATIONS = 12
STEP_FRACTION = 0.8
"""The default learning rate, as a fraction of the largest step that the theorem allows."""
OBJECTIVE_TOLERANCE = 1e-12


class TheoryPlan(NamedTuple):
    """What is run. A batch holds `batch` real examples and as many generated inputs."""

    clients: int = 10
    rounds: int = 30
    steps: int = 5  # local steps per round
    batch: int = 16
    num_generated: int = 64  # generated inputs
    repeats: int = 3  # runs over which expectations are averaged
    seed: int = 0


class Constants(NamedTuple):
    """The constants that the theorem assumes.

    Each is the largest value met during training. The smoothness of the linear model is an upper
    bound for all parameters.
    """

    smoothness: float  # L
    variance: float  # sigma^2
    kappa_squared: float  # with beta^2 = 1
    initial_gap: float  # Phi(theta_0; D_0) - Phi_inf, with Phi_inf = 0 as a lower bound
    weights_squared: float  # sum of p_k^2
    beta_squared: float = 1.0

    def largest_step(self, steps: int) -> float:
        """Return the largest learning rate that the theorem allows for `steps` local steps."""
        drift_limit = math.inf
        if steps > 1:
            drift_limit = 1 / math.sqrt(2 * steps * (steps - 1) * (2 * self.beta_squared + 1))
        return min(1 / (2 * steps), drift_limit) / self.smoothness

    def bound(self, steps: int, lr: float, rounds: int) -> float:
        """Return the theorem's bound of min_t E|grad Phi(theta_t; D_t)|^2.

        Args:
            steps: Local steps per round.
            lr: Learning rate.
            rounds: Number of rounds.

        Returns:
            The upper bound.
        """
        scaled_lr = lr * self.smoothness
        noise = self.variance * (
            4 * scaled_lr * self.weights_squared + 3 * (steps - 1) * scaled_lr**2
        )
        drift = 6 * steps * (steps - 1) * scaled_lr**2 * self.kappa_squared
        return 4 * self.initial_gap / (steps * lr * rounds) + noise + drift


class TheoryResult(NamedTuple):
    """Bound and measured gradient of one network."""

    network: Network
    constants: Constants
    lr: float
    bound: float
    min_gradient: float  # min over rounds of the mean over runs of |grad Phi|^2
    mean_gradient: float  # its mean over rounds
    max_distillation: float  # the largest Q(theta_t; D_t); zero by the paper's lemma
    num_increases: int  # how often new inputs D increased Phi; never by the lemma


def measure(
    network: Network,
    dataset: Dataset,
    plan: TheoryPlan = TheoryPlan(),  # noqa: B008
    lr: float = 0.0,
) -> TheoryResult:
    """Evaluate the theorem on a data set, split by label with two classes per client.

    L is known only after training. The step is therefore chosen from a short first run, and may
    turn out too large. The bound uses the constants of the runs that are measured.

    Args:
        network: The network.
        dataset: The data set.
        plan: What to run.
        lr: Learning rate; 0: `STEP_FRACTION` of the largest step.

    Returns:
        The bound and the measured gradient.
    """
    problem = Problem(network, dataset, plan)
    trial = problem.run(0, _exploratory_step(problem, plan), plan._replace(rounds=2))
    step = lr or STEP_FRACTION * trial.constants.largest_step(plan.steps)
    runs = [problem.run(repeat, step, plan) for repeat in range(plan.repeats)]
    values = zip(*(run.constants for run in runs), strict=True)
    constants = Constants(*(max(value) for value in values))
    gradients = torch.tensor([run.gradients for run in runs], dtype=torch.float64).mean(0)
    return TheoryResult(
        network=network,
        constants=constants,
        lr=step,
        bound=constants.bound(plan.steps, step, plan.rounds),
        min_gradient=float(gradients.min()),
        mean_gradient=float(gradients.mean()),
        max_distillation=max(run.max_distillation for run in runs),
        num_increases=sum(run.num_increases for run in runs),
    )


def _exploratory_step(problem: "Problem", plan: TheoryPlan) -> float:
    """A small learning rate for the first run."""
    generated = problem.generate(problem.start, 0)
    return 0.1 / (plan.steps * problem.smoothness(problem.start, generated))


class ProblemRun(NamedTuple):
    """One training run: its constants, and what was measured in its rounds."""

    constants: Constants
    gradients: list[float]  # |grad Phi|^2 by round
    max_distillation: float
    num_increases: int


class Generated(NamedTuple):
    """Generated inputs of a round, and the outputs of the model that they were generated from."""

    x: Tensor
    logits: Tensor


class Problem:
    """A network and its clients' data, in float64."""

    def __init__(self, network: Network, dataset: Dataset, plan: TheoryPlan) -> None:
        self.network = network
        self.plan = plan
        num_classes = len(dataset.classes)
        config = PartitionConfig(plan.clients, classes_per_client=2)
        train_labels = dataset.train_y.numpy()
        shares = schemes.make_partition("label-skew", train_labels, None, config, plan.seed)
        x = (dataset.train_x.double() / 255).flatten(1)
        self.x = [x[share] for share in shares]
        self.y = [dataset.train_y[share] for share in shares]
        sizes = torch.tensor([len(labels) for labels in self.y], dtype=torch.float64)
        self.weights = (sizes / sizes.sum()).tolist()  # the theorem's p_k
        module = _build(network, x.shape[1], num_classes, plan.seed)
        self.task = SingleLabel(num_classes)
        self.model = Model(module, (x.shape[1],), num_classes)
        self.start = self.model.params

    def task_loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Compute F, the mean task loss.

        Args:
            params: Parameters of the network.
            x: Inputs (N, D).
            y: Labels (N).

        Returns:
            A scalar.
        """
        return self.task.loss(self.model.predict(params, x), y).mean()

    def distillation_loss(self, params: Params, x: Tensor, logits: Tensor) -> Tensor:
        """Compute Q, the mean divergence from the global model.

        Args:
            params: Parameters of the network.
            x: Generated inputs (N, D).
            logits: Outputs of the global model on them (N, C).

        Returns:
            A scalar.
        """
        return self.task.distillation_loss(logits, self.model.predict(params, x)).mean()

    def objective(self, params: Params, client: int, generated: Generated) -> Tensor:
        """Compute Phi_k on all examples of a client.

        Args:
            params: Parameters of the network.
            client: Index of the client.
            generated: The generated inputs of the round.

        Returns:
            A scalar.
        """
        task_loss = self.task_loss(params, self.x[client], self.y[client])
        return task_loss + self.distillation_loss(params, *generated)

    def global_objective(self, params: Params, generated: Generated) -> Tensor:
        """Compute Phi, the weighted mean of the clients' objectives.

        Args:
            params: Parameters of the network.
            generated: The generated inputs of the round.

        Returns:
            A scalar.
        """
        terms = [
            weight * self.objective(params, client, generated)
            for client, weight in enumerate(self.weights)
        ]
        return torch.stack(terms).sum()

    def generate(self, params: Params, round: int) -> Generated:
        """Generate inputs from the global model, equally many of each class.

        Args:
            params: Parameters of the global model.
            round: Index of the round; it selects the initial noise, which all clients share.

        Returns:
            The inputs and the model's outputs on them.
        """
        client_ids = torch.zeros(1, dtype=torch.int64)
        num_generated = self.plan.num_generated
        shape = (num_generated, *self.model.continuous_shape)
        noise = rng.normal(self.plan.seed, "theory", round, client_ids, shape)[0].double()
        labels = torch.arange(num_generated) % self.task.num_classes
        models = generation.Models(self.task, self.model, params, params)
        recipe = generation.GenerationConfig(steps=20, lr=0.01, betas=(0.5, 0.9), disagreement=0.0)
        state = generation.generate(models, labels, noise, recipe, autograd_gradient)
        return Generated(state["x"], self.model.predict(params, state["x"]))

    def smoothness(self, params: Params, generated: Generated) -> float:
        """Compute L.

        The Hessian of cross-entropy with respect to the logits is at most 1/2, also with soft
        labels.

        Args:
            params: Parameters of the network.
            generated: The generated inputs of the round.

        Returns:
            Of the linear model an upper bound for all parameters; else the largest curvature of a
            client's objective at `params`.
        """
        if self.network == "linear":
            generated_eigenvalue = _largest_eigenvalue(generated.x)
            return max(_largest_eigenvalue(x) + generated_eigenvalue for x in self.x) / 2
        clients = range(len(self.weights))
        return max(self._curvature(params, client, generated) for client in clients)

    def _curvature(self, params: Params, client: int, generated: Generated) -> float:
        """The largest absolute eigenvalue of a client's Hessian, by power iteration."""
        gradient = grad(self.objective)
        generator = torch.Generator().manual_seed(0)
        direction = {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in params.items()
        }
        norm = tree.norm(direction)
        for _ in range(POWER_ITERATIONS):
            direction = tree.scale(1 / norm, direction)
            direction = jvp(lambda at: gradient(at, client, generated), (params,), (direction,))[1]
            norm = tree.norm(direction)
        return float(norm)

    def variance(self, params: Params, client: int, generated: Generated) -> float:
        """Compute sigma^2, the variance of a batch's gradient.

        Args:
            params: Parameters of the network.
            client: Index of the client.
            generated: The generated inputs of the round.

        Returns:
            The variance if real examples and generated inputs are drawn with replacement.
        """
        real = _gradient_variance(self.task_loss, params, self.x[client], self.y[client])
        distilled = _gradient_variance(self.distillation_loss, params, *generated)
        return (real + distilled) / self.plan.batch

    def run(self, repeat: int, lr: float, plan: TheoryPlan) -> ProblemRun:
        """Train, and take the largest constants met in any round.

        Args:
            repeat: Number of the run; it selects the batches.
            lr: Learning rate.
            plan: What to run.

        Returns:
            The constants and measurements of the run.
        """
        generator = torch.Generator().manual_seed((1000 * plan.seed + repeat) % 2**63)
        params = self.start
        generated = self.generate(params, 0)
        initial_gap = float(self.global_objective(params, generated))
        gradients = list[float]()
        max_distillation = 0.0
        num_increases = 0
        smoothness = 0.0
        variance = 0.0
        kappa_squared = 0.0
        for round in range(plan.rounds):
            gradient_squared, dissimilarity = self._gradient_statistics(params, generated)
            gradients.append(gradient_squared)
            kappa_squared = max(kappa_squared, dissimilarity)
            smoothness = max(smoothness, self.smoothness(params, generated))
            distillation = float(self.distillation_loss(params, *generated))
            max_distillation = max(max_distillation, distillation)
            params, round_variance = self._train_round(params, generated, lr, plan.steps, generator)
            variance = max(variance, round_variance)
            old_objective = self.global_objective(params, generated)
            generated = self.generate(params, round + 1)
            new_objective = self.global_objective(params, generated)
            num_increases += bool(new_objective > old_objective + OBJECTIVE_TOLERANCE)
        weights_squared = sum(weight**2 for weight in self.weights)
        constants = Constants(smoothness, variance, kappa_squared, initial_gap, weights_squared)
        return ProblemRun(constants, gradients, max_distillation, num_increases)

    def _gradient_statistics(self, params: Params, generated: Generated) -> tuple[float, float]:
        """Return |grad Phi|^2, and the mean of the clients' |grad Phi_k|^2 minus it."""
        mean = tree.zeros(params)
        mean_squared_norm = 0.0
        for client, weight in enumerate(self.weights):
            gradient = grad(self.objective)(params, client, generated)
            mean = tree.add(mean, tree.scale(weight, gradient))
            mean_squared_norm += weight * float(tree.norm(gradient)) ** 2
        squared_norm = float(tree.norm(mean)) ** 2
        return squared_norm, mean_squared_norm - squared_norm

    def _train_round(
        self,
        params: Params,
        generated: Generated,
        lr: float,
        steps: int,
        generator: torch.Generator,
    ) -> tuple[Params, float]:
        """Return the global model after a round, and the largest gradient variance met."""
        average = tree.zeros(params)
        variance = 0.0
        for client, weight in enumerate(self.weights):
            local_params = params
            for _ in range(steps):
                variance = max(variance, self.variance(local_params, client, generated))
                local_params = self._step(local_params, client, generated, lr, generator)
            average = tree.add(average, tree.scale(weight, local_params))
        return average, variance

    def _step(
        self,
        params: Params,
        client: int,
        generated: Generated,
        lr: float,
        generator: torch.Generator,
    ) -> Params:
        """One SGD step of a client."""
        batch = (self.plan.batch,)
        real = torch.randint(len(self.y[client]), batch, generator=generator)
        synthetic = torch.randint(len(generated.x), batch, generator=generator)

        def loss(at: Params) -> Tensor:
            task_loss = self.task_loss(at, self.x[client][real], self.y[client][real])
            return task_loss + self.distillation_loss(
                at, generated.x[synthetic], generated.logits[synthetic]
            )

        return tree.add(params, tree.scale(-lr, grad(loss)(params)))


def _build(network: Network, num_inputs: int, num_classes: int, seed: int) -> nn.Module:
    """Build the network in float64, with weights drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if network == "linear":
            return nn.Linear(num_inputs, num_classes).double()
        first = nn.Linear(num_inputs, HIDDEN_UNITS)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(HIDDEN_UNITS, num_classes)).double()


def _gradient_variance(
    loss: Callable[[Params, Tensor, Tensor], Tensor], params: Params, x: Tensor, targets: Tensor
) -> float:
    """The variance of the gradient of one randomly drawn example."""

    def _example_loss(at: Params, example: Tensor, target: Tensor) -> Tensor:
        return loss(at, example[None], target[None])

    gradients = vmap(grad(_example_loss), (None, 0, 0))(params, x, targets)
    flat = torch.cat([value.flatten(1) for value in gradients.values()], 1)
    return float((flat - flat.mean(0)).square().sum(1).mean())


def _largest_eigenvalue(x: Tensor) -> float:
    """The largest eigenvalue of the mean of x x^T, with a 1 appended to every x for the bias."""
    extended = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return float(torch.linalg.matrix_norm(extended, 2)) ** 2 / len(x)
