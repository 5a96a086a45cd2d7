"""Make a table, a figure and a pandas frame of recorded runs, for a paper.

python examples/tables_and_plots.py
"""

from dataclasses import replace
from pathlib import Path

import fedcog

base = fedcog.Experiment(
    dataset="digits",
    partition="label-skew",  # every client holds two digits
    clients=5,
    rounds=6,
    local_steps=10,
    batch_size=32,
    lr=0.05,
    evaluate_local=False,
    threads=1,
    mapping="vmap",
)
methods = (fedcog.FedAvg(), fedcog.FedProx(mu=0.1), fedcog.SCAFFOLD())
fedcog.compare(
    [replace(base, algorithm=method) for method in methods], seeds=[0, 1, 2], out="runs/paper"
)

# Later, and in another program: all runs below a folder.
runs = fedcog.read_all("runs/paper")

# Mean ± sample standard deviation over seeds, the best in bold, differences from FedAvg by seed.
print(fedcog.table(runs))
Path("table.tex").write_text(fedcog.table(runs, "latex"))

# Learning curves, one column of a paper wide. The suffix decides the format: .pdf, .svg or .png.
fedcog.plot(runs, "curves.pdf")
fedcog.plot(runs, "loss.png", metric="loss")

# Everything else: one row per round, with all that was recorded (pip install 'fedcog[pandas]').
rounds = fedcog.frame(runs)
reached = rounds[rounds["accuracy"] >= 0.3].groupby(["group", "seed"])["round"].min()
print("rounds until 30 %, median over the seeds that reached it:")
for method, median in reached.groupby("group").median().items():
    print(f"  {method}: {median:g}")
