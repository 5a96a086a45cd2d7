"""Files of a new federation: certificates, node keys, settings, and start scripts."""

import dataclasses
import os
import re
from pathlib import Path
from typing import NamedTuple

from fedcog.core.settings import ConfigError
from fedcog.core.toml import to_toml_value
from fedcog.data import DataError, node_data
from fedcog.deploy.defaults import DEPLOYMENT_DEFAULTS
from fedcog.models.libraries import is_library_name
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.flower_runs import deployment_faults, evaluation_faults

LINK_NAME = "federation"
"""The name of the server in Flower's configuration."""
MAX_NODES = 1000
MAX_PORT = 2**16 - 1
LOCAL_HOSTS = ("127.0.0.1", "localhost")

APP = '''"""The two apps of a federation, as Flower runs them: one on the server, one on every node.

To use your own network, put MyNet into this folder and write server_app(network=MyNet) and
client_app(network=MyNet).
"""

from fedcog.deploy.apps import client_app, server_app

server = server_app()
client = client_app()
'''

SERVER_SCRIPT = """#!/bin/sh
# Start the server. It writes the run to runs/ in this folder, and resumes it after a restart.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
exec flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
    --enable-supernode-auth --database superlink.db --host {bind} --port {port} \\
    --disable-runtime-dependency-installation
"""

NODE_SCRIPT = """#!/bin/sh
# Start this node: start.sh [DATA [DEVICE]]
# DATA is a folder of images, a .npz file or MODULE:FUNCTION.
case "$1" in
"" | *:*) data="$1" ;;
*) data="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" ;;
esac
device="${{2:-auto}}"
called_from="$PWD"
cd "$(dirname "$0")" || exit 1
# Python looks for MODULE:FUNCTION in these folders.
export PYTHONPATH="$called_from:$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
case "$PWD$data$device" in
*\\'* | *\\"*)
    echo "Flower does not allow quotation marks in paths: rename $PWD or $data." >&2
    exit 2
    ;;
esac
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
config="partition-id={number} num-partitions={nodes} state-dir='$PWD/state'"
config="$config data='$data' device='$device'"
trap 'kill "$child"; wait "$child"; exit' INT TERM
while :; do
    flower-supernode --root-certificates ca.crt --auth-supernode-private-key key \\
        --superlink {host}:{port} --port {runtime} --node-config "$config" &
    child=$!
    wait "$child"
    echo "node {number} is not connected (exit code $?). Either the server does not know its key" \\
        "(run register.sh), or this node was killed and the server still counts it as connected," \\
        "for at most a minute. Trying again in 10 seconds." >&2
    sleep 10 &
    child=$!
    wait "$child"
done
"""

REGISTER_SCRIPT = """#!/bin/sh
# Register the nodes' public keys: the server accepts no other nodes.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
failed=0
for key in ../nodes/*/key.pub; do
    output="$(flwr supernode register "$key" {link} 2>&1)" || case "$output" in
    *"already in use"*) ;; # it is registered already
    *) failed=1 ;;
    esac
    echo "$output"
done
exit "$failed"
"""

RUN_SCRIPT = """#!/bin/sh
# Start the run, or resume it, and show its log.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
exec flwr run ../app {link} --stream "$@"
"""


class Federation(NamedTuple):
    """What `init` was asked to set up."""

    experiment: Experiment
    host: str
    port: int
    test_data: str  # the server's test examples, if nodes have their own data
    classes: str  # names of all classes, separated by commas, if nodes have their own data
    shape: str = ""  # shape of one input, if the server has no test examples

    @property
    def has_own_data(self) -> bool:
        """Whether the nodes have their own data."""
        return bool(self.classes)


