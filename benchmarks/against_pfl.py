"""Rounds of pfl-research and of this engine on pfl-research's own published benchmark, in one
process on one device.

python benchmarks/against_pfl.py --out results/pfl.md [--rounds 100] [--mapping auto]

`pfl` 0.6.0 (`pip install pfl[pytorch]`) must be importable. The setting is apple/pfl-research's
benchmarks/image_classification/configs/baseline.yaml: CIFAR-10 IID, 1,000 users of 50 images, 50 of
them a round, one local epoch of batch 10, SGD at 0.1 without momentum, central learning rate 1,
users weighted alike, no augmentation, a CNN of 2 convolutions and 2 linear layers. Its dropout
(0.25 and 0.5) is left out on both sides, since this engine refuses networks that draw random
numbers; pfl with it is shown beside. pfl gets its fastest way: all data on the device as normalised
floats beforehand, user data sets built once, no privacy mechanism, metrics not printed, cuDNN's
search on; of several variants (memory layout, fused SGD, torch.compile) the best of a trial is
timed. No timed round is evaluated.
"""

import argparse
import functools
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.data import Dataset
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup, UserObjects


class Variant(NamedTuple):
    """A way to run pfl."""

    name: str
    channels_last: bool = (
        False  # images stored [n, 32, 32, 3] and turned by the network, as published
    )
    fused: bool = False
    compiled: str = ""  # torch.compile's mode
    dropout: bool = False


PUBLISHED = Variant("as published, with dropout", channels_last=True, dropout=True)
VARIANTS = [
    Variant("as published, no dropout", channels_last=True),
    Variant("channels first"),
    Variant("as published, no dropout, fused SGD", channels_last=True, fused=True),
    Variant("channels first, fused SGD", fused=True),
    Variant("channels first, fused SGD, torch.compile", fused=True, compiled="default"),
    Variant(
        "channels first, fused SGD, torch.compile with CUDA graphs",
        fused=True,
        compiled="reduce-overhead",
    ),
]


