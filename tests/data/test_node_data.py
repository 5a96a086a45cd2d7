"""Local examples of a node: folders of images, NumPy files, functions, and errors about them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcog.data import DataError, node_data

CLASSES = ["cat", "dog", "horse"]


def paint(file: Path, mode: str = "RGB", size: tuple[int, int] = (6, 5), value: int = 7) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(file)


def test_a_folder_for_each_class_of_which_some_may_be_missing(tmp_path: Path) -> None:
    paint(tmp_path / "dog" / "b.png", value=9)
    paint(tmp_path / "dog" / "deep" / "a.PNG")
    paint(tmp_path / "cat" / "c.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    found = node_data.read(str(tmp_path), CLASSES)
    assert found.train_y.tolist() == [0, 1, 1] and found.classes == tuple(CLASSES)
    assert found.train_x.shape == (3, 3, 5, 6) and found.train_x.dtype == torch.uint8
    assert (
        sorted(found.train_x[1:, 0, 0, 0].tolist()) == [7, 9]
        and int(found.train_x[0, 2, 4, 5]) == 255
    )
    assert found.mean == (0.5, 0.5, 0.5) == found.std


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    paint(tmp_path / "cat" / "a.png", "L")
    assert node_data.read(str(tmp_path), CLASSES).input_shape == (1, 5, 6)


def test_a_numpy_file(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz",
        x=np.zeros((4, 2), np.float32),
        y=np.array(["dog", "cat", "dog", "dog"]),
    )
    assert node_data.read(str(tmp_path / "own.npz"), CLASSES).train_y.tolist() == [1, 0, 1, 1]


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_place.py").write_text(
        "def load():\n    return [[0.5, 1.0]], [2]\n\ndef broken():\n    raise OSError('no disk')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert node_data.read("own_place:load", CLASSES).train_y.tolist() == [2]
    for name, words in {"broken": "no disk", "absent": "absent"}.items():
        with pytest.raises(DataError, match=words):
            node_data.read(f"own_place:{name}", CLASSES)
    sys.modules.pop("own_place")


def spoil(folder: Path, how: str) -> str:
    if how == "stranger":
        paint(folder / "cow" / "a.png")
    elif how == "sizes":
        paint(folder / "cat" / "a.png")
        paint(folder / "cat" / "b.png", size=(7, 5))
    elif how == "broken":
        paint(folder / "cat" / "a.png")
        (folder / "cat" / "b.png").write_bytes(b"\x89PNG nothing")
    elif how == "empty":
        (folder / "cat").mkdir()
    elif how == "pickle":
        np.savez(folder / "a.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    elif how == "names":
        np.savez(folder / "a.npz", images=np.zeros(1))
    elif how == "garbage":
        (folder / "a.npz").write_bytes(b"PK nothing")
    return str(folder / "a.npz") if how in ("pickle", "names", "garbage") else str(folder)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stranger", "cow is not a class of this federation"),
        ("sizes", "bring all images to one size"),
        ("broken", "b.png is not a readable image"),
        ("empty", "holds no images"),
        ("pickle", "cannot be read"),
        ("names", "holds no array called"),
        ("garbage", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(how: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        node_data.read(spoil(tmp_path, how), CLASSES)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for place, classes, words in [
        (str(tmp_path / "nowhere"), CLASSES, "there is no folder"),
        ("", CLASSES, "location of this node's examples"),
        (str(tmp_path), [], "no classes are given"),
        (str(tmp_path / "no.npz"), CLASSES, "cannot be read"),
        ("no_such_module:load", CLASSES, "no_such_module"),
    ]:
        with pytest.raises(DataError, match=words):
            node_data.read(place, classes)
