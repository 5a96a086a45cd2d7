"""Tests of gradient inversion: by hand, in closed form, and on small networks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.studies.audit.inversion import (
    AttackConfig,
    Knowledge,
    closed_form_inputs,
    cosine_cost,
    head_scores,
    infer_labels,
    invert,
    simulated_gradient,
    total_variation,
)

NUM_CLASSES = 4


def known(network: nn.Module, shape: tuple[int, ...], multi_label: bool = False) -> Knowledge:
    """Return an attacker who knows a network, but no gradient yet."""
    model = Model(network, shape, NUM_CLASSES, batch_size=2)
    like = next(iter(model.params.values()))
    low = like.new_tensor(0.0)
    return Knowledge(
        model, model.params, model.buffers, multi_label, {}, low, low + 1, is_image=len(shape) == 3
    )


def observed(attacker: Knowledge, x: Tensor, y: Tensor) -> Knowledge:
    """Return the attacker after it has seen the gradient of some examples."""
    probabilities = y if y.dim() == 2 else F.one_hot(y, NUM_CLASSES)
    gradient = simulated_gradient(attacker, x, probabilities.to(x))
    return attacker._replace(gradient=gradient)


def mean_squared_error(first: Tensor, second: Tensor) -> float:
    return float((first - second).square().mean())


def conv_network() -> nn.Module:
    """Return a small network without pooling, whose gradients give an image away."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 4)
    )


def smooth_image(size: int = 8) -> Tensor:
    ramp = torch.linspace(0, math.pi, size)
    return (ramp.sin()[:, None] * ramp.sin()[None]).expand(1, 1, size, size).contiguous()


def test_cosine_cost_of_parallel_orthogonal_and_opposite_gradients() -> None:
    first = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}
    assert float(cosine_cost({k: 3 * v for k, v in first.items()}, first)) == pytest.approx(0)
    orthogonal = {"a": torch.tensor([0.0, 5.0]), "b": torch.tensor([0.0])}
    assert float(cosine_cost(orthogonal, first)) == pytest.approx(1)
    assert float(cosine_cost({k: -v for k, v in first.items()}, first)) == pytest.approx(2)


def test_cosine_is_over_the_whole_model_not_by_layer() -> None:
    first = {"a": torch.tensor([1.0]), "b": torch.tensor([0.0])}
    second = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert float(cosine_cost(first, second)) == pytest.approx(1 - 3 / 5)


def test_total_variation_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    across = (1 + 3) / 2
    down = (0 + 2) / 2
    assert float(total_variation(image)) == across + down
    assert float(total_variation(torch.ones(2, 3, 4, 4))) == 0


def test_label_of_one_example_is_the_row_that_sums_lowest() -> None:
    scores = torch.tensor([[0.7, 1.4], [-0.7, -1.4]]).sum(1)
    assert scores.tolist() == pytest.approx([2.1, -2.1])
    assert infer_labels(scores, 1).tolist() == [1]


def test_labels_of_a_batch_are_inferred_with_repetitions() -> None:
    # Uniform outputs over four classes, labels 0, 0, 0, 2: 1/4 - share of the label.
    scores = torch.tensor([0.25 - 0.75, 0.25, 0.25 - 0.25, 0.25])
    scores[2] -= 0.01
    assert infer_labels(scores, 4).tolist() == [0, 0, 0, 2]


def test_head_without_bias_is_read_from_its_weights() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, NUM_CLASSES, bias=False))
    attacker = known(network, (2,))
    gradient = {"1.weight": torch.tensor([[1.0, 2.0], [-3.0, 0.0], [0.0, 0.0], [0.0, 1.0]])}
    scores = head_scores(attacker.model, gradient)
    assert scores is not None and scores.tolist() == [3, -3, 0, 1]


def test_input_of_a_linear_layer_by_hand() -> None:
    gradient = {
        "weight": torch.tensor([[0.7, 1.4], [-0.7, -1.4]]),
        "bias": torch.tensor([0.7, -0.7]),
    }
    (found,) = closed_form_inputs(gradient, (2,))
    torch.testing.assert_close(found, torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_first_layer_gives_one_example_away_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    attacker = known(network, (12,))
    x = torch.rand(1, 12, dtype=dtype)
    found = invert(observed(attacker, x, torch.tensor([2])), 1, AttackConfig(iterations=1))
    assert found.is_closed_form and found.labels.tolist() == [2]
    torch.testing.assert_close(found.inputs, x, rtol=1e-4, atol=1e-5)


def test_attack_recovers_an_image_well_above_the_baseline() -> None:
    attacker = known(conv_network(), (1, 8, 8))
    image = smooth_image()
    shown = []
    found = invert(
        observed(attacker, image, torch.tensor([3])),
        1,
        AttackConfig(iterations=400),
        lambda step, cost: shown.append((step, cost)),
    )
    error = mean_squared_error(found.inputs, image)
    baseline = mean_squared_error(torch.full_like(image, float(image.mean())), image)
    assert found.labels.tolist() == [3]
    assert error < baseline / 30, (error, baseline)  # 15 dB
    assert shown[-1][0] == 400 and found.cost < 0.01
    assert bool((found.inputs >= 0).all()) and bool((found.inputs <= 1).all())


def test_attack_with_optimized_labels_finds_label_and_image() -> None:
    attacker = known(conv_network(), (1, 8, 8))
    image = smooth_image()
    config = AttackConfig(iterations=400, labels="optimized")
    found = invert(observed(attacker, image, torch.tensor([1])), 1, config)
    assert found.labels.tolist() == [1]
    assert mean_squared_error(found.inputs, image) < 0.01


def test_attack_works_with_batch_norm_max_pooling_and_several_labels() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    attacker = known(network, (3, 8, 8), multi_label=True)
    x = torch.rand(2, 3, 8, 8)
    y = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    buffers = {name: value.clone() for name, value in attacker.buffers.items()}
    found = invert(observed(attacker, x, y), 2, AttackConfig(iterations=20))
    assert found.inputs.shape == x.shape and found.labels.shape == (2, 4)
    assert math.isfinite(found.cost)
    for name, value in attacker.buffers.items():
        torch.testing.assert_close(value, buffers[name])


def test_attack_is_repeatable_and_depends_on_the_seed() -> None:
    attacker = observed(known(conv_network(), (1, 8, 8)), smooth_image(), torch.tensor([0]))
    first, again, other = (
        invert(attacker, 1, AttackConfig(iterations=5, seed=seed)).inputs for seed in (0, 0, 1)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)


class NoSecondDerivative(torch.autograd.Function):
    """The identity, whose backward pass cannot be differentiated."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, slope: Tensor) -> Tensor:
        return slope


def test_network_without_second_derivatives_is_refused_with_a_reason() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(NoSecondDerivative.apply(torch.tanh(x)).flatten(1))
            return NoSecondDerivative.apply(logits)

    attacker = known(Once(), (1, 8, 8))
    attacker = observed(attacker, smooth_image(), torch.tensor([0]))
    with pytest.raises(ModelError, match="no second derivatives"):
        invert(attacker, 1, AttackConfig(iterations=2))
