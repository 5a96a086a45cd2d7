"""Train a model per client: fine-tuning, FedRep (personal heads), Ditto, and Ditto with FedCOG.

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

# "label mix" is the mean score of the clients' models on the test set, in which each client weighs
# classes by their share of its examples. The head of FedRep's global model is untrained.
print(f"{'last round':<22}{'label mix':>10}{'worst client':>14}{'global':>9}")
for name, method in methods.items():
    experiment = replace(base, algorithm=method)
    run = fedcog.run(experiment, f"runs/personal/{name}", resume=True, report=False)
    worst = min(client["own_accuracy"] for client in run.lines[-1]["local"])
    print(f"{name:<22}{run.label_mix[-1]:>10.1%}{worst:>14.1%}{run.last:>9.1%}")
