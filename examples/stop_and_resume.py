"""Stop a run and resume it: the numbers are the same, and the checkpoint is the same in every byte.

python examples/stop_and_resume.py
"""

from pathlib import Path

import fedcog

experiment = fedcog.Experiment(
    # Both algorithms keep client state: SCAFFOLD a control variate, FedCOG the previous model.
    algorithm=fedcog.FedCOG(fedcog.SCAFFOLD(), start_round=4, count=32, steps=10),
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
uninterrupted = fedcog.run(experiment, "runs/whole", resume=True, report=False)

# Stop after five rounds, as Ctrl-C does. The run also survives kill -9 and a power cut.
rounds_file = Path("runs/stopped/rounds.jsonl")
try:
    fedcog.run(
        experiment,
        "runs/stopped",
        resume=True,
        report=False,
        should_stop=lambda: len(rounds_file.read_text().splitlines()) == 5,
    )
except fedcog.Interrupted as interruption:
    print(interruption)

# On the command line: fedcog run --resume runs/stopped
resumed = fedcog.run(experiment, "runs/stopped", resume=True, report=False)
for (round, score), (_, resumed_score) in zip(uninterrupted.scores, resumed.scores, strict=True):
    note = " (resumed)" if round > 5 else ""
    print(f"round {round}: {score:.4f} and {resumed_score:.4f}{note}")
checkpoint = Path("runs/whole/checkpoint.safetensors").read_bytes()
resumed_checkpoint = Path("runs/stopped/checkpoint.safetensors").read_bytes()
is_same = checkpoint == resumed_checkpoint
print(f"last {resumed.last:.1%}; the checkpoints are", "the same" if is_same else "different")