def init(
    folder: Path,
    experiment: Experiment,
    *,
    host: str,
    port: int,
    data: str = "",
    classes: str = "",
    shape: str = "",
) -> None:
    """Write all files of a federation with `experiment.clients` nodes.

    Args:
        folder: The new folder.
        experiment: The experiment to run.
        host: Name or IPv4 address by which nodes reach the server.
        port: Port of the server; the nodes use the ports that follow it on their own machines.
        data: Where the server finds its test examples, if nodes have their own data.
        classes: Names of all classes, separated by commas, if nodes have their own data.
        shape: Shape of one input, such as 3x32x32, if the server has no test examples.

    Raises:
        ConfigError: The federation could not start; all faults at once.
    """
    try:
        from fedcog.deploy import certificates  # needs `cryptography`, which Flower installs
    except ImportError:
        raise ConfigError(["a deployment needs Flower: pip install 'fedcog[flower]'."]) from None
    experiment = dataclasses.replace(experiment, clients=experiment.num_clients)
    federation = Federation(experiment, host, port, data, classes, shape)
    faults = _faults(folder, federation)
    if faults:
        raise ConfigError(faults)
    authority, authority_key = certificates.new_authority()
    server, server_key = certificates.new_server_certificate(authority, authority_key, host)
    root_certificate = certificates.pem_certificate(authority)
    server_folder = folder / "server"
    _write(folder / "ca.key", certificates.pem_private_key(authority_key), secret=True)
    _write(server_folder / "ca.crt", root_certificate)
    _write(server_folder / "server.crt", certificates.pem_certificate(server))
    _write(server_folder / "server.key", certificates.pem_private_key(server_key), secret=True)
    bind = "127.0.0.1" if host in LOCAL_HOSTS else "0.0.0.0"
    _write_script(server_folder / "start.sh", SERVER_SCRIPT.format(bind=bind, port=port))
    for number in range(experiment.clients):
        node_folder = folder / "nodes" / f"node-{number}"
        key = certificates.new_key()
        public_key = certificates.openssh_public_key(key) + f" node-{number}\n".encode()
        _write(node_folder / "ca.crt", root_certificate)
        _write(node_folder / "key", certificates.openssh_private_key(key), secret=True)
        _write(node_folder / "key.pub", public_key)
        _write_script(node_folder / "start.sh", _node_script(federation, number))
    config = _flower_config(federation, server_folder / "ca.crt")
    _write(folder / "admin" / "flower" / "config.toml", config.encode())
    _write_script(folder / "admin" / "register.sh", REGISTER_SCRIPT.format(link=LINK_NAME))
    _write_script(folder / "admin" / "run.sh", RUN_SCRIPT.format(link=LINK_NAME))
    _write(folder / "app" / "federation.py", APP.encode())
    _write(folder / "app" / "pyproject.toml", _pyproject(federation).encode())
    _write(folder / "README.md", _readme(federation).encode())


def _node_script(federation: Federation, number: int) -> str:
    return NODE_SCRIPT.format(
        number=number,
        nodes=federation.experiment.clients,
        host=federation.host,
        port=federation.port,
        runtime=federation.port + 1 + number,
    )


def _flower_config(federation: Federation, root_certificate: Path) -> str:
    """Flower's config.toml, which names the server."""
    return (
        f'[superlink]\ndefault = "{LINK_NAME}"\n\n'
        f'[superlink.{LINK_NAME}]\naddress = "{federation.host}:{federation.port}"\n'
        f"root-certificates = {to_toml_value(str(root_certificate.resolve()))}\n"
    )


def _faults(folder: Path, federation: Federation) -> list[str]:
    """Why a federation could not start."""
    experiment = federation.experiment
    faults = []
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        faults.append(f"{folder} exists already: choose a folder that is empty or new.")
    max_port = MAX_PORT - experiment.clients  # each node uses another port after the server's
    if not 1 <= federation.port <= max_port:
        faults.append(f"port needs an integer from 1 to {max_port}, not {federation.port}.")
    if experiment.clients > MAX_NODES:
        faults.append(
            f"clients needs at most {MAX_NODES} here, one node each, not {experiment.clients}."
        )
    for name, layer in named_layers(experiment.algorithm):
        if not type(layer).__module__.startswith("fedcog."):
            faults.append(
                f"{name} is an algorithm of your own: put it in app/federation.py, "
                f"algorithms=[{name}]."
            )
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", federation.host):
        faults.append(
            f"host {federation.host!r} is not a host name or IPv4 address: give the one by which "
            "nodes reach the server."
        )
    faults += deployment_faults(experiment, federation.has_own_data)
    names = [name.strip() for name in federation.classes.split(",")]
    is_valid = len(set(names)) == len(names) >= 2 and all(names)
    if federation.classes and not is_valid:
        faults.append(
            "classes needs two or more names separated by commas, each once, not "
            f"{federation.classes!r}."
        )
    faults += _own_data_faults(federation)
    return faults


