"""Tests of the Python API: user data, networks and algorithms, divergence, comparisons."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcog
from fedcog import Experiment, FedCOG, FedProx, Run, compare
from fedcog.cli.main import main
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.data import registry
from fedcog.data.datasets import DataWarning
from fedcog.federation.backend import Diverged
from fedcog.runs.records import summary
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup, split_dataset
from tests.support.user_models import USER_MODELS

TINY = Experiment(
    rounds=2, local_steps=3, batch_size=8, clients=4, partition="iid", threads=1, min_examples=2
)


def blobs(**options: Any) -> fedcog.Dataset:
    """Three well-separated clusters in five dimensions."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = (rng.normal(size=(240, 5)) + 3 * np.eye(5)[y]).astype(np.float32)
    return fedcog.from_arrays(x[:200], y[:200], x[200:], y[200:], **options)


def test_user_arrays_train_to_high_accuracy(tmp_path: Path) -> None:
    run = fedcog.run(
        dataclasses.replace(TINY, rounds=8, lr=0.05), tmp_path / "run", data=blobs(), report=False
    )
    assert run.best > 0.9
    assert run.experiment.dataset == "custom"
    assert run == fedcog.read(tmp_path / "run")


def test_torch_datasets_train_like_arrays(tmp_path: Path) -> None:
    data = blobs()
    train = TensorDataset(data.train_x, data.train_y)
    test = TensorDataset(data.test_x, data.test_y)
    from_torch = fedcog.run(
        TINY, tmp_path / "one", data=fedcog.from_torch(train, test), report=False
    )
    from_arrays = fedcog.run(TINY, tmp_path / "other", data=data, report=False)
    assert from_torch.last == from_arrays.last


def test_user_indices_define_the_clients(tmp_path: Path) -> None:
    indices = [torch.arange(0, 50), torch.arange(50, 60), torch.arange(60, 200)]
    data = blobs(indices=indices)
    implied = dataclasses.replace(TINY, partition="auto", clients=0)
    fedcog.run(implied, tmp_path / "run", data=data, report=False)
    counts = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[0]["counts"]
    assert counts.sum(1).tolist() == [50, 10, 140]
    experiment = fedcog.read(tmp_path / "run").experiment
    assert (experiment.partition, experiment.clients) == ("given", 3)
    with pytest.raises(ConfigError, match="clients is 4, but there are indices for 3"):
        fedcog.run(dataclasses.replace(implied, clients=4), tmp_path / "four", data=data)
    run = fedcog.run(TINY, tmp_path / "iid", data=data, report=False)
    assert (run.experiment.partition, run.experiment.clients) == ("iid", 4)


def test_natural_partition_makes_each_user_a_client(tmp_path: Path) -> None:
    users = [f"user {number % 6}" for number in range(200)]
    natural = dataclasses.replace(TINY, partition="natural", clients=6)
    fedcog.run(natural, tmp_path / "run", data=blobs(users=users), report=False)
    counts = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[0]["counts"]
    assert sorted(counts.sum(1).tolist()) == [33, 33, 33, 33, 34, 34]


def split_natural(data: fedcog.Dataset, **changes: int) -> list[torch.Tensor]:
    return split_dataset(Experiment(**changes), data)


def test_left_out_users_are_counted_with_the_reason() -> None:
    sizes = [100, 60, 25, 11, 4]
    data = blobs(users=np.repeat(np.arange(5), sizes))
    assert len(split_natural(data)) == 5, "all users, however few examples"
    with pytest.warns(DataWarning, match="1 of 5 users are left out, which have fewer than 10"):
        assert len(split_natural(data, min_examples=10)) == 4
    with pytest.warns(
        DataWarning, match="3 of 5 .* because --clients is 2: set --clients 0"
    ) as two:
        assert len(split_natural(data, clients=2, min_examples=1)) == 2
    assert len(two) == 1


