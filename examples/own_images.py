"""Your own pictures: a folder for each class, in a federation whose clients are the people who took
them.

python examples/own_images.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

import fedcog

# Pictures to have something to read; yours may be of any size: album/CLASS/anything.png.
draw = np.random.default_rng(0)
folder = Path("album")
for number in range(300):
    name = ("stripes", "squares")[number % 2]
    person = ("ann", "bob", "eve")[number % 3]
    picture = draw.integers(0, 90, (20, 20))
    if name == "stripes":
        picture[:, draw.integers(0, 4) :: 4] += 150
    else:
        top, left = draw.integers(0, 10, 2)
        picture[top : top + 8, left : left + 8] += 150
    file = folder / name / f"{person}-{number:03}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.astype(np.uint8)).save(file)

# Every fifth picture of a class is for testing; all are brought to 16 x 16; the name tells whose
# each is.
data = fedcog.from_folder(folder, size=16, users=lambda file: file.stem.split("-")[0])
print(data)

experiment = fedcog.Experiment(
    algorithm=fedcog.FedCOG(start_round=4, count=32, steps=10),
    partition="natural",  # a client is a user
    clients=3,
    rounds=6,
    local_steps=10,
    batch_size=16,
    lr=0.03,
    threads=1,
)
run = fedcog.run(experiment, "runs/images", data=data, resume=True)
print(f"last {run.last:.1%}, best {run.best:.1%}; look at {run.path / 'report.html'}")
