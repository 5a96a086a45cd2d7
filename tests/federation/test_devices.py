"""Clients of different width, with different work, that generate in different ways or not at all."""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcog
from fedcog import console, tree
from fedcog.algorithms import SCAFFOLD, VHL, Algorithm, FedAvg, FedCOG, FedDyn, FedGen, HeteroFL
from fedcog.cli import main
from fedcog.experiments.config import Experiment, make_algorithm, read_recorded
from fedcog.experiments.run import carry_out
from fedcog.experiments.turns import in_step
from fedcog.federation import masking
from fedcog.federation.devices import Device
from fedcog.federation.simulation import Simulation
from fedcog.fitness import ModelError
from fedcog.models import Model, build
from fedcog.settings import ConfigError
from fedcog.testing import CLASSES, Small, worst
from tests.user_models import USER_MODELS


class Normal(nn.Module):
    """Two convolutions with BatchNorm around a shortcut, and a grouped one, so wide."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv, self.each = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, groups=width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.each(torch.relu(x + self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def narrow_small() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 2 * 2, 16), nn.ReLU(), nn.Linear(16, CLASSES)),
    )


def prefix(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value[tuple(slice(size) for size in shape)]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(build("small", (1, 8, 8), CLASSES, 1), narrow_small()), (Normal(), Normal(3))],
    ids=["small", "BatchNorm"],
)
def test_a_narrow_client_trains_the_narrow_network(wide: nn.Module, narrow: nn.Module) -> None:
    """Zeros in a wide network compute what a network does that is truly narrow, trained in plain PyTorch."""
    small = Small(HeteroFL(width=0.5), module=wide, sizes=(20,), rounds=1, steps=4)
    before = tree.apply(torch.clone, small.server)
    plan = small.data.plan(0, torch.tensor([0]), 4, 6)
    batches = [small.data.examples(plan.picks[:, step], plan.moves[:, step]) for step in range(4)]  # type: ignore[index]
    after = small.run()[-1].server

    local = narrow.double().train()
    weights = before["params"] | before["buffers"]
    local.load_state_dict(
        {
            name: prefix(weights[name], value.shape) if name in weights else value
            for name, value in local.state_dict().items()
        }
    )
    optimiser = torch.optim.SGD(local.parameters(), 0.05, momentum=0.9, weight_decay=1e-5)
    for batch in batches:
        optimiser.zero_grad()
        F.cross_entropy(local(batch["x"][0]), batch["y"][0]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for name, value in local.state_dict().items():
        if name in weights:
            new = (after["params"] | after["buffers"])[name]
            torch.testing.assert_close(prefix(new, value.shape), value, rtol=1e-9, atol=1e-12)
            rest = torch.ones_like(new, dtype=torch.bool)
            rest[tuple(slice(size) for size in value.shape)] = False
            assert torch.equal(new[rest], weights[name][rest]), "what nobody has stays as it was"


def test_means_are_over_those_who_have_a_number_by_pencil() -> None:
    """Width 4, A sends (1, 1, 1, 1), B of half the width (3, 3): (2, 2, 1, 1); B alone: (3, 3, old, old)."""
    server = {"params": {"w": torch.tensor([0.0, 0.0, 0.0, 7.0])}, "buffers": {}}
    one = torch.tensor(1.0)

    def sent(values: list[float], there: int) -> dict[str, object]:
        new = torch.tensor(values + [0.0] * (4 - there))
        delta = (new - server["params"]["w"]) * (torch.arange(4) < there)
        lacks = (torch.arange(4) >= there).float()
        return {"delta": {"w": delta}, "buffers": {}, "weight": one, "count": one, "lacks": {"w": lacks}}

    first, second = sent([1.0, 1.0, 1.0, 1.0], 4), sent([3.0, 3.0], 2)
    both = tree.apply(torch.add, first, second)
    assert HeteroFL().server_update(server, both, {})["params"]["w"].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert HeteroFL().server_update(server, second, {})["params"]["w"].tolist() == [3.0, 3.0, 0.0, 7.0]


def test_masked_sums_do_as_well() -> None:
    """Rounded as secure aggregation does, what nobody has stays, and the rest is as in clear."""
    algorithm = HeteroFL(width=0.5)
    small = Small(algorithm, rounds=1)
    shared = algorithm.broadcast(small.server)
    clear, vectors = small.backend.gather(algorithm, shared, [0, 1], 0, 0.05, None).total, []
    for client in (0, 1):
        done, _ = small.backend.alone(algorithm, shared, client, {}, 0, 0.05, False)
        vector = masking.vector(done.total, done.loss[0], algorithm.scales, 1.0)
        vectors.append((vector * 2**20).round() / 2**20)
    form = small.backend.form(algorithm, shared)["total"]
    masked, _ = masking.total(vectors[0] + vectors[1], form, algorithm.scales, 1.0)
    one, other = (algorithm.server_update(small.server, total, {})["params"] for total in (clear, masked))
    assert worst(one, other) < 1e-3
    assert worst(one, small.server["params"]) > 1e-2
    for name, mask in small.model.held(0.5).items():
        assert torch.equal(other[name][mask == 0], small.server["params"][name][mask == 0])


def test_a_cut_resnet_has_the_numbers_of_a_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count, and by the shape of every block that is there."""
    wide = Model(build("resnet18", (3, 32, 32), 7, 0), (3, 32, 32), 7)
    monkeypatch.setattr("fedcog.resnet.WIDTHS", (32, 64, 128, 256))
    narrow = build("resnet18", (3, 32, 32), 7, 0)
    for name, value in narrow.named_parameters():
        mask = wide.held(0.5)[name]
        assert bool((prefix(mask, value.shape) == 1).all()) and int(mask.sum()) == value.numel(), name


