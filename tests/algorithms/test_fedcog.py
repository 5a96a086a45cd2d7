"""Tests of FedCOG's options: each has its documented effect."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fedcog.algorithms import Algorithm, Draw, FedAvg, FedCOG, FedProx
from fedcog.core import rng, tree
from fedcog.core.optimizers import Optimizer
from fedcog.core.tree import Params
from fedcog.models import generators
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.zoo import build
from fedcog.testing import ToyFederation, max_difference, random_multi_label, random_vectors
from tests.support.generated_inputs import generate_inputs
from tests.support.user_models import USER_MODELS, user_generator

FEDCOG = FedCOG(count=8, steps=4, start_round=0, lr=0.1)


def test_stored_logits_are_the_teachers_outputs() -> None:
    _, client, generated = generate_inputs(FEDCOG)
    teacher: Params = client.broadcast["params"] | client.broadcast["buffers"]
    assert torch.equal(client.model.predict(teacher, generated["x"]), generated["logits"])


def test_previous_model_differs_from_global_and_shapes_inputs() -> None:
    _, client, generated = generate_inputs(FEDCOG)
    global_model = client.broadcast["params"] | client.broadcast["buffers"]
    assert max_difference(client.state["previous"], global_model) > 1e-4
    _, _, global_only = generate_inputs(dataclasses.replace(FEDCOG, source="global"))
    assert float((generated["x"] - global_only["x"]).abs().max()) > 1e-6
    _, _, no_disagreement = generate_inputs(dataclasses.replace(FEDCOG, lambda_dis=0.0))
    assert torch.equal(no_disagreement["x"], global_only["x"])


def test_noise_source_and_zero_steps_keep_the_noise() -> None:
    _, _, generated = generate_inputs(dataclasses.replace(FEDCOG, source="noise"))
    noise = rng.normal(3, "draw/noise", 1, torch.tensor([0]), (8, 1, 8, 8))[0].double()
    assert torch.equal(generated["x"], noise)
    _, _, no_steps = generate_inputs(dataclasses.replace(FEDCOG, steps=0))
    assert torch.equal(generated["x"], no_steps["x"])


def test_label_modes_choose_the_documented_targets() -> None:
    toy, client, generated = generate_inputs(FEDCOG)
    expected = toy.task.targets(
        client.class_counts, client.label_set_sizes, "complementary", torch.zeros(8, 5)
    )
    assert torch.equal(generated["y"], expected)
    _, _, generated = generate_inputs(dataclasses.replace(FEDCOG, labels="uniform"))
    assert torch.bincount(generated["y"], minlength=4).tolist() == [2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"supervision": "hard"},
        {"weighting": "fixed", "lambda_kd": 0.5},
        {"source": "noise"},
        {"source": "global"},
        {"labels": "uniform"},
        {"steps": 1},
        {"count": 5},
        {"lambda_dis": 3.0},
        {"beta1": 0.0},
        {"beta2": 0.5},
        {"lr": 0.5},
        {"start_round": 1},
        {"generator": "conv"},
        {"control": "loss"},
        {"control": "lr"},
    ],
)
def test_option_changes_the_result(change: dict[str, Any]) -> None:
    default = ToyFederation(FEDCOG).run()[-1].server["params"]
    changed = ToyFederation(dataclasses.replace(FEDCOG, **change)).run()[-1].server["params"]
    assert max_difference(default, changed) > 1e-9


def test_generation_batch_does_not_change_the_result() -> None:
    default = ToyFederation(FEDCOG).run()[-1].server["params"]
    batched = (
        ToyFederation(dataclasses.replace(FEDCOG, generation_batch=3)).run()[-1].server["params"]
    )
    assert max_difference(default, batched) < 1e-12


def test_fixed_weighting_with_lambda_zero_equals_the_inner_algorithm() -> None:
    inner = ToyFederation(FedProx()).run()[-1].server["params"]
    wrapped = ToyFederation(
        dataclasses.replace(FEDCOG, inner=FedProx(), weighting="fixed", lambda_kd=0.0)
    )
    assert max_difference(inner, wrapped.run()[-1].server["params"]) < 1e-12


def test_auto_weighting_is_balanced_and_fixed_for_multi_label() -> None:
    for dataset, default, alternative in (
        (None, "balanced", "fixed"),
        (random_multi_label(), "fixed", "balanced"),
    ):
        params = {}
        for weighting in ("auto", "balanced", "fixed"):
            algorithm = dataclasses.replace(FEDCOG, weighting=weighting)  # type: ignore[arg-type]
            params[weighting] = ToyFederation(algorithm, dataset=dataset).run()[-1].server["params"]
        assert max_difference(params["auto"], params[default]) == 0
        assert max_difference(params["auto"], params[alternative]) > 0


def test_hard_supervision_is_cross_entropy_with_the_teachers_label() -> None:
    algorithm = dataclasses.replace(FEDCOG, supervision="hard", weighting="fixed", lambda_kd=1.0)
    toy, client, generated = generate_inputs(algorithm)
    params = {name: value + 0.1 for name, value in client.broadcast["params"].items()}
    real = toy.data.examples(torch.arange(6))
    total, _ = algorithm.local_loss(params, {**real, "made": generated}, client)
    logits = client.model.predict(params, generated["x"])
    hard = torch.nn.functional.cross_entropy(logits, generated["logits"].argmax(-1))
    plain, _ = FedAvg().local_loss(params, real, client)
    assert total.item() == pytest.approx((plain + hard).item(), rel=1e-12)


def test_controls_equal_fedavg_with_lr_scaled_by_the_real_share() -> None:
    """Without weight decay, a factor on the loss is the same factor on the learning rate."""
    settings: dict[str, Any] = {
        "sizes": (50,),
        "rounds": 2,
        "optimizer": Optimizer(momentum=0.9, weight_decay=0.0),
    }
    toy = ToyFederation(FedAvg(), **settings)
    counts = toy.simulator.class_counts[0]
    share = int(counts.sum()) / int(counts.max() * len(counts))
    assert 0 < share < 0.9
    fedavg = ToyFederation(FedAvg(), lr=0.05 * share, **settings).run()[-1].server["params"]
    for control in ("loss", "lr"):
        algorithm = dataclasses.replace(FEDCOG, control=control)  # type: ignore[arg-type]
        params = ToyFederation(algorithm, **settings).run()[-1].server["params"]
        assert max_difference(params, fedavg) < 1e-12


@pytest.mark.slow
def test_conv_generator_lowers_the_teachers_loss() -> None:
    conv = dataclasses.replace(FEDCOG, generator="conv", steps=12, lr=0.01, count=16)
    _, client, generated = generate_inputs(conv)
    _, _, initial = generate_inputs(dataclasses.replace(conv, steps=0))
    assert generated["x"].shape == (16, 1, 8, 8)
    assert float(generated["x"].mean()) == pytest.approx(0, abs=1e-6)
    assert float(generated["x"].std()) == pytest.approx(1, rel=0.01)
    teacher: Params = client.broadcast["params"] | client.broadcast["buffers"]
    assert torch.equal(client.model.predict(teacher, generated["x"]), generated["logits"])
    initial_loss = float(client.task.loss(initial["logits"], initial["y"]).mean())
    final_loss = float(client.task.loss(generated["logits"], generated["y"]).mean())
    assert final_loss < initial_loss - 0.01


def test_conv_generator_is_rejected_for_inputs_other_than_images() -> None:
    with pytest.raises(ModelError, match="the inputs here are not images"):
        ToyFederation(
            dataclasses.replace(FEDCOG, generator="conv"),
            dataset=random_vectors(),
            module=nn.Linear(5, 4),
            sizes=(30,),
        ).run()


CUSTOM = dataclasses.replace(FEDCOG, generator="custom", noise=5)


def test_custom_generator_starts_from_its_weights_in_every_round() -> None:
    generator = generators.check_generator(user_generator(), 5, (1, 8, 8))
    toy, _, initial = generate_inputs(dataclasses.replace(CUSTOM, steps=0), generator=generator)
    noise = rng.normal(3, "draw/noise", 1, torch.tensor([0]), (8, 5))[0].double()
    # In training mode, so that BatchNorm normalizes by the batch.
    expected = user_generator(dropout=0.0).double().train()(noise).detach()
    assert float((initial["x"] - expected).abs().max()) < 1e-12
    toy, client, generated = generate_inputs(CUSTOM, generator=generator)
    initial_loss = float(client.task.loss(initial["logits"], initial["y"]).mean())
    final_loss = float(client.task.loss(generated["logits"], generated["y"]).mean())
    assert final_loss < initial_loss - 0.01
    assert toy.model.generator is not None
    after_training = toy.model.generator.state_dict()
    assert all(
        torch.equal(value.double(), after_training[name])
        for name, value in generator.state_dict().items()
    )


def test_frozen_generator_weights_do_not_change() -> None:
    frozen = nn.Sequential(
        nn.Linear(5, 64, bias=False).requires_grad_(False), nn.Unflatten(1, (1, 8, 8))
    )
    trainable = copy.deepcopy(frozen).requires_grad_()
    residuals = []
    for generator in (frozen, trainable):
        _, _, generated = generate_inputs(CUSTOM, generator=generator)
        basis = frozen[0].weight.detach().double()
        inputs = generated["x"].flatten(1).T
        projection = basis @ torch.linalg.lstsq(basis, inputs).solution
        residuals.append(float((inputs - projection).abs().max()))
    assert residuals[0] < 1e-9 < 1e-3 < residuals[1]


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["none", "conv", "custom"])
def test_vmap_equals_loop_with_batchnorm_loss(generator: str) -> None:
    algorithm = dataclasses.replace(FEDCOG, generator=generator, noise=5, lambda_bn=0.5)
    settings: dict[str, Any] = {"module": USER_MODELS["batch-norm"]()}
    if generator == "custom":
        settings["generator"] = generators.check_generator(user_generator(), 5, (1, 8, 8))
    loop = ToyFederation(algorithm, "loop", **settings).final_state()
    vmap = ToyFederation(algorithm, "vmap", **settings).final_state()
    assert max_difference(loop, vmap) < 1e-9
    without_loss = dataclasses.replace(algorithm, lambda_bn=0.0)
    assert max_difference(loop, ToyFederation(without_loss, **settings).final_state()) > 1e-6


def test_running_norms_start_with_almost_no_distillation_loss() -> None:
    """The paper's lemma assumes it; with batch statistics the student differs from the teacher."""
    losses = {}
    for norms in ("batch", "running"):
        algorithm = dataclasses.replace(FEDCOG, norms=norms)
        toy, client, generated = generate_inputs(algorithm, module=USER_MODELS["batch-norm"]())
        client = dataclasses.replace(client, buffers=client.broadcast["buffers"])
        outputs = algorithm.outputs(
            client.broadcast["params"],
            toy.data.examples(torch.arange(6)) | {"made": generated},
            client,
        )
        teacher = client.model.predict(
            client.broadcast["params"] | client.broadcast["buffers"], generated["x"]
        )
        assert torch.equal(generated["logits"], teacher)
        losses[norms] = float(toy.task.distillation_loss(teacher, outputs["made"]).mean())
    assert losses["batch"] > 1e-3
    # Not zero: the real batch has already moved the running statistics a little.
    assert losses["running"] < losses["batch"] / 10


