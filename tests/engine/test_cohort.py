"""Tests of local training: both mappings agree, for any network."""

import dataclasses

import pytest
import torch
from torch import nn

from fedcog.algorithms import Algorithm, Draw, ExtraData, FedAvg, FedCOG, FedProx
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer
from fedcog.core.tree import Params
from fedcog.models.functional import Model
from fedcog.testing import ToyFederation, max_difference, random_images
from tests.support.user_models import USER_MODELS

FEDCOG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
TEN_SIZES = (10, 12, 30, 11, 10, 25, 40, 17, 13, 22)


def final_numbers(toy: ToyFederation) -> Params:
    """Run a federation and return its states and the last round's records of clients."""
    rounds = toy.run()
    records = {
        f"{record['client']}/{key}": torch.tensor(float(value))
        for record in rounds[-1].record.to_line()["local"]
        for key, value in record.items()
    }
    return tree.flatten(rounds[-1].server) | toy.simulator.client_states.flatten() | records


@pytest.mark.parametrize("name", USER_MODELS)
@pytest.mark.parametrize("algorithm", [FedAvg(), FEDCOG], ids=["fedavg", "fedprox+fedcog"])
def test_loop_and_vmap_agree_for_user_models(name: str, algorithm: Algorithm) -> None:
    loop = final_numbers(ToyFederation(algorithm, "loop", module=USER_MODELS[name]()))
    vmap = final_numbers(ToyFederation(algorithm, "vmap", module=USER_MODELS[name]()))
    assert max_difference(loop, vmap) < 1e-9
    start = ToyFederation(algorithm, module=USER_MODELS[name]()).server.state
    trained = {key: value for key, value in loop.items() if key.startswith("params::")}
    assert all(
        float((value - start["params"][key[8:]]).abs().max()) > 1e-7
        for key, value in trained.items()
    )


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_cohort_of_ten_equals_ten_cohorts_of_one(mapping: str) -> None:
    def federation() -> ToyFederation:
        return ToyFederation(
            FEDCOG,
            mapping,  # type: ignore[arg-type]
            dataset=random_images(200),
            sizes=TEN_SIZES,
        )

    together = federation()
    one_by_one = federation()
    broadcast = FEDCOG.broadcast(together.server.state)
    total = together.run_clients(list(range(10)), 1, broadcast).total
    payloads = [one_by_one.run_clients([client], 1, broadcast).total for client in range(10)]
    sum_of_payloads = payloads[0]
    for payload in payloads[1:]:
        sum_of_payloads = tree.apply(torch.add, sum_of_payloads, payload)
    assert max_difference(tree.flatten(total), tree.flatten(sum_of_payloads)) < 1e-9
    client_states = [toy.simulator.client_states.flatten() for toy in (together, one_by_one)]
    assert max_difference(*client_states) < 1e-9


def test_loop_and_vmap_agree_after_one_float32_step() -> None:
    algorithm = dataclasses.replace(FEDCOG, start_round=0, steps=1)
    loop, vmap = (
        ToyFederation(algorithm, mapping, dtype=torch.float32, steps=1, rounds=1)
        .run()[-1]
        .server["params"]
        for mapping in ("loop", "vmap")
    )
    assert max_difference(loop, vmap) < 1e-5


