"""A model for each client: fine-tuning, FedRep's own heads, Ditto's own models, and Ditto with
FedCOG.

python examples/personalise.py
"""

from dataclasses import replace

import fedcog

base = fedcog.Experiment(
    dataset="digits",
    partition="dirichlet",
    beta=0.3,
    clients=6,
    rounds=6,
    local_steps=10,
    batch_size=32,
    lr=0.05,
    evaluate_every=6,
    threads=1,
    mapping="vmap",
)
ditto = fedcog.Ditto(fedcog.FedAvg(), lambda_pull=0.1)
methods = {
    "fine-tuning (FedAvg)": fedcog.FedAvg(),
    "FedRep": fedcog.FedRep(),
    "Ditto": ditto,
    "Ditto with FedCOG": fedcog.FedCOG(ditto, start_round=4, count=32, steps=20),
}

# Personal: each client's own model on its own mix of labels. FedRep's global model has an untrained
# head.
print(f"{'last round':<22}{'personal':>10}{'worst client':>14}{'global':>9}")
for name, method in methods.items():
    run = fedcog.run(
        replace(base, algorithm=method), f"runs/personal/{name}", resume=True, report=False
    )
    worst = min(client["own_accuracy"] for client in run.lines[-1]["local"])
    print(f"{name:<22}{run.personal[-1]:>10.1%}{worst:>14.1%}{run.last:>9.1%}")
