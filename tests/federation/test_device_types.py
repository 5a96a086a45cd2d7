"""Tests of device types and HeteroFL: clients of different width, work and generation."""

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcog
from fedcog.algorithms import SCAFFOLD, VHL, Algorithm, FedAvg, FedCOG, FedDyn, FedGen, HeteroFL
from fedcog.cli.main import main
from fedcog.cli.output import print_experiment
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.engine.cohort import RoundSpec
from fedcog.federation import secure_aggregation
from fedcog.federation.device_types import DeviceType
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.zoo import build
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment, read_recorded
from fedcog.runs.runner import Runner, run_in_step
from fedcog.testing import NUM_CLASSES, ToyFederation, max_difference
from tests.support.user_models import USER_MODELS


class BatchNormNet(nn.Module):
    """A ResNet-like block of the given width: BatchNorm, a shortcut and a grouped convolution."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.each = nn.Conv2d(width, width, 3, groups=width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.each(torch.relu(x + self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def narrow_small() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 2 * 2, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)),
    )


def prefix(value: Tensor, shape: Sequence[int]) -> Tensor:
    return value[tuple(slice(size) for size in shape)]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (build("small", (1, 8, 8), NUM_CLASSES, 1), narrow_small()),
        (BatchNormNet(), BatchNormNet(3)),
    ],
    ids=["small", "BatchNorm"],
)
def test_narrow_client_trains_the_narrow_network(wide: nn.Module, narrow: nn.Module) -> None:
    """A masked wide network computes what a narrow one does, trained in plain PyTorch."""
    toy = ToyFederation(HeteroFL(width=0.5), module=wide, sizes=(20,), rounds=1, steps=4)
    before = tree.apply(torch.clone, toy.server.state)
    plan = toy.data.plan_batches(0, torch.tensor([0]), 4, 6)
    assert plan.crops is not None
    batches = [toy.data.examples(plan.indices[:, step], plan.crops[:, step]) for step in range(4)]
    after = toy.run()[-1].server

    local = narrow.double().train()
    weights = before["params"] | before["buffers"]
    local.load_state_dict(
        {
            name: prefix(weights[name], value.shape) if name in weights else value
            for name, value in local.state_dict().items()
        }
    )
    optimizer = torch.optim.SGD(local.parameters(), 0.05, momentum=0.9, weight_decay=1e-5)
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(local(batch["x"][0]), batch["y"][0])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in local.state_dict().items():
        if name in weights:
            new = (after["params"] | after["buffers"])[name]
            torch.testing.assert_close(prefix(new, value.shape), value, rtol=1e-9, atol=1e-12)
            rest = torch.ones_like(new, dtype=torch.bool)
            rest[tuple(slice(size) for size in value.shape)] = False
            assert torch.equal(new[rest], weights[name][rest]), (
                "weights that no client has stay unchanged"
            )


def test_mean_of_a_weight_is_over_the_clients_that_have_it() -> None:
    """By hand: A sends (1, 1, 1, 1); B, half as wide, sends (3, 3)."""
    server = {"params": {"w": torch.tensor([0.0, 0.0, 0.0, 7.0])}, "buffers": {}}
    unit = torch.tensor(1.0)

    def payload(values: list[float]) -> dict[str, object]:
        width = len(values)
        new = torch.tensor(values + [0.0] * (4 - width))
        delta = (new - server["params"]["w"]) * (torch.arange(4) < width)
        lacks = (torch.arange(4) >= width).float()
        return {
            "delta": {"w": delta},
            "buffers": {},
            "weight": unit,
            "count": unit,
            "lacks": {"w": lacks},
        }

    wide = payload([1.0, 1.0, 1.0, 1.0])
    narrow = payload([3.0, 3.0])
    both = tree.apply(torch.add, wide, narrow)
    after_both = HeteroFL().server_update(server, HeteroFL().aggregate(both), {})["params"]["w"]
    assert after_both.tolist() == [2.0, 2.0, 1.0, 1.0]
    after_narrow = HeteroFL().server_update(server, HeteroFL().aggregate(narrow), {})["params"]["w"]
    assert after_narrow.tolist() == [3.0, 3.0, 0.0, 7.0]


def test_heterofl_works_with_quantized_secure_sums() -> None:
    """After quantization, weights that no client has stay unchanged; others match plain sums."""
    algorithm = HeteroFL(width=0.5)
    toy = ToyFederation(algorithm, rounds=1)
    broadcast = algorithm.broadcast(toy.server.state)
    clear = toy.run_clients([0, 1], 0, broadcast).total
    vectors = []
    bounds = algorithm.payload_bounds
    spec = RoundSpec(algorithm, broadcast, round=0, lr=0.05, evaluate_local=False)
    for client in (0, 1):
        answer, _ = toy.simulator.train_client(spec, client, {})
        vector = secure_aggregation.to_vector(answer.total, answer.loss[0], bounds, 1.0)
        vectors.append((vector * 2**20).round() / 2**20)
    template = toy.simulator.answer_template(algorithm, broadcast)["total"]
    masked, _ = secure_aggregation.from_vector(vectors[0] + vectors[1], template, bounds, 1.0)
    params = toy.server.state["params"]
    from_clear = algorithm.server_update(toy.server.state, algorithm.aggregate(clear), {})["params"]
    from_masked = algorithm.server_update(toy.server.state, algorithm.aggregate(masked), {})[
        "params"
    ]
    assert max_difference(from_clear, from_masked) < 1e-3
    assert max_difference(from_clear, params) > 1e-2
    for name, mask in toy.model.width_mask(0.5).items():
        assert torch.equal(from_masked[name][mask == 0], params[name][mask == 0])


@pytest.mark.slow
def test_width_mask_of_resnet_keeps_the_weights_of_a_narrow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = Model(build("resnet18", (3, 32, 32), 7, 0), (3, 32, 32), 7)
    monkeypatch.setattr("fedcog.models.resnet.STAGE_WIDTHS", (32, 64, 128, 256))
    narrow = build("resnet18", (3, 32, 32), 7, 0)
    for name, value in narrow.named_parameters():
        mask = wide.width_mask(0.5)[name]
        assert bool((prefix(mask, value.shape) == 1).all()), name
        assert int(mask.sum()) == value.numel(), name


@pytest.mark.parametrize("inner", [SCAFFOLD(), FedDyn(), FedGen(), VHL(), FedCOG(VHL())])
def test_algorithms_with_further_payloads_are_refused(inner: Algorithm) -> None:
    with pytest.raises(
        ConfigError,
        match="heterofl goes around algorithms that work with parts of the model",
    ):
        HeteroFL(inner)


@pytest.mark.parametrize("name", ["group-norm", "layer-norm", "frozen"])
def test_networks_without_a_narrow_version_are_refused(name: str) -> None:
    module = {"group-norm": "residual", "layer-norm": "layer-norm", "frozen": "frozen"}[name]
    model = Model(USER_MODELS[module](), (1, 8, 8), NUM_CLASSES)
    with pytest.raises(ModelError, match=r"cannot be made narrower: .* Set heterofl.width to 1\."):
        model.width_mask(0.5)
    assert all(bool((mask == 1).all()) for mask in model.width_mask(1.0).values())


class FunctionalWeight(nn.Module):
    """Uses a layer's weight outside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8, bias=False)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(F.linear(x.flatten(1), self.body.weight)))
        return logits