def network(dropout: bool = False) -> nn.Module:
    """pfl's `simple_cnn` behind its turn of the axes, from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *([nn.Dropout(0.25)] if dropout else []),
            *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU()),
            *([nn.Dropout(0.5)] if dropout else []),
            nn.Linear(128, 10),
        )
        for part in module:
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(part.weight)
    return module


class ForPfl(nn.Module):
    """The network with what pfl asks of one: a loss and metrics."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.network = network(variant.dropout)
        self.channels_last = variant.channels_last
        if variant.compiled:
            self.network.compile(mode=variant.compiled)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of a batch."""
        found: Tensor = self.network(x.permute(0, 3, 1, 2) if self.channels_last else x)
        return found

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What a step minimises."""
        return F.cross_entropy(self.logits(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Asked for in the first round alone, which is not timed."""
        from pfl.metrics import Weighted

        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Stopwatch:
    """A pfl callback that takes the time after every round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends = list[float]()

    def on_train_begin(self, *, model: Any) -> Any:
        """Nothing to say."""
        from pfl.metrics import Metrics

        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:
        """Note when the device had finished; go on."""
        from pfl.metrics import Metrics

        self.ends.append(common.now(self.device))
        return False, Metrics()

    def on_train_end(self, *, model: Any) -> None:
        """Nothing to do."""


def users(ready: ExperimentSetup, channels_last: bool) -> Callable[[int], Any]:
    """Every user's data set, built once, as views of normalised floats on the device."""
    from pfl.data.dataset import Dataset as UserData

    order = torch.cat(ready.indices).to(ready.device)
    x = torch.cat(
        [ready.data.to_inputs(ready.data.train_x[part]) for part in torch.split(order, 5000)]
    )
    x = x.permute(0, 2, 3, 1).contiguous() if channels_last else x
    sizes = [len(own) for own in ready.indices]
    parts = zip(torch.split(x, sizes), torch.split(ready.data.train_y[order], sizes), strict=True)
    built = [UserData(part, user_id=str(user)) for user, part in enumerate(parts)]
    return built.__getitem__


def pfl_run(
    ready: ExperimentSetup, variant: Variant, cohort: int, rounds: int, sampler: str = "random"
) -> tuple[Stopwatch, Any]:
    """Some rounds of pfl in one variant, and the network after them."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    module = ForPfl(variant).to(ready.device)
    experiment = ready.experiment
    everybody = get_user_sampler(sampler, range(ready.data.num_clients))
    data = FederatedDataset(users(ready, variant.channels_last), everybody)
    local = functools.partial(torch.optim.SGD, fused=True) if variant.fused else torch.optim.SGD
    model = PyTorchModel(module, local, torch.optim.SGD(module.parameters(), 1.0))
    clock = Stopwatch(ready.device)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(
            local_batch_size=experiment.batch_size,
            local_num_epochs=1,
            local_learning_rate=experiment.lr,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return clock, module


def pfl_seconds(
    ready: ExperimentSetup, variant: Variant, cohort: int, warm: int, count: int
) -> list[float]:
    """Seconds of `count` rounds of pfl after `warm` others."""
    common.clean(ready.device)
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32
    ):
        ends = pfl_run(ready, variant, cohort, warm + count)[0].ends
    return [after - before for before, after in zip(ends[warm - 1 :], ends[warm:], strict=False)]


def setting(options: argparse.Namespace, **others: Any) -> Experiment:
    """The published setting in this engine's words."""
    chosen: dict[str, Any] = {
        "partition": "iid",
        "clients": options.users,
        "participation": options.cohort / options.users,
        "local_epochs": 1.0,
        "batch_size": 10,
        "lr": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "augment": "off",
        "weights": "uniform",
        "model": "custom",
        "device": str(options.device),
        "mapping": options.mapping,
    }
    return common.experiment(**chosen | others)


def check(options: argparse.Namespace, data: Dataset) -> float:
    """How far both are apart after one round of ten users who take all they have as one batch:
    order plays no part.
    """
    alike = setting(options, clients=10, participation=1.0, batch_size=len(data.train_y) // 10)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        ready = ExperimentSetup(alike, UserObjects(data, network()))
        _, theirs = pfl_run(ready, Variant("channels first"), 10, 1, "minimize_reuse")
        ours = next(common.rounds(common.unscored(alike, 1), data, network())).server["params"]
    gap = max(
        float((ours[name] - value.detach()).abs().max())
        for name, value in theirs.network.named_parameters()
    )
    if not gap < 1e-4:
        raise SystemExit(
            f"the two do not do the same arithmetic: a parameter differs by {gap:.1e}."
        )
    return gap


def trial(
    ready: ExperimentSetup, options: argparse.Namespace
) -> tuple[dict[Variant, list[float]], dict[Variant, str]]:
    """Some rounds of every variant; and of those that do not run, why."""
    found = dict[Variant, list[float]]()
    failed = dict[Variant, str]()
    for variant in [PUBLISHED, *VARIANTS]:
        if variant.compiled and ready.device.type != "cuda":
            failed[variant] = "tried on a GPU only"
            continue
        try:
            found[variant] = pfl_seconds(
                ready, variant, options.cohort, options.warm, options.trial
            )
        except RuntimeError as error:
            failed[variant] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"tried: pfl, {variant.name}", file=sys.stderr)
    return found, failed


def main() -> None:
    """Check that both do the same, find pfl's best variant, time both."""
    parser = common.parser(__doc__, "results/pfl.md")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds of each")
    parser.add_argument("--warm", type=int, default=5, help="rounds before those")
    parser.add_argument(
        "--trial", type=int, default=10, help="timed rounds of each variant of pfl in the trial"
    )
    parser.add_argument("--mapping", default="auto", help="how this engine runs clients")
    options = parser.parse_args()
    if options.tiny:
        options.users = 20
        options.cohort = 4
        options.rounds = 3
        options.warm = 1
        options.trial = 2
    options.device = find_device(options.device)
    os.environ["PFL_PYTORCH_DEVICE"] = str(options.device)  # else pfl asks for a GPU at every batch
    np.random.seed(0)
    data = common.images(options.data, *((50 * options.users, 100) if options.tiny else ()))
    small = common.images(None, 500, 10)
    gap = check(options, small)
    ready = ExperimentSetup(setting(options), UserObjects(data, network()))
    tried, failed = trial(ready, options)
    best = min(tried.keys() - {PUBLISHED}, key=lambda variant: statistics.median(tried[variant]))
    theirs = pfl_seconds(ready, best, options.cohort, options.warm, options.rounds)
    print(f"timed: pfl, {best.name}", file=sys.stderr)
    ours = common.timed(
        setting(options), data, network(), warm=options.warm, count=options.rounds
    ).rounds
    report(options, tried, failed, best, {"pfl": theirs, "fedcog": ours}, gap)


def ms(seconds: list[float]) -> str:
    """The median in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.2f} ms"


def report(
    options: argparse.Namespace,
    tried: dict[Variant, list[float]],
    failed: dict[Variant, str],
    best: Variant,
    found: dict[str, list[float]],
    gap: float,
) -> None:
    """Write the two, and pfl's variants, down."""
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    how = {"pfl": best.name, "fedcog": f"mapping {options.mapping}"}
    rows = [
        (
            f"{name} ({how[name]})",
            ms(seconds),
            f"{sum(seconds):.3f} s",
            f"{middle['pfl'] / middle[name]:.1f} x",
        )
        for name, seconds in found.items()
    ]
    ways = [(one.name, ms(seconds)) for one, seconds in tried.items()] + [
        (one.name, reason) for one, reason in failed.items()
    ]
    parts = [
        f"{options.users} users, {options.cohort} a round, one epoch of batch 10 each, after "
        f"{options.warm} rounds of "
        "warm-up. No dropout on either side but where it says so. pfl runs in one process; it "
        "can also spread a "
        "cohort over several, which is not measured here.",
        common.table(["", "median round", f"{options.rounds} rounds", "speed"], rows),
        f"pfl's variants, median of {options.trial} rounds each:",
        common.table(["variant", "round"], ways),
        (
            "After one round of ten users with one batch each, the largest difference of a "
            f"parameter is {gap:.1e}."
        ),
    ]
    results = {
        "seconds": found,
        "variants": {one.name: seconds for one, seconds in tried.items()},
        "difference": gap,
    }
    facts = common.about(options.device, options.data) | {"pfl": importlib.metadata.version("pfl")}
    common.write(options.out, "Against pfl-research", facts, parts, results)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
