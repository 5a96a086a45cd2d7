"""FedCOG in a training loop that knows nothing of the engine, and yet comes to the same."""

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


def filled(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a network with other weights."""
    found = copy.deepcopy(module).double()
    found.load_state_dict(found.state_dict() | weights)
    return found


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
def test_a_plain_loop_comes_to_what_the_engine_comes_to(name: str, options: dict[str, Any]) -> None:
    """A client's second round, trained by torch's own SGD in a loop, ends where the engine ends."""
    module = USER_MODELS[name]() if name in USER_MODELS else build(name, SHAPE, NUM_CLASSES, seed=2)
    algorithm = dataclasses.replace(FedCOG(**OPTIONS | {"start_round": 0}), **options)
    toy = ToyFederation(algorithm, module=copy.deepcopy(module), rounds=1)
    toy.run()
    broadcast = algorithm.broadcast(toy.server.state)
    kept = toy.simulator.client_state(algorithm, toy.server.state, 1)
    spec = RoundSpec(algorithm, broadcast, round=1, lr=0.05, evaluate_local=False)
    expected, _ = toy.simulator.train_client(spec, 1, kept)

    given = filled(module, broadcast["params"] | broadcast["buffers"])
    previous = filled(module, kept["previous"])
    model = copy.deepcopy(given).train()
    made = fedcog.generate(
        given,
        previous,
        toy.simulator.class_counts[1].tolist(),
        SHAPE,
        seed=3,
        round=1,
        client=1,
        **OPTIONS | options,
    )
    plan = toy.data.plan_batches(1, torch.tensor([1]), 3, 6)
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-5)
    for step in range(3):
        batch = toy.data.examples(
            plan.indices[:, step], None if plan.crops is None else plan.crops[:, step]
        )
        optimiser.zero_grad()
        real = F.cross_entropy(model(batch["x"][0]), batch["y"][0])
        made.loss(real, model, size=6).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    weight = expected.total["weight"]
    delta = tree.scale(1 / weight, expected.total["delta"])
    own = {key: value - broadcast["params"][key] for key, value in model.named_parameters()}
    assert max_difference({key: own[key].detach() for key in delta}, delta) < 1e-9
    for key, value in expected.total["buffers"].items():
        moved = dict(model.named_buffers())[key] - broadcast["buffers"][key]
        assert float((moved - value / weight).abs().max()) < 1e-9, (
            "generated inputs move no statistics"
        )


def test_several_labels() -> None:
    toy = ToyFederation(FedCOG(**OPTIONS, start_round=0), dataset=random_multi_label(), rounds=1)
    weights = toy.server.state["params"]
    module = filled(build("small", SHAPE, NUM_CLASSES, seed=2), weights)
    counts = toy.simulator.class_counts[0].tolist()
    sizes = toy.simulator.label_set_sizes[0].tolist()
    made = fedcog.generate(module, None, counts, SHAPE, label_set_sizes=sizes, **OPTIONS)
    assert made.y.dtype == torch.bool and made.y.shape == (8, NUM_CLASSES)
    real = torch.zeros((), dtype=torch.float64)
    assert float(made.loss(real, module).detach()) == pytest.approx(0, abs=1e-12), (
        "it is its own teacher"
    )


def test_a_first_round_has_no_previous_model_and_disagrees_with_nothing() -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
    alone, both = (
        fedcog.generate(module, other, [9, 0, 3, 1], SHAPE, **OPTIONS) for other in (None, module)
    )
    assert torch.equal(alone.x, both.x)
    assert set(alone.y.tolist()) == {1, 2, 3}, "what is asked for is what the client lacks"
    other = fedcog.generate(
        module, build("small", SHAPE, NUM_CLASSES, seed=1), [9, 0, 3, 1], SHAPE, **OPTIONS
    )
    assert float((other.x - alone.x).abs().max()) > 1e-4


def test_networks_may_do_what_they_like_in_training_and_are_left_as_they_are() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES)).train()
    before = copy.deepcopy(module.state_dict())
    made = fedcog.generate(module, None, [9, 0, 3, 1], SHAPE, **OPTIONS)
    assert module.training and all(
        torch.equal(before[name], value) for name, value in module.state_dict().items()
    )
    assert all(value.grad is None for value in module.parameters())
    assert torch.equal(made.logits, copy.deepcopy(module).eval()(made.x))
    assert module[2].weight.requires_grad


def test_frozen_models_are_taken_as_they_are() -> None:
    """Who hands in models may have frozen them, and every weight counts all the same."""
    one, other = (build("small", SHAPE, NUM_CLASSES, seed=seed) for seed in (0, 1))
    expected = fedcog.generate(one, other, [9, 0, 3, 1], SHAPE, **OPTIONS)
    frozen = fedcog.generate(
        one.requires_grad_(False), other.requires_grad_(False), [9, 0, 3, 1], SHAPE, **OPTIONS
    )
    assert torch.equal(expected.x, frozen.x)


def test_a_generator_of_ones_own() -> None:
    made = fedcog.generate(
        build("small", SHAPE, NUM_CLASSES, seed=0),
        None,
        [9, 0, 3, 1],
        SHAPE,
        generator=user_generator(),
        noise=5,
        **OPTIONS,
    )
    assert made.x.shape == (8, *SHAPE)


def test_every_input_is_served_once_before_any_comes_twice() -> None:
    made = fedcog.generate(
        build("small", SHAPE, NUM_CLASSES, seed=0), None, [9, 0, 3, 1], SHAPE, **OPTIONS
    )
    seen = torch.cat([made.batch(4)["x"] for _ in range(200)])
    for start in range(0, len(seen), 8):
        assert len(torch.unique(seen[start : start + 8], dim=0)) == 8


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_a_batch_that_cannot_be_leaves_the_next_as_it_would_have_been(size: Any) -> None:
    first, second = (
        fedcog.generate(
            build("small", SHAPE, NUM_CLASSES, seed=0), None, [9, 0, 3, 1], SHAPE, **OPTIONS
        )
        for _ in range(2)
    )
    with pytest.raises(ValueError, match="must be a positive integer, not"):
        first.batch(size)
    assert torch.equal(first.batch(4)["x"], second.batch(4)["x"])


@pytest.mark.parametrize("name", ["seed", "round", "client"])
def test_numbers_too_large_for_a_computer_are_refused_and_those_of_torch_taken(name: str) -> None:
    model = build("small", SHAPE, NUM_CLASSES, seed=0)
    with pytest.raises(
        ConfigError, match=f"{name} needs an integer from 0 to {2**63 - 1}, not {2**63}"
    ):
        fedcog.generate(model, None, [9, 0, 3, 1], SHAPE, **OPTIONS | {name: 2**63})
    plain, of_torch = (
        fedcog.generate(model, None, [9, 0, 3, 1], SHAPE, **OPTIONS | {name: number})
        for number in (3, torch.tensor(3))
    )
    assert torch.equal(plain.x, of_torch.x)


def test_of_no_logits_there_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no logits to compare"):
        fedcog.distillation_loss(torch.empty(0, 4), torch.empty(0, 4))


def test_the_distillation_loss_is_a_divergence() -> None:
    """Against torch's own, single labels and several."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    single = F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(fedcog.distillation_loss(student, teacher), single)
    p = teacher.sigmoid()
    q = student.sigmoid()
    each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(
        fedcog.distillation_loss(student, teacher, multi_label=True), each.sum(-1).mean()
    )


@pytest.mark.parametrize(
    "counts",
    [
        *(
            [-1] * NUM_CLASSES,
            [0.5] * NUM_CLASSES,
            [float("nan")] * NUM_CLASSES,
            [[1]] * NUM_CLASSES,
            [2**62] * NUM_CLASSES,
        ),
        *(None, "many", {0: 1}, ["a"] * NUM_CLASSES, [True] * NUM_CLASSES),
    ],
)
def test_counts_are_numbers_of_examples(counts: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"class_counts needs a list of integers from 0 to 1e\+12"
    ):
        fedcog.generate(build("small", SHAPE, NUM_CLASSES, seed=0), None, counts, SHAPE, **OPTIONS)


def test_what_is_not_finite_is_not_trained_on() -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
    for value in module.parameters():
        nn.init.constant_(value, float("nan"))
    for steps in (4, 0):
        with pytest.raises(ModelError, match="not finite"):
            fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, **OPTIONS | {"steps": steps})