@pytest.mark.parametrize("inner", [SCAFFOLD(), FedDyn(), FedGen(), VHL(), FedCOG(VHL())])
def test_what_keeps_more_by_number_than_its_change_is_refused(inner: Algorithm) -> None:
    with pytest.raises(ConfigError, match="heterofl goes around algorithms whose clients send changes"):
        HeteroFL(inner)


@pytest.mark.parametrize("name", ["group-norm", "layer-norm", "frozen"])
def test_what_has_no_narrower_network_inside_is_refused(name: str) -> None:
    module = {"group-norm": "residual", "layer-norm": "layer-norm", "frozen": "frozen"}[name]
    model = Model(USER_MODELS[module](), (1, 8, 8), CLASSES)
    with pytest.raises(ModelError, match=r"cannot be made narrower: .* Set heterofl.width to 1\."):
        model.held(0.5)
    assert all(bool((mask == 1).all()) for mask in model.held(1.0).values())


class Outside(nn.Module):
    """Uses a layer's weights without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8, bias=False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(F.linear(x.flatten(1), self.body.weight)))
        return logits


class Apart(nn.Module):
    """What comes of a constant is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.head(F.relu(self.one(x) - self.other(x)))
        return logits


def between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), *layers, nn.Flatten(), nn.Linear(288, CLASSES))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (between(nn.Sigmoid()), "such as a sigmoid"),
        (between(nn.InstanceNorm2d(8), nn.ReLU()), "makes 0 of what is there"),
        (between(nn.Softshrink(1.0)), "makes 0 of what is there"),
        (between(nn.GroupNorm(2, 8, affine=False)), "mixes or holds"),
        (between(nn.Softmax(1)), "mixes or holds"),
        (Outside(), "used outside of its own"),
        (Apart(), "makes 0 of what is there"),
        (USER_MODELS["tied"](), "shared by two layers"),
    ],
)
def test_what_would_be_cut_wrong_is_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        Model(module, (1, 8, 8), CLASSES).held(0.5)


COG = FedCOG(count=8, steps=3, start_round=0, lr=0.1)
KINDS = (
    Device("phone", 2, steps=1, changes={HeteroFL: {"width": 0.5}, FedCOG: {"source": "nothing"}}),
    Device("laptop", 2, changes={FedCOG: {"generation_batch": 3}}),
    Device("server", 1, steps=4, changes={FedCOG: {"generator": "conv", "noise": 5}}),
)
SIZES = {"sizes": (30, 20, 20, 10, 10), "rounds": 3}


def unequal(algorithm: Algorithm, mapping: str = "loop", workers: int = 1, **settings: object) -> Small:
    small = Small(algorithm, mapping, **SIZES | settings)  # type: ignore[arg-type]
    small.backend.cohort.workers = workers
    small.backend = Simulation(small.backend.cohort, local_steps=3, local_epochs=0.0, weight_cap=0, devices=KINDS)
    return small


@pytest.mark.parametrize("other", [{"mapping": "vmap"}, {"workers": 2}, {"mapping": "vmap", "participation": 0.6}])
def test_kinds_end_as_they_do_in_a_loop(other: dict[str, object]) -> None:
    algorithm = HeteroFL(COG)
    part = {"participation": other["participation"]} if "participation" in other else {}
    plain, small = unequal(algorithm, **part), unequal(algorithm, **other)  # type: ignore[arg-type]
    assert worst(plain.everything(), small.everything()) < 1e-9
    small.backend.cohort.close()


