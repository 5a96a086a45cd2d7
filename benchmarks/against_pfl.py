"""Compare rounds of fedcog and pfl-research on pfl-research's published benchmark, on one device.

python benchmarks/against_pfl.py --out results/pfl.md [--rounds 100] [--mapping auto]

Needs `pfl` 0.6.0 (`pip install pfl[pytorch]`). Both run in one process.

The settings are those of apple/pfl-research's
benchmarks/image_classification/configs/baseline.yaml: CIFAR-10 IID, 1,000 users of 50 images, 50
users in a round, one local epoch of batch 10, SGD at 0.1 without momentum, central learning rate 1,
equal weights of users, no augmentation, and a CNN with 2 convolutions and 2 linear layers. Its
dropout (0.25 and 0.5) is left out on both sides, because fedcog's engine rejects networks that draw
random numbers. pfl with dropout is listed for comparison.

pfl runs as fast as it can: all data on the device as normalized floats beforehand, user data sets
built once, no privacy mechanism, no printed metrics, and cuDNN's search for the fastest algorithm.
A trial finds the fastest of several variants (memory layout, fused SGD, torch.compile), which is
then timed. Timed rounds are not evaluated.
"""

import argparse
import contextlib
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
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import find_device
from fedcog.runs.setup import ExperimentSetup


class Variant(NamedTuple):
    """A way to run pfl.

    Attributes:
        name: Name in the table.
        channels_last: Whether images are stored as `(N, 32, 32, 3)` and permuted by the network,
            as in the published code.
        fused: Whether SGD is fused.
        compile_mode: Mode of torch.compile; "" for none.
        dropout: Whether the network has dropout.
    """

    name: str
    channels_last: bool = False
    fused: bool = False
    compile_mode: str = ""
    dropout: bool = False


PUBLISHED = Variant("as published, with dropout", channels_last=True, dropout=True)
VARIANTS = [
    Variant("as published, no dropout", channels_last=True),
    Variant("channels first"),
    Variant("as published, no dropout, fused SGD", channels_last=True, fused=True),
    Variant("channels first, fused SGD", fused=True),
    Variant("channels first, fused SGD, torch.compile", fused=True, compile_mode="default"),
    Variant(
        "channels first, fused SGD, torch.compile with CUDA graphs",
        fused=True,
        compile_mode="reduce-overhead",
    ),
]


class Trial(NamedTuple):
    """Trial rounds of all variants of pfl.

    Attributes:
        seconds: Seconds of the trial rounds, by variant.
        failures: Why a variant did not run.
    """

    seconds: dict[Variant, list[float]]
    failures: dict[Variant, str]


