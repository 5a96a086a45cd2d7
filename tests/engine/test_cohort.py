"""One loop, two mappings, any network."""

import dataclasses

import pytest
import torch
from torch import nn

from fedcog.algorithms import Algorithm, Draw, ExtraData, FedAvg, FedCOG, FedProx
from fedcog.core import tree
from fedcog.core.optimizers import Optimizer
from fedcog.core.tree import Params
from fedcog.models.functional import Model
from fedcog.testing import ToyFederation, max_difference
from tests.support.user_models import USER_MODELS

COG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
TEN = (10, 12, 30, 11, 10, 25, 40, 17, 13, 22)


def everything(toy: ToyFederation) -> Params:
    rounds = toy.run()
    local = {
        f"{one['client']}/{key}": torch.tensor(float(value))
        for one in rounds[-1].record.to_line()["local"]
        for key, value in one.items()
    }
    return tree.flatten(rounds[-1].server) | toy.simulator.client_states.flatten() | local


@pytest.mark.parametrize("name", USER_MODELS)
@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
def test_users_networks_train_the_same_in_both_mappings(name: str, algorithm: Algorithm) -> None:
    loop, vmap = (
        everything(ToyFederation(algorithm, mapping, module=USER_MODELS[name]()))
        for mapping in ("loop", "vmap")
    )
    assert max_difference(loop, vmap) < 1e-9
    start = ToyFederation(algorithm, module=USER_MODELS[name]()).server.state
    trained = {key: value for key, value in loop.items() if key.startswith("params::")}
    assert all(
        float((value - start["params"][key[8:]]).abs().max()) > 1e-7
        for key, value in trained.items()
    )


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_a_cohort_of_ten_is_ten_cohorts_of_one(mapping: str) -> None:
    from fedcog.testing import random_images

    def federation() -> ToyFederation:
        return ToyFederation(COG, mapping, dataset=random_images(200), sizes=TEN)  # type: ignore[arg-type]

    whole = federation()
    parts = federation()
    broadcast = COG.broadcast(whole.server.state)
    total = whole.run_clients(list(range(10)), 1, broadcast).total
    ones = [parts.run_clients([client], 1, broadcast).total for client in range(10)]
    sum_of_ones = ones[0]
    for one in ones[1:]:
        sum_of_ones = tree.apply(torch.add, sum_of_ones, one)
    assert max_difference(tree.flatten(total), tree.flatten(sum_of_ones)) < 1e-9
    assert (
        max_difference(
            whole.simulator.client_states.flatten(), parts.simulator.client_states.flatten()
        )
        < 1e-9
    )


def test_in_float32_one_step_agrees() -> None:
    cog = dataclasses.replace(COG, start_round=0, steps=1)
    one, other = (
        ToyFederation(cog, mapping, dtype=torch.float32, steps=1, rounds=1)
        .run()[-1]
        .server["params"]
        for mapping in ("loop", "vmap")
    )
    assert max_difference(one, other) < 1e-5