def _own_data_faults(federation: Federation) -> list[str]:
    """Why nodes could not bring their own data."""
    if not federation.has_own_data:
        if federation.test_data or federation.shape:
            return [
                "--test-data and --input-shape are for nodes with their own data: add --classes."
            ]
        return []
    faults = evaluation_faults(federation.experiment, True, bool(federation.test_data))
    if federation.test_data and federation.shape:
        faults.append("--input-shape is for a server without --test-data: give one of the two.")
    elif not federation.test_data and not federation.shape:
        faults.append(
            "the server builds the network and sees no example: give it --test-data, or the shape "
            "of one input, such as --input-shape 3x32x32."
        )
    if federation.shape:
        try:
            node_data.without_examples(federation.shape, ["a", "b"])
        except DataError as error:
            faults.append(str(error))
    return faults


def _pyproject(federation: Federation) -> str:
    """The app's pyproject.toml; it has all settings, because `flwr run` can only change those."""
    experiment = federation.experiment
    values = experiment.to_dict()
    if federation.has_own_data:
        values |= {"dataset": "custom", "evaluate_local": False}
    for name in ("backend", "mapping", "workers", "device"):
        values.pop(name, None)
    values |= DEPLOYMENT_DEFAULTS | {
        "data": federation.test_data,
        "classes": federation.classes,
        "shape": federation.shape,
    }
    settings = {name: value for name, value in values.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [
        "[build-system]",
        'requires = ["hatchling>=1.24"]',
        'build-backend = "hatchling.build"',
        "",
        "[project]",
        'name = "federation"',
        'version = "0.1.0"',
        f'description = "{algorithm_name(experiment.algorithm)} on {experiment.clients} nodes"',
        'license = "Apache-2.0"',
        f'dependencies = ["{_requirement(experiment)}"]',
        "",
        "[tool.hatch.build.targets.wheel]",
        'include = ["*.py"]',
        "",
        "[tool.flwr.app]",
        'publisher = "federation"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "federation:server"',
        'clientapp = "federation:client"',
        "",
        "# Settings of the experiment (see fedcog run --help) and of the deployment:",
        "# out: where the server writes the run; patience: seconds that it waits for an answer;",
        "# data: where its test examples are; classes: the names of all classes;",
        "# shape: the shape of one input, if the server has no test examples.",
        "[tool.flwr.app.config]",
        *(f"{name} = {to_toml_value(value)}" for name, value in settings.items()),
    ]
    for name, table in tables.items():
        lines += ["", f"[tool.flwr.app.config.{name}]"]
        lines += [f"{key} = {to_toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _readme(federation: Federation) -> str:
    """Instructions, step by step."""
    experiment = federation.experiment
    name = algorithm_name(experiment.algorithm)
    address = f"{federation.host}:{federation.port}"
    data_argument = " /path/to/its/data" if federation.has_own_data else ""
    return f"""# A federation of {experiment.clients} nodes

{name}, {experiment.rounds} rounds. The server's address is {address}.

On every machine, in a new Python environment: `pip install '{_requirement(experiment)}'`.

1. Copy `server/` to the server's machine, and start it: `sh server/start.sh`
2. Register the nodes, from this folder: `sh admin/register.sh`
3. Give each folder `nodes/node-N` to the owner of that node, over a channel you trust: it holds the
   node's private key. On that machine: `sh node-N/start.sh{data_argument}`
4. Start the run, from this folder: `sh admin/run.sh`

If the server or the run stops, repeat steps 1 and 4: the run resumes after its last complete round.
If a node stops, start it again: it takes part from the next round on.

The settings of the experiment are in `app/pyproject.toml`. To change some of them for one run:
`sh admin/run.sh --run-config 'rounds=20 out="runs/other"'`

## Security

- `ca.key` signs certificates for new servers: store it offline. Certificates expire after a year.
- Anyone who can reach {address} and has `ca.crt` can register nodes and start runs: Flower does not
  authenticate administrators. Let only the nodes and your own machines reach that port.
"""


def _requirement(experiment: Experiment) -> str:
    """The package that every machine installs."""
    extras = ["flower"]
    if experiment.privacy != "off":
        extras.append("privacy")
    if is_library_name(experiment.model):
        extras.append(experiment.model.partition(":")[0])
    return f"fedcog[{','.join(extras)}]"


def _write(file: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file; only its owner can read a secret one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if secret else 0o644
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)


def _write_script(file: Path, text: str) -> None:
    """Write a new executable file."""
    _write(file, text.encode())
    file.chmod(0o755)
