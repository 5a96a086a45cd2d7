"""Every algorithm x every property. The next algorithm is one row of ROWS."""

import dataclasses

import pytest
import torch

from fedcog.algorithms import (
    ALGORITHMS,
    MOON,
    SCAFFOLD,
    VHL,
    Algorithm,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedCOG,
    FedDecorr,
    FedDyn,
    FedExP,
    FedGen,
    FedNova,
    FedProx,
    FedReg,
    FedRep,
    FedSAM,
    HeteroFL,
)
from fedcog.testing import COG, CONTRACT, PARTIAL, Small, neutral_is_fedavg, worst
from tests.user_models import USER_MODELS

GEN = {"hidden": 7, "noise": 3, "steps": 4, "batch": 5, "lr": 0.01}
VIRTUAL = {"virtual": 9, "temperature": 0.5}

# An algorithm with settings that bite, and the settings under which it is FedAvg.
ROWS: dict[str, tuple[Algorithm, Algorithm]] = {
    "fedavg": (FedAvg(), FedAvg()),
    "fedavgm": (FedAvgM(beta=0.5), FedAvgM(beta=0.0)),
    "fedadam": (FedAdam(), FedAdam(rule="sgd", lr=1.0, beta1=0.0)),
    "fedexp": (FedExP(epsilon=1e-9), FedExP(epsilon=1e9)),
    "fedprox": (FedProx(mu=0.5), FedProx(mu=0.0)),
    "scaffold": (SCAFFOLD(), SCAFFOLD(strength=0.0)),
    "moon": (MOON(mu=0.5), MOON(mu=0.0)),
    "fedsam": (FedSAM(), FedSAM(rho=0.0)),
    "feddecorr": (FedDecorr(beta=0.5), FedDecorr(beta=0.0)),
    "feddyn": (FedDyn(alpha=0.5), FedDyn(alpha=0.0, correction=0.0)),
    "fednova": (FedNova(), FedNova(strength=0.0)),
    "fedreg": (FedReg(count=7, pseudo_lr=0.1, perturbed_lr=0.01), FedReg(count=7, gamma=1.0, strength=0.0)),
    "fedgen": (FedGen(**GEN), FedGen(**GEN, alpha=0.0, beta=0.0)),
    "fedrep": (FedRep(), FedRep(personal="none", head_share=0.0)),
    "ditto": (Ditto(), Ditto()),
    "vhl": (VHL(**VIRTUAL), VHL(**VIRTUAL, labels="shared", alpha=0.0, lambda_align=0.0, kappa=0.0)),
    "fedcog": (COG, dataclasses.replace(COG, start_round=99)),
    "heterofl": (HeteroFL(width=0.5), HeteroFL()),
}
BARE = {name: algorithm for name, (algorithm, _) in ROWS.items()}
NESTED: dict[str, Algorithm] = {
    "fedprox+vhl": VHL(FedProx(mu=0.5), **VIRTUAL),
    "scaffold+vhl": VHL(SCAFFOLD(), **VIRTUAL),
    "fedgen+vhl": VHL(FedGen(**GEN), **VIRTUAL),
    "vhl style": VHL(**VIRTUAL, source="style"),
    "moon+ditto": Ditto(MOON(mu=0.5)),
    "fedsam+ditto+vhl": VHL(Ditto(FedSAM()), **VIRTUAL),
    "moon+fedcog+heterofl": HeteroFL(FedCOG(MOON(mu=0.5), count=8, steps=3, start_round=1, lr=0.1), width=0.5),
    "ditto+heterofl": HeteroFL(Ditto(), width=0.5),
    "fedprox+vhl+fedcog": FedCOG(VHL(FedProx(mu=0.5), **VIRTUAL), count=8, steps=3, start_round=1, lr=0.1),
}
ALL = BARE | NESTED


def test_no_algorithm_is_left_out() -> None:
    assert set(ROWS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ROWS)
def test_the_neutral_setting_is_fedavg_exactly(name: str) -> None:
    neutral_is_fedavg(*ROWS[name])


@pytest.mark.parametrize("check", CONTRACT.values(), ids=CONTRACT.keys())
@pytest.mark.parametrize("name", ALL)
def test_contract(name: str, check) -> None:  # type: ignore[no-untyped-def]
    check(ALL[name])


@pytest.mark.parametrize("name", ALL)
def test_running_statistics_are_each_clients_own(name: str) -> None:
    """With BatchNorm in the network and unequal steps, too, clients together end as clients one by one."""
    settings = PARTIAL | {"module": USER_MODELS["batch-norm"](), "epochs": 0.5}
    apart, together = Small(ALL[name], "loop", **settings), Small(ALL[name], "vmap", **settings)
    assert apart.server["buffers"]
    assert worst(apart.everything(), together.everything()) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ALL)
def test_a_gpu_agrees_with_the_cpu(name: str) -> None:
    here, there = (
        Small(ALL[name], **PARTIAL).everything(),
        Small(ALL[name], "vmap", device="cuda", **PARTIAL).everything(),
    )
    assert worst(here, {name: value.cpu() for name, value in there.items()}) < 1e-6
