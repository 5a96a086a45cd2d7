import pytest
import torch
from torch import Tensor, nn

from fedcog import generation
from fedcog.federation.course import autograd, functional
from fedcog.generation import Recipe
from fedcog.models import Model
from fedcog.task import SingleLabel
from fedcog.tree import Params
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
