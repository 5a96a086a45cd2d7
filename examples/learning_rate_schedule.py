"""Train with a cosine learning rate schedule and warm-up, and with a constant learning rate.

python examples/learning_rate_schedule.py
"""

from dataclasses import replace

import fedcog

constant = fedcog.Experiment(
    dataset="digits",
    partition="label-skew",  # every client holds two digits
    clients=5,
    rounds=12,
    local_steps=10,
    batch_size=32,
    lr=0.1,
    evaluate_local=False,
    threads=1,
    mapping="vmap",  # faster for a network this small: trains all clients at once
)
cosine = replace(constant, lr_schedule="cosine", lr_warmup=2, lr_final=0.05)

for name, experiment in {"constant": constant, "cosine": cosine}.items():
    run = fedcog.run(experiment, f"runs/schedules/{name}", resume=True)
    rates = [line.get("lr", experiment.lr) for line in run.lines]
    print(f"{name:<10} lr {' '.join(f'{rate:.3f}' for rate in rates)}  last {run.last:.1%}")
