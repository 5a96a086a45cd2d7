"""Tests of a node's local examples: image folders, NumPy files, functions, and errors."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcog.data import DataError, node_data

CLASSES = ["cat", "dog", "horse"]


def write_image(
    file: Path, mode: str = "RGB", size: tuple[int, int] = (6, 5), value: int = 7
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    color = value if mode == "L" else (value, 0, 255)
    Image.new(mode, size, color).save(file)


def test_folder_per_class_may_lack_classes(tmp_path: Path) -> None:
    write_image(tmp_path / "dog" / "b.png", value=9)
    write_image(tmp_path / "dog" / "deep" / "a.PNG")
    write_image(tmp_path / "cat" / "c.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    data = node_data.read(str(tmp_path), CLASSES)
    assert data.train_y.tolist() == [0, 1, 1] and data.classes == tuple(CLASSES)
    assert data.train_x.shape == (3, 3, 5, 6) and data.train_x.dtype == torch.uint8
    assert (
        sorted(data.train_x[1:, 0, 0, 0].tolist()) == [7, 9]
        and int(data.train_x[0, 2, 4, 5]) == 255
    )
    assert data.mean == (0.5, 0.5, 0.5) == data.std


def test_grayscale_images_have_one_channel(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "a.png", "L")
    assert node_data.read(str(tmp_path), CLASSES).input_shape == (1, 5, 6)


def test_numpy_file_is_read(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz",
        x=np.zeros((4, 2), np.float32),
        y=np.array(["dog", "cat", "dog", "dog"]),
    )
    assert node_data.read(str(tmp_path / "own.npz"), CLASSES).train_y.tolist() == [1, 0, 1, 1]


def test_function_supplies_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_place.py").write_text(
        "def load():\n    return [[0.5, 1.0]], [2]\n\ndef broken():\n    raise OSError('no disk')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert node_data.read("own_place:load", CLASSES).train_y.tolist() == [2]
    for name, message in {"broken": "no disk", "absent": "absent"}.items():
        with pytest.raises(DataError, match=message):
            node_data.read(f"own_place:{name}", CLASSES)
    sys.modules.pop("own_place")


def write_faulty(folder: Path, fault: str) -> str:
    if fault == "stranger":
        write_image(folder / "cow" / "a.png")
    elif fault == "sizes":
        write_image(folder / "cat" / "a.png")
        write_image(folder / "cat" / "b.png", size=(7, 5))
    elif fault == "broken":
        write_image(folder / "cat" / "a.png")
        (folder / "cat" / "b.png").write_bytes(b"\x89PNG nothing")
    elif fault == "empty":
        (folder / "cat").mkdir()
    elif fault == "pickle":
        np.savez(folder / "a.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    elif fault == "names":
        np.savez(folder / "a.npz", images=np.zeros(1))
    elif fault == "garbage":
        (folder / "a.npz").write_bytes(b"PK nothing")
    return str(folder / "a.npz") if fault in ("pickle", "names", "garbage") else str(folder)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stranger", "cow is not a class of this federation"),
        ("sizes", "bring all images to one size"),
        ("broken", "b.png is not a readable image"),
        ("empty", "holds no images"),
        ("pickle", "holds Python objects"),
        ("names", "holds no array called"),
        ("garbage", "cannot be read"),
    ],
)
def test_error_names_the_faulty_file(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        node_data.read(write_faulty(tmp_path, fault), CLASSES)


def test_error_names_the_missing_location(tmp_path: Path) -> None:
    for location, classes, message in [
        (str(tmp_path / "nowhere"), CLASSES, "there is no folder"),
        ("", CLASSES, "location of this node's examples"),
        (str(tmp_path), [], "no classes are given"),
        (str(tmp_path / "no.npz"), CLASSES, "cannot be read"),
        ("no_such_module:load", CLASSES, "no_such_module"),
    ]:
        with pytest.raises(DataError, match=message):
            node_data.read(location, classes)
