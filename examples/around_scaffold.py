"""Wrap SCAFFOLD in FedCOG: SCAFFOLD keeps its control variates, FedCOG adds generated inputs.

python examples/around_scaffold.py
"""

from dataclasses import replace

import fedcog

scaffold = fedcog.SCAFFOLD()
# On the command line: scaffold+fedcog
scaffold_fedcog = fedcog.FedCOG(scaffold, start_round=6, count=32, steps=20)

experiment = fedcog.Experiment(
    algorithm=scaffold,
    dataset="digits",
    partition="label-skew",
    clients=5,
    rounds=10,
    local_steps=20,
    batch_size=32,
    lr=0.01,
    evaluate_local=False,
    threads=1,
    mapping="vmap",
)
plain_run = fedcog.run(experiment, "runs/scaffold", resume=True, report=False)
wrapped_run = fedcog.run(
    replace(experiment, algorithm=scaffold_fedcog),
    "runs/scaffold+fedcog",
    resume=True,
    report=False,
)

print("round   scaffold   scaffold+fedcog")
for (round, plain_score), (_, wrapped_score) in zip(
    plain_run.scores, wrapped_run.scores, strict=True
):
    note = " (FedCOG awake)" if round > scaffold_fedcog.start_round else ""
    print(f"{round:>5}{plain_score:>11.1%}{wrapped_score:>18.1%}{note}")

plain_bytes, wrapped_bytes = (
    sum(client["up"] for client in run.lines[-1]["local"]) for run in (plain_run, wrapped_run)
)
print(f"bytes that all clients sent in the last round: {plain_bytes:,} and {wrapped_bytes:,}")
print("one seed of a small problem: the comparison over three is in docs/study.md")
