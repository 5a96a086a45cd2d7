"""Tests of `fedcog.generate` in a plain PyTorch loop, against the engine."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcog
from fedcog.algorithms import FedCOG
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.engine.cohort import RoundSpec
from fedcog.models.checks import ModelError
from fedcog.models.zoo import build
from fedcog.testing import NUM_CLASSES, ToyFederation, max_difference, random_multi_label
from tests.support.user_models import USER_MODELS, user_generator

SHAPE = (1, 8, 8)
OPTIONS = {"count": 8, "steps": 4, "lr": 0.1}
COUNTS = [9, 0, 3, 1]
"""Class counts of a client that lacks most of classes 1 to 3."""


def small_network(seed: int = 0) -> nn.Module:
    return build("small", SHAPE, NUM_CLASSES, seed=seed)


def with_weights(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Return a copy of a network with other weights."""
    filled = copy.deepcopy(module).double()
    filled.load_state_dict(filled.state_dict() | weights)
    return filled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("small", {}),
        ("batch-norm", {}),
        ("batch-norm", {"lambda_bn": 0.1}),
        ("small", {"weighting": "fixed", "lambda_kd": 0.7}),
        ("small", {"supervision": "hard", "labels": "uniform"}),
        ("small", {"generation_batch": 3}),
        ("small", {"generator": "conv", "noise": 5}),
    ],
)
def test_plain_loop_matches_the_engine(name: str, options: dict[str, Any]) -> None:
    """Train a client's second round with torch's SGD and compare with the engine."""
    module = USER_MODELS[name]() if name in USER_MODELS else build(name, SHAPE, NUM_CLASSES, seed=2)
    algorithm = dataclasses.replace(FedCOG(**OPTIONS | {"start_round": 0}), **options)
    toy = ToyFederation(algorithm, module=copy.deepcopy(module), rounds=1)
    toy.run()
    broadcast = algorithm.broadcast(toy.server.state)
    state = toy.simulator.client_state(algorithm, toy.server.state, 1)
    spec = RoundSpec(algorithm, broadcast, round=1, lr=0.05, evaluate_local=False)
    expected, _ = toy.simulator.train_client(spec, 1, state)

    global_model = with_weights(module, broadcast["params"] | broadcast["buffers"])
    previous = with_weights(module, state["previous"])
    model = copy.deepcopy(global_model).train()
    generated = fedcog.generate(
        global_model,
        previous,
        toy.simulator.class_counts[1].tolist(),
        SHAPE,
        seed=3,
        round=1,
        client=1,
        **OPTIONS | options,
    )
    plan = toy.data.plan_batches(1, torch.tensor([1]), 3, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-5)
    for step in range(3):
        crops = None if plan.crops is None else plan.crops[:, step]
        batch = toy.data.examples(plan.indices[:, step], crops)
        optimizer.zero_grad()
        real_loss = F.cross_entropy(model(batch["x"][0]), batch["y"][0])
        generated.loss(real_loss, model, size=6).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weight = expected.total["weight"]
    expected_update = tree.scale(1 / weight, expected.total["delta"])
    update = {
        key: value.detach() - broadcast["params"][key] for key, value in model.named_parameters()
    }
    assert max_difference({key: update[key] for key in expected_update}, expected_update) < 1e-9
    for key, value in expected.total["buffers"].items():
        change = dict(model.named_buffers())[key] - broadcast["buffers"][key]
        assert float((change - value / weight).abs().max()) < 1e-9, (
            "generated inputs change no running statistics"
        )


def test_multi_label_generation() -> None:
    toy = ToyFederation(FedCOG(**OPTIONS, start_round=0), dataset=random_multi_label(), rounds=1)
    weights = toy.server.state["params"]
    module = with_weights(build("small", SHAPE, NUM_CLASSES, seed=2), weights)
    counts = toy.simulator.class_counts[0].tolist()
    sizes = toy.simulator.label_set_sizes[0].tolist()
    generated = fedcog.generate(module, None, counts, SHAPE, label_set_sizes=sizes, **OPTIONS)
    assert generated.y.dtype == torch.bool and generated.y.shape == (8, NUM_CLASSES)
    real_loss = torch.zeros((), dtype=torch.float64)
    assert float(generated.loss(real_loss, module).detach()) == pytest.approx(0, abs=1e-12), (
        "the network is its own teacher"
    )


