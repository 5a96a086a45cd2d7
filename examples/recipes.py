"""Downloaded data sets: fedcog run --dataset examples/recipes.py:femnist"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import fedcog

DATA = Path("data")


def femnist() -> dict[str, Any]:
    """Read LEAF's FEMNIST from data/femnist/train and data/femnist/test; writers are clients."""
    splits: dict[str, Any] = {"train": ([], [], []), "test": ([], [], [])}
    for split, (images, labels, writers) in splits.items():
        for file in sorted((DATA / "femnist" / split).glob("*.json")):
            for writer, own in json.loads(file.read_text())["user_data"].items():
                pixels = np.rint(255 * np.reshape(own["x"], (-1, 1, 28, 28)))
                images += list(pixels.astype(np.uint8))
                labels += own["y"]
                writers += [writer] * len(own["y"])
    return _arguments(splits, 62)


def tiny_imagenet() -> fedcog.Dataset:
    """Read data/tiny-imagenet-200; links sort its validation images by class."""
    folder = DATA / "tiny-imagenet-200"
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines():
        name, class_name = line.split("\t")[:2]
        link = folder / "val-by-class" / class_name / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../../val/images") / name)
    return fedcog.from_folder(folder / "train", folder / "val-by-class", augment=True)


def fed_isic() -> dict[str, Any]:
    """Read FLamby's Fed-ISIC2019 from data/fed-isic at 64 x 64; hospitals are clients."""
    splits: dict[str, Any] = {"train": ([], [], []), "test": ([], [], [])}
    with open(DATA / "fed-isic" / "train_test_split.csv", newline="") as file:
        for row in csv.DictReader(file):
            images, labels, centers = splits[row["fold"]]
            image = Image.open(DATA / "fed-isic" / "images" / f"{row['image']}.jpg")
            images.append(np.asarray(image.convert("RGB").resize((64, 64))).transpose(2, 0, 1))
            labels.append(int(row["target"]))
            centers.append(row["center"])
    return _arguments(splits, 8)


def _arguments(splits: dict[str, Any], num_classes: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"classes": [str(number) for number in range(num_classes)]}
    for split, (images, labels, users) in splits.items():
        arguments |= {f"{split}_x": images, f"{split}_y": labels, f"{split}_users": users}
    return arguments | {"users": arguments.pop("train_users")}