def test_every_client_does_what_its_kind_does() -> None:
    """What a client sends is what it would send in a federation of its own kind alone."""
    algorithm = HeteroFL(COG)
    small = unequal(algorithm)
    shared = algorithm.broadcast(small.server)
    own = {
        0: (HeteroFL(dataclasses.replace(COG, source="nothing"), width=0.5), 1),
        2: (HeteroFL(dataclasses.replace(COG, generation_batch=3)), 3),
        4: (HeteroFL(dataclasses.replace(COG, generator="conv", noise=5)), 4),
    }
    for client, (alike, steps) in own.items():
        sent = small.backend.gather(algorithm, shared, [client], 1, 0.05, None).total
        expected = Small(alike, **SIZES, steps=steps).backend.gather(alike, shared, [client], 1, 0.05, None).total  # type: ignore[arg-type]
        assert worst(tree.flatten(sent), tree.flatten(expected)) == 0
    silent = Small(HeteroFL(FedAvg(), width=0.5), **SIZES, steps=1)  # type: ignore[arg-type]
    bare = silent.backend.gather(silent.algorithm, shared, [0], 1, 0.05, None).total
    phone = small.backend.gather(algorithm, shared, [0], 1, 0.05, None).total
    assert worst(tree.flatten(phone), tree.flatten(bare)) == 0, "a phone that generates nothing is plain"


TEXT = """
    phone: clients=2 local_steps=2 heterofl.width=0.5 fedcog.source=nothing
    laptop: clients=1 local_epochs=0.1 fedcog.generation_batch=3; server: clients=1 fedcog.generator=conv
"""


def experiment(**changes: object) -> Experiment:
    tables = {"fedcog": {"count": 8, "steps": 2, "start_round": 1}}
    usual = {"clients": 4, "rounds": 3, "local_steps": 3, "batch_size": 8, "devices": TEXT, "beta": 1.0}
    return Experiment(make_algorithm("fedavg+fedcog+heterofl", tables), **usual | changes)  # type: ignore[arg-type]


def test_devices_are_read_from_a_text() -> None:
    phone, laptop, server = experiment().kinds
    assert (phone.name, phone.clients, phone.steps, phone.epochs) == ("phone", 2, 2, None)
    assert phone.changes == {HeteroFL: {"width": 0.5}, FedCOG: {"source": "nothing"}}
    assert (laptop.epochs, laptop.changes, server.changes) == (
        0.1,
        {FedCOG: {"generation_batch": 3}},
        {FedCOG: {"generator": "conv"}},
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("phone clients=4", "'phone clients=4' must begin with a name and a colon"),
        (" ;; # nobody", "there is no kind of them in ';;'"),
        ("phone: clients=4 lr=0.1", "devices, phone: lr is the same for all devices."),
        ("phone: clients=4 fedprox.mu=1", "devices, phone: fedprox.mu is the same for all devices."),
        ("phone: clients=4 heterofl.widht=1", "unknown setting 'heterofl.widht': did you mean heterofl.width?"),
        ("phone: clients=4 heterofl.width=2", "phone: heterofl.width needs a number > 0 and <= 1, not 2.0."),
        ("phone: clients=4 local_steps=many", "phone: local_steps needs a whole number >= 1, not 'many'."),
        ("phone: local_steps=4", "phone: say how many clients have one"),
        ("phone: clients=4 clients=3", "phone: clients is told twice."),
        ("phone: clients=4 local_steps=3 local_epochs=1", "contradict each other"),
        ("phone: clients=4 fedcog.generator=custom", "phone: set --fedcog.generator custom for all"),
        ("phone: clients=2; phone: clients=2", "two kinds are called phone."),
        ("phone: clients=2; server: clients=1", "they are of 3 clients, and there are 4: set --clients 3."),
    ],
)
def test_what_is_wrong_with_devices_is_told(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment(devices=text)
    assert fault in str(error.value)


def test_a_setting_of_a_wrapper_that_is_not_there_is_told_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"heterofl.width is for an algorithm with heterofl: add \+heterofl"):
        Experiment(FedAvg(), clients=4, devices="phone: clients=4 heterofl.width=0.5")


def test_privacy_is_refused() -> None:
    with pytest.raises(ConfigError, match="heterofl sends who has what, which privacy would clip"):
        experiment(privacy="central", weights="auto")