def test_no_previous_model_equals_the_global_model_as_previous() -> None:
    module = small_network()
    without_previous, with_itself = (
        fedcog.generate(module, previous, COUNTS, SHAPE, **OPTIONS) for previous in (None, module)
    )
    assert torch.equal(without_previous.x, with_itself.x)
    assert set(without_previous.y.tolist()) == {1, 2, 3}, "the classes that the client lacks"
    with_other = fedcog.generate(module, small_network(seed=1), COUNTS, SHAPE, **OPTIONS)
    assert float((with_other.x - without_previous.x).abs().max()) > 1e-4


def test_generate_leaves_the_network_unchanged() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES)).train()
    before = copy.deepcopy(module.state_dict())
    generated = fedcog.generate(module, None, COUNTS, SHAPE, **OPTIONS)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(value.grad is None for value in module.parameters())
    assert torch.equal(generated.logits, copy.deepcopy(module).eval()(generated.x))
    assert module[2].weight.requires_grad


def test_frozen_models_generate_the_same_inputs() -> None:
    global_model = small_network(seed=0)
    previous = small_network(seed=1)
    expected = fedcog.generate(global_model, previous, COUNTS, SHAPE, **OPTIONS)
    global_model.requires_grad_(False)
    previous.requires_grad_(False)
    frozen = fedcog.generate(global_model, previous, COUNTS, SHAPE, **OPTIONS)
    assert torch.equal(expected.x, frozen.x)


def test_user_generator() -> None:
    generated = fedcog.generate(
        small_network(), None, COUNTS, SHAPE, generator=user_generator(), noise=5, **OPTIONS
    )
    assert generated.x.shape == (8, *SHAPE)


def test_batches_use_every_input_once_per_pass() -> None:
    generated = fedcog.generate(small_network(), None, COUNTS, SHAPE, **OPTIONS)
    served = torch.cat([generated.batch(4)["x"] for _ in range(200)])
    for start in range(0, len(served), 8):
        assert len(torch.unique(served[start : start + 8], dim=0)) == 8


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_invalid_batch_size_does_not_affect_the_next_batch(size: Any) -> None:
    first, second = (
        fedcog.generate(small_network(), None, COUNTS, SHAPE, **OPTIONS) for _ in range(2)
    )
    with pytest.raises(ValueError, match="must be a positive integer, not"):
        first.batch(size)
    assert torch.equal(first.batch(4)["x"], second.batch(4)["x"])


@pytest.mark.parametrize("name", ["seed", "round", "client"])
def test_integers_are_bounded_and_may_be_tensors(name: str) -> None:
    model = small_network()
    with pytest.raises(
        ConfigError, match=f"{name} needs an integer from 0 to {2**63 - 1}, not {2**63}"
    ):
        fedcog.generate(model, None, COUNTS, SHAPE, **OPTIONS | {name: 2**63})
    from_int, from_tensor = (
        fedcog.generate(model, None, COUNTS, SHAPE, **OPTIONS | {name: number})
        for number in (3, torch.tensor(3))
    )
    assert torch.equal(from_int.x, from_tensor.x)


def test_distillation_loss_refuses_empty_logits() -> None:
    with pytest.raises(ValueError, match="no logits to compare"):
        fedcog.distillation_loss(torch.empty(0, 4), torch.empty(0, 4))


def test_distillation_loss_is_the_kl_divergence() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    single_label = F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(fedcog.distillation_loss(student, teacher), single_label)
    p = teacher.sigmoid()
    q = student.sigmoid()
    per_label = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(
        fedcog.distillation_loss(student, teacher, multi_label=True), per_label.sum(-1).mean()
    )


@pytest.mark.parametrize(
    "counts",
    [
        [-1] * NUM_CLASSES,
        [0.5] * NUM_CLASSES,
        [float("nan")] * NUM_CLASSES,
        [[1]] * NUM_CLASSES,
        [2**62] * NUM_CLASSES,
        None,
        "many",
        {0: 1},
        ["a"] * NUM_CLASSES,
        [True] * NUM_CLASSES,
    ],
)
def test_invalid_class_counts_are_refused(counts: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"class_counts needs a list of integers from 0 to 1e\+12"
    ):
        fedcog.generate(small_network(), None, counts, SHAPE, **OPTIONS)


def test_weights_that_are_not_finite_are_refused() -> None:
    module = small_network()
    for value in module.parameters():
        nn.init.constant_(value, float("nan"))
    for steps in (4, 0):
        with pytest.raises(ModelError, match="not finite"):
            fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, **OPTIONS | {"steps": steps})


