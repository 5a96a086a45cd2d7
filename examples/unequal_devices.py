"""A federation of phones, laptops and a server: each trains and generates as much as it can.

Phones have a network of half the width, train half as long and generate nothing. Laptops generate
inputs, a few at a time to save memory. The server learns a generator for it.

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


def main() -> None:
    """Run it, and print what becomes of each kind of device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="communication rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="runs/devices", help="where the run goes (default: %(default)s)"
    )
    options = parser.parse_args()

    cog = fedcog.FedCOG(count=32, steps=20, start_round=options.rounds * 2 // 3)
    experiment = fedcog.Experiment(
        fedcog.HeteroFL(cog), devices=DEVICES, rounds=options.rounds, local_steps=40, beta=0.5
    )
    run = fedcog.run(experiment, options.out, resume=True)

    local = {one["client"]: one for one in run.lines[-1]["local"]}
    first = 0
    print("device   clients  width  steps  generates  on its own labels  on all labels")
    for device in experiment.device_types:
        clients = [local[client] for client in range(first, first + device.num_clients)]
        first += device.num_clients
        own, whole = (
            statistics.mean(one[name] for one in clients) for name in ("own_accuracy", "accuracy")
        )
        width = device.adapt(fedcog.HeteroFL()).width
        made = device.adapt(cog)
        how = (
            "nothing"
            if made.source == "nothing"
            else "inputs"
            if made.generator == "none"
            else "a network"
        )
        steps = device.local_steps or experiment.local_steps
        print(
            f"{device.name:<8} {device.num_clients:>7} {width:>6} {steps:>6} {how:>10} "
            f"{own:>18.1%} {whole:>14.1%}"
        )
    print(f"the global model, last: {run.lines[-1]['accuracy']:.1%} on all labels")


if __name__ == "__main__":
    main()
