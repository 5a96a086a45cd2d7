"""Three methods over two seeds, side by side: a table here, and curves in one report.

python examples/compare_methods.py
"""

from dataclasses import replace

import fedcog

base = fedcog.Experiment(
    dataset="digits",
    partition="label-skew",  # two kinds of digits a client
    clients=5,
    rounds=8,
    local_steps=10,
    batch_size=32,
    lr=0.05,
    evaluate_local=False,
    threads=1,
    mapping="vmap",  # so small a network is faster with all clients at once
)
methods = (
    fedcog.FedAvg(),
    fedcog.FedProx(mu=0.1),
    fedcog.FedCOG(fedcog.FedAvg(), start_round=5, count=32, steps=20),
)

# Runs that are there already are read, not made again: add a method or a seed, and call it once
# more.
runs = fedcog.compare(
    [replace(base, algorithm=method) for method in methods], seeds=[0, 1], out="runs/three"
)

print(f"{'':<16}{'last':>16}{'best':>16}")
for group in fedcog.group(runs):
    print(f"{group.label:<16}{group.last.percent():>16}{group.best.percent():>16}")
print("test accuracy in %, mean and deviation over seeds; curves are in runs/three/report.html")
