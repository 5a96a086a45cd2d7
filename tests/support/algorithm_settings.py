"""Every algorithm with active settings, and with neutral settings that make it FedAvg."""

import dataclasses

from fedcog.algorithms import (
    CCVR,
    MOON,
    SCAFFOLD,
    VHL,
    Algorithm,
    BalancedSoftmax,
    Ditto,
    FedACG,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedCM,
    FedCOG,
    FedDC,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedExP,
    FedGen,
    FedGKD,
    FedLC,
    FedLESAM,
    FedNova,
    FedNTD,
    FedPer,
    FedProx,
    FedReg,
    FedRep,
    FedRS,
    FedSAM,
    FedSOL,
    FedSpeed,
    FedUV,
    FedVLS,
    GeometricMedian,
    HeteroFL,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedcog.testing import FEDCOG

GEN = {"hidden": 7, "noise": 3, "steps": 4, "batch": 5, "lr": 0.01}


VIRTUAL = {"virtual": 9, "temperature": 0.5}


# Name -> (active settings, which change the result; neutral settings, which equal FedAvg; None if
# there are none).
ACTIVE_AND_NEUTRAL: dict[str, tuple[Algorithm, Algorithm | None]] = {
    "fedavg": (FedAvg(), FedAvg()),
    "fedavgm": (FedAvgM(beta=0.5), FedAvgM(beta=0.0)),
    "fedadam": (FedAdam(), FedAdam(rule="sgd", lr=1.0, beta1=0.0)),
    "fedexp": (FedExP(epsilon=1e-9), FedExP(epsilon=1e9)),
    "fedacg": (FedACG(), FedACG(beta=0.0, mu=0.0)),
    "fedprox": (FedProx(mu=0.5), FedProx(mu=0.0)),
    "scaffold": (SCAFFOLD(), SCAFFOLD(strength=0.0)),
    "moon": (MOON(mu=0.5), MOON(mu=0.0)),
    "fedsam": (FedSAM(), FedSAM(rho=0.0)),
    "feddecorr": (FedDecorr(beta=0.5), FedDecorr(beta=0.0)),
    "feddyn": (FedDyn(alpha=0.5), FedDyn(alpha=0.0, correction=0.0)),
    "fednova": (FedNova(), FedNova(strength=0.0)),
    "fedreg": (
        FedReg(count=7, pseudo_lr=0.1, perturbed_lr=0.01),
        FedReg(count=7, gamma=1.0, strength=0.0),
    ),
    "fedgen": (FedGen(**GEN), FedGen(**GEN, alpha=0.0, beta=0.0)),
    "fedrep": (FedRep(), FedRep(personal="none", head_share=0.0)),
    "ditto": (Ditto(), Ditto()),
    "balanced-softmax": (BalancedSoftmax(), BalancedSoftmax(strength=0.0)),
    "fedlc": (FedLC(tau=2.0), FedLC(tau=0.0)),
    "fedrs": (FedRS(rule="soft"), FedRS(alpha=1.0)),
    "fedntd": (FedNTD(), FedNTD(beta=0.0)),
    "fedvls": (FedVLS(), FedVLS(strength=0.0, lambda_vacant=0.0, suppression=0.0)),
    "feduv": (FedUV(), FedUV(variance=0.0, uniformity=0.0)),
    "fedgkd": (FedGKD(gamma=0.5, models=2), FedGKD(gamma=0.0)),
    "fedcm": (FedCM(), FedCM(alpha=1.0)),
    "feddc": (FedDC(alpha=0.5), FedDC(alpha=0.0, correction=0.0, strength=0.0)),
    "fedspeed": (FedSpeed(mix=0.7), FedSpeed(alpha=0.0, correction=0.0, rho=0.0)),
    "fedlesam": (FedLESAM(rho=0.5), FedLESAM(rho=0.0)),
    "fedsol": (FedSOL(), FedSOL(rho=0.0)),
    "fedper": (FedPer(), FedPer(personal="none")),
    "fedbabu": (FedBABU(), FedBABU(personal="none")),
    "feddisco": (FedDisco(), FedDisco(a=0.0, b=0.0)),
    "median": (Median(), None),
    "trimmed-mean": (TrimmedMean(), TrimmedMean(trim=0)),
    "krum": (Krum(attackers=0), None),
    "multi-krum": (MultiKrum(attackers=0, keep=2), MultiKrum(attackers=0)),
    "geometric-median": (GeometricMedian(), GeometricMedian(passes=0)),
    "vhl": (
        VHL(**VIRTUAL),
        VHL(**VIRTUAL, labels="shared", alpha=0.0, lambda_align=0.0, kappa=0.0),
    ),
    "fedcog": (FEDCOG, dataclasses.replace(FEDCOG, start_round=99)),
    "ccvr": (CCVR(samples=20, steps=5), CCVR(samples=0)),
    "heterofl": (HeteroFL(width=0.5), HeteroFL()),
}


SINGLE_ALGORITHMS = {name: algorithm for name, (algorithm, _) in ACTIVE_AND_NEUTRAL.items()}


COMPOSITIONS: dict[str, Algorithm] = {
    "fedprox+vhl": VHL(FedProx(mu=0.5), **VIRTUAL),
    "scaffold+vhl": VHL(SCAFFOLD(), **VIRTUAL),
    "fedgen+vhl": VHL(FedGen(**GEN), **VIRTUAL),
    "vhl style": VHL(**VIRTUAL, source="style"),
    "moon+ditto": Ditto(MOON(mu=0.5)),
    "fedsam+ditto+vhl": VHL(Ditto(FedSAM()), **VIRTUAL),
    "moon+fedcog+heterofl": HeteroFL(
        FedCOG(MOON(mu=0.5), count=8, steps=3, start_round=1, lr=0.1), width=0.5
    ),
    "ditto+heterofl": HeteroFL(Ditto(), width=0.5),
    "fedlc+fedavgm+fedcog": FedCOG(
        FedAvgM(FedLC(), beta=0.5), count=8, steps=3, start_round=1, lr=0.1
    ),
    "scaffold+fedadam": FedAdam(SCAFFOLD()),
    "fedntd+fedacg": FedACG(FedNTD()),
    "fednova+feddisco+fedavgm": FedAvgM(FedDisco(FedNova()), beta=0.5),
    "fedprox+multi-krum+fedavgm": FedAvgM(MultiKrum(FedProx(mu=0.5), attackers=0, keep=2)),
    "feddyn+fedlesam": FedLESAM(FedDyn(alpha=0.5), rho=0.5),
    "moon+ccvr": CCVR(MOON(mu=0.5), samples=20, steps=5),
    "fedprox+vhl+fedcog": FedCOG(
        VHL(FedProx(mu=0.5), **VIRTUAL), count=8, steps=3, start_round=1, lr=0.1
    ),
}


ALL_ALGORITHMS = SINGLE_ALGORITHMS | COMPOSITIONS
