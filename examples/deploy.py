"""A federation of real processes, all of them on this machine: a server and two nodes, each with
data of its own.

On several machines, the folders that this writes go where their names say, and the same scripts are
called there.

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
AROUND = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def start(script: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a script that goes on beside us, with all that it starts; what it says goes into a
    file.
    """
    with open(f"{script.replace('/', '-')}.log", "wb") as log:
        command = ["sh", str(FOLDER / script), *words]
        return subprocess.Popen(command, env=AROUND, stdout=log, stderr=log, start_new_session=True)


# What each party has, as a NumPy file: the nodes some of the digits, the server a test set.
images, digits = load_digits(return_X_y=True)
test = np.arange(len(digits)) % 5 == 4
for name, own in {
    "node-0": ~test & (digits < 6),
    "node-1": ~test & (digits > 3),
    "test": test,
}.items():
    np.savez(
        f"{name}.npz",
        x=(15 * images[own]).astype(np.uint8).reshape(-1, 8, 8),
        y=digits[own].astype(str),
    )

# Certificates, keys, settings and scripts for everybody.
words = f"--clients 2 --host 127.0.0.1 --port {PORT} --classes 0,1,2,3,4,5,6,7,8,9".split()
words += f"{ALGORITHM} {TRAINING}".split()
words += ["--test-data", str(Path("test.npz").resolve()), "--quiet", *sys.argv[2:]]
subprocess.run([sys.executable, "-m", "fedcog", "deploy", "init", str(FOLDER), *words], check=True)

going = [start("server/start.sh")]
try:
    while socket.socket().connect_ex(("127.0.0.1", PORT)):
        time.sleep(0.2)  # until the server listens
    subprocess.run(
        ["sh", str(FOLDER / "admin/register.sh")], env=AROUND, check=True
    )  # it lets in no other nodes
    going += [
        start(f"nodes/node-{number}/start.sh", f"node-{number}.npz", "cpu") for number in range(2)
    ]
    subprocess.run(["sh", str(FOLDER / "admin/run.sh")], env=AROUND, check=True)
finally:
    for process in reversed(going):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
run = fedcog.read(FOLDER / "server/runs/federation")
print(
    f"last {run.last:.1%} of the server's test set, after {len(run.lines)} rounds; look at "
    f"{run.path / 'report.html'}"
)
