"""Train networks by name: fedcog's own, and those of torchvision and timm that are installed.

python examples/networks_by_name.py
"""

from dataclasses import replace
from importlib.util import find_spec

import fedcog

names = ["mlp", "small"]
if find_spec("timm"):  # pip install 'fedcog[timm]'
    names += ["timm:test_resnet", "timm:test_vit"]

base = fedcog.Experiment(
    algorithm=fedcog.FedCOG(start_round=2, count=8, steps=3),
    dataset="digits",
    partition="label-skew",  # every client holds two digits
    clients=5,
    rounds=3,
    local_steps=6,
    batch_size=16,
    optimizer="adam",
    lr=0.002,
    evaluate_every=3,
    evaluate_local=False,
    threads=2,
)

for name in names:
    experiment = replace(base, model=name)
    out = f"runs/networks/{name.replace(':', '-')}"
    run = fedcog.run(experiment, out, resume=True, report=False)
    network = fedcog.load(run.path)  # from its name; nothing else is needed
    size = sum(value.numel() for value in network.parameters())
    print(f"{name:<20} {size:>9,} parameters, last {run.last:.1%}")
