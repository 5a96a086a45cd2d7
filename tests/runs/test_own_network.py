"""A network of one's own: seeds, dropout, and what is never touched."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fedcog
from fedcog import ConfigError, Experiment, FedCOG, ModelError
from fedcog.models.behavior import is_same, network_behavior
from fedcog.models.functional import Model
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.runner import NetworkNote

TINY = Experiment(clients=4, rounds=2, local_steps=3, batch_size=8, threads=1, workers=1)
WITH_FEDCOG = dataclasses.replace(TINY, algorithm=FedCOG(count=8, steps=2, start_round=1), rounds=3)


class Net(nn.Module):
    """A network with BatchNorm and dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4)
        )
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def losses(run: fedcog.Run) -> list[float]:
    return [line["loss"] for line in run.lines]


def test_equal_experiments_give_the_same_run(tmp_path: Path) -> None:
    runs = [fedcog.run(TINY, tmp_path / name, model=Net, report=False) for name in "ab"]
    assert losses(runs[0]) == losses(runs[1])
    files = [(run.path / "checkpoint.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]


def test_each_seed_starts_from_its_own_weights(tmp_path: Path) -> None:
    fixed = dataclasses.replace(TINY, partition_seed=0, lr=1e-12, rounds=1)
    fedcog.compare([fixed], [0, 1], tmp_path, model=lambda: Net(10))
    weights = [
        fedcog.load(tmp_path / "fedavg" / f"seed-{seed}", model=Net).state_dict() for seed in (0, 1)
    ]
    assert float((weights[0]["head.weight"] - weights[1]["head.weight"]).abs().max()) > 0.01


def test_one_instance_for_several_seeds_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeds 0, 1 would all start.*model=Net or model=lambda"):
        fedcog.compare([TINY], [0, 1], tmp_path, model=Net())
    with pytest.raises(ConfigError, match="would all start"):
        fedcog.sweep([TINY], {"lr": [0.1, 0.2]}, tmp_path, trials=2, model=Net())
    fedcog.compare([TINY], [0], tmp_path / "one", model=Net())


def test_runs_of_other_networks_are_other_groups(tmp_path: Path) -> None:
    class Other(Net):
        """The same layers under another name."""

    for name, model in {"a": Net, "b": Other}.items():
        fedcog.run(TINY, tmp_path / name, model=model, report=False)
    groups = fedcog.group(fedcog.read_all(tmp_path))
    assert [len(each.runs) for each in groups] == [1, 1]
    assert "network Net-" in groups[0].label and "network Other-" in groups[1].label


def test_record_and_report_say_where_initial_weights_come_from(tmp_path: Path) -> None:
    for name, model in {"seed": Net, "given": Net()}.items():
        run = fedcog.run(TINY, tmp_path / name, model=model)
        about = RunDirectory(run.path).tensors("federation.safetensors")[1]
        assert about["initial_weights"] == name
        page = (run.path / "report.html").read_text()
        assert f"<td>{run.user_objects['network']}</td>" in page
        assert ("those of the network that was passed in" in page) == (name == "given")


def test_load_leaves_the_given_network_alone(tmp_path: Path) -> None:
    fedcog.run(TINY, tmp_path / "run", model=Net, report=False)
    mine = Net().train()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    loaded = fedcog.load(tmp_path / "run", model=mine)
    assert loaded is not mine and not loaded.training
    assert mine.training
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    assert not torch.equal(loaded.state_dict()["head.weight"], before["head.weight"])


def test_run_leaves_the_given_network_alone(tmp_path: Path) -> None:
    mine = Net().eval()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    fedcog.run(TINY, tmp_path / "run", model=mine, report=False)
    assert not mine.training
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())


def test_dropout_resumes_byte_for_byte(tmp_path: Path) -> None:
    straight = fedcog.run(WITH_FEDCOG, tmp_path / "straight", model=Net, report=False)
    short = dataclasses.replace(WITH_FEDCOG, rounds=2)
    fedcog.run(short, tmp_path / "resumed", model=Net, report=False)
    resumed = fedcog.run(WITH_FEDCOG, tmp_path / "resumed", model=Net, resume=True, report=False)
    assert losses(straight) == losses(resumed)
    file = "checkpoint.safetensors"
    assert (straight.path / file).read_bytes() == (resumed.path / file).read_bytes()


@pytest.mark.processes
def test_dropout_is_the_same_in_worker_processes(tmp_path: Path) -> None:
    alone = fedcog.run(WITH_FEDCOG, tmp_path / "alone", model=Net, report=False)
    shared = dataclasses.replace(WITH_FEDCOG, workers=2, threads=2)
    together = fedcog.run(shared, tmp_path / "together", model=Net, report=False)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)


