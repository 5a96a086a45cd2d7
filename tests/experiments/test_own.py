"""Algorithms of your own: from a file on the command line, and put to the contract."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcog
from fedcog import ConfigError, FedCOG
from fedcog.algorithms import Algorithm, Batch, Effort, Site
from fedcog.cli import main
from fedcog.experiments.own import resolve
from fedcog.testing import check_algorithm
from fedcog.tree import Params, State

MINE = """
from dataclasses import dataclass
from beside import HALF
from fedcog import Algorithm, Wrapper

@dataclass(frozen=True)
class Mine(Algorithm):
    "FedAvg that goes part of the way."
    share: float = HALF

    def server_update(self, server, total, draws):
        return super().server_update(server, total | {"weight": total["weight"] / self.share}, draws)

@dataclass(frozen=True)
class Around(Wrapper):
    patience: int = 3
"""
FAST = {"rounds": 2, "local-steps": 2, "clients": 3, "batch-size": 8, "threads": 1}
OPEN = (
    "from dataclasses import dataclass\nfrom typing import Literal\nfrom fedcog import Algorithm\n"
    "@dataclass(frozen=True)\nclass Mine(Algorithm):\n"
)
TINY = ["run", *(f"--{name}={value}" for name, value in FAST.items()), "--no-evaluate-local", "--plain"]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "a + b").mkdir()
    (tmp_path / "a + b/beside.py").write_text("HALF = 0.5")
    (tmp_path / "a + b/mine.py").write_text(MINE)
    return tmp_path / "a + b/mine.py"


def test_a_file_is_run_composed_resumed_and_compared(mine: Path, tmp_path: Path, capsys: Any) -> None:
    out, name = str(tmp_path / "run"), f"{mine}:Mine+{mine}:Around+fedcog"
    cog = ["--fedcog.count", "6", "--fedcog.steps", "2", "--start-round", "1"]
    assert main([*TINY, "--algorithm", name, "--Mine.share", "0.25", "--Around.patience", "4", *cog, "--out", out]) == 0
    assert fedcog.read(out).experiment.to_dict()["algorithm"] == "Mine+Around+fedcog"
    assert fedcog.read(out).experiment.to_dict()["Mine"] == {"share": 0.25}
    assert main(["run", "--resume", out, "--rounds", "3"]) == 2  # nothing that a record names is run
    assert "--algorithm FILE.py:Mine+FILE.py:Around+fedcog" in capsys.readouterr().err
    assert main(["run", "--resume", out, "--rounds", "3", f"--algorithm={name}"]) == 0
    assert len(fedcog.read(out).lines) == 3
    compared = ["compare", *TINY[1:], "--algorithms", "fedavg", f"{mine}:Mine", "--seeds", "0", "--out"]
    assert main([*compared, str(tmp_path / "both")]) == 0
    assert (tmp_path / "both/Mine/seed-0/checkpoint.safetensors").exists()
    assert main(["run", "--algorithm", f"{mine}:Mine", "--Mine.share", "much"]) == 2
    assert "Mine.share needs a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        ("x = (", "Mine", "cannot be run: SyntaxError"),
        ("raise SystemExit(3)", "Mine", "cannot be run: SystemExit"),
        ("import nowhere_to_be_found", "Mine", "No module named"),
        ("x = 1", "Mine", "has no algorithm called 'Mine': it has none"),
        ("from fedcog import Algorithm\nclass Other(Algorithm): pass", "Mine", "it has Other"),
        ("class Mine: pass", "Mine", "it has none"),
        ("from fedcog import Algorithm\nclass seed(Algorithm): pass", "seed", "that name is taken"),
        (OPEN + "    mu: float", "Mine", "mu has no default"),
        (OPEN + "    kind: Literal[1, 2] = 1", "Mine", "kind is neither"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(content: str, name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        resolve(f"{tmp_path / 'odd.py'}:{name}+fedcog")


def test_a_settings_file_cannot_name_code(mine: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "x.toml").write_text(f'algorithm = "{mine}:Mine"\n')
    assert main(["run", str(tmp_path / "x.toml")]) == 2
    assert "nothing that a settings file names is run" in capsys.readouterr().err
    assert main(["run", "--algorithm", str(mine)]) == 2
    assert "say which class" in capsys.readouterr().err
    assert main(["run", "--algorithm", "nowhere.py:Mine"]) == 2


@dataclasses.dataclass(frozen=True)
class Careless(Algorithm):
    """FedAvg that breaks a rule of the contract."""

    def client_init(self, shared: State) -> State:
        return {"seen": torch.zeros((), dtype=torch.float64)}


class InPlace(Careless):
    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        for value in site.shared["params"].values():
            value.mul_(0.5)
        return super().client_update(params, site, effort)


class Random(Careless):
    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> torch.Tensor:
        return params["9.bias"].sum() * torch.rand((), dtype=torch.float64)


class Peeks(Careless):
    """Says that sums are enough, and sends something that must not be summed."""

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        own, payload = super().client_update(params, site, effort)
        return own, payload | {"each": {"loss": site.weight}}


class Selfish(Careless):
    """Takes the gradient of its own loss, whatever is around it."""

    def local_grad(self, loss: Any, params: Params, batch: Batch, site: Site) -> tuple[Params, torch.Tensor]:
        return site.gradient(lambda p, b: self.local_loss(p, b, site), params, batch)


class Forgets(Careless):
    """Grows a state that its start does not have."""

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        own, payload = super().client_update(params, site, effort)
        return own | {"more": site.weight}, payload


@pytest.mark.parametrize(
    ("careless", "broken"),
    [
        (InPlace(), "nothing_in_place"),
        (Random(), "loop_is_vmap"),
        (Peeks(), "payloads_add_up"),
        (Selfish(), "awake_fedcog_keeps_its_rule"),
        (Forgets(), "not what it starts with: more"),
    ],
)
def test_the_contract_finds_what_is_wrong(careless: Algorithm, broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        check_algorithm(careless)


@dataclasses.dataclass(frozen=True)
class Each(Algorithm):
    """Adds a number of every example, and not their mean."""

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> torch.Tensor:
        return site.task.divergence(outputs["logits"], site.logits(site.shared["params"], batch["x"]))


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
def test_a_loss_of_many_numbers_is_refused_with_its_hooks_name(tmp_path: Path, mapping: Any) -> None:
    one = fedcog.Experiment(Each(), rounds=1, local_steps=1, batch_size=8, clients=2, workers=1, mapping=mapping)
    with pytest.raises(fedcog.ModelError, match=r"Each.penalty gave \[8\] numbers, and a step's loss is one"):
        fedcog.run(one, tmp_path / "run")


def test_natural_mistakes_are_told_at_once() -> None:
    with pytest.raises(TypeError, match=r"penality is no hook.*did you mean penalty"):
        type("M", (Algorithm,), {"penality": lambda self, params, outputs, batch, site: 0})
    with pytest.raises(TypeError, match=r"M.server_update takes \(self, server, total\), and is called with"):
        type("M", (Algorithm,), {"server_update": lambda self, server, total: server})
    type("M", (Algorithm,), {"server_update": lambda self, *rest: rest[0]})

    class Nothing(Algorithm):
        pass

    class Wrong(Algorithm):
        def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
            return site.own, {"delta": params}

    with pytest.raises(AssertionError, match="nothing but FedAvg"):
        check_algorithm(Nothing())
    with pytest.raises(AssertionError, match="Wrong does not run: KeyError: 'weight'"):
        check_algorithm(Wrong())


def test_a_neutral_setting_that_is_not_neutral_is_found() -> None:
    with pytest.raises(AssertionError, match="neutral_is_fedavg"):
        check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.1))


def test_ours_keep_the_contract() -> None:
    check_algorithm(fedcog.FedProx(mu=0.5), neutral=fedcog.FedProx(mu=0.0))
    check_algorithm(FedCOG(fedcog.FedProx(mu=0.5), count=4, steps=1, start_round=1))


def test_names_that_clash_numbers_that_are_whole_and_code_that_changed(tmp_path: Path, capsys: Any) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "m.py").write_text(OPEN + "    µ: float = 1\n" + f"    x = '{place}'\n")
    one, other = (f"{tmp_path / place / 'm.py'}:Mine" for place in ("a", "b"))
    assert main(["compare", "--algorithms", one, other]) == 2
    assert "two algorithms of your own are called Mine" in capsys.readouterr().err
    out = str(tmp_path / "run")
    assert main([*TINY, "--algorithm", one, "--out", out]) == 0
    assert main(["run", "--resume", out, "--rounds", "3", "--algorithm", one]) == 0  # 1 is 1.0, and µ is a name
    assert main(["run", "--resume", out, "--rounds", "4", "--algorithm", other]) == 2
    assert "by other code of an algorithm of your own" in capsys.readouterr().err
