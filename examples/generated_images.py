"""Look at what FedCOG generates: noise on its way to inputs, above real pictures of the same
classes, in one PNG.

python examples/generated_images.py
"""

import numpy as np
from PIL import Image
from safetensors.torch import load_file

import fedcog

experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(start_round=8, count=32, steps=60),
    dataset="digits",
    partition="label-skew",
    clients=5,
    rounds=9,
    local_steps=10,
    batch_size=32,
    lr=0.05,
    evaluate_local=False,
    threads=1,
    mapping="vmap",
)
run = fedcog.run(experiment, "runs/generated", resume=True, report=False)

# One client's images of each round that generated, at a few steps: values from 0 to 1, [step,
# image, channel, y, x].
made = load_file(sorted((run.path / "exhibits").iterdir())[-1])
real = load_file(run.path / "federation.safetensors")
same = [int((real["real_labels"] == label).nonzero()[0]) for label in made["labels"]]
rows = [*made["images"], real["real_images"][same]]

# Each row side by side, the rows below each other, and every pixel six times as large.
wall = np.concatenate(
    [np.concatenate([np.pad(image[0], 1) for image in row], axis=1) for row in rows]
)
pixels = (255 * wall.clip(0, 1)).astype(np.uint8) if wall.dtype != np.uint8 else wall
Image.fromarray(pixels).resize(
    (6 * wall.shape[1], 6 * wall.shape[0]), Image.Resampling.NEAREST
).save("generated.png")

print("asked for, from left to right:", *made["labels"].tolist())
print(
    "from top to bottom: after",
    ", ".join(map(str, made["steps"].tolist())),
    "steps; the last row is real",
)
print(f"last {run.last:.1%}; look at generated.png")
