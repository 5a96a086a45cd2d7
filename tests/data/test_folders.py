"""Tests of data sets from image folders: reading, splitting, and errors."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedcog
from fedcog import from_folder
from fedcog.data import DataError
from fedcog.data.datasets import DataWarning


def write_image(file: Path, value: int, *, mode: str = "L", size: tuple[int, int] = (6, 5)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    is_single_channel = mode in ("1", "L", "P", "I;16")
    color = value if is_single_channel else (value,) * len(mode)
    Image.new(mode, size, color).save(file)
    return file


def write_folders(folder: Path, count: int = 5, start: int = 0) -> Path:
    """Write two classes: dark cats and light dogs, every image with a different shade."""
    for i in range(count):
        write_image(folder / "cat" / f"{i}.png", start + i)
        write_image(folder / "dog" / "deep" / f"{i}.PNG", 100 + start + i)
    return folder


def test_every_fifth_image_of_a_class_is_a_test_image(tmp_path: Path) -> None:
    data = from_folder(write_folders(tmp_path, 11))
    assert (
        data.classes == ("cat", "dog")
        and data.input_shape == (1, 5, 6)
        and data.train_x.dtype == torch.uint8
    )
    by_name = sorted(range(11), key=str)  # 0, 1, 10, 2, ...
    test_shades = [by_name[4], by_name[9]]
    assert data.test_x[:, 0, 0, 0].tolist() == [
        *test_shades,
        *(100 + shade for shade in test_shades),
    ]
    assert data.test_y.tolist() == [0, 0, 1, 1] and data.train_y.bincount().tolist() == [9, 9]
    assert not set(data.train_x[:, 0, 0, 0].tolist()) & set(data.test_x[:, 0, 0, 0].tolist())


def test_separate_test_folder_classes_and_users(tmp_path: Path) -> None:
    train = write_folders(tmp_path / "train")
    test = write_folders(tmp_path / "test", 1, start=50)
    (train / "cat" / "notes.txt").write_text("no picture")
    write_image(train / "cow" / "0.png", 9)
    data = from_folder(
        train, test, classes=["dog", "cat"], users=lambda file: int(file.stem) % 2, name="mine"
    )
    assert data.name == "mine" and data.classes == ("dog", "cat")
    assert data.train_x[:, 0, 0, 0].tolist() == [100, 101, 102, 103, 104, 0, 1, 2, 3, 4]
    assert data.test_x[:, 0, 0, 0].tolist() == [150, 50] and data.test_y.tolist() == [0, 1]
    assert data.users is not None and data.users.tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0]
    assert from_folder(train, test).classes == ("cat", "cow", "dog")


def test_images_are_converted_to_one_size_and_mode(tmp_path: Path) -> None:
    write_folders(tmp_path)
    half_bright = np.zeros((4, 8, 3), np.uint8)
    half_bright[:, 4:] = 200
    Image.fromarray(half_bright).save(tmp_path / "cat" / "0.png")
    data = from_folder(tmp_path, size=(2, 4))
    assert data.input_shape == (3, 2, 4)  # one image is RGB, so all have three channels
    assert data.train_x[0, :, 0].tolist() == [[0, 0, 200, 200]] * 3
    assert data.train_x[1].unique().tolist() == [1]
    assert from_folder(tmp_path, size=1).train_x[0].flatten().tolist() == [100, 100, 100]


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)],
    ids=lambda value: str(value),
)
def test_every_eight_bit_mode_is_read(tmp_path: Path, mode: str, channels: int) -> None:
    for number in range(5):
        for name in ("one", "two"):
            write_image(tmp_path / name / f"{number}.png", 1, mode=mode)
    assert from_folder(tmp_path).input_shape == (channels, 5, 6)


def write_decompression_bomb(file: Path) -> None:
    """Write a PNG of a hundred bytes that claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("size", r"4\.png is 7x5, and .*0\.png is 5x6: bring all images to one size"),
        ("empty", r"cat.4\.png is not a readable image"),
        ("cut", r"cat.4\.png is not a readable image"),
        ("deep", r"cat.4\.png has more than 8 bits per channel"),
        ("bomb", r"cat.4\.png is not a readable image: .*pixels"),
        ("large", r"cat.4\.png has 8200 x 8200 pixels, more than"),
    ],
)
def test_error_names_the_unusable_image(tmp_path: Path, damage: str, message: str) -> None:
    file = write_folders(tmp_path) / "cat" / "4.png"
    if damage == "size":
        write_image(file, 1, size=(5, 7))
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        rng = np.random.default_rng(0)
        Image.fromarray(rng.integers(0, 255, (5, 6)).astype(np.uint8)).save(file)
        file.write_bytes(file.read_bytes()[:-30])
    elif damage == "deep":
        write_image(file, 1, mode="I;16")
    elif damage == "bomb":
        write_decompression_bomb(file)
    else:
        write_image(file, 1, mode="1", size=(8200, 8200))
    with pytest.raises(DataError, match=message):
        from_folder(tmp_path)