class DifferenceNet(nn.Module):
    """Subtracts two layers, so that equal constants cancel out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 8)
        self.right = nn.Linear(64, 8)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.head(F.relu(self.left(x) - self.right(x)))
        return logits


def conv_net_with(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), *layers, nn.Flatten(), nn.Linear(288, NUM_CLASSES))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (conv_net_with(nn.Sigmoid()), "such as a sigmoid"),
        (conv_net_with(nn.InstanceNorm2d(8), nn.ReLU()), "sets kept channels to 0"),
        (conv_net_with(nn.Softshrink(1.0)), "sets kept channels to 0"),
        (conv_net_with(nn.GroupNorm(2, 8, affine=False)), "mixes channels"),
        (conv_net_with(nn.Softmax(1)), "mixes channels"),
        (FunctionalWeight(), "used outside of its own"),
        (DifferenceNet(), "sets kept channels to 0"),
        (USER_MODELS["tied"](), "shared by two layers"),
    ],
)
def test_networks_with_unsupported_layers_are_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Model(module, (1, 8, 8), NUM_CLASSES).width_mask(0.5)


FEDCOG = FedCOG(count=8, steps=3, start_round=0, lr=0.1)
DEVICE_TYPES = (
    DeviceType(
        "phone", 2, local_steps=1, changes={HeteroFL: {"width": 0.5}, FedCOG: {"source": "nothing"}}
    ),
    DeviceType("laptop", 2, changes={FedCOG: {"generation_batch": 3}}),
    DeviceType("server", 1, local_steps=4, changes={FedCOG: {"generator": "conv", "noise": 5}}),
)
TOY = {"sizes": (30, 20, 20, 10, 10), "rounds": 3}


def toy_with_device_types(
    algorithm: Algorithm, mapping: str = "loop", workers: int = 1, **settings: object
) -> ToyFederation:
    toy = ToyFederation(algorithm, mapping, **TOY | settings)  # type: ignore[arg-type]
    cohort = toy.simulator.cohort
    cohort.config = cohort.config._replace(num_workers=workers)
    toy.simulator = Simulator(cohort, LocalWorkload(local_steps=3, device_types=DEVICE_TYPES))
    toy.server.backend = toy.simulator
    return toy


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mapping": "vmap"},
        pytest.param({"workers": 2}, marks=pytest.mark.processes),
        {"mapping": "vmap", "participation": 0.6},
    ],
)
def test_device_types_match_the_loop(options: dict[str, object]) -> None:
    algorithm = HeteroFL(FEDCOG)
    participation = {name: options[name] for name in options if name == "participation"}
    loop = toy_with_device_types(algorithm, **participation)
    toy = toy_with_device_types(algorithm, **options)
    assert max_difference(loop.final_state(), toy.final_state()) < 1e-9
    toy.simulator.cohort.close()


def test_client_trains_as_in_a_federation_of_its_device_type() -> None:
    """Payloads are bit-equal."""
    algorithm = HeteroFL(FEDCOG)
    toy = toy_with_device_types(algorithm)
    broadcast = algorithm.broadcast(toy.server.state)
    variants = {
        0: (HeteroFL(dataclasses.replace(FEDCOG, source="nothing"), width=0.5), 1),
        2: (HeteroFL(dataclasses.replace(FEDCOG, generation_batch=3)), 3),
        4: (HeteroFL(dataclasses.replace(FEDCOG, generator="conv", noise=5)), 4),
    }
    for client, (variant, steps) in variants.items():
        payload = toy.run_clients([client], 1, broadcast).total
        uniform = ToyFederation(variant, **TOY, steps=steps)  # type: ignore[arg-type]
        expected = uniform.run_clients([client], 1, broadcast).total
        assert max_difference(tree.flatten(payload), tree.flatten(expected)) == 0
    plain = ToyFederation(HeteroFL(FedAvg(), width=0.5), **TOY, steps=1)  # type: ignore[arg-type]
    bare = plain.run_clients([0], 1, broadcast).total
    phone = toy_with_device_types(algorithm).run_clients([0], 1, broadcast).total
    # Without generation a phone trains as in FedAvg.
    assert max_difference(tree.flatten(phone), tree.flatten(bare)) == 0


DEVICES = """
    phone: clients=2 local_steps=2 heterofl.width=0.5 fedcog.source=nothing
    laptop: clients=1 local_epochs=0.1 fedcog.generation_batch=3; server: clients=1 \
