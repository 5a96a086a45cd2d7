"""Stop a run and go on with it: the same numbers, and the same checkpoint byte for byte.

python examples/stop_and_resume.py
"""

from pathlib import Path

import fedcog

experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(
        fedcog.SCAFFOLD(), start_round=4, count=32, steps=10
    ),  # clients that keep two things each
    dataset="digits",
    beta=0.5,
    clients=6,
    participation=0.5,
    rounds=8,
    local_steps=20,
    batch_size=32,
    lr=0.02,
    evaluate_local=False,
    threads=1,
)
whole = fedcog.run(experiment, "runs/whole", resume=True, report=False)

# After five rounds somebody presses Ctrl-C. A kill -9 or a power cut would do as well.
rounds = Path("runs/stopped/rounds.jsonl")
try:
    fedcog.run(
        experiment,
        "runs/stopped",
        resume=True,
        report=False,
        should_stop=lambda: len(rounds.read_text().splitlines()) == 5,
    )
except fedcog.Interrupted as stop:
    print(stop)

again = fedcog.run(
    experiment, "runs/stopped", resume=True, report=False
)  # fedcog run --resume runs/stopped
for (round, one), (_, other) in zip(whole.scores, again.scores, strict=True):
    print(f"round {round}: {one:.4f} and {other:.4f}" + (" (resumed)" if round > 5 else ""))
same = (
    Path("runs/whole/checkpoint.safetensors").read_bytes()
    == Path("runs/stopped/checkpoint.safetensors").read_bytes()
)
print(f"last {again.last:.1%}; the checkpoints are", "the same" if same else "different")
