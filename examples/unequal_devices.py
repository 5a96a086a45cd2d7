"""Mix phones, laptops and a server: each device trains and generates as much as it can.

Phones have a network of half the width, take half as many steps and generate nothing. Laptops
generate a few inputs at a time, which saves memory. The server trains a generator network.

python examples/unequal_devices.py [--rounds 15]
"""

import argparse
import statistics

import fedcog

DEVICES = """
    phone:  clients=5 heterofl.width=0.5 local_steps=20 fedcog.source=nothing
    laptop: clients=4 fedcog.generation_batch=8
    server: clients=1 fedcog.generator=conv
"""


def describe_generation(algorithm: fedcog.FedCOG) -> str:
    """Say what clients with these settings generate with."""
    if algorithm.source == "nothing":
        return "nothing"
    return "inputs" if algorithm.generator == "none" else "a network"


def main() -> None:
    """Run the federation, and print the scores of each device type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="communication rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="runs/devices", help="run directory (default: %(default)s)"
    )
    options = parser.parse_args()

    fedcog_algorithm = fedcog.FedCOG(count=32, steps=20, start_round=options.rounds * 2 // 3)
    experiment = fedcog.Experiment(
        fedcog.HeteroFL(fedcog_algorithm),
        devices=DEVICES,
        rounds=options.rounds,
        local_steps=40,
        beta=0.5,
    )
    run = fedcog.run(experiment, options.out, resume=True)

    clients = {client["client"]: client for client in run.lines[-1]["local"]}
    next_id = 0
    print("device   clients  width  steps  generates  on its own labels  on all labels")
    for device in experiment.device_types:
        client_ids = range(next_id, next_id + device.num_clients)
        next_id += device.num_clients
        own_labels = statistics.mean(clients[id]["own_accuracy"] for id in client_ids)
        all_labels = statistics.mean(clients[id]["accuracy"] for id in client_ids)
        width = device.adapt(fedcog.HeteroFL()).width
        generates = describe_generation(device.adapt(fedcog_algorithm))
        steps = device.local_steps or experiment.local_steps
        print(
            f"{device.name:<8} {device.num_clients:>7} {width:>6} {steps:>6} {generates:>10} "
            f"{own_labels:>18.1%} {all_labels:>14.1%}"
        )
    print(f"the global model, last: {run.lines[-1]['accuracy']:.1%} on all labels")


if __name__ == "__main__":
    main()