def test_counts_may_be_of_any_kind_of_number() -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
    counts = [90, 0, 30, 60, 90, 0, 1, 2, 3, 127][:NUM_CLASSES]
    asked = [
        fedcog.generate(module, None, kind, SHAPE, source="noise").y
        for kind in (counts, torch.tensor(counts))
    ]
    for kind in (torch.uint8, torch.int8, torch.int16, torch.float16):
        asked.append(
            fedcog.generate(module, None, torch.tensor(counts, dtype=kind), SHAPE, source="noise").y
        )
    assert all(torch.equal(one, asked[0]) for one in asked) and int(asked[0].max()) < NUM_CLASSES


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_it_may_be_called_where_gradients_are_off(around: Any) -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
    usual = fedcog.generate(module, None, [5, *[0] * (NUM_CLASSES - 1)], SHAPE, **OPTIONS)
    with around():
        made = fedcog.generate(module, None, [5, *[0] * (NUM_CLASSES - 1)], SHAPE, **OPTIONS)
    assert torch.equal(made.x, usual.x)
    made.loss(torch.tensor(1.0), module).backward()  # type: ignore[no-untyped-call]


def test_networks_that_cannot_be_copied_or_called_are_refused() -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
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
    kept = copy.deepcopy(module)
    kept.last = kept(torch.zeros(2, *SHAPE)) + 0  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"cannot be copied .* may keep activations"):
        fedcog.generate(kept, None, counts, SHAPE)


