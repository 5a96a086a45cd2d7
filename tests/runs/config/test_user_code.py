"""Tests of user algorithms: loaded from files, and checked against the contract."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import ConfigError, FedCOG
from fedcog.algorithms import Algorithm, Batch, ClientContext, LocalWork, StepGradient
from fedcog.cli.main import main
from fedcog.core.tree import Params, State
from fedcog.runs.config.user_code import function_source, resolve
from fedcog.testing import check_algorithm, neutral_equals_fedavg

USER_CODE = """
from dataclasses import dataclass
from beside import HALF
from fedcog import Algorithm, Wrapper

@dataclass(frozen=True)
class Mine(Algorithm):
    "FedAvg that applies only a fraction of the mean update."
    share: float = HALF

    def server_update(self, server, total, draws):
        total = total | {"weight": total["weight"] / self.share}
        return super().server_update(server, total, draws)

@dataclass(frozen=True)
class Around(Wrapper):
    patience: int = 3
"""
SETTINGS = {"rounds": 2, "local-steps": 2, "clients": 3, "batch-size": 8, "threads": 1}
CLASS_HEADER = (
    "from dataclasses import dataclass\nfrom typing import Literal\nfrom fedcog import Algorithm\n"
    "@dataclass(frozen=True)\nclass Mine(Algorithm):\n"
)
TINY = [
    "run",
    *(f"--{name}={value}" for name, value in SETTINGS.items()),
    "--no-evaluate-local",
    "--plain",
]


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """A file with two algorithms that imports its neighbor, in a folder with an odd name."""
    (tmp_path / "a + b").mkdir()
    (tmp_path / "a + b/beside.py").write_text("HALF = 0.5")
    (tmp_path / "a + b/mine.py").write_text(USER_CODE)
    return tmp_path / "a + b/mine.py"


@pytest.mark.slow
def test_user_file_is_run_composed_resumed_and_compared(
    user_file: Path, tmp_path: Path, capsys: Any
) -> None:
    out = str(tmp_path / "run")
    name = f"{user_file}:Mine+{user_file}:Around+fedcog"
    arguments = ["--algorithm", name, "--Mine.share", "0.25", "--Around.patience", "4"]
    arguments += ["--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert main([*TINY, *arguments, "--out", out]) == 0
    assert fedcog.read(out).experiment.to_dict()["algorithm"] == "Mine+Around+fedcog"
    assert fedcog.read(out).experiment.to_dict()["Mine"] == {"share": 0.25}
    # A record must never decide which code runs.
    assert main(["run", "--resume", out, "--rounds", "3"]) == 2
    assert "--algorithm FILE.py:Mine+FILE.py:Around+fedcog" in capsys.readouterr().err
    assert main(["run", "--resume", out, "--rounds", "3", f"--algorithm={name}"]) == 0
    assert len(fedcog.read(out).lines) == 3
    arguments = ["--algorithms", "fedavg", f"{user_file}:Mine", "--seeds", "0"]
    assert main(["compare", *TINY[1:], *arguments, "--out", str(tmp_path / "both")]) == 0
    assert (tmp_path / "both/Mine/seed-0/checkpoint.safetensors").exists()
    assert main(["run", "--algorithm", f"{user_file}:Mine", "--Mine.share", "much"]) == 2
    assert "Mine.share needs a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        ("x = (", "Mine", "failed: SyntaxError"),
        ("raise SystemExit(3)", "Mine", "failed: SystemExit"),
        ("import nowhere_to_be_found", "Mine", "No module named"),
        ("x = 1", "Mine", "has no algorithm called 'Mine': it defines none"),
        ("from fedcog import Algorithm\nclass Other(Algorithm): pass", "Mine", "it defines Other"),
        ("class Mine: pass", "Mine", "it defines none"),
        (
            "from fedcog import Algorithm\nclass seed(Algorithm): pass",
            "seed",
            "the name seed is taken",
        ),
        (CLASS_HEADER + "    mu: float", "Mine", "mu has no default"),
        (CLASS_HEADER + "    kind: Literal[1, 2] = 1", "Mine", "kind is neither"),
    ],
)
def test_unusable_files_are_refused_with_a_reason(
    content: str, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        resolve(f"{tmp_path / 'odd.py'}:{name}+fedcog")


def test_settings_file_cannot_name_code(user_file: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.toml").write_text(f'algorithm = "{user_file}:Mine"\n')
    assert main(["run", str(tmp_path / "x.toml")]) == 2
    assert "a settings file cannot name code to run" in capsys.readouterr().err
    assert main(["run", "--algorithm", str(user_file)]) == 2
    assert "name the class in the file too" in capsys.readouterr().err
    assert main(["run", "--algorithm", "nowhere.py:Mine"]) == 2


@dataclasses.dataclass(frozen=True)
class StatefulFedAvg(Algorithm):
    """FedAvg with a client state; its subclasses each break a rule of the contract."""

    def client_init(self, shared: State) -> State:
        return {"seen": torch.zeros((), dtype=torch.float64)}


class WritesInPlace(StatefulFedAvg):
    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        for value in client.broadcast["params"].values():
            value.mul_(0.5)
        return super().client_update(params, client, work)


class DrawsRandomNumbers(StatefulFedAvg):
    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> torch.Tensor:
        return params["9.bias"].sum() * torch.rand((), dtype=torch.float64)


class SendsPerClientValues(StatefulFedAvg):
    """Declares that sums are enough, but sends a value per client."""

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        state, payload = super().client_update(params, client, work)
        return state, payload | {"per_client": {"loss": client.weight}}


class IgnoresOuterLoss(StatefulFedAvg):
    """Takes the gradient of its own loss and ignores the loss of wrappers."""

    def local_grad(
        self, loss: Any, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        return client.step_gradient(lambda p, b: self.local_loss(p, b, client), params, batch)


class GrowsClientState(StatefulFedAvg):
    """Adds a key to the client state that `client_init` does not have."""

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        state, payload = super().client_update(params, client, work)
        return state | {"more": client.weight}, payload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "violation"),
    [
        (WritesInPlace(), "nothing_is_written_in_place"),
        (DrawsRandomNumbers(), "loop_equals_vmap"),
        (SendsPerClientValues(), "payloads_add_up"),
        (IgnoresOuterLoss(), "active_fedcog_keeps_the_rule"),
        (GrowsClientState(), "the client state changes its form: more"),
    ],
)
def test_contract_finds_violations(algorithm: Algorithm, violation: str) -> None:
    with pytest.raises(AssertionError, match=violation):
        check_algorithm(algorithm)


@dataclasses.dataclass(frozen=True)
class Each(Algorithm):
    """Returns a penalty per example instead of their mean."""

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> torch.Tensor:
        return client.task.divergence(
            outputs["logits"], client.logits(client.broadcast["params"], batch["x"])
        )


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_loss_that_is_no_scalar_is_refused_by_hook_name(tmp_path: Path, mapping: Any) -> None:
    config = fedcog.Experiment(
        Each(), rounds=1, local_steps=1, batch_size=8, clients=2, workers=1, mapping=mapping
    )
    with pytest.raises(
        fedcog.ModelError,
        match=r"Each\.penalty returned a tensor of shape \[8\], but the loss of a step is a single",
    ):
        fedcog.run(config, tmp_path / "run")


def test_common_mistakes_in_subclasses_are_refused() -> None:
    with pytest.raises(TypeError, match=r"penality is not a hook.*did you mean penalty"):
        type("M", (Algorithm,), {"penality": lambda self, params, outputs, batch, client: 0})
    with pytest.raises(
        TypeError,
        match=r"M.server_update takes \(self, server, total\), but the engine calls it with",
    ):
        type("M", (Algorithm,), {"server_update": lambda self, server, total: server})
    type("M", (Algorithm,), {"server_update": lambda self, *rest: rest[0]})

    class Nothing(Algorithm):
        pass

    class Wrong(Algorithm):
        def client_update(
            self, params: Params, client: ClientContext, work: LocalWork
        ) -> tuple[State, State]:
            return client.state, {"delta": params}

    with pytest.raises(AssertionError, match="it equals FedAvg"):
        check_algorithm(Nothing())
    with pytest.raises(AssertionError, match="Wrong does not run: KeyError: 'weight'"):
        check_algorithm(Wrong())


@pytest.mark.slow
def test_contract_finds_a_wrong_neutral_setting() -> None:
    with pytest.raises(AssertionError, match="neutral_equals_fedavg"):
        check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.1))


@pytest.mark.slow
def test_builtin_algorithms_keep_the_contract() -> None:
    check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.0))
    check_algorithm(FedCOG(fedcog.FedProx(mu=0.5), count=4, steps=1, start_round=1))


@pytest.mark.slow
def test_clashing_names_and_changed_code_are_refused(tmp_path: Path, capsys: Any) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text(
            CLASS_HEADER + "    µ: float = 1\n" + f"    x = '{folder}'\n"
        )
    first = f"{tmp_path}/a/m.py:Mine"
    second = f"{tmp_path}/b/m.py:Mine"
    assert main(["compare", "--algorithms", first, second]) == 2
    assert "two of your algorithms are called Mine" in capsys.readouterr().err
    out = str(tmp_path / "run")
    assert main([*TINY, "--algorithm", first, "--out", out]) == 0
    # The integer default of a float setting and its name µ must survive the record.
    assert main(["run", "--resume", out, "--rounds", "3", "--algorithm", first]) == 0
    assert main(["run", "--resume", out, "--rounds", "4", "--algorithm", second]) == 2
    assert "by other code of your own algorithm" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class NotTrueDistillation(Algorithm):
    """FedNTD: distills what the global model says of the classes that are not true.

    Attributes:
        beta: Weight of the distillation.
        teacher: How the teacher is computed.
    """

    beta: float = 0.0
    teacher: str = "teacher_logits"

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> torch.Tensor:
        if self.teacher == "logits":
            logits = client.logits(client.broadcast["params"], batch["x"])
        else:
            logits = client.teacher_logits(batch["x"])
        is_true = torch.nn.functional.one_hot(batch["y"], logits.shape[-1]).bool()
        others = (one.masked_fill(is_true, -1e9) for one in (logits, outputs["logits"]))
        return self.beta * client.task.distillation_loss(*others).mean()


class TeacherMovesStatistics(NotTrueDistillation):
    """Its running statistics have also seen the teacher's pass."""

    def outputs(self, params: Params, batch: Batch, client: ClientContext) -> State:
        first = super().outputs(params, batch, client)
        teacher = client.forward(client.broadcast["params"], batch["x"], first["buffers"])
        return first | {"buffers": teacher.buffers}