def make_network(dropout: bool = False) -> nn.Module:
    """Build pfl's `simple_cnn` for images with channels first, from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
        layers += [nn.Dropout(0.25)] if dropout else []
        layers += [nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU()]
        layers += [nn.Dropout(0.5)] if dropout else []
        layers += [nn.Linear(128, 10)]
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    return nn.Sequential(*layers)


class PflNetwork(nn.Module):
    """The network with the methods that pfl requires: a loss and metrics."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.network = make_network(variant.dropout)
        self.channels_last = variant.channels_last
        if variant.compile_mode:
            self.network.compile(mode=variant.compile_mode)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of a batch, `(B, 10)`."""
        logits: Tensor = self.network(x.permute(0, 3, 1, 2) if self.channels_last else x)
        return logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a step."""
        return F.cross_entropy(self.logits(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return the loss as a metric; pfl calls this only in the first round, of the warm-up."""
        from pfl.metrics import Weighted

        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class TimingCallback:
    """A pfl callback that records the time at the end of every round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.end_times = list[float]()

    def on_train_begin(self, *, model: Any) -> Any:
        """Return no metrics."""
        from pfl.metrics import Metrics

        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:
        """Record when the device finished the round, and continue training."""
        from pfl.metrics import Metrics

        self.end_times.append(common.synchronized_time(self.device))
        return False, Metrics()

    def on_train_end(self, *, model: Any) -> None:
        """Do nothing."""


def make_user_datasets(setup: ExperimentSetup, channels_last: bool) -> Callable[[int], Any]:
    """Build the data set of every user once, as views of normalized floats on the device.

    Args:
        setup: The experiment's data.
        channels_last: Whether images are `(N, 32, 32, 3)`.

    Returns:
        A function from a user's number to the data set.
    """
    from pfl.data.dataset import Dataset as UserDataset

    data = setup.data
    order = torch.cat(setup.indices).to(setup.device)
    chunks = torch.split(order, 5000)
    x = torch.cat([data.to_inputs(data.train_x[chunk]) for chunk in chunks])
    x = x.permute(0, 2, 3, 1).contiguous() if channels_last else x
    sizes = [len(indices) for indices in setup.indices]
    user_arrays = zip(torch.split(x, sizes), torch.split(data.train_y[order], sizes), strict=True)
    datasets = [UserDataset(arrays, user_id=str(user)) for user, arrays in enumerate(user_arrays)]
    return datasets.__getitem__


def run_pfl(
    setup: ExperimentSetup,
    variant: Variant,
    cohort_size: int,
    num_rounds: int,
    sampler: str = "random",
) -> tuple[TimingCallback, Any]:
    """Run rounds of pfl.

    Args:
        setup: The experiment's data.
        variant: How to run it.
        cohort_size: Users in a round.
        num_rounds: Rounds.
        sampler: pfl's sampler of users.

    Returns:
        The end times of the rounds, and the network after the last.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    network = PflNetwork(variant).to(setup.device)
    experiment = setup.experiment
    user_sampler = get_user_sampler(sampler, range(setup.data.num_clients))
    dataset = FederatedDataset(make_user_datasets(setup, variant.channels_last), user_sampler)
    local_optimizer: Any = torch.optim.SGD
    if variant.fused:
        local_optimizer = functools.partial(torch.optim.SGD, fused=True)
    model = PyTorchModel(network, local_optimizer, torch.optim.SGD(network.parameters(), 1.0))
    timing = TimingCallback(setup.device)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=num_rounds,
            evaluation_frequency=10**9,
            train_cohort_size=cohort_size,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(
            local_batch_size=experiment.batch_size,
            local_num_epochs=1,
            local_learning_rate=experiment.lr,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[timing],
        send_metrics_to_platform=False,
    )
    return timing, network


def time_pfl(
    setup: ExperimentSetup, variant: Variant, cohort_size: int, num_warmup: int, num_timed: int
) -> list[float]:
    """Measure the wall time of pfl's rounds after a warm-up.

    Args:
        setup: The experiment's data.
        variant: How to run pfl.
        cohort_size: Users in a round.
        num_warmup: Rounds before the timed ones.
        num_timed: Timed rounds.

    Returns:
        Seconds of every timed round.
    """
    common.free_memory(setup.device)
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32
    ):
        timing, _ = run_pfl(setup, variant, cohort_size, num_warmup + num_timed)
    return common.seconds_between(timing.end_times, num_warmup)


def make_experiment(options: argparse.Namespace, **settings: Any) -> Experiment:
    """Return the published settings as an experiment of fedcog.

    Args:
        options: The command line.
        **settings: Settings that differ from the published ones.

    Returns:
        The experiment.
    """
    published_settings: dict[str, Any] = {
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
    return common.paper_experiment(**published_settings | settings)


def check_agreement(options: argparse.Namespace, dataset: Dataset) -> float:
    """Check that fedcog and pfl compute the same round.

    Ten users each train on all their examples in one batch, so that the order does not matter.

    Args:
        options: The command line.
        dataset: A small data set.

    Returns:
        The largest difference of a parameter after the round.

    Raises:
        SystemExit: If they differ by more than rounding explains.
    """
    batch_size = len(dataset.train_y) // 10
    experiment = make_experiment(options, clients=10, participation=1.0, batch_size=batch_size)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        setup = ExperimentSetup(experiment, UserObjects(dataset, make_network()))
        _, pfl_network = run_pfl(setup, Variant("channels first"), 10, 1, "minimize_reuse")
        one_round = common.without_evaluation(experiment, 1)
        with contextlib.closing(common.run_rounds(one_round, dataset, make_network())) as rounds:
            fedcog_params = next(rounds).server["params"]
    difference = max(
        float((fedcog_params[name] - value.detach()).abs().max())
        for name, value in pfl_network.network.named_parameters()
    )
    if not difference < 1e-4:
        raise SystemExit(
            f"fedcog and pfl do not compute the same: a parameter differs by {difference:.1e}."
        )
    return difference


def try_variants(setup: ExperimentSetup, options: argparse.Namespace) -> Trial:
    """Measure a few rounds of every variant of pfl.

    Args:
        setup: The experiment's data.
        options: The command line.

    Returns:
        Seconds by variant, and the reasons of variants that failed.
    """
    trial = Trial({}, {})
    for variant in [PUBLISHED, *VARIANTS]:
        if variant.compile_mode and setup.device.type != "cuda":
            trial.failures[variant] = "tried on a GPU only"
            continue
        try:
            trial.seconds[variant] = time_pfl(
                setup, variant, options.cohort, options.warm, options.trial
            )
        except RuntimeError as error:
            trial.failures[variant] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"tried: pfl, {variant.name}", file=sys.stderr)
    return trial


def format_median(seconds: list[float]) -> str:
    """Format the median in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.2f} ms"


def write_results(
    options: argparse.Namespace,
    trial: Trial,
    best_variant: Variant,
    seconds: dict[str, list[float]],
    difference: float,
) -> None:
    """Write the comparison, and the trial of pfl's variants.

    Args:
        options: The command line.
        trial: Trial rounds of all variants.
        best_variant: The fastest variant.
        seconds: Timed rounds of "pfl" and "fedcog".
        difference: Result of `check_agreement`.
    """
    medians = {name: statistics.median(round_seconds) for name, round_seconds in seconds.items()}
    details = {"pfl": best_variant.name, "fedcog": f"mapping {options.mapping}"}
    rows = []
    for name, round_seconds in seconds.items():
        speed = medians["pfl"] / medians[name]
        total = f"{sum(round_seconds):.3f} s"
        rows.append(
            [f"{name} ({details[name]})", format_median(round_seconds), total, f"{speed:.1f} x"]
        )
    variant_rows = [
        [variant.name, format_median(round_seconds)]
        for variant, round_seconds in trial.seconds.items()
    ]
    variant_rows += [[variant.name, reason] for variant, reason in trial.failures.items()]
    paragraphs = [
        f"{options.users} users, {options.cohort} in a round, one epoch of batch 10 each, after "
        f"{options.warm} rounds of warm-up. No dropout on either side unless a row says so. pfl "
        "runs in one process; it can also distribute a cohort over several, which is not measured "
        "here.",
        common.markdown_table(["", "median round", f"{options.rounds} rounds", "speed"], rows),
        f"pfl's variants, median of {options.trial} rounds each:",
        common.markdown_table(["variant", "round"], variant_rows),
        "After one round of ten users with one batch each, the largest difference of a "
        f"parameter is {difference:.1e}.",
    ]
    results = {
        "seconds": seconds,
        "variants": {variant.name: values for variant, values in trial.seconds.items()},
        "difference": difference,
    }
    facts = common.describe_environment(options.device, options.data)
    facts["pfl"] = importlib.metadata.version("pfl")
    common.write_report(options.out, "Against pfl-research", facts, paragraphs, results)
    print(options.out.with_suffix(".md").read_text())


def main() -> None:
    """Check that both compute the same, find pfl's fastest variant, and time both."""
    parser = common.make_parser(__doc__, "results/pfl.md")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds of each")
    parser.add_argument("--warm", type=int, default=5, help="rounds of warm-up before them")
    parser.add_argument(
        "--trial", type=int, default=10, help="timed rounds of each variant of pfl in the trial"
    )
    parser.add_argument("--mapping", default="auto", help="how clients of fedcog train")
    options = parser.parse_args()
    if options.tiny:
        options.users = 20
        options.cohort = 4
        options.rounds = 3
        options.warm = 1
        options.trial = 2
    options.device = find_device(options.device)
    # Otherwise pfl queries the GPU at every batch.
    os.environ["PFL_PYTORCH_DEVICE"] = str(options.device)
    np.random.seed(0)
    num_images = (50 * options.users, 100) if options.tiny else ()
    dataset = common.load_images(options.data, *num_images)
    difference = check_agreement(options, common.load_images(None, 500, 10))
    experiment = make_experiment(options)
    setup = ExperimentSetup(experiment, UserObjects(dataset, make_network()))
    trial = try_variants(setup, options)
    candidates = trial.seconds.keys() - {PUBLISHED}
    best_variant = min(candidates, key=lambda variant: statistics.median(trial.seconds[variant]))
    pfl_seconds = time_pfl(setup, best_variant, options.cohort, options.warm, options.rounds)
    print(f"timed: pfl, {best_variant.name}", file=sys.stderr)
    fedcog_timing = common.time_rounds(
        experiment, dataset, make_network(), num_warmup=options.warm, num_timed=options.rounds
    )
    seconds = {"pfl": pfl_seconds, "fedcog": fedcog_timing.round_seconds}
    write_results(options, trial, best_variant, seconds, difference)


if __name__ == "__main__":
    main()
