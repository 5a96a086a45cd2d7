"""Name your data instead of writing code: a .npz file here; folders and hub:NAME work alike.

python examples/data_by_name.py
The same on the command line: fedcog run --dataset my_data.npz --partition published
"""

import numpy as np

import fedcog

# Points around three centers. Save yours with the same names of arrays.
rng = np.random.default_rng(0)
labels = rng.integers(0, 3, 900)
points = (rng.normal(size=(900, 4)) + 2 * np.eye(3, 4)[labels]).astype(np.float32)
np.savez(
    "my_data.npz",
    train_x=points[:600],
    train_y=labels[:600],
    test_x=points[600:],
    test_y=labels[600:],
    classes=np.array(["red", "green", "blue"]),
)

data = fedcog.load_dataset("my_data.npz")
print(data)

# Any partition by name, without running anything. This one is the draw of the FedCOG authors.
for client, part in enumerate(fedcog.partition(data, "published", clients=4, beta=0.3, seed=0)):
    print(client, data.train_y[part].bincount(minlength=3).tolist())

# A quick look: 200 examples are enough to see that everything works.
experiment = fedcog.Experiment(
    dataset="my_data.npz",
    subset=200,
    partition="published",
    clients=4,
    beta=0.3,
    rounds=5,
    local_steps=20,
    threads=1,
)
run = fedcog.run(experiment, "runs/by-name", resume=True)
print(f"last {run.last:.1%}; look at {run.path / 'report.html'}")
