"""Tests of `fedcog deploy init`: certificates, keys, settings and scripts."""
# ruff: noqa: E402

import ipaddress
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPO

certificates = pytest.importorskip("fedcog.deploy.certificates")
pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedcog.cli.main import main
from fedcog.core.settings import ConfigError
from fedcog.deploy.apps import client_app, read_settings
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment

FLAGS = ["--clients", "2", "--host", "fl.example.org"]
FLAGS += ["--algorithm", "fedprox+fedcog", "--rounds", "7"]


def flatten(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def test_server_certificate_verifies_and_node_keys_differ(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *FLAGS, "--quiet"]) == 0
    root = x509.load_pem_x509_certificate((tmp_path / "fed/server/ca.crt").read_bytes())
    certificate = x509.load_pem_x509_certificate((tmp_path / "fed/server/server.crt").read_bytes())
    policy = PolicyBuilder().store(Store([root]))
    for name in (x509.DNSName("fl.example.org"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))):
        policy.build_server_verifier(name).verify(certificate, [])
    other_host = policy.build_server_verifier(x509.DNSName("evil.example.org"))
    with pytest.raises(VerificationError):
        other_host.verify(certificate, [])
    public_keys = []
    for number in range(2):
        folder = tmp_path / f"fed/nodes/node-{number}"
        private_key: Any = load_ssh_private_key((folder / "key").read_bytes(), None)
        public_key: Any = load_ssh_public_key((folder / "key.pub").read_bytes())
        public_keys.append(public_key.public_numbers())
        assert private_key.public_key().public_numbers() == public_keys[-1]
        assert (folder / "ca.crt").read_bytes() == (tmp_path / "fed/server/ca.crt").read_bytes()
    assert public_keys[0] != public_keys[1]
    for private_file in [
        tmp_path / "fed/ca.key",
        *tmp_path.rglob("key"),
        *tmp_path.rglob("server.key"),
    ]:
        assert private_file.stat().st_mode & 0o077 == 0, private_file


def test_project_settings_match_the_flags_and_scripts_parse(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *FLAGS, "--quiet"]) == 0
    app = tomllib.loads((tmp_path / "fed/app/pyproject.toml").read_text())
    experiment, app_settings = read_settings(flatten(app["tool"]["flwr"]["app"]["config"]))
    assert experiment == Experiment(
        algorithm=make_algorithm("fedprox+fedcog"), clients=2, rounds=7, backend="flower"
    )
    assert app_settings["patience"] == 600
    for script in tmp_path.rglob("*.sh"):
        subprocess.run(["sh", "-n", str(script)], check=True)
        assert script.stat().st_mode & 0o100
    guide = (tmp_path / "fed/README.md").read_text()
    for text in (
        "server/start.sh",
        "admin/register.sh",
        "start.sh",
        "admin/run.sh",
        "fl.example.org:9092",
    ):
        assert text in guide


@pytest.mark.slow
def test_example_app_builds() -> None:
    example = REPO / "examples" / "flower-app"
    app = tomllib.loads((example / "pyproject.toml").read_text())
    experiment, _ = read_settings(flatten(app["tool"]["flwr"]["app"]["config"]))
    assert experiment.clients == 3
    build = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(example)],
        cwd=example.parent,
        capture_output=True,
        text=True,
    )
    for file in example.parent.glob("*.fab"):
        file.unlink()
    assert build.returncode == 0, build.stdout + build.stderr


def test_client_app_can_be_pickled_by_ray() -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    assert callable(cloudpickle.loads(cloudpickle.dumps(client_app())))


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--port", "70000"], "port needs an integer"),
        (["--classes", "a,b"], "set --weight-cap"),
        (["--host", "käse"], "is not a host name or IPv4 address"),
        (["--host", "a$(touch x)"], "is not a host name or IPv4 address"),
        (["--checkpoint-every", "5"], "--checkpoint-every 1"),
        (["--secure-aggregation", "--clients", "2"], "needs 3 to"),
        (["--clients", "1001"], "at most 1000"),
        (["--classes", "a,a", "--weights", "uniform", "--test-data", "x"], "each once"),
        (["--test-data", "x"], "are for nodes with their own data: add --classes"),
        (["--dataset", "./photos"], "is a location on this machine"),
    ],
)
def test_init_refuses_settings_that_cannot_start(
    flags: list[str], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "fed"), *flags]) == 2
    assert remedy in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fed").exists()


def test_init_does_not_overwrite_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert main(["deploy", "init", str(tmp_path), *FLAGS]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": "power-of-choice"}, "selection uniform"),
        ({"checkpoint_every": 5}, "--checkpoint-every 1"),
        ({"algorithm": "fedcog", "fedcog.generator": "custom"}, "but no generator"),
        ({"dataset": "custom"}, "weight-cap"),
        ({"rounds": 5, "rounds.x": 1}, "not a table"),
        ({"patience": "soon"}, "patience needs seconds"),
        ({"patience": float("nan")}, "patience needs seconds"),
        ({"out": 5}, "out needs text"),
        ({"secure_aggregation": True, "clients": 2}, "secure aggregation needs 3 to"),
        ({"rouns": 3}, "rounds"),
    ],
)
def test_app_refuses_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(settings)


def test_machines_install_the_library_of_the_network(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "new"), "--model", "timm:resnet10t"]) == 0
    text = (tmp_path / "new" / "app" / "pyproject.toml").read_text()
    assert 'dependencies = ["fedcog[flower,timm]"]' in text