def test_missing_small_and_oversized_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a readable folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds too few images in folders of classes"):
        from_folder(tmp_path)
    with pytest.raises(DataError, match="at least 5 per class"):
        from_folder(write_folders(tmp_path / "few", 4))
    with pytest.raises(DataError, match="size is 0: give a height and a width"):
        from_folder(write_folders(tmp_path / "all"), size=0)
    with pytest.raises(DataError, match="size is a: give a height and a width"):
        from_folder(tmp_path / "all", size="a")  # type: ignore[arg-type]
    monkeypatch.setattr("fedcog.data.folders.MAX_TOTAL_BYTES", 5 * 6 * 10 - 1)
    with pytest.raises(DataError, match="10 images of 5x6 are more than 299 bytes"):
        from_folder(tmp_path / "all")


def test_folders_that_would_be_misread_are_refused(tmp_path: Path) -> None:
    write_folders(tmp_path / "only" / "test")
    with pytest.raises(DataError, match="holds test and no training images"):
        from_folder(tmp_path / "only")
    write_folders(tmp_path / "both" / "train")
    write_folders(tmp_path / "both" / "test")
    with pytest.raises(DataError, match=r"lies in .*where it would be a class"):
        from_folder(tmp_path / "both", tmp_path / "both" / "test")
    for i in range(5):
        write_image(tmp_path / "one" / "cat" / f"{i}.png", i)
    with pytest.raises(DataError, match="one class, 'cat', and nothing to tell apart"):
        from_folder(tmp_path / "one")


def test_classes_without_images_are_named(tmp_path: Path) -> None:
    write_folders(tmp_path)
    with pytest.warns(DataWarning, match=r"class 'dgo' has no images in .* mean 'dog'\?"):
        data = from_folder(tmp_path, classes=["cat", "dgo"])
    assert data.classes == ("cat", "dgo") and data.train_y.unique().tolist() == [0]
    (tmp_path / "cow").mkdir()
    with pytest.warns(DataWarning, match="class 'cow' has no images"):
        assert from_folder(tmp_path).classes == ("cat", "cow", "dog")


def test_classes_of_test_examples_alone_are_named(tmp_path: Path) -> None:
    x = torch.rand(6, 3)
    with pytest.warns(DataWarning, match=r"classes 'Cat', 'dog ' have test examples and no train"):
        fedcog.from_arrays(x, ["cat", "dog"] * 3, x[:2], ["Cat", "dog "])
    write_folders(tmp_path / "train")
    write_folders(tmp_path / "test")
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "zebra")
    with pytest.warns(DataWarning, match="classes 'zebra' have test examples and no training"):
        from_folder(tmp_path)


def test_only_known_formats_are_decoded(tmp_path: Path) -> None:
    """Pillow would start Ghostscript for PostScript, whatever the file is called."""
    write_folders(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 5\n%%EndComments\nshowpage\n"
    )
    with pytest.raises(DataError, match=r"0\.png is not a readable image"):
        from_folder(tmp_path)


def test_test_folder_is_one_with_the_training_classes(tmp_path: Path) -> None:
    write_folders(tmp_path / "train")
    write_image(tmp_path / "test" / "images" / "0.png", 1)
    with pytest.raises(DataError, match=r"test holds no folder of a class of .*train: sort"):
        from_folder(tmp_path)
    write_folders(tmp_path / "val", 2)
    (tmp_path / "__MACOSX").mkdir()
    data = from_folder(tmp_path)
    assert data.classes == ("cat", "dog") and len(data.test_y) == 4


def test_named_classes_make_unusual_folders_unambiguous(tmp_path: Path) -> None:
    write_folders(tmp_path)
    write_folders(tmp_path / "test", 2)
    data = from_folder(tmp_path, tmp_path / "test", classes=["cat", "dog"])
    assert len(data.train_y) == 10 and len(data.test_y) == 4
    for name in ("test", "valid"):
        for i in range(5):
            write_image(tmp_path / "odd" / name / f"{i}.png", i)
    assert from_folder(tmp_path / "odd", classes=["test", "valid"]).classes == ("test", "valid")
