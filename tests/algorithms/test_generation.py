"""Tests of input generation: objective, gradients, batches, BatchNorm loss, recorded steps."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import vmap

from fedcog.algorithms import generation
from fedcog.algorithms.generation import GenerationConfig, Models
from fedcog.core.tasks import SingleLabel
from fedcog.core.tree import Params, State
from fedcog.engine import cuda_graphs
from fedcog.engine.local_training import autograd_gradient, functional_gradient
from fedcog.models import generators
from fedcog.models.functional import Model
from fedcog.models.zoo import build
from tests.support.user_models import batch_norm

task = SingleLabel(4)


def teacher_and_student(sharpness: float = 1.0) -> tuple[Model, Params, Params]:
    """Return a network and two sets of weights; a high sharpness makes confident predictions."""
    draw = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = Model(module, (6,), 4)

    def weights() -> Params:
        drawn = {
            name: torch.randn(value.shape, generator=draw).double()
            for name, value in model.params.items()
        }
        return drawn | {name: sharpness * drawn[name] for name in ("2.weight", "2.bias")}

    return model, weights(), weights()


def objective(
    model: Model,
    teacher: Params,
    student: Params,
    disagreement: float,
    num_inputs: int,
    batchnorm_weight: float = 0.0,
) -> generation.Loss:
    """Return the loss of generated inputs with the given weights of its terms."""
    config = GenerationConfig(
        steps=0,
        lr=0.0,
        betas=(0.5, 0.9),
        disagreement=disagreement,
        batchnorm_weight=batchnorm_weight,
    )
    return generation.objective(Models(task, model, teacher, student), config, num_inputs)


def noise(number: int) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("gradient", [autograd_gradient, functional_gradient])
@pytest.mark.parametrize("disagreement", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_input_gradient_equals_finite_differences(
    sharpness: float, disagreement: float, gradient: generation.Gradient
) -> None:
    model, teacher, student = teacher_and_student(sharpness)
    x = noise(3)
    y = torch.tensor([0, 1, 3])
    loss = objective(model, teacher, student, disagreement, 3)
    grad = gradient(loss, {"x": x}, {"y": y})[0]["x"]
    step = 1e-6
    for row in range(3):
        for column in range(6):
            shift = torch.zeros_like(x)
            shift[row, column] = step
            difference = loss({"x": x + shift}, {"y": y}) - loss({"x": x - shift}, {"y": y})
            assert grad[row, column].item() == pytest.approx(
                difference.item() / (2 * step), rel=1e-4, abs=1e-7
            )


def test_objective_equals_equations_1_and_2() -> None:
    """The expected value uses probabilities and plain logarithms."""
    model, teacher, student = teacher_and_student()
    x = noise(5)
    y = torch.tensor([0, 1, 2, 3, 0])
    p = model.predict(teacher, x).softmax(-1)
    q = model.predict(student, x).softmax(-1)
    middle = (p + q) / 2
    js = ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2
    expected = (-p[torch.arange(5), y].log() + 0.1 * (1 - js)).mean()
    loss = objective(model, teacher, student, 0.1, 5)
    assert loss({"x": x}, {"y": y}).item() == pytest.approx(expected.item(), rel=1e-12)


def test_generation_equals_torch_adam() -> None:
    model, teacher, student = teacher_and_student()
    labels = torch.tensor([0, 1, 2, 3, 0])
    config = GenerationConfig(steps=20, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    generated = generation.generate(
        Models(task, model, teacher, student), labels, noise(5), config, autograd_gradient
    )["x"]
    x = noise(5).requires_grad_()
    adam = torch.optim.Adam([x], lr=0.05, betas=(0.5, 0.9))
    loss = objective(model, teacher, student, 0.1, 5)
    for _ in range(20):
        adam.zero_grad()
        loss({"x": x}, {"y": labels}).backward()  # type: ignore[no-untyped-call]
        adam.step()
    assert float((generated - x.detach()).abs().max()) < 1e-12
    assert loss({"x": generated}, {"y": labels}) < loss({"x": noise(5)}, {"y": labels})


SIZES = {"cnn": 16, "small": 8}


@functools.cache
def trained_on_digits(name: str, labels: tuple[int, ...]) -> Params:
    """Return float32 weights of a network with over 95 % accuracy on these digits."""
    images, digits = load_digits(return_X_y=True)
    draw = torch.Generator().manual_seed(0)
    candidates = torch.tensor(np.flatnonzero(np.isin(digits, labels)))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(digits)
    x = F.interpolate(x, size=2 * [SIZES[name]])
    module = build(name, (1, SIZES[name], SIZES[name]), 10, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(500):
        batch = candidates[torch.randint(len(candidates), (64,), generator=draw)]
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float((module(x[candidates]).argmax(-1) == y[candidates]).float().mean()) > 0.95
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "vmapped", "batch"),
    [("cnn", False, 7), ("cnn", True, 7), ("small", False, 1), ("small", True, 1)],
)
def test_generation_batch_does_not_change_a_hundred_float32_steps(
    name: str, vmapped: bool, batch: int
) -> None:
    """ReLU and pooling of confident networks amplify rounding 1e5 times, so it must be equal."""
    shape = 1, SIZES[name], SIZES[name]
    model = Model(build(name, shape, 10, seed=0), shape, 10)
    teacher = trained_on_digits(name, tuple(range(10)))
    student = trained_on_digits(name, (0, 1, 2))
    start = torch.randn(2, 9, *shape, generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(steps=100, lr=0.01, betas=(0.5, 0.9), disagreement=0.1)

    def generate(
        start: Tensor, config: GenerationConfig, gradient: generation.Gradient, model: Model = model
    ) -> Tensor:
        labels = torch.arange(len(start)) % 10
        inputs: Tensor = generation.generate(
            Models(SingleLabel(10), model, teacher, student), labels, start, config, gradient
        )["x"]
        return inputs

    def generate_with(config: GenerationConfig) -> Tensor:
        if not vmapped:
            return generate(start[0], config, autograd_gradient)
        generate_one = functools.partial(
            generate, config=config, gradient=functional_gradient, model=model.vmappable
        )
        return vmap(generate_one)(start)

    batched = generate_with(config._replace(batch=batch))
    assert float((batched - generate_with(config)).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn3", "mlp", "resnet18", "resnet18-gn", "1x1 convolutions"])
def test_generation_is_bit_equal_for_every_batch_size(name: str) -> None:
    shape = (3, 24, 24)
    width = 20
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(3, width, 1), nn.SiLU(), nn.Conv2d(width, 7, 1), nn.Flatten()
    )
    module = (
        nn.Sequential(convolutions, nn.Linear(7 * 576, 10))
        if name == "1x1 convolutions"
        else build(name, shape, 10, seed=0)
    )
    model = Model(module, shape, 10)
    teacher = model.params | model.buffers
    student = {
        key: 1.1 * value if value.is_floating_point() else value for key, value in teacher.items()
    }
    start = torch.randn(9, *shape)
    labels = torch.arange(9)

    def generate(batch: int) -> Tensor:
        config = GenerationConfig(steps=2, lr=0.01, betas=(0.5, 0.9), disagreement=0.1, batch=batch)
        task = SingleLabel(10)
        inputs: Tensor = generation.generate(
            Models(task, model, teacher, student), labels, start, config, autograd_gradient
        )["x"]
        return inputs

    with torch.no_grad():
        assert torch.equal(generate(1), generate(0)) and torch.equal(generate(4), generate(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["cnn", "small"])
def test_generation_batch_does_not_change_recorded_cuda_graphs(name: str) -> None:
    """Fused kernels are chosen by shape, so other batches may run other kernels."""
    shape = 1, SIZES[name], SIZES[name]
    model = (
        Model(build(name, shape, 10, seed=0), shape, 10)
        .to(torch.device("cuda"), torch.float32)
        .vmappable
    )
    all_digits = trained_on_digits(name, tuple(range(10)))
    three_digits = trained_on_digits(name, (0, 1, 2))
    teacher = {key: value.cuda() for key, value in all_digits.items()}
    student = {key: value.cuda() for key, value in three_digits.items()}
    students = {key: torch.stack([value, 1.02 * value]) for key, value in student.items()}
    start = torch.randn(2, 17, *shape, generator=torch.Generator().manual_seed(1)).cuda()
    labels = torch.arange(17).cuda() % 10

    def generate(batch: int) -> Tensor:
        config = GenerationConfig(
            steps=100, lr=0.01, betas=(0.5, 0.9), disagreement=0.1, batch=batch
        )

        def step(state: State, fixed: State) -> State:
            def client_step(gen_state: State, student: Params) -> State:
                models = Models(SingleLabel(10), model, fixed["teacher"], student)
                loss = generation.objective(models, config, 17)
                return generation.adam_step(
                    loss, gen_state, state["step"], config, functional_gradient
                )

            gen_states = vmap(client_step)(state["generation"], fixed["students"])
            return {"generation": gen_states, "step": state["step"] + 1}

        initial = vmap(lambda x: generation.begin({"x": x}, labels, config))(start)
        state = {"generation": initial, "step": torch.zeros((), dtype=torch.int64, device="cuda")}
        fixed = {"teacher": teacher, "students": students}
        final = cuda_graphs.GraphCache().repeat(step, "", state, fixed, config.num_steps(17))
        inputs: Tensor = final["generation"]["optimized"]["x"]
        return inputs

    with torch.no_grad():
        unbatched = generate(0)
        assert float((unbatched - start).abs().max()) > 0.1
        for batch in (1, 3, 7):
            assert float((generate(batch) - unbatched).abs().max()) < 1e-4


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_generation_batch_does_not_change_inputs(batch: int) -> None:
    model, teacher, student = teacher_and_student()
    labels = torch.arange(7) % 4
    models = Models(task, model, teacher, student)
    config = GenerationConfig(steps=30, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    batched_config = config._replace(batch=batch)
    unbatched = generation.generate(models, labels, noise(7), config, autograd_gradient)["x"]
    batched = generation.generate(models, labels, noise(7), batched_config, autograd_gradient)["x"]
    assert float((unbatched - batched).abs().max()) < 1e-12


def test_disagreement_weight_raises_the_divergence() -> None:
    model, teacher, student = teacher_and_student()
    labels = torch.arange(16) % 4
    config = GenerationConfig(steps=100, lr=0.05, betas=(0.5, 0.9), disagreement=0.0, batch=0)
    divergence = {}
    for weight in (0.0, 2.0):
        inputs = generation.generate(
            Models(task, model, teacher, student),
            labels,
            noise(16),
            config._replace(disagreement=weight),
            autograd_gradient,
        )["x"]
        divergence[weight] = (
            task.divergence(model.predict(teacher, inputs), model.predict(student, inputs))
            .mean()
            .item()
        )
    assert divergence[2.0] > divergence[0.0] + 0.01


def test_generation_does_not_change_running_statistics() -> None:
    model = Model(batch_norm(), (1, 8, 8), 4)
    weights = model.params | model.buffers
    before = {name: value.clone() for name, value in weights.items()}
    config = GenerationConfig(steps=3, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    generation.generate(
        Models(task, model, weights, weights),
        torch.arange(4),
        torch.randn(4, 1, 8, 8),
        config,
        autograd_gradient,
    )
    assert all(torch.equal(before[name], weights[name]) for name in weights)


def batch_norm_network() -> tuple[nn.Module, Model, Params]:
    """Return a network with BatchNorm2d and BatchNorm1d and random running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(2, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(20, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Linear(6, 4),
        ).double()
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
                assert layer.running_mean is not None and layer.running_var is not None
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
    model = Model(module, (2, 4, 4), 4).to(torch.device("cpu"), torch.float64)
    return module.eval(), model, model.params | model.buffers


def images(number: int) -> Tensor:
    return torch.randn(number, 2, 4, 4, generator=torch.Generator().manual_seed(2)).double()


def batchnorm_loss_by_loops(module: nn.Module, x: Tensor) -> float:
    """Compute DeepInversion's R_feature with forward hooks and loops over channels."""
    total = 0.0

    def add_loss(layer: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        nonlocal total
        channels = inputs[0].transpose(0, 1).flatten(1).tolist()
        means = [sum(values) / len(values) for values in channels]
        variances = [
            sum((v - mean) ** 2 for v in values) / len(values)
            for values, mean in zip(channels, means, strict=True)
        ]
        for batch, running in ((means, layer.running_mean), (variances, layer.running_var)):
            assert running is not None
            total += sum((a - b) ** 2 for a, b in zip(batch, running.tolist(), strict=True)) ** 0.5

    for layer in (module[1], module[5]):  # type: ignore[index]
        layer.register_forward_pre_hook(add_loss)
    with torch.no_grad():
        module(x)
    return total


def test_batchnorm_loss_equals_deepinversion() -> None:
    module, model, weights = batch_norm_network()
    logits, loss = model.batchnorm_loss(weights, images(5))
    assert torch.equal(logits, model.predict(weights, images(5)))
    assert loss.item() == pytest.approx(batchnorm_loss_by_loops(module, images(5)), rel=1e-12)
    moved = weights | {"1.running_mean": weights["1.running_mean"] + 1}
    # The running statistics are those of the given weights, not of the module.
    assert abs(model.batchnorm_loss(moved, images(5))[1].item() - loss.item()) > 0.1


@pytest.mark.parametrize("gradient", [autograd_gradient, functional_gradient])
def test_batchnorm_loss_gradient_equals_finite_differences(
    gradient: generation.Gradient,
) -> None:
    _, model, weights = batch_norm_network()
    x = images(3)
    y = torch.tensor([0, 1, 3])
    loss = objective(model, weights, weights, 0.1, 3, batchnorm_weight=0.7)
    grad = gradient(loss, {"x": x}, {"y": y})[0]["x"].flatten()
    for index in range(0, x.numel(), 5):
        shift = torch.zeros_like(x)
        shift.view(-1)[index] = 1e-6
        difference = loss({"x": x + shift}, {"y": y}) - loss({"x": x - shift}, {"y": y})
        assert grad[index].item() == pytest.approx(difference.item() / 2e-6, rel=1e-4, abs=1e-7)


def test_batchnorm_loss_weights_batches_by_their_size() -> None:
    """Batches of two and one: each batch's statistics count by its share of the inputs."""
    _, model, weights = batch_norm_network()
    x = images(3)
    y = torch.tensor([0, 1, 3])
    without_statistics = objective(model, weights, weights, 0.1, 3, batchnorm_weight=0.0)
    with_statistics = objective(model, weights, weights, 0.1, 3, batchnorm_weight=0.7)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    batchnorm_loss = sum(len(a) / 3 * model.batchnorm_loss(weights, a)[1] for a, _ in batches)
    expected = without_statistics({"x": x}, {"y": y}) + 0.7 * batchnorm_loss
    total = sum(with_statistics({"x": a}, {"y": b}) for a, b in batches)
    assert float(total) == pytest.approx(float(expected), rel=1e-12)


def test_batchnorm_weight_lowers_the_batchnorm_loss() -> None:
    _, model, weights = batch_norm_network()
    config = GenerationConfig(steps=60, lr=0.05, betas=(0.5, 0.9), disagreement=0.1)
    losses = {}
    for strength in (0.0, 1.0):
        weighted = config._replace(batchnorm_weight=strength)
        generated = generation.generate(
            Models(task, model, weights, weights),
            torch.arange(8) % 4,
            images(8),
            weighted,
            autograd_gradient,
        )
        losses[strength] = model.batchnorm_loss(weights, generated["x"])[1].item()
    assert losses[1.0] < 0.7 * losses[0.0]


@pytest.mark.parametrize("batch", [0, 2, 3])
def test_trail_records_inputs_at_the_marked_steps(batch: int) -> None:
    model, teacher, student = teacher_and_student()
    config = GenerationConfig(
        steps=4,
        lr=0.05,
        betas=(0.5, 0.9),
        disagreement=0.1,
        batch=batch,
        marks=(0, 2, 4),
        shown=(0, 3, 6),
    )
    labels = torch.arange(7) % 4
    generated = generation.generate(
        Models(task, model, teacher, student), labels, noise(7), config, autograd_gradient
    )
    trail = generated["trail"]
    assert trail.shape == (3, 3, 6)
    assert torch.equal(trail[0], noise(7)[[0, 3, 6]])
    assert torch.equal(trail[2], generated["x"][[0, 3, 6]])
    halfway = generation.generate(
        Models(task, model, teacher, student),
        labels,
        noise(7),
        config._replace(steps=2, marks=()),
        autograd_gradient,
    )
    assert torch.equal(trail[1], halfway["x"][[0, 3, 6]])


def test_trail_of_a_generator_adds_no_forward_passes() -> None:
    """The trail equals shorter generations, and recording it does not change the result."""
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).double(), (3, 4, 4), 4)
    teacher = model.params
    student = {name: value + 0.1 for name, value in model.params.items()}
    numbers = torch.randn(
        sum(map(math.prod, generators.conv_shapes((3, 4, 4), 5))), dtype=torch.float64
    )
    noise = torch.randn(7, 5, dtype=torch.float64)
    calls = 0

    def render(optimized: Params) -> Tensor:
        nonlocal calls
        calls += 1
        return generators.generate_inputs(model, optimized)

    def generate(config: GenerationConfig) -> State:
        state = generation.begin(
            generators.init_generator(model, noise, numbers), torch.arange(7) % 4, config, render
        )
        loss = generation.objective(Models(task, model, teacher, student), config, 7, render)
        for step in torch.arange(config.steps):
            state = generation.adam_step(loss, state, step, config, autograd_gradient)
        return generation.end(state, render(state["optimized"]), config)

    config = GenerationConfig(
        steps=4, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, marks=(0, 2, 4), shown=(0, 3, 6)
    )
    generated = generate(config)
    assert calls == 1 + 4 + 1  # begin, steps, end
    shorter = [
        generate(config._replace(steps=steps, marks=(), shown=()))["x"][[0, 3, 6]]
        for steps in config.marks
    ]
    assert torch.equal(generated["trail"], torch.stack(shorter))
    assert torch.equal(generated["x"], generate(config._replace(marks=(), shown=()))["x"])
