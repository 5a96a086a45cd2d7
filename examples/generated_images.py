"""Save what FedCOG generates as a PNG: from noise to inputs, and real images of the same classes.

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

# A run stores one client's images of each round that generated. `images` has values from 0 to 1
# and shape (generation steps, images, channels, height, width).
generated = load_file(sorted((run.path / "exhibits").iterdir())[-1])
federation = load_file(run.path / "federation.safetensors")
real_indices = [
    int((federation["real_labels"] == label).nonzero()[0]) for label in generated["labels"]
]
rows = [*generated["images"], federation["real_images"][real_indices]]

# Put images next to each other, rows below each other, and enlarge every pixel six times.
grid = np.concatenate(
    [np.concatenate([np.pad(image[0], 1) for image in row], axis=1) for row in rows]
)
pixels = grid if grid.dtype == np.uint8 else (255 * grid.clip(0, 1)).astype(np.uint8)
height, width = pixels.shape
picture = Image.fromarray(pixels).resize((6 * width, 6 * height), Image.Resampling.NEAREST)
picture.save("generated.png")

steps = ", ".join(map(str, generated["steps"].tolist()))
print("target labels, from left to right:", *generated["labels"].tolist())
print(f"from top to bottom: after {steps} steps; the last row is real")
print(f"last {run.last:.1%}; look at generated.png")
