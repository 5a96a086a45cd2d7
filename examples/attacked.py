"""Train with two malicious clients among ten, with the mean and with robust means.

The attackers train on images with a trigger in the corner, labeled 0, and scale their updates up.

python examples/attacked.py
"""

import fedcog

MEANS = {
    "mean": fedcog.FedAvg(),
    "trimmed mean": fedcog.TrimmedMean(trim=2),
    "multi-Krum": fedcog.MultiKrum(attackers=2),
    "geometric median": fedcog.GeometricMedian(),
}
ATTACKER = "attack=replacement attack.scale=5 attack.target=0"

for name, algorithm in MEANS.items():
    experiment = fedcog.Experiment(
        algorithm=algorithm,
        dataset="digits",
        beta=5.0,
        devices=f"honest: clients=8; attacker: clients=2 {ATTACKER}",
        rounds=10,
        local_steps=10,
        batch_size=32,
        lr=0.1,
        evaluate_local=False,
        threads=1,
        mapping="vmap",  # faster for a network this small: trains all clients at once
    )
    run = fedcog.run(experiment, f"runs/attacked/{name.replace(' ', '-')}", resume=True)
    success = run.lines[-1]["attack_success"]
    print(f"{name:<17} clean accuracy {run.last:6.1%}  attack success {success:6.1%}")
