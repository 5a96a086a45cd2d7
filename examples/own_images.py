"""Use your own images: one folder per class, and every person who took images is a client.

python examples/own_images.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

import fedcog

# Create images as album/CLASS/PERSON-NUMBER.png. Yours may have any size and any file name.
rng = np.random.default_rng(0)
folder = Path("album")
for number in range(300):
    class_name = ("stripes", "squares")[number % 2]
    person = ("ann", "bob", "eve")[number % 3]
    pixels = rng.integers(0, 90, (20, 20))
    if class_name == "stripes":
        pixels[:, rng.integers(0, 4) :: 4] += 150
    else:
        top, left = rng.integers(0, 10, 2)
        pixels[top : top + 8, left : left + 8] += 150
    file = folder / class_name / f"{person}-{number:03}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(file)

# Every fifth image of a class becomes a test image. All are resized to 16 x 16. The file name says
# who took an image, and every person becomes a client.
data = fedcog.from_folder(folder, size=16, users=lambda file: file.stem.split("-")[0])
print(data)

experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(start_round=4, count=32, steps=10),
    rounds=6,
    local_steps=10,
    batch_size=16,
    lr=0.03,
    threads=1,
)
run = fedcog.run(experiment, "runs/images", data=data, resume=True)
print(f"last {run.last:.1%}, best {run.best:.1%}; look at {run.path / 'report.html'}")