@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["residual", "batch-norm"])
def test_epochs_give_unequal_steps_and_a_client_that_is_done_stands_still(
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

    assert federation("loop").simulator.num_steps.tolist() == [
        7,
        4,
        2,
    ]  # 50, 30 and 10 examples in batches of 8
    assert max_difference(everything(federation("loop")), everything(federation("vmap"))) < 1e-9


def test_clipping_is_per_client_over_the_whole_model() -> None:
    loop, vmap = (
        everything(ToyFederation(COG, mapping, clip=0.05)) for mapping in ("loop", "vmap")
    )
    assert max_difference(loop, vmap) < 1e-9
    plain = Optimizer("sgd", 0.0, 0.0)
    toy = ToyFederation(FedAvg(), clip=0.05, steps=1, rounds=1, lr=1.0, optimizer=plain)
    for one in toy.run()[-1].record.to_line()["local"]:
        assert one["distance"] == pytest.approx(0.05, rel=1e-4)


def test_only_the_real_batch_moves_running_statistics() -> None:
    """With all weight on the real loss, FedCOG's generated batches leave BatchNorm's statistics as
    FedAvg's.
    """
    cog = FedCOG(count=8, steps=2, start_round=0, weighting="fixed", lambda_kd=0.0)
    one, other = (
        ToyFederation(a, module=USER_MODELS["batch-norm"]()).run()[-1].server
        for a in (FedAvg(), cog)
    )
    assert max_difference(one["buffers"], other["buffers"]) < 1e-12
    start = ToyFederation(FedAvg(), module=USER_MODELS["batch-norm"]()).server.state["buffers"]
    assert max_difference(one["buffers"], start) > 1e-3


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
    got = toy.run()[-1].server["buffers"]["1.running_mean"]
    assert float((got - expected).abs().max()) < 1e-12


def test_frozen_parameters_stay() -> None:
    """What training does not move is not sent, and is used as it is."""
    toy = ToyFederation(FedAvg(), module=USER_MODELS["frozen"]())
    assert toy.server.state["buffers"] == {} and set(toy.server.state["params"]) == {
        "head.weight",
        "head.bias",
    }
    before = toy.model._train.body.weight.clone()  # type: ignore[union-attr, operator]
    toy.run()
    assert torch.equal(before, toy.model._train.body.weight)  # type: ignore[union-attr, arg-type]


@dataclasses.dataclass(frozen=True)
class Greedy(Algorithm):
    """Asks for noise and keeps it, so that a test can see it."""

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"mine": Draw((2, 3))}

    def client_init(self, broadcast: tree.State) -> tree.State:
        return {"seen": torch.zeros(2, 3, dtype=torch.float64)}

    def extra_data(self, client, gen_state):  # type: ignore[no-untyped-def]
        return ExtraData({"mine": {"z": gen_state["mine"]}}, {})

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        frozen = {"9.bias": before["9.bias"]}
        assert batch["mine"]["z"].shape[-1] == 3
        return after | frozen


def test_hooks_get_what_they_ask_for_and_after_step_may_freeze() -> None:
    for mapping in ("loop", "vmap"):
        toy = ToyFederation(Greedy(), mapping)  # type: ignore[arg-type]
        before = toy.server.state["params"]["9.bias"].clone()
        server = toy.run()[-1].server
        assert torch.equal(server["params"]["9.bias"], before)
        assert not torch.equal(server["params"]["9.weight"], toy.model.params["9.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
def test_a_gpu_agrees_with_the_cpu(algorithm: Algorithm) -> None:
    here = ToyFederation(algorithm).run()[-1].server["params"]
    there = ToyFederation(algorithm, "vmap", device="cuda").run()[-1].server["params"]
    assert max_difference(here, {name: value.cpu() for name, value in there.items()}) < 1e-6


def test_what_vmap_cannot_do_is_not_needed_on_a_cpu() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(x.flatten(1))
            return logits if float(logits.sum().item()) > 1e9 else logits * 1.0

    ToyFederation(FedAvg(), "loop", module=Stubborn()).run()


@dataclasses.dataclass(frozen=True)
class Particular(Algorithm):
    """Asks for its own examples at every step, and gives parameters back in another order."""

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"some": Draw((5,), "step", "examples"), "one": Draw((2,), "step", "uniform")}

    def after_step(self, before, after, batch, client):  # type: ignore[no-untyped-def]
        assert batch["draws"]["some"]["x"].shape == (5, 1, 8, 8) and batch["draws"]["some"][
            "y"
        ].shape == (5,)
        assert batch["draws"]["one"].shape == (2,)
        return dict(reversed(after.items()))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_draws_of_a_step_and_the_order_of_parameters(mapping: str) -> None:
    plain = ToyFederation(FedAvg(), mapping).run()[-1].server["params"]  # type: ignore[arg-type]
    assert (
        max_difference(plain, ToyFederation(Particular(), mapping).run()[-1].server["params"]) == 0
    )  # type: ignore[arg-type]