def plain_torch_accuracy(model: nn.Module, data: fedcog.Dataset) -> float:
    """Accuracy on the test set, measured without fedcog."""
    x = data.test_x
    if not x.is_floating_point():
        mean = torch.tensor(data.mean)[:, None, None]
        std = torch.tensor(data.std)[:, None, None]
        x = (x / 255 - mean) / std
    with torch.no_grad():
        return float((model(x).argmax(1) == data.test_y).double().mean())


def test_load_returns_the_trained_model(tmp_path: Path) -> None:
    run = fedcog.run(TINY, tmp_path / "run", report=False)
    model = fedcog.load(tmp_path / "run")
    assert not model.training
    assert plain_torch_accuracy(model, registry.load("digits")) == pytest.approx(
        run.last, abs=1e-12
    )


@pytest.mark.parametrize("name", USER_MODELS)
def test_user_network_trains_and_loads(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8, generator=generator)
    data = fedcog.from_arrays(x[:80], torch.arange(80) % 4, x[80:], torch.arange(20) % 4)
    algorithm = FedCOG(FedProx(), count=8, steps=2, start_round=1)
    run = fedcog.run(
        dataclasses.replace(TINY, algorithm=algorithm, rounds=3),
        tmp_path / "run",
        data=data,
        model=USER_MODELS[name](),
        report=False,
    )
    with pytest.raises(RecordError, match="trained your own network"):
        fedcog.load(tmp_path / "run")
    with pytest.raises(RecordError, match="not the one"):
        fedcog.load(tmp_path / "run", model=nn.Linear(64, 4))
    model = fedcog.load(tmp_path / "run", model=USER_MODELS[name]())
    assert plain_torch_accuracy(model, data) == pytest.approx(run.last, abs=1e-12)


def test_unsuitable_networks_are_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(fedcog.ModelError, match="does not take inputs"):
        fedcog.run(TINY, tmp_path / "run", data=blobs(), model=nn.Linear(6, 3), report=False)
    with pytest.raises(fedcog.ModelError, match="cannot be called as Linear"):
        fedcog.run(TINY, tmp_path / "run", data=blobs(), model=nn.Linear, report=False)


def test_validation_accuracy_counts_held_out_examples(tmp_path: Path) -> None:
    run = fedcog.run(dataclasses.replace(TINY, validation=0.2), tmp_path / "run", report=False)
    line = run.lines[-1]
    num_correct = round(line["validation_accuracy"] * 288, 6)  # 4 clients, 72 examples each
    assert num_correct == int(num_correct)


def test_evaluate_every_n_rounds(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, rounds=5, evaluate_every=2, evaluate_local=False)
    run = fedcog.run(config, tmp_path / "run", report=False)
    assert [round for round, _ in run.scores] == [2, 4, 5]
    assert "accuracy" not in run.lines[0]["local"][0]


def test_results_depend_only_on_the_seed(tmp_path: Path) -> None:
    def recorded_lines(name: str, **changes: Any) -> list[Any]:
        torch.manual_seed(len(name))  # must not matter
        run = fedcog.run(dataclasses.replace(TINY, **changes), tmp_path / name, report=False)
        return [
            {key: value for key, value in line.items() if key != "seconds"} for line in run.lines
        ]

    assert recorded_lines("one") == recorded_lines("another")
    assert recorded_lines("one more", seed=1) != recorded_lines("yet another")