@pytest.mark.parametrize("teacher", ["teacher_logits", "logits"])
def test_teacher_of_weight_0_leaves_fedavg_with_batchnorm_and_dropout(teacher: str) -> None:
    neutral = NotTrueDistillation(0.0, teacher)
    neutral_equals_fedavg(NotTrueDistillation(1.0, teacher), neutral)


def test_contract_finds_a_teacher_that_moves_running_statistics() -> None:
    reason = r"is not FedAvg on a network with BatchNorm and dropout: 1\.running_mean"
    with pytest.raises(AssertionError, match=reason):
        check_algorithm(TeacherMovesStatistics(1.0), neutral=TeacherMovesStatistics(0.0))


def test_contract_finds_moved_statistics_without_neutral_settings() -> None:
    with pytest.raises(AssertionError, match=r"one_pass_moves_statistics: .*running_mean"):
        check_algorithm(TeacherMovesStatistics(1.0))


def test_source_of_functions_has_their_values() -> None:
    def make(probability: float) -> Callable[[float], float]:
        return lambda x, scale=2.0: x * scale * probability

    def named(probability: float) -> Callable[[float], float]:
        def flip(x: float) -> float:
            return x * probability

        return flip

    for function in (make, named, lambda value: functools.partial(max, value)):
        sources = [function_source(function(value)) for value in (0.1, 0.1, 0.2)]
        assert sources[0] == sources[1] != sources[2]
    assert function_source(len) == "len"
