"""A small federation laid out as files: certificates, node keys, settings, and the commands that start it."""

import os
import re
from pathlib import Path

from fedcog.experiments.config import Experiment, layers, name_of, toml
from fedcog.experiments.nodes import OWN, check_deployed
from fedcog.settings import ConfigError

LINK = "federation"  # the name under which Flower's command line knows the server

APP = '''"""The two halves of a federation, as Flower runs them: one at the server, one at every node.

A network of your own: server_app(network=MyNet) and client_app(network=MyNet), with MyNet in this folder.
"""

from fedcog.experiments.deployment import client_app, server_app

server = server_app()
client = client_app()
'''

SERVER = """#!/bin/sh
# Start the server. Its record goes to runs/ in this folder, and a server that was killed goes on with it.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
exec flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \\
    --enable-supernode-auth --database superlink.db --host {bind} --port {port} \\
    --disable-runtime-dependency-installation
"""

NODE = """#!/bin/sh
# Start this node: start.sh [DATA [DEVICE]], where DATA is a folder of images, a .npz file or MODULE:FUNCTION.
case "$1" in
"" | *:*) data="$1" ;;
*) data="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" ;;
esac
device="${{2:-auto}}"
from="$PWD"
cd "$(dirname "$0")" || exit 1
export PYTHONPATH="$from:$PWD${{PYTHONPATH:+:$PYTHONPATH}}"  # where MODULE:FUNCTION is looked for
case "$PWD$data$device" in
*\\'* | *\\"*) echo "Flower takes no quotation marks in paths: rename $PWD or $data." >&2 && exit 2 ;;
esac
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
about="partition-id={number} num-partitions={nodes} state-dir='$PWD/state' data='$data' device='$device'"
trap 'kill "$child"; wait "$child"; exit' INT TERM
while :; do
    flower-supernode --root-certificates ca.crt --auth-supernode-private-key key --superlink {host}:{port} \\
        --port {runtime} --node-config "$about" &
    child=$!
    wait "$child"
    echo "node {number} is not connected (exit code $?). Either the server does not know its key (register.sh), or" \\
        "it was killed and still counts as connected, for a minute at most. Trying again in 10 seconds." >&2
    sleep 10 &
    child=$!
    wait "$child"
done
"""

REGISTER = """#!/bin/sh
# Make the nodes known to the server: it listens to no others.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
failed=0
for key in ../nodes/*/key.pub; do
    said="$(flwr supernode register "$key" {link} 2>&1)" || case "$said" in
    *"already in use"*) ;; # it was registered before
    *) failed=1 ;;
    esac
    echo "$said"
done
exit "$failed"
"""

RUN = """#!/bin/sh
# Begin the run, or go on with it where its record ends; what it prints is shown.
cd "$(dirname "$0")" || exit 1
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flower"
exec flwr run ../app {link} --stream "$@"
"""


def init(folder: Path, experiment: Experiment, *, host: str, port: int, data: str = "", classes: str = "") -> None:
    """Write all that a federation of `experiment.clients` nodes needs, whose server is reached at `host`:`port`.

    With `classes` the nodes' data are their own and the server's test examples lie at `data`.
    """
    try:
        from fedcog.experiments import certificates  # of `cryptography`, which Flower brings
    except ImportError:
        raise ConfigError(["a deployment needs Flower: pip install 'fedcog[flower]'."]) from None
    _check(folder, experiment, host, port, data, classes)
    nodes = experiment.clients
    authority, authority_key = certificates.authority()
    server, server_key = certificates.certificate(authority, authority_key, host)
    root, values = certificates.pem(authority), {"host": host, "port": port, "nodes": nodes, "link": LINK}
    _write(folder / "ca.key", certificates.private(authority_key), secret=True)
    _write(folder / "server" / "ca.crt", root)
    _write(folder / "server" / "server.crt", certificates.pem(server))
    _write(folder / "server" / "server.key", certificates.private(server_key), secret=True)
    bind = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "0.0.0.0"
    _write(folder / "server" / "start.sh", SERVER.format(bind=bind, **values).encode(), script=True)
    for number in range(nodes):
        own, key = folder / "nodes" / f"node-{number}", certificates.new_key()
        _write(own / "ca.crt", root)
        _write(own / "key", certificates.openssh(key), secret=True)
        _write(own / "key.pub", certificates.openssh_public(key) + f" node-{number}\n".encode())
        text = NODE.format(number=number, runtime=port + 1 + number, **values)
        _write(own / "start.sh", text.encode(), script=True)
    link = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{host}:{port}"\n'
    link += f"root-certificates = {toml(str((folder / 'server' / 'ca.crt').resolve()))}\n"
    _write(folder / "admin" / "flower" / "config.toml", link.encode())
    _write(folder / "admin" / "register.sh", REGISTER.format(**values).encode(), script=True)
    _write(folder / "admin" / "run.sh", RUN.format(**values).encode(), script=True)
    _write(folder / "app" / "federation.py", APP.encode())
    _write(folder / "app" / "pyproject.toml", _app(experiment, data, classes).encode())
    _write(folder / "README.md", _guide(experiment, host, port, bool(classes)).encode())