fedcog.generator=conv
"""


def experiment(**changes: Any) -> Experiment:
    tables = {"fedcog": {"count": 8, "steps": 2, "start_round": 1}}
    defaults: dict[str, Any] = {
        "clients": 4,
        "rounds": 3,
        "local_steps": 3,
        "batch_size": 8,
        "devices": DEVICES,
        "beta": 1.0,
    }
    return Experiment(make_algorithm("fedavg+fedcog+heterofl", tables), **defaults | changes)


def test_devices_text_is_parsed() -> None:
    phone, laptop, server = experiment().device_types
    assert (phone.name, phone.num_clients) == ("phone", 2)
    assert (phone.local_steps, phone.local_epochs) == (2, None)
    assert phone.changes == {HeteroFL: {"width": 0.5}, FedCOG: {"source": "nothing"}}
    assert laptop.local_epochs == 0.1
    assert laptop.changes == {FedCOG: {"generation_batch": 3}}
    assert server.changes == {FedCOG: {"generator": "conv"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phone clients=4", "'phone clients=4' must start with a name and a colon"),
        (" ;; # nobody", "';;' names no type; write phone: clients=6."),
        ("phone: clients=4 lr=0.1", "devices, phone: lr is the same for all devices."),
        (
            "phone: clients=4 fedprox.mu=1",
            "devices, phone: fedprox.mu is the same for all devices.",
        ),
        (
            "phone: clients=4 heterofl.widht=1",
            "unknown setting 'heterofl.widht': did you mean heterofl.width?",
        ),
        (
            "phone: clients=4 heterofl.width=2",
            "phone: heterofl.width needs a number > 0 and <= 1, not 2.0.",
        ),
        (
            "phone: clients=4 local_steps=many",
            "phone: local_steps needs an integer >= 1, not 'many'.",
        ),
        ("phone: local_steps=4", "phone: set the number of clients"),
        ("phone: clients=4 clients=3", "phone: clients is set twice."),
        ("phone: clients=4 local_steps=3 local_epochs=1", "contradict each other"),
        (
            "phone: clients=4 fedcog.generator=custom",
            "phone: set --fedcog.generator custom for all",
        ),
        ("phone: clients=2; phone: clients=2", "two types are called phone."),
        (
            "phone: clients=2; server: clients=1",
            "the types have 3 clients, but there are 4: set --clients 3.",
        ),
    ],
)
def test_errors_in_devices_are_reported(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment(devices=text)
    assert message in str(error.value)


def test_setting_of_a_missing_wrapper_names_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"heterofl.width needs an algorithm with heterofl: add \+heterofl"
    ):
        Experiment(FedAvg(), clients=4, devices="phone: clients=4 heterofl.width=0.5")


def test_heterofl_with_privacy_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="heterofl sends which weights a client has, which privacy would clip"
    ):
        experiment(privacy="central", weights="auto")


def test_record_of_an_unavailable_algorithm_can_be_read() -> None:
    values = experiment().to_dict() | {"algorithm": "Mine+fedcog+heterofl", "Mine": {}}
    assert read_recorded(values).devices == DEVICES


@pytest.mark.slow
def test_stacked_seeds_of_one_device_type_match_separate_runs(tmp_path: Path) -> None:
    seeds = [
        experiment(seed=seed, mapping="vmap", devices="a: clients=4 heterofl.width=0.5")
        for seed in (0, 1)
    ]
    stacked_runs = run_in_step(
        [Runner(config, tmp_path / f"stacked-{config.seed}") for config in seeds]
    )
    for config, run in zip(seeds, stacked_runs, strict=True):
        assert isinstance(run, fedcog.Run)
        separate = fedcog.run(config, tmp_path / f"separate-{config.seed}")
        assert [line["loss"] for line in run.lines] == pytest.approx(
            [line["loss"] for line in separate.lines], rel=1e-4
        )


def test_weight_held_by_one_small_client_is_averaged_exactly() -> None:
    server = {"params": {"w": torch.zeros(2)}, "buffers": {}}
    total = {"delta": {"w": torch.tensor([1.0, 3e-4])}, "buffers": {}, "weight": torch.tensor(1.0)}
    total |= {"count": torch.tensor(9.0), "lacks": {"w": torch.tensor([0.0, 1 - 1e-4])}}
    after = HeteroFL().server_update(server, HeteroFL().aggregate(total), {})["params"]["w"]
    assert after.tolist() == pytest.approx([1.0, 3.0], rel=1e-2)


@pytest.mark.slow
def test_run_with_device_types_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = fedcog.run(experiment(), tmp_path / "straight")
    page = (tmp_path / "straight/report.html").read_text()
    # The phones come first and generate nothing; the page shows another client.
    assert "What one client generated in round 3" in page
    fedcog.run(experiment(rounds=2), tmp_path / "halted")
    resumed = fedcog.run(experiment(), tmp_path / "halted", resume=True)
    accuracies = [line["accuracy"] for line in straight.lines]
    assert [line["accuracy"] for line in resumed.lines] == accuracies
    expected = (tmp_path / "straight/checkpoint.safetensors").read_bytes()[4096:]
    assert (tmp_path / "halted/checkpoint.safetensors").read_bytes()[4096:] == expected


@pytest.mark.slow
def test_seeds_with_device_types_in_step_equal_separate_runs(tmp_path: Path) -> None:
    """Such runs are not stacked; they take turns, with bit-equal results."""
    seeds = [experiment(seed=seed, mapping="vmap") for seed in (0, 1)]
    in_step = run_in_step([Runner(config, tmp_path / f"stacked-{config.seed}") for config in seeds])
    for config, run in zip(seeds, in_step, strict=True):
        assert isinstance(run, fedcog.Run)
        separate = fedcog.run(config, tmp_path / f"separate-{config.seed}")
        assert [line["loss"] for line in run.lines] == [line["loss"] for line in separate.lines]


def test_run_prints_the_device_types(capsys: pytest.CaptureFixture[str]) -> None:
    devices = (
        "phone: clients=3 heterofl.width=0.5 local_steps=1 fedcog.source=nothing; server: clients=1"
    )
    print_experiment(
        Experiment(make_algorithm("fedcog+heterofl"), clients=4, devices=devices),
        "somewhere",
        "plain",
    )
    lines = capsys.readouterr().out.splitlines()
    assert "  phone (clients 0 to 2): local_steps 1, width 0.5, source nothing" in lines
    assert "  server (clients 3 to 3): no changes" in lines


def test_compare_drops_device_settings_of_absent_wrappers(tmp_path: Path) -> None:
    devices = "phone: clients=3 heterofl.width=0.5 fedcog.source=nothing local_steps=1; "
    devices += "server: clients=1 fedcog.count=8"
    command = "compare --dataset digits --clients 4 --rounds 1 --local-steps 2 --threads 1 --quiet"
    command += f" --out {tmp_path}/out"
    command += " --fedcog.count 4 --fedcog.steps 1 --start-round 0 --no-evaluate-local --seeds 0"
    algorithms = ["--algorithms", "fedavg+heterofl", "fedcog+heterofl"]
    assert main([*command.split(), *algorithms, "--devices", devices]) == 0

    def recorded_devices(algorithm: str) -> str:
        file = tmp_path / "out" / algorithm / "seed-0" / "experiment.toml"
        return str(tomllib.loads(file.read_text())["devices"])

    without_fedcog = "phone: clients=3 heterofl.width=0.5 local_steps=1; server: clients=1"
    assert recorded_devices("fedavg+heterofl") == without_fedcog
    assert recorded_devices("fedavg+fedcog+heterofl") == devices
    assert main([*command.split(), "--algorithms", "fedavg", "fedprox", "--devices", devices]) == 2