def test_what_cannot_work_is_told() -> None:
    module = build("small", SHAPE, NUM_CLASSES, seed=0)
    for name, value in {"seed": 1.5, "round": "a", "client": "hospital-A"}.items():
        with pytest.raises(
            ConfigError, match=rf"{name} needs an integer from 0 to \d+, not '?{value}"
        ):
            fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, **{name: value})  # type: ignore[arg-type]
    for shape in (0, (), (1, 8, 0), ("a",), (1.5,)):
        with pytest.raises(ConfigError, match="input_shape needs the shape of one input"):
            fedcog.generate(module, None, [1] * NUM_CLASSES, shape)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fedcog\.control needs the engine"):
        fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, control="lr")
    made = fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, **OPTIONS)
    for size in (0, -1):
        with pytest.raises(ValueError, match="must be a positive integer, not"):
            made.loss(torch.tensor(1.0), module, size)
    for name in ("seed", "round", "client"):
        with pytest.raises(ConfigError, match=rf"{name} needs an integer from 0 to \d+, not -1"):
            fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, **{name: -1})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no weights"):
        fedcog.generate(nn.Flatten(), None, [1] * 64, SHAPE)
    with pytest.raises(ValueError, match="but the teacher's have"):
        fedcog.distillation_loss(torch.zeros(3, 4), torch.zeros(1, 4))
    with pytest.raises(
        ConfigError, match=r"unknown setting 'fedcog\.step': did you mean fedcog\.steps"
    ):
        fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, step=3)
    with pytest.raises(ConfigError, match="do not call generate"):
        fedcog.generate(module, None, [1] * NUM_CLASSES, SHAPE, source="nothing")
    with pytest.raises(ModelError, match="logits of shape"):
        fedcog.generate(module, None, [1] * 7, SHAPE)
    with pytest.raises(ModelError, match="must have the form of the global one"):
        fedcog.generate(module, build("mlp", SHAPE, NUM_CLASSES, seed=0), [1] * NUM_CLASSES, SHAPE)
