"""What `fedcog deploy init` writes: keys and certificates that hold, settings that are read back, sound scripts."""
# ruff: noqa: E402

import ipaddress
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

certificates = pytest.importorskip("fedcog.experiments.certificates")
pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedcog.cli import main
from fedcog.experiments.config import Experiment, make_algorithm
from fedcog.experiments.deployment import client_app, read_settings
from fedcog.settings import ConfigError

WORDS = ["--clients", "2", "--host", "fl.example.org", "--algorithm", "fedprox+fedcog", "--rounds", "7"]


def flat(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def test_the_server_is_vouched_for_and_nodes_have_keys_of_their_own(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *WORDS, "--quiet"]) == 0
    root = x509.load_pem_x509_certificate((tmp_path / "fed/server/ca.crt").read_bytes())
    own = x509.load_pem_x509_certificate((tmp_path / "fed/server/server.crt").read_bytes())
    for name in (x509.DNSName("fl.example.org"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))):
        PolicyBuilder().store(Store([root])).build_server_verifier(name).verify(own, [])
    with pytest.raises(VerificationError):
        PolicyBuilder().store(Store([root])).build_server_verifier(x509.DNSName("evil.example.org")).verify(own, [])
    public = []
    for number in range(2):
        folder = tmp_path / f"fed/nodes/node-{number}"
        private = load_ssh_private_key((folder / "key").read_bytes(), None)
        public.append(load_ssh_public_key((folder / "key.pub").read_bytes()).public_numbers())  # type: ignore[union-attr]
        assert private.public_key().public_numbers() == public[-1]  # type: ignore[union-attr]
        assert (folder / "ca.crt").read_bytes() == (tmp_path / "fed/server/ca.crt").read_bytes()
    assert public[0] != public[1]
    for secret in [tmp_path / "fed/ca.key", *tmp_path.rglob("key"), *tmp_path.rglob("server.key")]:
        assert secret.stat().st_mode & 0o077 == 0, secret


def test_its_settings_are_the_experiments_and_its_scripts_are_sound(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *WORDS, "--quiet"]) == 0
    app = tomllib.loads((tmp_path / "fed/app/pyproject.toml").read_text())
    experiment, own = read_settings(flat(app["tool"]["flwr"]["app"]["config"]))
    assert experiment == Experiment(algorithm=make_algorithm("fedprox+fedcog"), clients=2, rounds=7, backend="flower")
    assert own["patience"] == 600
    for script in tmp_path.rglob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)
        assert script.stat().st_mode & 0o100
    guide = (tmp_path / "fed/README.md").read_text()
    for word in ("server/start.sh", "admin/register.sh", "start.sh", "admin/run.sh", "fl.example.org:9092"):
        assert word in guide


def test_the_example_is_an_app_of_ours() -> None:
    example = Path(__file__).parents[2] / "examples" / "flower-app"
    app = tomllib.loads((example / "pyproject.toml").read_text())
    experiment, _ = read_settings(flat(app["tool"]["flwr"]["app"]["config"]))
    assert experiment.clients == 3
    done = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(example)],
        cwd=example.parent,
        capture_output=True,
        text=True,
    )
    for built in example.parent.glob("*.fab"):
        built.unlink()
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_node_may_be_sent_to_other_processes_as_flowers_simulation_does() -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    assert callable(cloudpickle.loads(cloudpickle.dumps(client_app())))


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--port", "70000"], "port needs a whole number"),
        (["--classes", "a,b"], "set --weight-cap"),
        (["--host", "käse"], "no name and no IPv4 address"),
        (["--host", "a$(touch x)"], "no name and no IPv4 address"),
        (["--checkpoint-every", "5"], "--checkpoint-every 1"),
        (["--secure-aggregation", "--clients", "2"], "needs from 3"),
        (["--clients", "1001"], "at most 1000"),
        (["--classes", "a,a", "--weights", "uniform", "--test-data", "x"], "each once"),
        (["--test-data", "x"], "need both"),
    ],
)
def test_what_would_not_start_is_refused(
    words: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *words]) == 2
    assert remedy in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fed").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert main(["deploy", "init", str(tmp_path), *WORDS]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"selection": "power-of-choice"}, "selection uniform"),
        ({"checkpoint_every": 5}, "--checkpoint-every 1"),
        ({"algorithm": "fedcog", "fedcog.generator": "custom"}, "and no generator"),
        ({"dataset": "custom"}, "weight-cap"),
        ({"rounds": 5, "rounds.x": 1}, "no table"),
        ({"patience": "soon"}, "patience needs seconds"),
        ({"patience": float("nan")}, "patience needs seconds"),
        ({"out": 5}, "out needs text"),
        ({"secure_aggregation": True, "clients": 2}, "secure aggregation needs from 3"),
        ({"rouns": 3}, "rounds"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(settings)