def test_dropout_is_the_same_for_clients_at_once(tmp_path: Path) -> None:
    lines = []
    for mapping in ("loop", "vmap"):
        mapped = dataclasses.replace(WITH_FEDCOG, mapping=mapping, precision="float64")
        run = fedcog.run(mapped, tmp_path / mapping, model=Net, report=False)
        lines.append(json.dumps([[round(loss, 9) for loss in losses(run)]]))
    assert lines[0] == lines[1]


class Branching(nn.Module):
    """A network whose control flow depends on its inputs, which vmap cannot map."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if x.sum() > 0:
            x = x * 2
        return self.head(x)  # type: ignore[no-any-return]


def test_network_that_vmap_cannot_map_is_refused_before_round_1(tmp_path: Path) -> None:
    mapped = dataclasses.replace(TINY, mapping="vmap")
    with pytest.raises(ModelError, match=r"torch cannot do with this one.*set --mapping loop"):
        fedcog.run(mapped, tmp_path / "run", model=Branching, report=False)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("rounds.jsonl"))
    for mapping in ("loop", "auto"):
        one_by_one = dataclasses.replace(TINY, mapping=mapping)  # type: ignore[arg-type]
        fedcog.run(one_by_one, tmp_path / mapping, model=Branching, report=False)


class Frozen(nn.Module):
    """A network with a frozen weight and a setting that its representation does not show."""

    def __init__(self, scale: float = 0.9, power: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        self.power = power
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * self.scale**self.power  # type: ignore[no-any-return]


def test_resume_with_other_constants_is_refused(tmp_path: Path) -> None:
    longer = dataclasses.replace(TINY, rounds=3)
    fedcog.run(TINY, tmp_path / "run", model=Frozen(), report=False)
    for other in (Frozen(0.5), lambda: Frozen(power=2)):
        with pytest.raises(RecordError, match="with another network, or other values in it"):
            fedcog.run(longer, tmp_path / "run", model=other, resume=True, report=False)
    run = fedcog.run(longer, tmp_path / "run", model=Frozen, resume=True, report=False)
    assert len(run.lines) == 3


def test_resume_with_a_network_that_was_used_is_accepted(tmp_path: Path) -> None:
    net = Net()
    fedcog.run(TINY, tmp_path / "run", model=net, report=False)
    net.train()(torch.rand(5, 1, 8, 8)).sum().backward()
    net.eval()
    longer = dataclasses.replace(TINY, rounds=3)
    assert (
        len(fedcog.run(longer, tmp_path / "run", model=net, resume=True, report=False).lines) == 3
    )


def test_behavior_of_a_network_depends_on_all_but_its_weights() -> None:
    def behavior(module: nn.Module) -> list[float]:
        return network_behavior(Model(module, (1, 8, 8), 10))

    first = behavior(Net())
    assert is_same(first, behavior(Net()))
    other = Net()
    other.body[4].p = 0.5
    assert not is_same(first, behavior(other))
    assert is_same(behavior(Frozen()), behavior(Frozen()))
    assert not is_same(behavior(Frozen()), behavior(Frozen(scale=0.8)))


def test_lambdas_that_build_other_networks_have_other_names(tmp_path: Path) -> None:
    names = []
    for number, make in enumerate((lambda: Net(10), lambda: Frozen(), lambda: Net(10))):
        run = fedcog.run(TINY, tmp_path / str(number), model=make, report=False)
        names.append(run.user_objects["network"])
    assert names[0] == names[2] != names[1]


class Scaled(nn.Module):
    """A network whose number no layer shows, and with a parameter without dimensions."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * self.scale * self.temperature


