"""Run a federation as processes on this machine: a server, and two nodes with their own data.

On several machines, copy each folder that this program writes to the machine that it is named for,
and start the same scripts there.

python examples/deploy.py [PORT [--rounds 5 and other settings]]     # needs fedcog[flower]
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import fedcog

PORT = int([*sys.argv, "9092"][1])
FOLDER = Path("federation")
ALGORITHM = "--algorithm fedprox+fedcog --start-round 1 --fedcog.count 32 --fedcog.steps 20"
TRAINING = "--rounds 2 --local-steps 60 --batch-size 32 --lr 0.05 --weight-cap 1000 --threads 1"
SEARCH_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ENVIRONMENT = os.environ | {"PATH": SEARCH_PATH}


def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a script in the background, in its own process group, with a log file."""
    with open(f"{script.replace('/', '-')}.log", "wb") as log:
        return subprocess.Popen(
            ["sh", str(FOLDER / script), *arguments],
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


# Write the data as NumPy files: each node holds some of the digits, the server a test set.
images, digits = load_digits(return_X_y=True)
is_test = np.arange(len(digits)) % 5 == 4
node_0 = ~is_test & (digits < 6)
node_1 = ~is_test & (digits > 3)
for name, selected in {"node-0": node_0, "node-1": node_1, "test": is_test}.items():
    pixels = (15 * images[selected]).astype(np.uint8).reshape(-1, 8, 8)
    np.savez(f"{name}.npz", x=pixels, y=digits[selected].astype(str))

# Write certificates, keys, settings and scripts for server and nodes.
flags = f"--clients 2 --host 127.0.0.1 --port {PORT} --classes 0,1,2,3,4,5,6,7,8,9".split()
flags += f"{ALGORITHM} {TRAINING}".split()
flags += ["--test-data", str(Path("test.npz").resolve()), "--quiet", *sys.argv[2:]]
subprocess.run([sys.executable, "-m", "fedcog", "deploy", "init", str(FOLDER), *flags], check=True)

processes = [start("server/start.sh")]
try:
    while socket.socket().connect_ex(("127.0.0.1", PORT)):
        time.sleep(0.2)  # until the server listens
    # The server admits only registered nodes.
    subprocess.run(["sh", str(FOLDER / "admin/register.sh")], env=ENVIRONMENT, check=True)
    for node in ("node-0", "node-1"):
        processes.append(start(f"nodes/{node}/start.sh", f"{node}.npz", "cpu"))
    subprocess.run(["sh", str(FOLDER / "admin/run.sh")], env=ENVIRONMENT, check=True)
finally:
    for process in reversed(processes):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
run = fedcog.read(FOLDER / "server/runs/federation")
print(
    f"last {run.last:.1%} of the server's test set, after {len(run.lines)} rounds; look at "
    f"{run.path / 'report.html'}"
)