def test_a_record_of_an_algorithm_that_is_not_at_hand_is_read() -> None:
    values = experiment().to_dict() | {"algorithm": "Mine+fedcog+heterofl", "Mine": {}}
    assert read_recorded(values).devices == TEXT


def test_one_kind_counts_in_step_too(tmp_path: Path) -> None:
    """Seeds that train as one, all clients of one narrow kind, end as they do alone."""
    seeds = [experiment(seed=seed, mapping="vmap", devices="a: clients=4 heterofl.width=0.5") for seed in (0, 1)]
    together = in_step([carry_out(one, tmp_path / f"together-{one.seed}") for one in seeds])
    for one, run in zip(seeds, together, strict=True):
        assert isinstance(run, fedcog.Run)
        alone = fedcog.run(one, tmp_path / f"alone-{one.seed}")
        assert [line["loss"] for line in run.lines] == pytest.approx([line["loss"] for line in alone.lines], rel=1e-4)


def test_a_little_client_that_alone_has_a_number_counts() -> None:
    server = {"params": {"w": torch.zeros(2)}, "buffers": {}}
    total = {"delta": {"w": torch.tensor([1.0, 3e-4])}, "buffers": {}, "weight": torch.tensor(1.0)}
    total |= {"count": torch.tensor(9.0), "lacks": {"w": torch.tensor([0.0, 1 - 1e-4])}}
    after = HeteroFL().server_update(server, total, {})["params"]["w"]
    assert after.tolist() == pytest.approx([1.0, 3.0], rel=1e-2)


def test_a_run_of_unequal_devices_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = fedcog.run(experiment(), tmp_path / "straight")
    page = (tmp_path / "straight/report.html").read_text()
    assert "What one client generated in round 3" in page, "phones, who come first, generate nothing"
    fedcog.run(experiment(rounds=2), tmp_path / "halted")
    resumed = fedcog.run(experiment(), tmp_path / "halted", resume=True)
    assert [line["accuracy"] for line in resumed.lines] == [line["accuracy"] for line in straight.lines]
    one, other = ((tmp_path / name / "checkpoint.safetensors").read_bytes()[4096:] for name in ("straight", "halted"))
    assert one == other


def test_seeds_of_unequal_devices_go_in_step(tmp_path: Path) -> None:
    """They are not trained as one cohort, but end as they do alone."""
    seeds = [experiment(seed=seed, mapping="vmap") for seed in (0, 1)]
    together = in_step([carry_out(one, tmp_path / f"together-{one.seed}") for one in seeds])
    for one, run in zip(seeds, together, strict=True):
        assert isinstance(run, fedcog.Run)
        alone = fedcog.run(one, tmp_path / f"alone-{one.seed}")
        assert [line["loss"] for line in run.lines] == [line["loss"] for line in alone.lines]


def test_a_run_says_who_has_what(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = "phone: clients=3 heterofl.width=0.5 local_steps=1 fedcog.source=nothing; server: clients=1"
    console.experiment(Experiment(make_algorithm("fedcog+heterofl"), clients=4, devices=kinds), "somewhere", "plain")
    lines = capsys.readouterr().out.splitlines()
    assert "  phone (clients 0 to 2): local_steps 1, width 0.5, source nothing" in lines
    assert "  server (clients 3 to 3): as everybody's" in lines


def test_a_comparison_leaves_an_algorithm_what_it_has(tmp_path: Path) -> None:
    kinds = "phone: clients=3 heterofl.width=0.5 fedcog.source=nothing local_steps=1; server: clients=1 fedcog.count=8"
    words = f"compare --dataset digits --clients 4 --rounds 1 --local-steps 2 --threads 1 --quiet --out {tmp_path}/out"
    words += " --fedcog.count 4 --fedcog.steps 1 --start-round 0 --no-evaluate-local --seeds 0"
    assert main([*words.split(), "--algorithms", "fedavg+heterofl", "fedcog+heterofl", "--devices", kinds]) == 0
    plain, cog = (
        tomllib.loads((tmp_path / "out" / f"fedavg{name}" / "seed-0" / "experiment.toml").read_text())["devices"]
        for name in ("+heterofl", "+fedcog+heterofl")
    )
    assert plain == "phone: clients=3 heterofl.width=0.5 local_steps=1; server: clients=1"
    assert cog == kinds
    assert main([*words.split(), "--algorithms", "fedavg", "fedprox", "--devices", kinds]) == 2
