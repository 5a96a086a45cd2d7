"""The same from Python: your own data, your own network, and the trained model back."""

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
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.federation.backend import Diverged
from fedcog.runs.records import summary
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup
from tests.support.user_models import USER_MODELS

TINY = Experiment(
    rounds=2, local_steps=3, batch_size=8, clients=4, partition="iid", threads=1, min_examples=2
)


def blobs(**keywords: Any) -> fedcog.Dataset:
    """Three clouds of points in five dimensions: easy to tell apart."""
    draw = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = (draw.normal(size=(240, 5)) + 3 * np.eye(5)[y]).astype(np.float32)
    return fedcog.from_arrays(x[:200], y[:200], x[200:], y[200:], **keywords)


def test_your_own_arrays_learn(tmp_path: Path) -> None:
    done = fedcog.run(
        dataclasses.replace(TINY, rounds=8, lr=0.05), tmp_path / "run", data=blobs(), report=False
    )
    assert done.best > 0.9
    assert done.experiment.dataset == "custom"
    assert done == fedcog.read(tmp_path / "run")


def test_any_torch_dataset(tmp_path: Path) -> None:
    data = blobs()
    train = TensorDataset(data.train_x, data.train_y)
    test = TensorDataset(data.test_x, data.test_y)
    one = fedcog.run(TINY, tmp_path / "one", data=fedcog.from_torch(train, test), report=False)
    other = fedcog.run(TINY, tmp_path / "other", data=data, report=False)
    assert one.last == other.last


def test_given_client_indices(tmp_path: Path) -> None:
    indices = [torch.arange(0, 50), torch.arange(50, 60), torch.arange(60, 200)]
    fedcog.run(TINY, tmp_path / "run", data=blobs(indices=indices), report=False)
    counts = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[0]["counts"]
    assert counts.sum(1).tolist() == [50, 10, 140]
    experiment = fedcog.read(tmp_path / "run").experiment
    assert (experiment.partition, experiment.clients) == ("given", 3)


def test_users_are_clients(tmp_path: Path) -> None:
    users = [f"user {number % 6}" for number in range(200)]
    natural = dataclasses.replace(TINY, partition="natural", clients=6)
    fedcog.run(natural, tmp_path / "run", data=blobs(users=users), report=False)
    counts = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[0]["counts"]
    assert sorted(counts.sum(1).tolist()) == [33, 33, 33, 33, 34, 34]


