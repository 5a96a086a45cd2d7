import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import vmap

from fedcog import generation, generators
from fedcog.federation import graphs
from fedcog.federation.course import autograd, functional
from fedcog.generation import Recipe
from fedcog.models import Model, build
from fedcog.task import SingleLabel
from fedcog.tree import Params, State
from tests.user_models import batch_norm

task = SingleLabel(4)


def pair(sharpness: float = 1.0) -> tuple[Model, Params, Params]:
    """A network with the weights of a teacher and of a student; sharp ones are certain of everything."""
    draw = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = Model(module, (6,), 4)

    def weights() -> Params:
        drawn = {name: torch.randn(value.shape, generator=draw).double() for name, value in model.params.items()}
        return drawn | {name: sharpness * drawn[name] for name in ("2.weight", "2.bias")}

    return model, weights(), weights()


def noise(number: int) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("gradient", [autograd, functional])
@pytest.mark.parametrize("disagreement", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_the_gradient_of_the_inputs_agrees_with_finite_differences(
    sharpness: float, disagreement: float, gradient: generation.Gradient
) -> None:
    model, teacher, student = pair(sharpness)
    x, y = noise(3), torch.tensor([0, 1, 3])
    loss = generation.objective(task, model, teacher, student, disagreement, 3)
    slope = gradient(loss, {"x": x}, {"y": y})[0]["x"]
    step = 1e-6
    for row in range(3):
        for column in range(6):
            shift = torch.zeros_like(x)
            shift[row, column] = step
            rise = loss({"x": x + shift}, {"y": y}) - loss({"x": x - shift}, {"y": y})
            assert slope[row, column].item() == pytest.approx(rise.item() / (2 * step), rel=1e-4, abs=1e-7)


def test_the_objective_by_hand() -> None:
    """Written from the paper's equations 1 and 2, with probabilities and plain logarithms."""
    model, teacher, student = pair()
    x, y = noise(5), torch.tensor([0, 1, 2, 3, 0])
    p = model.predict(teacher, x).softmax(-1)
    q = model.predict(student, x).softmax(-1)
    middle = (p + q) / 2
    js = ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2
    expected = (-p[torch.arange(5), y].log() + 0.1 * (1 - js)).mean()
    loss = generation.objective(task, model, teacher, student, 0.1, 5)
    assert loss({"x": x}, {"y": y}).item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_inputs_take_the_steps_of_torchs_adam() -> None:
    model, teacher, student = pair()
    labels = torch.tensor([0, 1, 2, 3, 0])
    recipe = Recipe(steps=20, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    made = generation.generate(task, model, teacher, student, labels, noise(5), recipe, autograd)["x"]
    x = noise(5).requires_grad_()
    adam = torch.optim.Adam([x], lr=0.05, betas=(0.5, 0.9))
    loss = generation.objective(task, model, teacher, student, 0.1, 5)
    for _ in range(20):
        adam.zero_grad()
        loss({"x": x}, {"y": labels}).backward()  # type: ignore[no-untyped-call]
        adam.step()
    assert float((made - x.detach()).abs().max()) < 1e-12
    assert loss({"x": made}, {"y": labels}) < loss({"x": noise(5)}, {"y": labels})


SIZES = {"cnn": 16, "small": 8}


@functools.cache
def learnt_from_digits(name: str, labels: tuple[int, ...]) -> Params:
    """The weights of a network that has learnt its digits well, in float32."""
    images, digits = load_digits(return_X_y=True)
    draw, few = torch.Generator().manual_seed(0), torch.tensor(np.flatnonzero(np.isin(digits, labels)))
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(digits)
    x, module = F.interpolate(x, size=2 * [SIZES[name]]), build(name, (1, SIZES[name], SIZES[name]), 10, seed=0)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(300):
        some = few[torch.randint(len(few), (64,), generator=draw)]
        optimiser.zero_grad()
        F.cross_entropy(module(x[some]), y[some]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert float((module(x[few]).argmax(-1) == y[few]).float().mean()) > 0.95
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "together", "batch"),
    [("cnn", False, 7), ("cnn", True, 7), ("small", False, 1), ("small", True, 1)],
)
def test_a_hundred_steps_on_a_network_that_is_sure_make_nothing_of_the_batch(
    name: str, together: bool, batch: int
) -> None:
    """In float32 rounding is enlarged 1e5 times there, by ReLU and pooling, whose choices turn: it must be the same."""
    shape = 1, SIZES[name], SIZES[name]
    model = Model(build(name, shape, 10, seed=0), shape, 10)
    teacher, student = learnt_from_digits(name, tuple(range(10))), learnt_from_digits(name, (0, 1, 2))
    start = torch.randn(2, 9, *shape, generator=torch.Generator().manual_seed(1))
    whole = Recipe(steps=100, lr=0.01, betas=(0.5, 0.9), disagreement=0.1)

    def made(start: Tensor, recipe: Recipe, gradient: generation.Gradient, model: Model = model) -> Tensor:
        labels = torch.arange(len(start)) % 10
        found: Tensor = generation.generate(SingleLabel(10), model, teacher, student, labels, start, recipe, gradient)[
            "x"
        ]
        return found

    def of(recipe: Recipe) -> Tensor:
        if together:
            return vmap(functools.partial(made, recipe=recipe, gradient=functional, model=model.side_by_side))(start)
        return made(start[0], recipe, autograd)

    assert float((of(whole._replace(batch=batch)) - of(whole)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["cnn3", "mlp", "resnet18", "resnet18-gn", "pixel by pixel"])
def test_the_company_of_an_input_makes_no_difference_to_the_last_bit(name: str) -> None:
    shape, width = (3, 24, 24), 20
    torch.manual_seed(0)
    pixels = nn.Sequential(*(nn.Conv2d(3, width, 1), nn.SiLU(), nn.Conv2d(width, 7, 1), nn.Flatten()))
    module = (
        nn.Sequential(pixels, nn.Linear(7 * 576, 10)) if name == "pixel by pixel" else build(name, shape, 10, seed=0)
    )
    model = Model(module, shape, 10)
    teacher = model.params | model.buffers
    student = {key: 1.1 * value if value.is_floating_point() else value for key, value in teacher.items()}
    start, labels = torch.randn(9, *shape), torch.arange(9)

    def made(batch: int) -> Tensor:
        recipe = Recipe(steps=2, lr=0.01, betas=(0.5, 0.9), disagreement=0.1, batch=batch)
        task = SingleLabel(10)
        found: Tensor = generation.generate(task, model, teacher, student, labels, start, recipe, autograd)["x"]
        return found

    with torch.no_grad():
        assert torch.equal(made(1), made(0)) and torch.equal(made(4), made(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["cnn", "small"])
def test_nor_do_they_on_a_gpu(name: str) -> None:
    """Recorded and fused, where kernels are chosen by the shapes they are for."""
    shape = 1, SIZES[name], SIZES[name]
    model = Model(build(name, shape, 10, seed=0), shape, 10).to(torch.device("cuda"), torch.float32).side_by_side
    teacher, student = (
        {key: value.cuda() for key, value in learnt_from_digits(name, labels).items()}
        for labels in (tuple(range(10)), (0, 1, 2))
    )
    students = {key: torch.stack([value, 1.02 * value]) for key, value in student.items()}
    start = torch.randn(2, 17, *shape, generator=torch.Generator().manual_seed(1)).cuda()
    labels = torch.arange(17).cuda() % 10

    def made(batch: int) -> Tensor:
        recipe = Recipe(steps=100, lr=0.01, betas=(0.5, 0.9), disagreement=0.1, batch=batch)

        def step(state: State, fixed: State) -> State:
            def one(made: State, student: Params) -> State:
                loss = generation.objective(SingleLabel(10), model, fixed["teacher"], student, 0.1, 17)
                return generation.improve(loss, made, state["step"], recipe, functional)

            return {"made": vmap(one)(state["made"], fixed["students"]), "step": state["step"] + 1}

        begun = vmap(lambda x: generation.begin({"x": x}, labels, recipe))(start)
        state = {"made": begun, "step": torch.zeros((), dtype=torch.int64, device="cuda")}
        fixed = {"teacher": teacher, "students": students}
        found: Tensor = graphs.Graphs().repeat(step, "", state, fixed, recipe.length(17))["made"]["learnt"]["x"]
        return found

    with torch.no_grad():
        whole = made(0)
        assert float((whole - start).abs().max()) > 0.1
        for batch in (1, 3, 7):
            assert float((made(batch) - whole).abs().max()) < 1e-4


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_batch_decides_about_memory_alone(batch: int) -> None:
    model, teacher, student = pair()
    labels = torch.arange(7) % 4
    whole = Recipe(steps=30, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    one, other = (
        generation.generate(task, model, teacher, student, labels, noise(7), recipe, autograd)["x"]
        for recipe in (whole, whole._replace(batch=batch))
    )
    assert float((one - other).abs().max()) < 1e-12


def test_disagreement_makes_the_student_disagree() -> None:
    model, teacher, student = pair()
    labels = torch.arange(16) % 4
    recipe = Recipe(steps=100, lr=0.05, betas=(0.5, 0.9), disagreement=0.0, batch=0)
    js = {}
    for weight in (0.0, 2.0):
        made = generation.generate(
            task, model, teacher, student, labels, noise(16), recipe._replace(disagreement=weight), autograd
        )["x"]
        js[weight] = task.divergence(model.predict(teacher, made), model.predict(student, made)).mean().item()
    assert js[2.0] > js[0.0] + 0.01


def test_generation_leaves_running_statistics_alone() -> None:
    model = Model(batch_norm(), (1, 8, 8), 4)
    weights = model.params | model.buffers
    before = {name: value.clone() for name, value in weights.items()}
    recipe = Recipe(steps=3, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=0)
    generation.generate(task, model, weights, weights, torch.arange(4), torch.randn(4, 1, 8, 8), recipe, autograd)
    assert all(torch.equal(before[name], weights[name]) for name in weights)


def normalised() -> tuple[nn.Module, Model, Params]:
    """A network with BatchNorm over places and without, whose running statistics are far from those of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(
            *(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Flatten()),
            *(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)),
        ).double()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
                assert part.running_mean is not None and part.running_var is not None
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)
    model = Model(module, (2, 4, 4), 4).to(torch.device("cpu"), torch.float64)
    return module.eval(), model, model.params | model.buffers


def pictures(number: int) -> Tensor:
    return torch.randn(number, 2, 4, 4, generator=torch.Generator().manual_seed(2)).double()


def strangeness(module: nn.Module, x: Tensor) -> float:
    """R_feature by plain hooks on an ordinary network, in loops over channels."""
    total = 0.0

    def note(layer: nn.BatchNorm2d, given: tuple[Tensor]) -> None:
        nonlocal total
        channels = given[0].transpose(0, 1).flatten(1).tolist()
        means = [sum(values) / len(values) for values in channels]
        spread = [
            sum((v - mean) ** 2 for v in values) / len(values) for values, mean in zip(channels, means, strict=True)
        ]
        for found, running in ((means, layer.running_mean), (spread, layer.running_var)):
            assert running is not None
            total += sum((a - b) ** 2 for a, b in zip(found, running.tolist(), strict=True)) ** 0.5

    for part in (module[1], module[5]):  # type: ignore[index]
        part.register_forward_pre_hook(note)
    with torch.no_grad():
        module(x)
    return total


def test_strangeness_is_deepinversions_term_by_hand() -> None:
    module, model, weights = normalised()
    logits, found = model.strangeness(weights, pictures(5))
    assert torch.equal(logits, model.predict(weights, pictures(5)))
    assert found.item() == pytest.approx(strangeness(module, pictures(5)), rel=1e-12)
    moved = weights | {"1.running_mean": weights["1.running_mean"] + 1}
    assert abs(model.strangeness(moved, pictures(5))[1].item() - found.item()) > 0.1  # of these weights, no others


@pytest.mark.parametrize("gradient", [autograd, functional])
def test_the_gradient_of_the_statistics_agrees_with_finite_differences(gradient: generation.Gradient) -> None:
    _, model, weights = normalised()
    x, y = pictures(3), torch.tensor([0, 1, 3])
    loss = generation.objective(task, model, weights, weights, 0.1, 3, statistics=0.7)
    slope = gradient(loss, {"x": x}, {"y": y})[0]["x"].flatten()
    for place in range(0, x.numel(), 5):
        shift = torch.zeros_like(x)
        shift.view(-1)[place] = 1e-6
        rise = loss({"x": x + shift}, {"y": y}) - loss({"x": x - shift}, {"y": y})
        assert slope[place].item() == pytest.approx(rise.item() / 2e-6, rel=1e-4, abs=1e-7)


def test_the_statistics_of_a_batch_count_for_its_inputs() -> None:
    """Optimised two and one at a time: each part's own statistics, weighed by its share of all."""
    _, model, weights = normalised()
    x, y = pictures(3), torch.tensor([0, 1, 3])
    plain, whole = (generation.objective(task, model, weights, weights, 0.1, 3, statistics=s) for s in (0.0, 0.7))
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    more = sum(len(a) / 3 * model.strangeness(weights, a)[1] for a, _ in parts)
    found = sum(whole({"x": a}, {"y": b}) for a, b in parts)
    assert float(found) == pytest.approx(float(plain({"x": x}, {"y": y}) + 0.7 * more), rel=1e-12)


def test_inputs_become_less_strange() -> None:
    _, model, weights = normalised()
    recipe = Recipe(steps=60, lr=0.05, betas=(0.5, 0.9), disagreement=0.1)
    found = {}
    for strength in (0.0, 1.0):
        one = recipe._replace(statistics=strength)
        made = generation.generate(task, model, weights, weights, torch.arange(8) % 4, pictures(8), one, autograd)
        found[strength] = model.strangeness(weights, made["x"])[1].item()
    assert found[1.0] < 0.7 * found[0.0]


@pytest.mark.parametrize("batch", [0, 2, 3])
def test_what_is_shown_is_what_was_made(batch: int) -> None:
    model, teacher, student = pair()
    recipe = Recipe(steps=4, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, batch=batch, marks=(0, 2, 4), shown=(0, 3, 6))
    labels = torch.arange(7) % 4
    made = generation.generate(task, model, teacher, student, labels, noise(7), recipe, autograd)
    trail = made["trail"]
    assert trail.shape == (3, 3, 6)
    assert torch.equal(trail[0], noise(7)[[0, 3, 6]])
    assert torch.equal(trail[2], made["x"][[0, 3, 6]])
    halfway = generation.generate(
        task, model, teacher, student, labels, noise(7), recipe._replace(steps=2, marks=()), autograd
    )
    assert torch.equal(trail[1], halfway["x"][[0, 3, 6]])


def test_what_a_generator_shows_is_what_it_makes_after_so_many_steps() -> None:
    """Inputs are not made a second time to be shown, and showing them changes nothing."""
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).double(), (3, 4, 4), 4)
    teacher, student = model.params, {name: value + 0.1 for name, value in model.params.items()}
    numbers = torch.randn(sum(map(math.prod, generators.conv_sizes((3, 4, 4), 5))), dtype=torch.float64)
    noise = torch.randn(7, 5, dtype=torch.float64)
    calls = 0

    def render(learnt: Params) -> Tensor:
        nonlocal calls
        calls += 1
        return generators.inputs(model, learnt)

    def made(recipe: Recipe) -> State:
        state = generation.begin(generators.begin(model, noise, numbers), torch.arange(7) % 4, recipe, render)
        loss = generation.objective(task, model, teacher, student, 0.1, 7, render)
        for step in torch.arange(recipe.steps):
            state = generation.improve(loss, state, step, recipe, autograd)
        return generation.end(state, render(state["learnt"]), recipe)

    recipe = Recipe(steps=4, lr=0.05, betas=(0.5, 0.9), disagreement=0.1, marks=(0, 2, 4), shown=(0, 3, 6))
    found = made(recipe)
    assert calls == 1 + 4 + 1
    ways = [made(recipe._replace(steps=steps, marks=(), shown=()))["x"][[0, 3, 6]] for steps in recipe.marks]
    assert torch.equal(found["trail"], torch.stack(ways))
    assert torch.equal(found["x"], made(recipe._replace(marks=(), shown=()))["x"])