def test_class_counts_may_have_any_numeric_type() -> None:
    module = small_network()
    counts = [90, 0, 30, 60, 90, 0, 1, 2, 3, 127][:NUM_CLASSES]
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.float16)
    variants = [counts, torch.tensor(counts)]
    variants += [torch.tensor(counts, dtype=dtype) for dtype in dtypes]
    labels = [
        fedcog.generate(module, None, variant, SHAPE, source="noise").y for variant in variants
    ]
    assert all(torch.equal(generated, labels[0]) for generated in labels)
    assert int(labels[0].max()) < NUM_CLASSES


@pytest.mark.parametrize("disable_gradients", [torch.no_grad, torch.inference_mode])
def test_generate_works_without_gradient_mode(disable_gradients: Any) -> None:
    module = small_network()
    counts = [5, *[0] * (NUM_CLASSES - 1)]
    expected = fedcog.generate(module, None, counts, SHAPE, **OPTIONS)
    with disable_gradients():
        generated = fedcog.generate(module, None, counts, SHAPE, **OPTIONS)
    assert torch.equal(generated.x, expected.x)
    generated.loss(torch.tensor(1.0), module).backward()  # type: ignore[no-untyped-call]


def test_networks_that_cannot_be_copied_or_called_are_refused() -> None:
    module = small_network()
    counts = [1] * NUM_CLASSES
    with pytest.raises(
        ModelError, match=r"wrapped in DataParallel: give what is inside, model\.module"
    ):
        fedcog.generate(nn.DataParallel(module), None, counts, SHAPE)
    with pytest.raises(ModelError, match="has no shape yet"):
        fedcog.generate(
            nn.Sequential(nn.Flatten(), nn.LazyLinear(NUM_CLASSES)), None, counts, SHAPE
        )
    with pytest.raises(ModelError, match=r"OrderedDict is no nn\.Module"):
        fedcog.generate(module.state_dict(), None, counts, SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="must be a network like the global one, not OrderedDict"):
        fedcog.generate(module, module.state_dict(), counts, SHAPE)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="must have the form of the global one"):
        fedcog.generate(module, nn.Sequential(), counts, SHAPE)
    with_activation = copy.deepcopy(module)
    with_activation.last = with_activation(torch.zeros(2, *SHAPE)) + 0  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"cannot be copied .* may keep activations"):
        fedcog.generate(with_activation, None, counts, SHAPE)


def test_invalid_arguments_are_refused() -> None:
    module = small_network()
    counts = [1] * NUM_CLASSES
    for name, value in {"seed": 1.5, "round": "a", "client": "hospital-A"}.items():
        with pytest.raises(
            ConfigError, match=rf"{name} needs an integer from 0 to \d+, not '?{value}"
        ):
            fedcog.generate(module, None, counts, SHAPE, **{name: value})  # type: ignore[arg-type]
    for shape in (0, (), (1, 8, 0), ("a",), (1.5,)):
        with pytest.raises(ConfigError, match="input_shape needs the shape of one input"):
            fedcog.generate(module, None, counts, shape)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fedcog\.control needs the engine"):
        fedcog.generate(module, None, counts, SHAPE, control="lr")
    generated = fedcog.generate(module, None, counts, SHAPE, **OPTIONS)
    for size in (0, -1):
        with pytest.raises(ValueError, match="must be a positive integer, not"):
            generated.loss(torch.tensor(1.0), module, size)
    for name in ("seed", "round", "client"):
        with pytest.raises(ConfigError, match=rf"{name} needs an integer from 0 to \d+, not -1"):
            fedcog.generate(module, None, counts, SHAPE, **{name: -1})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no weights"):
        fedcog.generate(nn.Flatten(), None, [1] * 64, SHAPE)
    with pytest.raises(ValueError, match="but the teacher's have"):
        fedcog.distillation_loss(torch.zeros(3, 4), torch.zeros(1, 4))
    with pytest.raises(
        ConfigError, match=r"unknown setting 'fedcog\.step': did you mean fedcog\.steps"
    ):
        fedcog.generate(module, None, counts, SHAPE, step=3)
    with pytest.raises(ConfigError, match="do not call generate"):
        fedcog.generate(module, None, counts, SHAPE, source="nothing")
    with pytest.raises(ModelError, match="logits of shape"):
        fedcog.generate(module, None, [1] * 7, SHAPE)
    with pytest.raises(ModelError, match="must have the form of the global one"):
        fedcog.generate(module, build("mlp", SHAPE, NUM_CLASSES, seed=0), counts, SHAPE)
