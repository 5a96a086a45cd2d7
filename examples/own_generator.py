"""Give FedCOG your own generator, pre-trained on public images.

python examples/own_generator.py
"""

import torch
from torch import nn

import fedcog
from fedcog.data import registry

# Any nn.Module from noise to inputs works. This one maps 32 random numbers to an 8x8 image.
torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(32, 128),
    nn.BatchNorm1d(128),
    nn.ReLU(),
    nn.Linear(128, 64),
    nn.Unflatten(1, (1, 8, 8)),
)

# Pre-train it on a public data set. To keep the example small, this is the clients' data set.
public = registry.load("digits")
fedcog.pretrain(generator, public, "generator.safetensors", noise=32, steps=200)

experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(generator="custom", noise=32, start_round=5, count=64, steps=20),
    pretrained_generator="generator.safetensors",
    partition="label-skew",
    rounds=8,
    local_steps=10,
    batch_size=32,
    lr=0.05,
)
run = fedcog.run(experiment, "runs/generator", generator=generator, resume=True)
print(f"last {run.last:.1%}, best {run.best:.1%}; look at {run.path / 'report.html'}")