def test_vmap_equals_loop_with_running_norms() -> None:
    settings: dict[str, Any] = {"module": USER_MODELS["batch-norm"]()}
    running = dataclasses.replace(FEDCOG, norms="running")
    loop = ToyFederation(running, "loop", **settings).final_state()
    vmap = ToyFederation(running, "vmap", **settings).final_state()
    assert max_difference(loop, vmap) < 1e-9
    assert max_difference(loop, ToyFederation(FEDCOG, **settings).final_state()) > 1e-6
    # A network without BatchNorm does not depend on the setting.
    without_batch_norm = ToyFederation(dataclasses.replace(FEDCOG, norms="batch")).final_state()
    assert max_difference(without_batch_norm, ToyFederation(running).final_state()) == 0


@pytest.mark.slow
def test_missing_network_features_are_errors() -> None:
    with pytest.raises(ModelError, match="this network has none: set it to 0"):
        ToyFederation(
            dataclasses.replace(FEDCOG, lambda_bn=0.5),
            module=build("resnet18-gn", (1, 8, 8), 4, seed=0),
        )
    with pytest.raises(ModelError, match="8 inputs do not divide into batches of 3: choose"):
        ToyFederation(
            dataclasses.replace(FEDCOG, lambda_bn=0.5, generation_batch=3),
            module=build("resnet18", (1, 8, 8), 4, seed=0),
        )
    with pytest.raises(ModelError, match="pass it from Python"):
        ToyFederation(CUSTOM)
    assert len(Model(build("resnet18", (1, 8, 8), 4, seed=0), (1, 8, 8), 4).batch_norms) == 20