def _check(folder: Path, experiment: Experiment, host: str, port: int, data: str, classes: str) -> None:
    """Refuse what would not start, all faults at once."""
    faults = []
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        faults.append(f"{folder} is there already: choose a folder that is empty or new.")
    most = 2**16 - 1 - experiment.clients  # nodes speak to their own processes on the ports that follow
    if not 1 <= port <= most:
        faults.append(f"port needs a whole number from 1 to {most}, not {port}.")
    if experiment.clients > 1000:
        faults.append(f"clients needs at most 1000 here, a node each, not {experiment.clients}.")
    for name, layer in layers(experiment.algorithm):
        if not type(layer).__module__.startswith("fedcog."):
            faults.append(f"{name} is an algorithm of your own: put it in app/federation.py, algorithms=[{name}].")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        faults.append(f"host {host!r} is no name and no IPv4 address: give one by which nodes reach the server.")
    faults += check_deployed(experiment, bool(classes))
    names = [name.strip() for name in classes.split(",")]
    if classes and (len(set(names)) < max(len(names), 2) or not all(names)):
        faults.append(f"classes needs two names or more with commas between them, each once, not {classes!r}.")
    if bool(classes) != bool(data):
        faults.append("nodes with data of their own need both: --classes, and --test-data for the server.")
    if faults:
        raise ConfigError(faults)


def _app(experiment: Experiment, data: str, classes: str) -> str:
    """The settings of the app: all of the experiment's, so that any can be changed when it is run."""
    values = experiment.to_dict() | ({"dataset": "custom", "evaluate_local": False} if classes else {})
    values = {name: value for name, value in values.items() if name not in ("backend", "mapping", "workers", "device")}
    own = OWN | {"data": data, "classes": classes}
    plain = {name: value for name, value in (values | own).items() if not isinstance(value, dict)}
    lines = [
        "[build-system]",
        'requires = ["hatchling>=1.24"]',
        'build-backend = "hatchling.build"',
        "",
        "[project]",
        'name = "federation"',
        'version = "0.1.0"',
        f'description = "{name_of(experiment.algorithm)} on {experiment.clients} nodes"',
        'license = "Apache-2.0"',
        f'dependencies = ["{_needs(experiment)}"]',
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
        "# The experiment (fedcog run --help explains its settings) and the deployment: where the server's record is,",
        "# how many seconds it waits for an answer, where its test examples lie, and the names of all classes.",
        "[tool.flwr.app.config]",
        *(f"{name} = {toml(value)}" for name, value in plain.items()),
    ]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[tool.flwr.app.config.{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _guide(experiment: Experiment, host: str, port: int, own: bool) -> str:
    """What to do, in order."""
    data = " /path/to/its/data" if own else ""
    return f"""# A federation of {experiment.clients} nodes

{name_of(experiment.algorithm)}, {experiment.rounds} rounds; the server is reached at {host}:{port}.

On every machine, in a Python environment of its own: `pip install '{_needs(experiment)}'`.

1. On the server's machine, put `server/` and start it: `sh server/start.sh`
2. Where you administer it (this folder): `sh admin/register.sh`
3. Give each `nodes/node-N` to its owner, over a channel you trust: it holds that node's private key. On its machine:
   `sh node-N/start.sh{data}`
4. Begin the run: `sh admin/run.sh`

If the server or the run is stopped, do steps 1 and 4 again: it goes on after its last whole round. If a node is
stopped, start it again: it takes part from the next round on.

`ca.key` signs certificates for new servers: keep it away from all machines. Certificates run out in a year.
Settings of the experiment are in `app/pyproject.toml`; `sh admin/run.sh --run-config 'rounds=20 out="runs/other"'`
changes some.

Whoever reaches {host}:{port} and has `ca.crt` can register nodes and start runs, too: Flower asks nobody who
administers it. Let only the nodes' and your own machines reach that port.
"""


def _needs(experiment: Experiment) -> str:
    """What every machine has to install."""
    return "fedcog[flower]" if experiment.privacy == "off" else "fedcog[flower,privacy]"


def _write(file: Path, content: bytes, *, secret: bool = False, script: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as opened:
        opened.write(content)
    if script:
        file.chmod(0o755)
