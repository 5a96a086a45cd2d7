"""Initial weights of a user's network: they depend on the seed alone."""

import random
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fedcog.models.checks import ModelError
from fedcog.models.initialization import make_network


class Net(nn.Module):
    def __init__(self, num_classes: int, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Linear(5, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_classes_and_functions_start_from_the_seed() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = make_network(lambda: Net(3), (5,), 3, seed=0).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    again = make_network(Net, (5,), 3, seed=0).state_dict()
    other = make_network(Net, (5,), 3, seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["body.weight"], other["body.weight"])


def test_named_parameters_are_filled_in() -> None:
    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Linear(input_shape[0], num_classes)

    network = make_network(build, (5,), 3, seed=0)
    assert isinstance(network, nn.Linear)
    assert (network.in_features, network.out_features) == (5, 3)


def test_instances_are_returned_unchanged() -> None:
    network = Net(3)
    assert make_network(network, (5,), 3, seed=0) is network


def test_calls_that_cannot_work_are_explained() -> None:
    with pytest.raises(ModelError, match=r"cannot be called as Linear\(\).*model=lambda: Linear"):
        make_network(nn.Linear, (5,), 3, seed=0)
    with pytest.raises(ModelError, match="returned str, which is no"):
        make_network(lambda: "net", (5,), 3, seed=0)  # type: ignore[arg-type, return-value]

    def unseeded() -> nn.Module:
        layer = nn.Linear(5, 3)
        nn.init.constant_(layer.bias, random.random())
        return layer

    with pytest.raises(ModelError, match="other weights when it is called again"):
        make_network(unseeded, (5,), 3, seed=0)


def test_function_that_returns_one_network_again_and_again_is_refused() -> None:
    network = Net(3)
    body = nn.Linear(5, 4).requires_grad_(False)
    with pytest.raises(ModelError, match=r"same weights in every call.*inside the function"):
        make_network(lambda: network, (5,), 3, seed=0)
    with pytest.raises(ModelError, match="same weights in every call"):
        make_network(lambda: nn.Sequential(network, nn.Tanh()), (5,), 3, seed=0)
    make_network(lambda: nn.Sequential(body, nn.Linear(4, 3)), (5,), 3, seed=0)  # a frozen body


def test_constructor_may_import_a_torchvision_of_another_torch() -> None:
    """As `import torchvision` fails the first time, until its operators are declared."""
    calls = []

    def build() -> nn.Module:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("operator torchvision::nms does not exist")
        return nn.Linear(3, 2)

    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    assert isinstance(make_network(build, (3,), 2, 0), nn.Linear)


def test_import_in_the_middle_of_a_constructor_changes_no_weight() -> None:
    calls = []

    def build(fails: bool) -> nn.Module:
        first = nn.Linear(3, 4)
        calls.append(1)
        if fails and len(calls) == 1:
            raise RuntimeError("operator torchvision::nms does not exist")
        return nn.Sequential(first, nn.Linear(4, 2))

    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    failed = make_network(lambda: build(True), (3,), 2, 0).state_dict()
    expected = make_network(lambda: build(False), (3,), 2, 0).state_dict()
    assert all(torch.equal(failed[name], value) for name, value in expected.items())
