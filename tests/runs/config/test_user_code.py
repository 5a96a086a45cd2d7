"""Algorithms of your own: from a file on the command line, and put to the contract."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import ConfigError, FedCOG
from fedcog.algorithms import Algorithm, Batch, ClientContext, LocalWork, StepGradient
from fedcog.cli.main import main
from fedcog.core.tree import Params, State
from fedcog.runs.config.user_code import resolve
from fedcog.testing import check_algorithm

MINE = """
from dataclasses import dataclass
from beside import HALF
from fedcog import Algorithm, Wrapper

@dataclass(frozen=True)
class Mine(Algorithm):
    "FedAvg that goes part of the way."
    share: float = HALF

    def server_update(self, server, total, draws):
        total = total | {"weight": total["weight"] / self.share}
        return super().server_update(server, total, draws)

@dataclass(frozen=True)
class Around(Wrapper):
    patience: int = 3
"""
FAST = {"rounds": 2, "local-steps": 2, "clients": 3, "batch-size": 8, "threads": 1}
OPEN = (
    "from dataclasses import dataclass\nfrom typing import Literal\nfrom fedcog import Algorithm\n"
    "@dataclass(frozen=True)\nclass Mine(Algorithm):\n"
)
TINY = [
    "run",
    *(f"--{name}={value}" for name, value in FAST.items()),
    "--no-evaluate-local",
    "--plain",
]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "a + b").mkdir()
    (tmp_path / "a + b/beside.py").write_text("HALF = 0.5")
    (tmp_path / "a + b/mine.py").write_text(MINE)
    return tmp_path / "a + b/mine.py"


def test_a_file_is_run_composed_resumed_and_compared(
    mine: Path, tmp_path: Path, capsys: Any
) -> None:
    out = str(tmp_path / "run")
    name = f"{mine}:Mine+{mine}:Around+fedcog"
    cog = ["--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert (
        main(
            [
                *TINY,
                "--algorithm",
                name,
                "--Mine.share",
                "0.25",
                "--Around.patience",
                "4",
                *cog,
                "--out",
                out,
            ]
        )
        == 0
    )
    assert fedcog.read(out).experiment.to_dict()["algorithm"] == "Mine+Around+fedcog"
    assert fedcog.read(out).experiment.to_dict()["Mine"] == {"share": 0.25}
    assert (
        main(["run", "--resume", out, "--rounds", "3"]) == 2
    )  # nothing that a record names is run
    assert "--algorithm FILE.py:Mine+FILE.py:Around+fedcog" in capsys.readouterr().err
    assert main(["run", "--resume", out, "--rounds", "3", f"--algorithm={name}"]) == 0
    assert len(fedcog.read(out).lines) == 3
    compared = [
        "compare",
        *TINY[1:],
        "--algorithms",
        "fedavg",
        f"{mine}:Mine",
        "--seeds",
        "0",
        "--out",
    ]
    assert main([*compared, str(tmp_path / "both")]) == 0
    assert (tmp_path / "both/Mine/seed-0/checkpoint.safetensors").exists()
    assert main(["run", "--algorithm", f"{mine}:Mine", "--Mine.share", "much"]) == 2
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
        (OPEN + "    mu: float", "Mine", "mu has no default"),
        (OPEN + "    kind: Literal[1, 2] = 1", "Mine", "kind is neither"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    content: str, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        resolve(f"{tmp_path / 'odd.py'}:{name}+fedcog")


def test_a_settings_file_cannot_name_code(mine: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.toml").write_text(f'algorithm = "{mine}:Mine"\n')
    assert main(["run", str(tmp_path / "x.toml")]) == 2
    assert "a settings file cannot name code to run" in capsys.readouterr().err
    assert main(["run", "--algorithm", str(mine)]) == 2
    assert "name the class in the file too" in capsys.readouterr().err
    assert main(["run", "--algorithm", "nowhere.py:Mine"]) == 2


@dataclasses.dataclass(frozen=True)
class Careless(Algorithm):
    """FedAvg that breaks a rule of the contract."""

    def client_init(self, shared: State) -> State:
        return {"seen": torch.zeros((), dtype=torch.float64)}


class InPlace(Careless):
    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        for value in client.broadcast["params"].values():
            value.mul_(0.5)
        return super().client_update(params, client, work)


class Random(Careless):
    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> torch.Tensor:
        return params["9.bias"].sum() * torch.rand((), dtype=torch.float64)


class Peeks(Careless):
    """Says that sums are enough, and sends something that must not be summed."""

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        own, payload = super().client_update(params, client, work)
        return own, payload | {"per_client": {"loss": client.weight}}


class Selfish(Careless):
    """Takes the gradient of its own loss, whatever is around it."""

    def local_grad(
        self, loss: Any, params: Params, batch: Batch, client: ClientContext
    ) -> StepGradient:
        return client.step_gradient(lambda p, b: self.local_loss(p, b, client), params, batch)


class Forgets(Careless):
    """Grows a state that its start does not have."""

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        own, payload = super().client_update(params, client, work)
        return own | {"more": client.weight}, payload


@pytest.mark.parametrize(
    ("careless", "broken"),
    [
        (InPlace(), "nothing_is_written_in_place"),
        (Random(), "loop_equals_vmap"),
        (Peeks(), "payloads_add_up"),
        (Selfish(), "active_fedcog_keeps_the_rule"),
        (Forgets(), "the client state changes its form: more"),
    ],
)
def test_the_contract_finds_what_is_wrong(careless: Algorithm, broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        check_algorithm(careless)


@dataclasses.dataclass(frozen=True)
class Each(Algorithm):
    """Adds a number of every example, and not their mean."""

    def penalty(
        self, params: Params, outputs: State, batch: Batch, client: ClientContext
    ) -> torch.Tensor:
        return client.task.divergence(
            outputs["logits"], client.logits(client.broadcast["params"], batch["x"])
        )


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_a_loss_of_many_numbers_is_refused_with_its_hooks_name(
    tmp_path: Path, mapping: Any
) -> None:
    one = fedcog.Experiment(
        Each(), rounds=1, local_steps=1, batch_size=8, clients=2, workers=1, mapping=mapping
    )
    with pytest.raises(
        fedcog.ModelError,
        match=r"Each\.penalty returned a tensor of shape \[8\], but the loss of a step is a single",
    ):
        fedcog.run(one, tmp_path / "run")


def test_natural_mistakes_are_told_at_once() -> None:
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


def test_a_neutral_setting_that_is_not_neutral_is_found() -> None:
    with pytest.raises(AssertionError, match="neutral_equals_fedavg"):
        check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.1))


def test_ours_keep_the_contract() -> None:
    check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.0))
    check_algorithm(FedCOG(fedcog.FedProx(mu=0.5), count=4, steps=1, start_round=1))


def test_names_that_clash_numbers_that_are_whole_and_code_that_changed(
    tmp_path: Path, capsys: Any
) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "m.py").write_text(OPEN + "    µ: float = 1\n" + f"    x = '{place}'\n")
    one, other = (f"{tmp_path / place / 'm.py'}:Mine" for place in ("a", "b"))
    assert main(["compare", "--algorithms", one, other]) == 2
    assert "two of your algorithms are called Mine" in capsys.readouterr().err
    out = str(tmp_path / "run")
    assert main([*TINY, "--algorithm", one, "--out", out]) == 0
    assert (
        main(["run", "--resume", out, "--rounds", "3", "--algorithm", one]) == 0
    )  # 1 is 1.0, and µ is a name
    assert main(["run", "--resume", out, "--rounds", "4", "--algorithm", other]) == 2
    assert "by other code of your own algorithm" in capsys.readouterr().err