class DoublePrecision(nn.Linear):
    """A generator with outputs in float64."""

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return super().forward(noise).reshape(-1, 1, 8, 8).double()


class ParameterNamedX(nn.Module):
    """A generator whose weights have the name of inputs elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(5, 64))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return (noise @ self.x).reshape(-1, 1, 8, 8)


def test_generator_parameters_may_have_any_name() -> None:
    linear = nn.Sequential(nn.Linear(5, 64, bias=False), nn.Unflatten(1, (1, 8, 8)))
    nn.init.ones_(linear[0].weight)
    inputs = [
        generate_inputs(CUSTOM, generator=generators.check_generator(module, 5, (1, 8, 8)))[2]["x"]
        for module in (ParameterNamedX(), linear)
    ]
    assert float((inputs[0] - inputs[1]).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (
            nn.Linear(5, 64),
            r"for noise of shape \(4, 5\) the generator gave \(4, 64\), "
            r"and inputs .* \(4, 1, 8, 8\)",
        ),
        (nn.Linear(6, 64), r"does not take noise of shape \(4, 5\).*Set fedcog.noise"),
        (nn.Linear, "is not an nn.Module: give an instance"),
        (DoublePrecision(5, 64), "gave torch.float64, and inputs are torch.float32"),
    ],
)
def test_unusable_generator_is_rejected(generator: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        generators.check_generator(generator, 5, (1, 8, 8))


def test_generator_with_batch_norm_needs_two_inputs() -> None:
    generator = nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.Unflatten(1, (1, 8, 8)))
    with pytest.raises(ModelError, match=r"cannot make a single input: .*Set fedcog.count to 2"):
        generate_inputs(
            dataclasses.replace(CUSTOM, count=1),
            generator=generators.check_generator(generator, 5, (1, 8, 8)),
        )
    _, _, generated = generate_inputs(
        dataclasses.replace(CUSTOM, count=2),
        generator=generators.check_generator(generator, 5, (1, 8, 8)),
    )
    assert bool(generated["x"].isfinite().all())


def test_generator_that_draws_random_numbers_is_rejected() -> None:
    class Random(nn.Module):
        def forward(self, noise: torch.Tensor) -> torch.Tensor:
            return noise + torch.rand(noise.shape)

    with pytest.raises(ModelError, match="must be drawing random numbers"):
        generators.check_generator(Random(), 5, (5,))


def test_conv_generator_equals_its_network_with_the_same_weights() -> None:
    conv = dataclasses.replace(FEDCOG, generator="conv", noise=7, steps=0)
    network = generators.ConvGenerator((1, 8, 8), noise=7)
    numbers = rng.normal(
        3, "draw/generator", 1, torch.tensor([0]), (sum(p.numel() for p in network.parameters()),)
    )
    network.double().load_state_dict(generators.conv_weights(numbers[0].double(), (1, 8, 8), 7))
    _, _, drawn = generate_inputs(conv)
    _, _, loaded = generate_inputs(conv, generator=network)
    assert torch.equal(drawn["x"], loaded["x"])


def test_payload_has_fedavgs_names_and_shapes() -> None:
    def payload_shapes(algorithm: Algorithm) -> dict[str, tuple[int, ...]]:
        toy = ToyFederation(algorithm, rounds=1)
        broadcast = algorithm.broadcast(toy.server.state)
        total = toy.run_clients([0, 1, 2], 0, broadcast, lr=0.1).total
        return {name: tuple(value.shape) for name, value in tree.flatten(total).items()}

    assert payload_shapes(FEDCOG) == payload_shapes(FedAvg())


def test_artifacts_show_the_generated_inputs_by_step() -> None:
    toy = ToyFederation(FEDCOG, rounds=1)
    artifacts = toy.run()[-1].artifacts
    assert artifacts["steps"].tolist() == [0, 1, 2, 3, 4]
    assert artifacts["images"].shape == (5, 8, 1, 8, 8)
    assert not ToyFederation(dataclasses.replace(FEDCOG, start_round=5)).run()[-1].artifacts


@dataclasses.dataclass(frozen=True)
class FiveGenerationSteps(Algorithm):
    """An inner algorithm with five generation steps of its own."""

    def request_draws(self, round, model, batch_size):  # type: ignore[no-untyped-def]
        return {"z": Draw((2,))}

    def num_generation_steps(self, round: int) -> int:
        return 5

    def generation_step(self, gen_state, client):  # type: ignore[no-untyped-def]
        return gen_state | {"z": torch.where(client.step < 5, gen_state["z"] + 1, gen_state["z"])}


@pytest.mark.parametrize("source", ["noise", "global+local"])
def test_inner_algorithm_has_its_own_number_of_generation_steps(source: str) -> None:
    algorithm = dataclasses.replace(FEDCOG, source=source)
    _, _, unwrapped = generate_inputs(algorithm)
    _, _, wrapped = generate_inputs(dataclasses.replace(algorithm, inner=FiveGenerationSteps()))
    assert torch.equal(unwrapped["x"], wrapped["x"])
