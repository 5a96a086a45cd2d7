"""FedCOG around SCAFFOLD: the control variates stay SCAFFOLD's, FedCOG complements the data.

python examples/around_scaffold.py
"""

from dataclasses import replace

import fedcog

inner = fedcog.SCAFFOLD()
# on the command line: scaffold+fedcog
around = fedcog.FedCOG(inner, start_round=6, count=32, steps=20)

experiment = fedcog.Experiment(
    algorithm=inner,
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
alone = fedcog.run(experiment, "runs/scaffold", resume=True, report=False)
both = fedcog.run(
    replace(experiment, algorithm=around), "runs/scaffold+fedcog", resume=True, report=False
)

print("round   scaffold   scaffold+fedcog")
for (round, one), (_, other) in zip(alone.scores, both.scores, strict=True):
    print(
        f"{round:>5}{one:>11.1%}{other:>18.1%}"
        + (" (FedCOG awake)" if round > around.start_round else "")
    )

sent = [sum(client["up"] for client in run.lines[-1]["local"]) for run in (alone, both)]
print(f"bytes that all clients sent in the last round: {sent[0]:,} and {sent[1]:,}")
print("one seed of a small problem: the comparison over three is in docs/study.md")
