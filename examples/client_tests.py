"""Evaluate on every client's own test examples; the server has none, and clients are people.

python examples/client_tests.py
"""

from dataclasses import replace

import numpy as np
import torch

import fedcog

# Eight people, each with a rule of their own that is a little off the common one.
rng = np.random.default_rng(0)
people = rng.choice(["ann", "bob", "cem", "dia", "eve", "fay", "gus", "hal"], 1600)
x = rng.normal(size=(1600, 6)).astype(np.float32)
tilt = {name: rng.normal(scale=0.7) for name in np.unique(people)}
y = (x[:, 0] + np.array([tilt[name] for name in people]) * x[:, 1] > 0).astype(int)

data = fedcog.from_arrays(x, y, users=people)  # no test set; every person becomes a client


def confidence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A metric of one's own: the mean of the largest probability."""
    return logits.softmax(1).max(1).values.mean()


base = fedcog.Experiment(
    local_test=0.25,  # every client holds out a quarter of its examples
    metrics="balanced_accuracy, ece",
    participation=0.5,  # half of the clients train in a round, and all are evaluated
    rounds=12,
    local_steps=10,
    batch_size=16,
    lr=0.05,
    threads=1,
)
for name, algorithm in {"FedAvg": fedcog.FedAvg(), "Ditto": fedcog.Ditto()}.items():
    run = fedcog.run(
        replace(base, algorithm=algorithm),
        f"runs/clients/{name}",
        data=data,
        metrics={"confidence": confidence},
        resume=True,
    )
    tests = run.lines[-1]["local_test"]
    personal = tests.get("personal_accuracy_mean", tests["accuracy_mean"])
    print(
        f"{name}: mean {tests['accuracy_mean']:.1%}, worst {tests['accuracy_worst']:.1%}, "
        f"personal {personal:.1%}, ece {tests['ece']:.3f}, confidence {tests['confidence']:.2f}"
    )
