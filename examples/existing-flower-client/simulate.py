"""Run the app in Flower's simulation engine, with five clients that hold two digits each.

python simulate.py
"""

from client_app import app as client
from flwr.simulation import run_simulation
from server_app import app as server

if __name__ == "__main__":
    run_simulation(
        server, client, num_supernodes=5, backend_config={"client_resources": {"num_cpus": 1}}
    )
