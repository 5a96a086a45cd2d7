"""Tests of the recipes in `examples/recipes.py`, on tiny files in the publishers' layouts."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

import fedcog
from tests.support.paths import REPO

RECIPES = REPO / "examples" / "recipes.py"


def recipe(name: str) -> fedcog.Dataset:
    return fedcog.load_dataset(f"{RECIPES}:{name}")


def test_femnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    people = {"train": {"f1": [3, 61], "f0": [5]}, "test": {"f0": [6]}}
    for split, labels in people.items():
        folder = tmp_path / "data" / "femnist" / split
        folder.mkdir(parents=True)
        user_data = {
            user: {"x": [[0.5, *[1.0] * 783] for _ in own], "y": own}
            for user, own in labels.items()
        }
        content = {"users": list(labels), "num_samples": [], "user_data": user_data}
        (folder / "all_data_0.json").write_text(json.dumps(content))
    data = recipe("femnist")
    assert data.train_x.shape == (3, 1, 28, 28) and data.train_x[0, 0, 0, :2].tolist() == [128, 255]
    assert data.train_y.tolist() == [3, 61, 5] and len(data.classes) == 62
    assert data.users is not None and data.test_users is not None
    assert [data.user_names[user] for user in data.users] == ["f1", "f1", "f0"]
    assert [data.user_names[user] for user in data.test_users] == ["f0"]


def test_tiny_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "tiny-imagenet-200"
    for class_name, value in {"n01": 10, "n02": 20}.items():
        images = folder / "train" / class_name / "images"
        images.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (64, 64), (value, 0, 0)).save(images / f"{class_name}_{number}.png")
    (folder / "val" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64), (30, 0, 0)).save(folder / "val" / "images" / "val_0.png")
    (folder / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t62\t62\n")
    for _ in range(2):  # links that are there already are kept
        data = recipe("tiny_imagenet")
    assert data.classes == ("n01", "n02") and data.train_y.tolist() == [0, 0, 1, 1]
    assert data.test_y.tolist() == [1] and int(data.test_x[0, 0, 0, 0]) == 30


def test_fed_isic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "fed-isic"
    (folder / "images").mkdir(parents=True)
    rows = [("a", 0, 1, "train"), ("b", 7, 0, "train"), ("c", 2, 1, "test")]
    with open(folder / "train_test_split.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "image", "target", "center", "fold", "fold2"])
        for number, (name, target, center, fold) in enumerate(rows):
            writer.writerow([number, name, target, center, fold, f"{fold}_{center}"])
            Image.new("RGB", (70, 80), (9, 9, 9)).save(folder / "images" / f"{name}.jpg")
    data = recipe("fed_isic")
    assert data.train_x.shape == (2, 3, 64, 64) and data.train_y.tolist() == [0, 7]
    assert data.user_names == ("0", "1")
    assert data.users is not None and data.users.tolist() == [1, 0]
    assert data.test_users is not None and data.test_users.tolist() == [1]
