"""Use your own arrays and network, with FedCOG around FedProx.

python examples/own_data_and_model.py
"""

import numpy as np
from torch import nn

import fedcog

# Any arrays work. These are 600 points in four dimensions, in three clusters.
rng = np.random.default_rng(0)
labels = np.arange(600) % 3
points = (rng.normal(size=(600, 4)) + 2.5 * np.eye(4)[labels]).astype(np.float32)
data = fedcog.from_arrays(
    points[:500], labels[:500], points[500:], labels[500:], classes=["red", "green", "blue"]
)


# Any nn.Module from inputs to logits works, too. fedcog calls this function (or a class) to
# initialize the network from the experiment's seed.
def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(fedcog.FedProx(mu=0.01), start_round=5, count=30, steps=20),
    partition="dirichlet",
    beta=0.3,
    clients=8,
    participation=0.5,
    rounds=10,
    local_epochs=1,
    batch_size=16,
)
run = fedcog.run(experiment, "runs/own", data=data, model=network, resume=True)
print(f"last {run.last:.1%}, best {run.best:.1%}; look at {run.path / 'report.html'}")
