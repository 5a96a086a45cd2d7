"""Compare synchronous rounds with asynchronous ones, which do not wait for slow clients.

Both train the same clients in virtual time: two of ten are ten times slower than the others.

python examples/async_rounds.py
"""

from dataclasses import replace

import fedcog

TARGET = 0.8

synchronous = fedcog.Experiment(
    dataset="digits",
    beta=0.5,
    devices="fast: clients=8 speed=1; slow: clients=2 speed=0.1",
    rounds=12,
    local_steps=10,
    batch_size=32,
    lr=0.1,
    evaluate_local=False,
    threads=1,
    mapping="vmap",  # faster for a network this small: trains all clients at once
)
asynchronous = replace(synchronous, async_buffer=5, rounds=40)

for name, experiment in {"synchronous": synchronous, "asynchronous": asynchronous}.items():
    run = fedcog.run(experiment, f"runs/async/{name}", resume=True)
    times = [line["virtual_seconds"] for line in run.lines if line["accuracy"] >= TARGET]
    reached = f"{times[0]:.0f}" if times else "never"
    staleness = [line.get("staleness", 0) for line in run.lines]
    print(
        f"{name:<13} {len(run.lines)} rounds in {run.lines[-1]['virtual_seconds']:.0f} virtual "
        f"seconds, mean age {sum(staleness) / len(staleness):.1f}, {TARGET:.0%} after {reached}, "
        f"last {run.last:.1%}"
    )
