"""One loop, two mappings, any network."""

import dataclasses

import pytest
import torch
from torch import nn

from fedcog import tree
from fedcog.algorithms import Algorithm, Draw, Extra, FedAvg, FedCOG, FedProx
from fedcog.models import Model
from fedcog.optimiser import Optimiser
from fedcog.testing import Small, worst
from fedcog.tree import Params
from tests.user_models import USER_MODELS

COG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
TEN = (10, 12, 30, 11, 10, 25, 40, 17, 13, 22)


def everything(small: Small) -> Params:
    rounds = small.run()
    local = {
        f"{one['client']}/{key}": torch.tensor(float(value))
        for one in rounds[-1].line["local"]
        for key, value in one.items()
    }
    return tree.flatten(rounds[-1].server) | small.backend.store.flatten() | local


@pytest.mark.parametrize("name", USER_MODELS)
@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
def test_users_networks_train_the_same_in_both_mappings(name: str, algorithm: Algorithm) -> None:
    loop, vmap = (everything(Small(algorithm, mapping, module=USER_MODELS[name]())) for mapping in ("loop", "vmap"))
    assert worst(loop, vmap) < 1e-9
    start = Small(algorithm, module=USER_MODELS[name]()).server
    trained = {key: value for key, value in loop.items() if key.startswith("params::")}
    assert all(float((value - start["params"][key[8:]]).abs().max()) > 1e-7 for key, value in trained.items())


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_a_cohort_of_ten_is_ten_cohorts_of_one(mapping: str) -> None:
    from fedcog.testing import images

    def federation() -> Small:
        return Small(COG, mapping, dataset=images(200), sizes=TEN)  # type: ignore[arg-type]

    whole, parts = federation(), federation()
    shared = COG.broadcast(whole.server)
    together = whole.backend.gather(COG, shared, range(10), 1, 0.05, None)
    apart = [parts.backend.gather(COG, shared, [client], 1, 0.05, None) for client in range(10)]
    for one in (together, *apart):
        one.report()
    total, ones = together.total, [one.total for one in apart]
    sum_of_ones = ones[0]
    for one in ones[1:]:
        sum_of_ones = tree.apply(torch.add, sum_of_ones, one)
    assert worst(tree.flatten(total), tree.flatten(sum_of_ones)) < 1e-9
    assert worst(whole.backend.store.flatten(), parts.backend.store.flatten()) < 1e-9


def test_in_float32_one_step_agrees() -> None:
    cog = dataclasses.replace(COG, start_round=0, steps=1)
    one, other = (
        Small(cog, mapping, dtype=torch.float32, steps=1, rounds=1).run()[-1].server["params"]
        for mapping in ("loop", "vmap")
    )
    assert worst(one, other) < 1e-5


@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["residual", "batch-norm"])
def test_epochs_give_unequal_steps_and_a_client_that_is_done_stands_still(
    name: str, kind: str, algorithm: Algorithm
) -> None:
    def federation(mapping: str) -> Small:
        return Small(
            algorithm,
            mapping,  # type: ignore[arg-type]
            module=USER_MODELS[name](),
            epochs=1.0,
            batch=8,
            optimiser=Optimiser(kind, 0.9, 1e-2),  # type: ignore[arg-type]
        )

    assert federation("loop").backend.steps.tolist() == [7, 4, 2]  # 50, 30 and 10 examples in batches of 8
    assert worst(everything(federation("loop")), everything(federation("vmap"))) < 1e-9


def test_clipping_is_per_client_over_the_whole_model() -> None:
    loop, vmap = (everything(Small(COG, mapping, clip=0.05)) for mapping in ("loop", "vmap"))
    assert worst(loop, vmap) < 1e-9
    plain = Optimiser("sgd", 0.0, 0.0)
    small = Small(FedAvg(), clip=0.05, steps=1, rounds=1, lr=1.0, optimiser=plain)
    for one in small.run()[-1].line["local"]:
        assert one["distance"] == pytest.approx(0.05, rel=1e-4)