def accuracy_elsewhere(model: nn.Module, data: fedcog.Dataset) -> float:
    """As somebody without fedcog would measure it."""
    x = data.test_x
    if not x.is_floating_point():
        x = (x / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[
            :, None, None
        ]
    with torch.no_grad():
        return float((model(x).argmax(1) == data.test_y).double().mean())


def test_the_trained_model_comes_back(tmp_path: Path) -> None:
    done = fedcog.run(TINY, tmp_path / "run", report=False)
    from fedcog.data import registry

    model = fedcog.load(tmp_path / "run")
    assert not model.training
    assert accuracy_elsewhere(model, registry.load("digits")) == pytest.approx(done.last, abs=1e-12)


@pytest.mark.parametrize("name", USER_MODELS)
def test_your_own_network_trains_and_comes_back(name: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8, generator=draw)
    data = fedcog.from_arrays(x[:80], torch.arange(80) % 4, x[80:], torch.arange(20) % 4)
    cog = FedCOG(FedProx(), count=8, steps=2, start_round=1)
    done = fedcog.run(
        dataclasses.replace(TINY, algorithm=cog, rounds=3),
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
    assert accuracy_elsewhere(model, data) == pytest.approx(done.last, abs=1e-12)


def test_a_network_that_does_not_fit_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(fedcog.ModelError, match="does not take inputs"):
        fedcog.run(TINY, tmp_path / "run", data=blobs(), model=nn.Linear(6, 3), report=False)
    with pytest.raises(fedcog.ModelError, match="must be drawing random numbers"):
        fedcog.run(
            TINY,
            tmp_path / "run",
            data=blobs(),
            model=nn.Sequential(nn.Linear(5, 3), nn.Dropout()),
            report=False,
        )


def test_validation_is_scored_beside_the_test_set(tmp_path: Path) -> None:
    done = fedcog.run(dataclasses.replace(TINY, validation=0.2), tmp_path / "run", report=False)
    line = done.lines[-1]
    held_out = round(line["validation_accuracy"] * 288, 6)  # 4 clients x 72 of 360 or 361 examples
    assert held_out == int(held_out)


def test_evaluation_is_as_often_as_asked(tmp_path: Path) -> None:
    sparse = dataclasses.replace(TINY, rounds=5, evaluate_every=2, evaluate_local=False)
    done = fedcog.run(sparse, tmp_path / "run", report=False)
    assert [round for round, _ in done.scores] == [2, 4, 5]
    assert "accuracy" not in done.lines[0]["local"][0]


def test_the_seed_decides_everything_and_nothing_else_does(tmp_path: Path) -> None:
    def lines(name: str, **changes: Any) -> list[Any]:
        torch.manual_seed(len(name))
        done = fedcog.run(dataclasses.replace(TINY, **changes), tmp_path / name, report=False)
        return [
            {key: value for key, value in line.items() if key != "seconds"} for line in done.lines
        ]

    assert lines("one") == lines("another")
    assert lines("one more", seed=1) != lines("yet another")


def test_the_partition_may_have_a_seed_of_its_own(tmp_path: Path) -> None:
    def counts(name: str, **changes: Any) -> torch.Tensor:
        changes = {"partition": "dirichlet", "beta": 0.5} | changes
        fedcog.run(dataclasses.replace(TINY, **changes), tmp_path / name, report=False)
        return RunDirectory(tmp_path / name).tensors("federation.safetensors")[0]["counts"]

    assert torch.equal(counts("a", seed=1, partition_seed=7), counts("b", seed=2, partition_seed=7))
    assert not torch.equal(counts("c", seed=1), counts("d", seed=2))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize(
    "change", [{"optimizer": "adam"}, {"local_epochs": 0.5}, {"grad_clip": 0.1}, {"lr_decay": 0.5}]
)
def test_every_way_of_training_runs(mapping: str, change: dict[str, Any], tmp_path: Path) -> None:
    done = fedcog.run(
        dataclasses.replace(TINY, mapping=mapping, **change), tmp_path / "run", report=False
    )
    assert done.lines[-1]["loss"] > 0


def test_augmenting_what_is_no_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only images"):
        fedcog.run(
            dataclasses.replace(TINY, augment="on"), tmp_path / "run", data=blobs(), report=False
        )


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used here"):
        fedcog.run(dataclasses.replace(TINY, device="cuda:99"), tmp_path / "run", report=False)


def test_compare_runs_all_and_goes_on_where_it_was(tmp_path: Path) -> None:
    experiments = [TINY, dataclasses.replace(TINY, algorithm=FedProx())]
    seen: list[Run] = compare(experiments, [0, 1], tmp_path / "all")
    assert [run.path.relative_to(tmp_path / "all").as_posix() for run in seen] == [
        "fedavg/seed-0",
        "fedavg/seed-1",
        "fedprox/seed-0",
        "fedprox/seed-1",
    ]
    lines: list[Any] = []
    assert len(compare([*experiments, TINY], [0, 1, 1], tmp_path / "all")) == 4, (
        "twice the same is once"
    )
    again = compare(
        experiments,
        [0, 1, 2],
        tmp_path / "all",
        callbacks=lambda experiment, line: lines.append(line),
    )
    assert len(again) == 6 and len(lines) == 4  # two rounds of the new seed for each algorithm
    assert (tmp_path / "all" / "report.html").exists()


class Masked(nn.Module):
    """An infinite constant, a statistic that no state_dict holds, and a name with a slash."""

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


def test_odd_buffers_and_names_survive(tmp_path: Path) -> None:
    loop = dataclasses.replace(TINY, mapping="loop")
    done = fedcog.run(loop, tmp_path / "run", data=blobs(), model=Masked(), report=False)
    assert all(line["loss"] is not None for line in done.lines)
    model = fedcog.load(tmp_path / "run", model=Masked())
    assert model.mask.tolist() == [0.0, -float("inf")]  # type: ignore[operator, union-attr]
    assert float(model.seen.abs().max()) > 0  # type: ignore[operator, union-attr, arg-type]
    assert accuracy_elsewhere(model, blobs()) == pytest.approx(done.last, abs=1e-12)
    longer = dataclasses.replace(loop, rounds=3)
    fedcog.run(longer, tmp_path / "run", data=blobs(), model=Masked(), resume=True, report=False)
    ends = []
    for mapping in ("loop", "vmap"):  # buffers that forward writes in place are each client's own
        torch.manual_seed(0)  # the network's first weights
        one = dataclasses.replace(longer, mapping=mapping)
        fedcog.run(one, tmp_path / mapping, data=blobs(), model=Masked(), report=False)
        ends.append(fedcog.load(tmp_path / mapping, model=Masked()).state_dict())
        ends[-1]["seen"] = fedcog.load(tmp_path / mapping, model=Masked()).seen
    torch.testing.assert_close(ends[1], ends[0])
    more = dataclasses.replace(TINY, rounds=4)
    with pytest.raises(RecordError, match="of another network"):
        fedcog.run(
            more, tmp_path / "run", data=blobs(), model=nn.Linear(5, 3), resume=True, report=False
        )


def test_a_network_that_only_looks_the_same_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    nets = list[nn.Module]()
    for name, sign in {"one_net": "", "other_net": "-"}.items():
        body = f"    def forward(self, x):\n        return {sign}super().forward(x)\n"
        code = f"class Net(nn.Linear):\n{body}"
        (tmp_path / f"{name}.py").write_text(f"from torch import nn\n\n\n{code}")
        nets.append(importlib.import_module(name).Net(5, 3))
    assert repr(nets[0]) == repr(nets[1])
    fedcog.run(TINY, tmp_path / "run", data=blobs(), model=nets[0], report=False)
    more = dataclasses.replace(TINY, rounds=TINY.rounds + 1)
    with pytest.raises(RecordError, match="of another network"):
        fedcog.run(more, tmp_path / "run", data=blobs(), model=nets[1], resume=True, report=False)
    fedcog.run(more, tmp_path / "run", data=blobs(), model=nets[0], resume=True, report=False)


def test_the_callers_torch_settings_matter_not_and_are_kept(tmp_path: Path) -> None:
    expected = fedcog.run(TINY, tmp_path / "plain", report=False).lines[-1]["loss"]
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            done = fedcog.run(dataclasses.replace(TINY, threads=2), tmp_path / "odd", report=False)
        assert torch.get_default_dtype() == torch.float64 and torch.get_num_threads() == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert done.lines[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_your_data_are_not_written_to(tmp_path: Path) -> None:
    data = blobs()
    before = data.test_x.clone()
    fedcog.run(TINY, tmp_path / "run", data=data, report=False)
    assert torch.equal(before, data.test_x)


def test_what_vmap_cannot_do_is_said(tmp_path: Path) -> None:
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
class Lazy(fedcog.Algorithm):
    """FedAvg that only goes part of the way."""

    share: float = 0.5

    def server_update(self, server: Any, total: Any, draws: Any) -> Any:
        return super().server_update(
            server, total | {"weight": total["weight"] / self.share}, draws
        )


@dataclasses.dataclass(frozen=True)
class Patient(fedcog.Wrapper):
    """Anything, with a setting."""

    patience: int = 3


OWN = {
    "own": Lazy(),
    "inside": FedCOG(Lazy(0.25), count=6, steps=2, start_round=1),
    "around": FedCOG(Patient(FedProx(mu=0.5), patience=7), count=6, steps=2, start_round=1),
    "both": Patient(Lazy(0.75)),
}


@pytest.mark.parametrize("algorithm", OWN.values(), ids=OWN.keys())
def test_your_own_algorithm_is_recorded_read_and_continued(
    algorithm: fedcog.Algorithm, tmp_path: Path
) -> None:
    experiment = dataclasses.replace(TINY, algorithm=algorithm)
    done = fedcog.run(experiment, tmp_path / "run")
    assert (tmp_path / "run/report.html").exists()
    again = fedcog.read(tmp_path / "run")
    assert again.experiment.to_dict() == experiment.to_dict() and again.last == done.last
    longer = fedcog.run(
        dataclasses.replace(experiment, rounds=3), tmp_path / "run", resume=True, report=False
    )
    assert len(longer.lines) == 3
    with pytest.raises(RecordError, match="algorithm="):
        fedcog.load(tmp_path / "run")  # whose server_model is nobody's here
    fedcog.load(tmp_path / "run", algorithm=algorithm)
    other = dataclasses.replace(TINY, algorithm=Lazy(0.1))
    with pytest.raises(RecordError, match="another experiment"):
        fedcog.run(other, tmp_path / "run", resume=True, report=False)
    from fedcog.cli.main import main

    assert main(["run", "--resume", str(tmp_path / "run")]) == 2


STIFF = dataclasses.replace(
    TINY, algorithm=FedProx(mu=1000.0), lr=0.05, local_steps=6, rounds=9, checkpoint_every=9
)


@dataclasses.dataclass(frozen=True)
class Boom(fedcog.Algorithm):
    """FedAvg whose server leaves the numbers in round 3."""

    def server_init(self, origin: Any) -> Any:
        return super().server_init(origin) | {"round": torch.zeros(())}

    def server_update(self, server: Any, total: Any, draws: Any) -> Any:
        round = server["round"] + 1
        return super().server_update(server, total, draws) | {"round": round / (round < 3)}


def test_a_server_that_diverges_leaves_the_clients_as_they_were(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, algorithm=fedcog.Ditto(Boom()), rounds=5)
    with pytest.raises(Diverged, match="the server state is not finite"):
        fedcog.run(experiment, tmp_path / "run", report=False)
    fedcog.run(dataclasses.replace(experiment, rounds=2), tmp_path / "two", report=False)
    one, other = (
        (tmp_path / place / "checkpoint.safetensors").read_bytes() for place in ("run", "two")
    )
    assert one == other


def test_a_personal_model_that_diverges_does_not_cost_the_client_its_place(tmp_path: Path) -> None:
    stiff = dataclasses.replace(TINY, local_steps=9, lr=0.05, rounds=3, on_divergence="skip")
    alone = fedcog.run(stiff, tmp_path / "fedavg", report=False)
    both = dataclasses.replace(stiff, algorithm=fedcog.Ditto(lambda_pull=1e6))
    done = fedcog.run(both, tmp_path / "ditto", report=False)
    assert done.scores == alone.scores
    assert all(line["forgot"] == [0, 1, 2, 3] and "skipped" not in line for line in done.lines)
    assert not done.personal  # there is no model to score


def test_diverged_runs_are_told_apart_in_tables(tmp_path: Path) -> None:
    both = [dataclasses.replace(STIFF, rounds=4), dataclasses.replace(TINY, lr=1e6)]
    with pytest.warns(UserWarning, match="seed 0: training diverged"):
        runs = compare(both, [0], tmp_path / "c")
    assert all(run.diverged for run in runs)
    rows = summary.rows(runs)
    assert [row[-1] for row in rows] == [f"{len(runs[0].lines)}, 1 diverged", "0, 1 diverged"]
    assert rows[1][1] == "" and "diverged" in (tmp_path / "c/report.html").read_text()


def test_scaffold_is_refused_where_steps_do_not_tell_gradients() -> None:
    with pytest.raises(ConfigError, match="set --optimizer sgd"):
        Experiment(algorithm=fedcog.FedCOG(fedcog.SCAFFOLD()), optimizer="adam")


def test_settings_that_could_not_be_recorded_are_refused() -> None:
    class Careless(fedcog.Algorithm):
        def __init__(self, share: float = 0.5) -> None:
            pass

    @dataclasses.dataclass(frozen=True)
    class Odd(fedcog.Algorithm):
        shares: tuple[float, ...] = (0.5,)

    for algorithm, reason in (
        (Careless(), "is not a dataclass"),
        (Odd(), "shares is neither"),
        ("fedavg", "is not an Algorithm"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Experiment(algorithm=algorithm)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=reason):
            Experiment(algorithm=FedCOG(algorithm))  # type: ignore[arg-type]


def test_compare_tells_settings_of_one_algorithm_apart(tmp_path: Path) -> None:
    one, other = (
        dataclasses.replace(TINY, rounds=1, algorithm=FedProx(mu=mu)) for mu in (0.1, 0.2)
    )
    runs = compare([one, other], [0], tmp_path / "c")
    assert [run.path.parent.name for run in runs] == [
        "fedprox_fedprox.mu_0.1",
        "fedprox_fedprox.mu_0.2",
    ]
    assert [found.label for found in fedcog.group(runs)] == [
        "fedprox (fedprox.mu 0.1)",
        "fedprox (fedprox.mu 0.2)",
    ]


def test_short_words_for_long_things(tmp_path: Path) -> None:
    assert repr(blobs()) == "Dataset('custom', 200 + 40 examples of float32 [5], 3 classes)"
    done = fedcog.run(TINY, tmp_path / "run", report=False)
    assert repr(done).endswith(f"fedavg, 2 rounds, last {done.last:.4f}, best {done.best:.4f})")


def test_divergence_is_caught_in_its_round_and_leaves_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        Diverged,
        match=r"round \d: the updates? of clients? .* The likely cause is --fedprox.mu 1000",
    ):
        fedcog.run(STIFF, tmp_path / "run", report=False)
    lines = fedcog.read(tmp_path / "run").lines
    checkpoint = RunDirectory(tmp_path / "run").load()
    assert (
        checkpoint is not None and 0 < checkpoint.round == len(lines) < 9
    )  # though checkpoints were due every nine
    assert all(value.isfinite().all() for value in tree.flatten(checkpoint.server).values())
    with pytest.raises(Diverged, match=f"round {len(lines) + 1}"):
        fedcog.run(STIFF, tmp_path / "run", resume=True, report=False)


def test_a_rate_too_high_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        Diverged, match=r"clients 0, 1, 2, 3 are not finite. The likely cause is --lr 1e\+06"
    ):
        fedcog.run(dataclasses.replace(TINY, lr=1e6), tmp_path / "run", report=False)
    from fedcog.cli.main import main

    words = "run --rounds 2 --local-steps 3 --clients 4 --min-examples 1 --lr 1e6 --quiet --out"
    assert main([*words.split(), str(tmp_path / "again")]) == 1


def test_a_diverging_client_can_be_left_out_of_its_round(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw)
    y = torch.arange(60) % 3
    x[40:] *= 1e30  # the third client's
    share = [torch.arange(start, start + 20) for start in (0, 20, 40)]
    data = fedcog.from_arrays(x, y, x[:9], y[:9], classes=["a", "b", "c"], indices=share)
    experiment = dataclasses.replace(
        TINY, model="mlp", rounds=2, algorithm=FedCOG(count=6, steps=2, start_round=1)
    )
    with pytest.raises(Diverged, match="client 2 is not finite"):
        fedcog.run(experiment, tmp_path / "stop", data=data, report=False)
    skip = dataclasses.replace(experiment, on_divergence="skip")
    done = fedcog.run(skip, tmp_path / "skip", data=data)
    assert [line["skipped"] for line in done.lines] == [[2], [2]]
    assert done.lines[-1]["clients"] == [0, 1, 2] and done.lines[-1]["loss"] > 0
    checkpoint = RunDirectory(tmp_path / "skip").load()
    assert checkpoint is not None and checkpoint.client_ids == {
        0,
        1,
    }  # it keeps nothing of a round it was left out of


def test_graphs_are_refused_without_a_gpu(tmp_path: Path) -> None:
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
def test_short_rounds_go_together_on_a_cpu(settings: dict[str, Any], mapping: str) -> None:
    prepared = ExperimentSetup(Experiment(device="cpu", **settings))
    assert prepared.simulator.cohort.config.mapping == mapping
    assert prepared.simulator.cohort.config.num_threads == (1 if mapping == "vmap" else 0)