@pytest.mark.parametrize("algorithm", [FedAvg(), FEDCOG], ids=["fedavg", "fedprox+fedcog"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["residual", "batch-norm"])
def test_loop_and_vmap_agree_with_unequal_local_steps(
    name: str, kind: str, algorithm: Algorithm
) -> None:
    def federation(mapping: str) -> ToyFederation:
        return ToyFederation(
            algorithm,
            mapping,  # type: ignore[arg-type]
            module=USER_MODELS[name](),
            epochs=1.0,
            batch=8,
            optimizer=Optimizer(kind, 0.9, 1e-2),  # type: ignore[arg-type]
        )

    # 50, 30 and 10 examples in batches of 8.
    assert federation("loop").simulator.num_steps.tolist() == [7, 4, 2]
    loop = final_numbers(federation("loop"))
    vmap = final_numbers(federation("vmap"))
    assert max_difference(loop, vmap) < 1e-9


def test_gradient_clipping_is_per_client_over_the_full_model() -> None:
    loop = final_numbers(ToyFederation(FEDCOG, "loop", clip=0.05))
    vmap = final_numbers(ToyFederation(FEDCOG, "vmap", clip=0.05))
    assert max_difference(loop, vmap) < 1e-9
    plain_sgd = Optimizer("sgd", 0.0, 0.0)
    toy = ToyFederation(FedAvg(), clip=0.05, steps=1, rounds=1, lr=1.0, optimizer=plain_sgd)
    for client_record in toy.run()[-1].record.to_line()["local"]:
        assert client_record["distance"] == pytest.approx(0.05, rel=1e-4)


def test_only_real_batches_update_running_statistics() -> None:
    """With lambda_kd = 0, FedCOG's BatchNorm statistics equal FedAvg's."""
    no_distillation = FedCOG(count=8, steps=2, start_round=0, weighting="fixed", lambda_kd=0.0)
    fedavg_buffers, fedcog_buffers = (
        ToyFederation(algorithm, module=USER_MODELS["batch-norm"]()).run()[-1].server["buffers"]
        for algorithm in (FedAvg(), no_distillation)
    )
    assert max_difference(fedavg_buffers, fedcog_buffers) < 1e-12
    start = ToyFederation(FedAvg(), module=USER_MODELS["batch-norm"]()).server.state["buffers"]
    assert max_difference(fedavg_buffers, start) > 1e-3


def test_batch_norm_statistics_are_averaged_by_weight() -> None:
    module = USER_MODELS["batch-norm"]()
    toy = ToyFederation(FedAvg(), module=module, rounds=1)
    broadcast = toy.algorithm.broadcast(toy.server.state)
    sizes = torch.tensor([50.0, 30.0, 10.0], dtype=torch.float64)
    means = []
    for client in range(3):
        total = ToyFederation(FedAvg(), module=module).run_clients([client], 0, broadcast).total
        means.append(total["buffers"]["1.running_mean"] / total["weight"])
    expected = (torch.stack(means) * sizes[:, None]).sum(0) / sizes.sum()
    actual = toy.run()[-1].server["buffers"]["1.running_mean"]
    assert float((actual - expected).abs().max()) < 1e-12


def test_frozen_parameters_are_neither_sent_nor_changed() -> None:
    toy = ToyFederation(FedAvg(), module=USER_MODELS["frozen"]())
    assert toy.server.state["buffers"] == {}
    assert set(toy.server.state["params"]) == {"head.weight", "head.bias"}
    before = toy.model._train.body.weight.clone()  # type: ignore[union-attr, operator]
    toy.run()
    assert torch.equal(before, toy.model._train.body.weight)  # type: ignore[union-attr, arg-type]


@dataclasses.dataclass(frozen=True)
class DrawingAlgorithm(Algorithm):
    """Requests noise, passes it to every batch, and freezes one parameter."""

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"mine": Draw((2, 3))}

    def extra_data(self, client, gen_state):  # type: ignore[no-untyped-def]
        return ExtraData({"mine": {"z": gen_state["mine"]}}, {})

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        frozen = {"9.bias": before["9.bias"]}
        assert batch["mine"]["z"].shape[-1] == 3
        return after | frozen


def test_hooks_receive_draws_and_after_step_may_freeze() -> None:
    for mapping in ("loop", "vmap"):
        toy = ToyFederation(DrawingAlgorithm(), mapping)  # type: ignore[arg-type]
        before = toy.server.state["params"]["9.bias"].clone()
        server = toy.run()[-1].server
        assert torch.equal(server["params"]["9.bias"], before)
        assert not torch.equal(server["params"]["9.weight"], toy.model.params["9.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", [FedAvg(), FEDCOG], ids=["fedavg", "fedprox+fedcog"])
def test_gpu_agrees_with_cpu(algorithm: Algorithm) -> None:
    on_cpu = ToyFederation(algorithm).run()[-1].server["params"]
    on_gpu = ToyFederation(algorithm, "vmap", device="cuda").run()[-1].server["params"]
    assert max_difference(on_cpu, {name: value.cpu() for name, value in on_gpu.items()}) < 1e-6


def test_loop_trains_networks_that_vmap_cannot() -> None:
    class DataDependentNetwork(nn.Module):
        """Reads a number with `item`, which vmap refuses."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(x.flatten(1))
            return logits if float(logits.sum().item()) > 1e9 else logits * 1.0

    ToyFederation(FedAvg(), "loop", module=DataDependentNetwork()).run()


@dataclasses.dataclass(frozen=True)
class ReorderingAlgorithm(Algorithm):
    """Requests examples at every step, and returns parameters in another order."""

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"some": Draw((5,), "step", "examples"), "one": Draw((2,), "step", "uniform")}

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        draws = batch["draws"]
        assert draws["some"]["x"].shape == (5, 1, 8, 8)
        assert draws["some"]["y"].shape == (5,)
        assert draws["one"].shape == (2,)
        return dict(reversed(after.items()))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_step_draws_and_parameter_order_do_not_change_training(mapping: str) -> None:
    plain, reordered = (
        ToyFederation(algorithm, mapping).run()[-1].server["params"]  # type: ignore[arg-type]
        for algorithm in (FedAvg(), ReorderingAlgorithm())
    )
    assert max_difference(plain, reordered) == 0