def test_only_the_real_batch_moves_running_statistics() -> None:
    """With all weight on the real loss, FedCOG's generated batches leave BatchNorm's statistics as FedAvg's."""
    cog = FedCOG(count=8, steps=2, start_round=0, weighting="fixed", lambda_kd=0.0)
    one, other = (Small(a, module=USER_MODELS["batch-norm"]()).run()[-1].server for a in (FedAvg(), cog))
    assert worst(one["buffers"], other["buffers"]) < 1e-12
    start = Small(FedAvg(), module=USER_MODELS["batch-norm"]()).server["buffers"]
    assert worst(one["buffers"], start) > 1e-3


def test_batch_norm_statistics_are_averaged_by_weight() -> None:
    module = USER_MODELS["batch-norm"]()
    small = Small(FedAvg(), module=module, rounds=1)
    shared = small.algorithm.broadcast(small.server)
    sizes, means = torch.tensor([50.0, 30.0, 10.0], dtype=torch.float64), []
    for client in range(3):
        total = Small(FedAvg(), module=module).backend.gather(small.algorithm, shared, [client], 0, 0.05, None)[0]
        means.append(total["buffers"]["1.running_mean"] / total["weight"])
    expected = (torch.stack(means) * sizes[:, None]).sum(0) / sizes.sum()
    got = small.run()[-1].server["buffers"]["1.running_mean"]
    assert float((got - expected).abs().max()) < 1e-12


def test_frozen_parameters_stay() -> None:
    """What training does not move is not sent, and is used as it is."""
    small = Small(FedAvg(), module=USER_MODELS["frozen"]())
    assert small.server["buffers"] == {} and set(small.server["params"]) == {"head.weight", "head.bias"}
    before = small.model._train.body.weight.clone()  # type: ignore[union-attr, operator]
    small.run()
    assert torch.equal(before, small.model._train.body.weight)  # type: ignore[union-attr, arg-type]


@dataclasses.dataclass(frozen=True)
class Greedy(Algorithm):
    """Asks for noise and keeps it, so that a test can see it."""

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"mine": Draw((2, 3))}

    def client_init(self, shared: tree.State) -> tree.State:
        return {"seen": torch.zeros(2, 3, dtype=torch.float64)}

    def extra_data(self, site, draws):  # type: ignore[no-untyped-def]
        return Extra({"mine": {"z": draws["mine"]}}, {})

    def after_step(self, before, after, batch, site):  # type: ignore[no-untyped-def]
        frozen = {"9.bias": before["9.bias"]}
        assert batch["mine"]["z"].shape[-1] == 3
        return after | frozen


def test_hooks_get_what_they_ask_for_and_after_step_may_freeze() -> None:
    for mapping in ("loop", "vmap"):
        small = Small(Greedy(), mapping)  # type: ignore[arg-type]
        before = small.server["params"]["9.bias"].clone()
        server = small.run()[-1].server
        assert torch.equal(server["params"]["9.bias"], before)
        assert not torch.equal(server["params"]["9.weight"], small.model.params["9.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", [FedAvg(), COG], ids=["fedavg", "fedprox+fedcog"])
def test_a_gpu_agrees_with_the_cpu(algorithm: Algorithm) -> None:
    here = Small(algorithm).run()[-1].server["params"]
    there = Small(algorithm, "vmap", device="cuda").run()[-1].server["params"]
    assert worst(here, {name: value.cpu() for name, value in there.items()}) < 1e-6


def test_what_vmap_cannot_do_is_not_needed_on_a_cpu() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layer(x.flatten(1))
            return logits if float(logits.sum().item()) > 1e9 else logits * 1.0

    Small(FedAvg(), "loop", module=Stubborn()).run()


@dataclasses.dataclass(frozen=True)
class Particular(Algorithm):
    """Asks for its own examples at every step, and gives parameters back in another order."""

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        return {"some": Draw((5,), "step", "examples"), "one": Draw((2,), "step", "uniform")}

    def after_step(self, before, after, batch, site):  # type: ignore[no-untyped-def]
        assert batch["draws"]["some"]["x"].shape == (5, 1, 8, 8) and batch["draws"]["some"]["y"].shape == (5,)
        assert batch["draws"]["one"].shape == (2,)
        return dict(reversed(after.items()))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_draws_of_a_step_and_the_order_of_parameters(mapping: str) -> None:
    plain = Small(FedAvg(), mapping).run()[-1].server["params"]  # type: ignore[arg-type]
    assert worst(plain, Small(Particular(), mapping).run()[-1].server["params"]) == 0  # type: ignore[arg-type]