def test_partition_seed_fixes_the_partition(tmp_path: Path) -> None:
    def class_counts(name: str, **changes: Any) -> torch.Tensor:
        changes = {"partition": "dirichlet", "beta": 0.5} | changes
        fedcog.run(dataclasses.replace(TINY, **changes), tmp_path / name, report=False)
        return RunDirectory(tmp_path / name).tensors("federation.safetensors")[0]["counts"]

    assert torch.equal(
        class_counts("a", seed=1, partition_seed=7), class_counts("b", seed=2, partition_seed=7)
    )
    assert not torch.equal(class_counts("c", seed=1), class_counts("d", seed=2))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize(
    "changes", [{"optimizer": "adam"}, {"local_epochs": 0.5}, {"grad_clip": 0.1}, {"lr_decay": 0.5}]
)
def test_training_settings_run_with_loop_and_vmap(
    mapping: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = fedcog.run(
        dataclasses.replace(TINY, mapping=mapping, **changes), tmp_path / "run", report=False
    )
    assert run.lines[-1]["loss"] > 0


def test_augmentation_of_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only images"):
        fedcog.run(
            dataclasses.replace(TINY, augment="on"), tmp_path / "run", data=blobs(), report=False
        )


def test_unavailable_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used here"):
        fedcog.run(dataclasses.replace(TINY, device="cuda:99"), tmp_path / "run", report=False)


@pytest.mark.slow
def test_compare_runs_all_and_resumes(tmp_path: Path) -> None:
    experiments = [TINY, dataclasses.replace(TINY, algorithm=FedProx())]
    runs: list[Run] = compare(experiments, [0, 1], tmp_path / "all")
    assert [run.path.relative_to(tmp_path / "all").as_posix() for run in runs] == [
        "fedavg/seed-0",
        "fedavg/seed-1",
        "fedprox/seed-0",
        "fedprox/seed-1",
    ]
    repeated = compare([*experiments, TINY], [0, 1, 1], tmp_path / "all")
    assert len(repeated) == 4, "repeated experiments and seeds run once"
    lines: list[Any] = []
    extended = compare(
        experiments,
        [0, 1, 2],
        tmp_path / "all",
        callbacks=lambda experiment, line: lines.append(line),
    )
    assert len(extended) == 6 and len(lines) == 4  # two new rounds per algorithm
    assert (tmp_path / "all" / "report.html").exists()


class UnusualBuffers(nn.Module):
    """A network with an infinite buffer, a non-persistent buffer, and a name with a slash."""

    mask: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a/b", nn.Linear(5, 3))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
        self.register_buffer("seen", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(0.1 * x.mean(0))
        scale = torch.softmax(self.mask, 0)[0]
        return self.get_submodule("a/b")(x - self.seen) * scale  # type: ignore[no-any-return]


def test_unusual_buffers_and_names_are_saved_and_loaded(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, mapping="loop")
    run = fedcog.run(config, tmp_path / "run", data=blobs(), model=UnusualBuffers(), report=False)
    assert all(line["loss"] is not None for line in run.lines)
    model = fedcog.load(tmp_path / "run", model=UnusualBuffers())
    assert model.mask.tolist() == [0.0, -float("inf")]  # type: ignore[operator, union-attr]
    assert float(model.seen.abs().max()) > 0  # type: ignore[operator, union-attr, arg-type]
    assert plain_torch_accuracy(model, blobs()) == pytest.approx(run.last, abs=1e-12)
    longer = dataclasses.replace(config, rounds=3)
    fedcog.run(
        longer, tmp_path / "run", data=blobs(), model=UnusualBuffers(), resume=True, report=False
    )
    states = []
    # Buffers that `forward` writes in place must stay separate per client.
    for mapping in ("loop", "vmap"):
        torch.manual_seed(0)  # for the network's initial weights
        mapped = dataclasses.replace(longer, mapping=mapping)
        fedcog.run(mapped, tmp_path / mapping, data=blobs(), model=UnusualBuffers(), report=False)
        states.append(fedcog.load(tmp_path / mapping, model=UnusualBuffers()).state_dict())
        states[-1]["seen"] = fedcog.load(tmp_path / mapping, model=UnusualBuffers()).seen
    torch.testing.assert_close(states[1], states[0])
    longest = dataclasses.replace(TINY, rounds=4)
    with pytest.raises(RecordError, match="of another network"):
        fedcog.run(
            longest,
            tmp_path / "run",
            data=blobs(),
            model=nn.Linear(5, 3),
            resume=True,
            report=False,
        )


def test_resume_refuses_a_network_with_other_source_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    networks = list[nn.Module]()
    for name, sign in {"one_net": "", "other_net": "-"}.items():
        body = f"    def forward(self, x):\n        return {sign}super().forward(x)\n"
        code = f"class Net(nn.Linear):\n{body}"
        (tmp_path / f"{name}.py").write_text(f"from torch import nn\n\n\n{code}")
        networks.append(importlib.import_module(name).Net(5, 3))
    assert repr(networks[0]) == repr(networks[1])
    fedcog.run(TINY, tmp_path / "run", data=blobs(), model=networks[0], report=False)
    longer = dataclasses.replace(TINY, rounds=TINY.rounds + 1)
    with pytest.raises(RecordError, match="of another network"):
        fedcog.run(
            longer, tmp_path / "run", data=blobs(), model=networks[1], resume=True, report=False
        )
    fedcog.run(longer, tmp_path / "run", data=blobs(), model=networks[0], resume=True, report=False)


@pytest.mark.slow
def test_run_ignores_and_restores_torch_settings(tmp_path: Path) -> None:
    expected = fedcog.run(TINY, tmp_path / "plain", report=False).lines[-1]["loss"]
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            run = fedcog.run(dataclasses.replace(TINY, threads=2), tmp_path / "odd", report=False)
        assert torch.get_default_dtype() == torch.float64 and torch.get_num_threads() == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.lines[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_user_data_are_not_modified(tmp_path: Path) -> None:
    data = blobs()
    before = data.test_x.clone()
    fedcog.run(TINY, tmp_path / "run", data=data, report=False)
    assert torch.equal(before, data.test_x)


def test_vmap_error_suggests_mapping_loop(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else self.layer(-x)  # type: ignore[no-any-return]

    with pytest.raises(fedcog.ModelError, match="set --mapping loop"):
        fedcog.run(
            dataclasses.replace(TINY, mapping="vmap"),
            tmp_path / "run",
            data=blobs(),
            model=Branching(),
            report=False,
        )


@dataclasses.dataclass(frozen=True)
class PartialStep(fedcog.Algorithm):
    """FedAvg that applies only a fraction of the mean update."""

    share: float = 0.5

    def server_update(self, server: Any, total: Any, draws: Any) -> Any:
        return super().server_update(
            server, total | {"weight": total["weight"] / self.share}, draws
        )


@dataclasses.dataclass(frozen=True)
class WrapperWithSetting(fedcog.Wrapper):
    """A wrapper that adds a setting and no behavior."""

    patience: int = 3


USER_ALGORITHMS = {
    "own": PartialStep(),
    "inside": FedCOG(PartialStep(0.25), count=6, steps=2, start_round=1),
    "around": FedCOG(
        WrapperWithSetting(FedProx(mu=0.5), patience=7), count=6, steps=2, start_round=1
    ),
    "both": WrapperWithSetting(PartialStep(0.75)),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", USER_ALGORITHMS.values(), ids=USER_ALGORITHMS.keys())
def test_user_algorithm_is_recorded_and_resumed(
    algorithm: fedcog.Algorithm, tmp_path: Path
) -> None:
    experiment = dataclasses.replace(TINY, algorithm=algorithm)
    run = fedcog.run(experiment, tmp_path / "run")
    assert (tmp_path / "run/report.html").exists()
    recorded = fedcog.read(tmp_path / "run")
    assert recorded.experiment.to_dict() == experiment.to_dict() and recorded.last == run.last
    longer = fedcog.run(
        dataclasses.replace(experiment, rounds=3), tmp_path / "run", resume=True, report=False
    )
    assert len(longer.lines) == 3
    with pytest.raises(RecordError, match="algorithm="):
        fedcog.load(tmp_path / "run")  # needs the algorithm's server_model
    fedcog.load(tmp_path / "run", algorithm=algorithm)
    other = dataclasses.replace(TINY, algorithm=PartialStep(0.1))
    with pytest.raises(RecordError, match="another experiment"):
        fedcog.run(other, tmp_path / "run", resume=True, report=False)
    assert main(["run", "--resume", str(tmp_path / "run")]) == 2


DIVERGING = dataclasses.replace(
    TINY, algorithm=FedProx(mu=1000.0), lr=0.05, local_steps=6, rounds=9, checkpoint_every=9
)


@dataclasses.dataclass(frozen=True)
class DivergesInRound3(fedcog.Algorithm):
    """FedAvg whose server state becomes infinite in round 3."""

    def server_init(self, origin: Any) -> Any:
        return super().server_init(origin) | {"round": torch.zeros(())}

    def server_update(self, server: Any, total: Any, draws: Any) -> Any:
        round = server["round"] + 1
        return super().server_update(server, total, draws) | {"round": round / (round < 3)}


def test_diverged_server_leaves_client_states_unchanged(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, algorithm=fedcog.Ditto(DivergesInRound3()), rounds=5)
    with pytest.raises(Diverged, match="the server state is not finite"):
        fedcog.run(experiment, tmp_path / "run", report=False)
    fedcog.run(dataclasses.replace(experiment, rounds=2), tmp_path / "two", report=False)
    expected = (tmp_path / "two/checkpoint.safetensors").read_bytes()
    assert (tmp_path / "run/checkpoint.safetensors").read_bytes() == expected


def test_diverged_personal_model_keeps_the_client_in_the_round(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, local_steps=9, lr=0.05, rounds=3, on_divergence="skip")
    fedavg = fedcog.run(config, tmp_path / "fedavg", report=False)
    ditto_config = dataclasses.replace(config, algorithm=fedcog.Ditto(lambda_pull=1e6))
    ditto = fedcog.run(ditto_config, tmp_path / "ditto", report=False)
    assert ditto.scores == fedavg.scores
    assert all(line["forgot"] == [0, 1, 2, 3] and "skipped" not in line for line in ditto.lines)
    assert not ditto.label_mix, "no personal model is left to score"


@pytest.mark.slow
def test_tables_mark_diverged_runs(tmp_path: Path) -> None:
    experiments = [dataclasses.replace(DIVERGING, rounds=4), dataclasses.replace(TINY, lr=1e6)]
    with pytest.warns(UserWarning, match="seed 0: training diverged"):
        runs = compare(experiments, [0], tmp_path / "c")
    assert all(run.diverged for run in runs)
    rows = summary.rows(runs)
    assert [row[-1] for row in rows] == [f"{len(runs[0].lines)}, 1 diverged", "0, 1 diverged"]
    assert rows[1][1] == "" and "diverged" in (tmp_path / "c/report.html").read_text()


def test_scaffold_refuses_adam() -> None:
    with pytest.raises(ConfigError, match="set --optimizer sgd"):
        Experiment(algorithm=fedcog.FedCOG(fedcog.SCAFFOLD()), optimizer="adam")


def test_algorithms_that_cannot_be_recorded_are_refused() -> None:
    class NoDataclass(fedcog.Algorithm):
        def __init__(self, share: float = 0.5) -> None:
            pass

    @dataclasses.dataclass(frozen=True)
    class TupleSetting(fedcog.Algorithm):
        shares: tuple[float, ...] = (0.5,)

    for algorithm, reason in (
        (NoDataclass(), "is not a dataclass"),
        (TupleSetting(), "shares is neither"),
        ("fedavg", "is not an Algorithm"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Experiment(algorithm=algorithm)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=reason):
            Experiment(algorithm=FedCOG(algorithm))  # type: ignore[arg-type]


@pytest.mark.slow
def test_compare_names_runs_by_the_settings_that_differ(tmp_path: Path) -> None:
    experiments = [
        dataclasses.replace(TINY, rounds=1, algorithm=FedProx(mu=mu)) for mu in (0.1, 0.2)
    ]
    runs = compare(experiments, [0], tmp_path / "c")
    assert [run.path.parent.name for run in runs] == [
        "fedprox_fedprox.mu_0.1",
        "fedprox_fedprox.mu_0.2",
    ]
    assert [group.label for group in fedcog.group(runs)] == [
        "fedprox (fedprox.mu 0.1)",
        "fedprox (fedprox.mu 0.2)",
    ]


def test_repr_is_a_short_summary(tmp_path: Path) -> None:
    assert repr(blobs()) == "Dataset('custom', 200 + 40 examples of float32 [5], 3 classes)"
    run = fedcog.run(TINY, tmp_path / "run", report=False)
    assert repr(run).endswith(f"fedavg, 2 rounds, last {run.last:.4f}, best {run.best:.4f})")


def test_divergence_stops_the_round_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        Diverged,
        match=r"round \d: the updates? of clients? .* The likely cause is --fedprox.mu 1000",
    ):
        fedcog.run(DIVERGING, tmp_path / "run", report=False)
    lines = fedcog.read(tmp_path / "run").lines
    checkpoint = RunDirectory(tmp_path / "run").load()
    # Divergence writes a checkpoint at once, although one is due only every nine rounds.
    assert checkpoint is not None and 0 < checkpoint.round == len(lines) < 9
    assert all(value.isfinite().all() for value in tree.flatten(checkpoint.server).values())
    with pytest.raises(Diverged, match=f"round {len(lines) + 1}"):
        fedcog.run(DIVERGING, tmp_path / "run", resume=True, report=False)


def test_divergence_error_names_a_high_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"clients 0, 1, 2, 3 are not finite. The likely cause is --lr 1e\+06"
    ):
        fedcog.run(dataclasses.replace(TINY, lr=1e6), tmp_path / "run", report=False)
    arguments = "run --rounds 2 --local-steps 3 --clients 4 --min-examples 1 --lr 1e6 --quiet --out"
    assert main([*arguments.split(), str(tmp_path / "again")]) == 1


def test_on_divergence_skip_leaves_the_client_out_of_the_round(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    y = torch.arange(60) % 3
    x[40:] *= 1e30  # the examples of client 2
    indices = [torch.arange(start, start + 20) for start in (0, 20, 40)]
    data = fedcog.from_arrays(x, y, x[:9], y[:9], classes=["a", "b", "c"], indices=indices)
    fedcog_late = FedCOG(count=6, steps=2, start_round=1)
    experiment = dataclasses.replace(
        TINY, model="mlp", rounds=2, algorithm=fedcog_late, partition="given", clients=3
    )
    with pytest.raises(Diverged, match="client 2 is not finite"):
        fedcog.run(experiment, tmp_path / "stop", data=data, report=False)
    skip_config = dataclasses.replace(experiment, on_divergence="skip")
    run = fedcog.run(skip_config, tmp_path / "skip", data=data)
    assert [line["skipped"] for line in run.lines] == [[2], [2]]
    assert run.lines[-1]["clients"] == [0, 1, 2] and run.lines[-1]["loss"] > 0
    checkpoint = RunDirectory(tmp_path / "skip").load()
    # The skipped client keeps no state of these rounds.
    assert checkpoint is not None and checkpoint.client_ids == {0, 1}


def test_mapping_graph_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set --mapping auto"):
        fedcog.run(Experiment(rounds=1, mapping="graph", device="cpu"), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "mapping"),
    [
        ({"local_steps": 3, "batch_size": 16}, "vmap"),
        ({"local_steps": 400}, "loop"),
        ({"local_epochs": 1.0, "batch_size": 16, "clients": 100, "partition": "iid"}, "vmap"),
        ({"local_steps": 3, "batch_size": 16, "workers": 2}, "vmap"),
        ({"local_steps": 3, "batch_size": 16, "mapping": "loop"}, "loop"),
    ],
)
def test_auto_mapping_on_a_cpu_uses_vmap_for_short_rounds(
    settings: dict[str, Any], mapping: str
) -> None:
    setup = ExperimentSetup(Experiment(device="cpu", **settings))
    assert setup.simulator.cohort.config.mapping == mapping
    assert setup.simulator.cohort.config.num_threads == (1 if mapping == "vmap" else 0)
