"""Compare three methods over two seeds: prints a table, and writes a report with curves.

python examples/compare_methods.py
"""

from dataclasses import replace

import fedcog

base = fedcog.Experiment(
    dataset="digits",
    partition="label-skew",  # every client holds two digits
    clients=5,
    rounds=8,
    local_steps=10,
    batch_size=32,
    lr=0.05,
    evaluate_local=False,
    threads=1,
    mapping="vmap",  # faster for a network this small: trains all clients at once
)
methods = (
    fedcog.FedAvg(),
    fedcog.FedProx(mu=0.1),
    fedcog.FedCOG(fedcog.FedAvg(), start_round=5, count=32, steps=20),
)

# Finished runs are read, not repeated. To extend the comparison, add a method or a seed and call
# the program again.
runs = fedcog.compare(
    [replace(base, algorithm=method) for method in methods], seeds=[0, 1], out="runs/three"
)

print(f"{'':<16}{'last':>16}{'best':>16}")
for group in fedcog.group(runs):
    print(f"{group.label:<16}{group.last.percent():>16}{group.best.percent():>16}")
print("test accuracy in %, mean and deviation over seeds; curves are in runs/three/report.html")