def test_values_that_source_does_not_show_make_other_networks(tmp_path: Path) -> None:
    """The names are those of the function, not of the seed, so seeds are averaged."""
    names = []
    for seed, scale in ((0, 1.0), (1, 1.0), (0, 2.0)):
        run = fedcog.run(
            dataclasses.replace(TINY, seed=seed),
            tmp_path / f"{seed}-{scale}",
            model=functools.partial(Scaled, scale),
            report=False,
        )
        names.append(run.user_objects["network"])
    assert names[0] == names[1] != names[2]


class AssignedNorm(nn.Module):
    """Batch normalization that assigns its statistics anew, or writes to them."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(10))
        self.register_buffer("variance", torch.ones(10), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 3 * self.layer(x.flatten(1)) + 1
        if not self.training:
            return (x - self.mean) / self.variance.sqrt()
        mean = x.mean(0)
        variance = x.var(0, unbiased=False)
        if self.assigns:
            self.mean = 0.9 * self.mean + 0.1 * mean
            self._buffers["variance"] = 0.9 * self.variance + 0.1 * variance
        else:
            self.mean.mul_(0.9).add_(0.1 * mean.detach())
            self.variance.mul_(0.9).add_(0.1 * variance.detach())
        return (x - mean) / variance.sqrt()


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_statistics_that_are_assigned_move_as_those_that_are_written(
    tmp_path: Path, mapping: str
) -> None:
    mapped = dataclasses.replace(TINY, mapping=mapping, precision="float64")  # type: ignore[arg-type]
    networks = []
    for assigns in (False, True):
        build = functools.partial(AssignedNorm, assigns)
        run = fedcog.run(mapped, tmp_path / str(assigns), model=build, report=False)
        networks.append(fedcog.load(run.path, model=build))
    written, assigned = (dict(each.named_buffers()) for each in networks)
    assert torch.allclose(written["mean"], assigned["mean"], rtol=1e-12)
    assert torch.allclose(written["variance"], assigned["variance"], rtol=1e-12)
    assert float(assigned["mean"].abs().max()) > 0.1
    assert float((assigned["variance"] - 1).abs().min()) > 0.01


def zero_head(is_zero: bool) -> nn.Module:
    """A network whose function decides about its initial weights."""
    network = Net()
    if is_zero:
        nn.init.zeros_(network.head.weight)
    return network


def test_networks_with_other_initial_weights_are_other_networks(tmp_path: Path) -> None:
    runs = [
        fedcog.run(
            dataclasses.replace(TINY, seed=seed),
            tmp_path / f"{seed}-{is_zero}",
            model=functools.partial(zero_head, is_zero),
            report=False,
        )
        for seed, is_zero in ((0, False), (1, False), (1, True))
    ]
    assert [len(each.runs) for each in fedcog.group(runs)] == [2, 1]


def test_instances_are_never_averaged_with_what_starts_from_the_seed(tmp_path: Path) -> None:
    nets = {"class": Net, "first": Net(), "second": Net()}
    runs = [
        fedcog.run(TINY, tmp_path / name, model=net, report=False) for name, net in nets.items()
    ]
    assert len({run.user_objects["network"] for run in runs}) == 3
    assert [len(each.runs) for each in fedcog.group(runs)] == [1, 1, 1]


def test_function_that_sets_its_own_seed_is_noted(tmp_path: Path) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    for seed in (0, 3):
        experiment = dataclasses.replace(TINY, seed=seed)
        with pytest.warns(NetworkNote, match="starts from the same weights with every seed"):
            run = fedcog.run(experiment, tmp_path / str(seed), model=seeded)
        about = RunDirectory(run.path).tensors("federation.safetensors")[1]
        assert about["initial_weights"] == "function"
        assert "the same for every seed" in (run.path / "report.html").read_text()


def test_data_of_other_types_are_explained(tmp_path: Path) -> None:
    for data in ("table.npz", (torch.rand(4, 64), torch.zeros(4).long())):
        with pytest.raises(ConfigError, match=r"not a fedcog\.Dataset: make one with"):
            fedcog.run(TINY, tmp_path, data=data)  # type: ignore[arg-type]


def test_network_with_a_precision_of_its_own_is_refused(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10).to(torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(1).double())

    with pytest.raises(ModelError, match=r"does not compute in float32.*set --precision"):
        fedcog.run(TINY, tmp_path, model=Half, report=False)
