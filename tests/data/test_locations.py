"""Tests of data sets by location: folders, .npz files, functions, and what is refused."""

import contextlib
import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedcog
from fedcog import ConfigError, DataError, Experiment
from fedcog.data.datasets import DataWarning
from fedcog.data.sources import locations
from fedcog.data.sources.array_files import read_arrays
from fedcog.data.sources.client_indices import read_client_indices
from fedcog.runs.records.run_directory import RunDirectory

QUICK = {"rounds": 1, "local_steps": 2, "batch_size": 4, "threads": 1, "workers": 1}


def write_images(folder: Path, count: int, value: int, size: tuple[int, int] = (6, 6)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("L", size, value + number).save(folder / f"{number:02}.png")


def write_arrays(path: Path, **arrays: object) -> Path:
    rng = np.random.default_rng(0)
    values = {
        "train_x": rng.normal(size=(40, 5)).astype("f4"),
        "train_y": np.arange(40) % 2,
        "test_x": rng.normal(size=(10, 5)).astype("f4"),
        "test_y": np.arange(10) % 2,
    }
    np.savez(path, **(values | arrays))
    return path


def test_folder_of_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "pets" / "cat", 5, 10)
    write_images(tmp_path / "pets" / "dog", 10, 100)
    data = fedcog.load_dataset(str(tmp_path / "pets"))
    assert data.name == "pets" and data.classes == ("cat", "dog")
    assert (len(data.train_y), len(data.test_y)) == (12, 3)


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_folder_with_train_and_test_is_split_already(tmp_path: Path, test_name: str) -> None:
    for split, count in {"train": 6, test_name: 2}.items():
        for number, name in enumerate(("cat", "dog")):
            write_images(tmp_path / split / name, count, 50 * number)
    data = fedcog.load_dataset(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert (len(data.train_y), len(data.test_y)) == (12, 4)
    assert data.test_x[:, 0, 0, 0].tolist() == [0, 1, 50, 51]


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 5, 10)
    write_images(tmp_path / "tram", 5, 100)
    assert fedcog.load_dataset(str(tmp_path)).classes == ("train", "tram")


def test_folder_with_a_split_and_something_else_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", 5, 10)
    write_images(tmp_path / "extra", 5, 10)
    with pytest.raises(DataError, match=r"holds both train with folders below it and extra"):
        fedcog.load_dataset(str(tmp_path))


def test_images_are_resized_on_reading(tmp_path: Path) -> None:
    write_images(tmp_path / "cat", 5, 10, (6, 4))
    write_images(tmp_path / "dog", 5, 100, (9, 9))
    with pytest.raises(DataError, match="--image-size"):
        fedcog.load_dataset(str(tmp_path))
    data = fedcog.load_dataset(str(tmp_path), image_size=8)
    assert data.input_shape == (1, 8, 8)
    measured = data.train_x.double() / 255
    assert data.mean == pytest.approx((float(measured.mean()),))
    assert data.std == pytest.approx((float(measured.std(correction=0)),))


def test_registered_images_are_resized_like_pillow_does(tmp_path: Path) -> None:
    small = fedcog.load_dataset("digits", image_size=4)
    original = fedcog.load_dataset("digits")
    assert small.input_shape == (1, 4, 4)
    expected = original.train_x.float().reshape(-1, 4, 2, 4, 2).mean((2, 4))  # 2 x 2 boxes
    assert float((small.train_x[:, 0] - expected).abs().max()) < 1  # Pillow rounds twice
    assert small.mean != original.mean
    with pytest.raises(DataError, match="no uint8 images"):
        fedcog.load_dataset(str(write_arrays(tmp_path / "a.npz")), image_size=4)


@pytest.mark.parametrize("style", ["{}_x {}_y", "x_{} y_{}", "{}_images {}_labels"])
def test_array_file_under_usual_names(tmp_path: Path, style: str) -> None:
    x = np.arange(12, dtype="f4").reshape(6, 2)
    y = np.array([[0], [1], [0], [1], [0], [1]])
    arrays = {}
    for split, part in {"train": slice(0, 4), "test": slice(4, 6)}.items():
        x_name, y_name = style.format(split, split).split()
        arrays |= {x_name: x[part], y_name: y[part]}
    np.savez(tmp_path / "mine.npz", **arrays)
    data = fedcog.load_dataset(str(tmp_path / "mine.npz"))
    assert data.name == "mine"
    assert data.train_x.tolist() == x[:4].tolist() and data.test_y.tolist() == [0, 1]


def test_array_file_with_users_and_classes(tmp_path: Path) -> None:
    users = np.array(["eve", "ann"] * 20)
    path = write_arrays(tmp_path / "a.npz", users=users, classes=np.array(["no", "yes"]))
    data = fedcog.load_dataset(str(path))
    assert data.classes == ("no", "yes") and data.user_names == ("ann", "eve")
    run = fedcog.run(Experiment(dataset=str(path), **QUICK), tmp_path / "run")
    assert run.experiment.partition == "natural" and run.experiment.clients == 2
    about = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[1]
    assert about["client_names"] == run.client_names == ["ann", "eve"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "0 ann" in page and "1 eve" in page


def test_bad_array_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "objects.npz", train_x=np.array([{}, {}]), train_y=[0, 1])
    with pytest.raises(DataError, match="holds Python objects"):
        fedcog.load_dataset(str(tmp_path / "objects.npz"))
    np.savez(tmp_path / "lacks.npz", train_x=np.zeros((2, 2)), label=[0, 1])
    with pytest.raises(DataError, match=r"holds train_x, label, and no array called train_y"):
        fedcog.load_dataset(str(tmp_path / "lacks.npz"))
    (tmp_path / "no.npz").write_bytes(b"PK not really")
    with pytest.raises(DataError, match="cannot be read"):
        fedcog.load_dataset(str(tmp_path / "no.npz"))
    with zipfile.ZipFile(tmp_path / "large.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train_x.npy", bytes(1 << 20))
    monkeypatch.setattr("fedcog.data.sources.array_files.MAX_FILE_BYTES", 1 << 16)
    with pytest.raises(DataError, match=r"holds 1,048,576 bytes, more than 65,536"):
        fedcog.load_dataset(str(tmp_path / "large.npz"))


def test_function_in_a_file_and_in_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import numpy as np\nimport fedcog\nX = np.eye(4, dtype='f4')\n"
        "def arrays():\n    return X, [0, 1, 0, 1]\n"
        "def named():\n    return dict(train_x=X, train_y=['a', 'b'] * 2, users=[3, 3, 4, 4])\n"
        "def made():\n    return fedcog.from_arrays(*arrays(), name='made')\n"
        "def broken():\n    raise OSError('no disk')\n"
        "def wrong():\n    return 3\n"
        "def typo():\n    return dict(train_x=X, train_y=[0, 1, 0, 1], tset_x=X)\n"
    )
    (tmp_path / "my_sets_of_data.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for place in (str(tmp_path / "my_sets_of_data.py"), "my_sets_of_data"):
        assert fedcog.load_dataset(f"{place}:arrays").train_y.tolist() == [0, 1, 0, 1]
        assert fedcog.load_dataset(f"{place}:named").classes == ("a", "b")
        assert fedcog.load_dataset(f"{place}:made").name == "made"
    for name, message in {
        "broken": "no disk",
        "typo": "unknown keyword argument 'tset_x'",
        "wrong": "returned int: return a fedcog.Dataset",
        "absent": "has nothing called 'absent': it defines arrays, named, made, broken, wrong,",
    }.items():
        with pytest.raises(DataError, match=message):
            fedcog.load_dataset(f"my_sets_of_data:{name}")
    with pytest.raises(DataError, match="cannot be imported"):
        fedcog.load_dataset("no_such_module_here:load")


def test_experiments_name_no_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names code, which is run only if you name it on the"):
        Experiment(dataset="mine:load")
    with pytest.raises(ConfigError, match=r"did you mean cifar10.*Or give a folder of images"):
        Experiment(dataset="cifar11")


def test_subset_is_the_same_for_every_seed_and_keeps_users() -> None:
    digits = fedcog.load_dataset("digits")
    few = fedcog.load_dataset("digits", subset=100)
    assert (len(few.train_y), len(few.test_y)) == (100, 100)
    again = fedcog.load_dataset("digits", subset=100)
    assert torch.equal(few.train_x, again.train_x)
    users = torch.arange(len(digits.train_y)) % 7
    mine = fedcog.from_arrays(digits.train_x, digits.train_y, users=users)
    part = locations.adapt_dataset(mine, locations.ReadOptions(subset=50))
    assert part.users is not None and len(part.users) == 50
    rows = [(digits.train_x == x).flatten(1).all(1).nonzero()[0, 0] for x in part.train_x]
    assert part.users.tolist() == [int(users[row]) for row in rows]
    many = fedcog.from_arrays(digits.train_x[:60], digits.train_y[:60], users=range(60))
    with pytest.warns(DataWarning, match="40 of 60 users have none of the 20 training examples"):
        locations.adapt_dataset(many, locations.ReadOptions(subset=20))


def test_indices_from_files(tmp_path: Path) -> None:
    parts = [[3, 1], [2], [0, 5, 4]]
    (tmp_path / "list.json").write_text(json.dumps(parts))
    (tmp_path / "table.json").write_text(json.dumps({"ann": parts[0], "bob": parts[1]}))
    np.savez(tmp_path / "arrays.npz", *[np.array(part) for part in parts * 4])
    assert [part.tolist() for part in read_client_indices(tmp_path / "list.json")] == parts
    assert len(read_client_indices(tmp_path / "table.json")) == 2
    assert [one.tolist() for one in read_client_indices(tmp_path / "arrays.npz")] == parts * 4
    for content, reason in {
        "3": "holds no lists",
        "[]": "holds no client",
        "[[0.5]]": "client 0 has no list of integers",
        "[[true]]": "client 0 has no list of integers",
        "[[99999999999999999999]]": "positions of client 0",
        "[": "cannot be read",
    }.items():
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=reason):
            read_client_indices(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r"neither \.json nor \.npz"):
        read_client_indices(tmp_path / "x.csv")


def test_names_are_as_long_as_they_must_be() -> None:
    places = ["/a/x/data.npz", "/b/x/data.npz", "/b/other/", "digits", "/a/x/data.npz"]
    assert locations.distinct_names(places) == [
        "a/x/data",
        "b/x/data",
        "other",
        "digits",
        "a/x/data",
    ]
    assert locations.distinct_names(["hub:me/set", "hub:you/set"]) == ["me/set", "you/set"]


def test_given_partition_from_a_file(tmp_path: Path) -> None:
    parts = [[0, 1, 2], [5, 9], [7, 6, 20, 21]]
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    experiment = Experiment(indices=str(tmp_path / "parts.json"), **QUICK)
    run = fedcog.run(experiment, tmp_path / "run", report=False)
    assert (run.experiment.partition, run.experiment.clients) == ("given", 3)
    counts = RunDirectory(tmp_path / "run").tensors("federation.safetensors")[0]["counts"]
    labels = fedcog.load_dataset("digits").train_y
    expected = [torch.bincount(labels[part], minlength=10).tolist() for part in parts]
    assert counts.tolist() == expected
    more = dataclasses.replace(experiment, clients=5)
    with pytest.raises(ConfigError, match="clients is 5, but there are indices for 3"):
        fedcog.run(more, tmp_path / "more", report=False)
    with pytest.raises(ConfigError, match="indices are for --partition given, not iid"):
        Experiment(partition="iid", indices="x.json")


def test_run_resumes_after_its_data_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    write_arrays(tmp_path / "old" / "a.npz")
    monkeypatch.chdir(tmp_path / "old")
    experiment = Experiment(dataset="a.npz", clients=2, **QUICK)
    run = fedcog.run(experiment, tmp_path / "run", report=False)
    assert run.experiment.dataset == str(tmp_path / "old" / "a.npz")
    (tmp_path / "old" / "a.npz").rename(tmp_path / "new" / "b.npz")
    monkeypatch.chdir(tmp_path / "new")
    longer = Experiment(dataset="b.npz", clients=2, **(QUICK | {"rounds": 2}))
    assert len(fedcog.run(longer, tmp_path / "run", resume=True, report=False).lines) == 2
    write_arrays(tmp_path / "new" / "b.npz", test_y=np.ones(10, dtype=np.int64))
    longer = Experiment(dataset="b.npz", clients=2, **(QUICK | {"rounds": 3}))
    with pytest.raises(fedcog.RecordError, match="made on other data"):
        fedcog.run(longer, tmp_path / "run", resume=True, report=False)


def test_unknown_arrays_and_unusable_users_are_named(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "a.npz", tset_x=np.zeros(3))
    with pytest.warns(UserWarning, match=r"arrays tset_x are ignored; known are train_x"):
        fedcog.load_dataset(str(path))
    x = np.zeros((2, 3), "f4")
    with pytest.raises(DataError, match="users holds None or NaN"):
        fedcog.from_arrays(x, [0, 1], users=[1.0, float("nan")])
    with pytest.raises(DataError, match=r"train_x is \[0, 3\]: give at least one example"):
        fedcog.from_arrays(x[:0], [])
    with pytest.raises(ConfigError, match=r"partition needs a Dataset, not str"):
        fedcog.partition("digits")  # type: ignore[arg-type]


def test_unusable_array_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_x", b"no array")
    with pytest.raises(DataError, match=r"'train_x' is no array: save the file with np\.savez"):
        fedcog.load_dataset(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_x.npy", b"x" * 100)
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1  # encrypted
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read: .*encrypted.* Save it with np\.savez"):
        fedcog.load_dataset(str(path))
    write_arrays(path, classes=np.array("cats"))
    with pytest.raises(DataError, match="classes is no list of names"):
        fedcog.load_dataset(str(path))


def test_unusual_numbers_are_converted_or_refused() -> None:
    y = [0, 1] * 5
    wide = np.arange(20).reshape(10, 2)
    assert fedcog.from_arrays(wide.astype(np.longdouble), y).train_x.dtype == torch.float32
    with pytest.raises(DataError, match="holds 18446744073709551615, which no int64 can"):
        fedcog.from_arrays(wide.astype("f4"), np.array([0, 2**64 - 1] * 5, np.uint64))


def test_wrong_options_and_locations_are_explained(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown keyword argument 'image_sise': did you mean"):
        fedcog.load_dataset("digits", image_sise=3)  # type: ignore[call-arg]
    with pytest.raises(DataError, match="subset is -3: give 0 or more"):
        fedcog.load_dataset("digits", subset=-3)
    (tmp_path / "a.csv").write_text("1,2")
    assert "a.csv is a file that is not read" in locations.missing_location(f"{tmp_path}/a.csv")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert locations.missing_location(str(tmp_path)).endswith(f"datasets: give hub:{tmp_path}.")
    Image.new("L", (3, 3)).save(tmp_path / "one.png")
    with pytest.raises(DataError, match="images lie in it directly"):
        fedcog.load_dataset(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"names no class in the file: add it, --model n\.py:Name"
    ):
        Experiment(model="n.py")


def test_array_of_objects_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "a.npz", train_y=np.array(["a", "b"] * 20, object))
    with pytest.raises(DataError, match=r"'train_y' holds Python objects.*train_y\.astype\(str\)"):
        fedcog.load_dataset(str(path))


def test_examples_of_no_client_are_counted() -> None:
    data = fedcog.from_arrays(np.zeros((6, 2), "f4"), [0, 1] * 3, indices=[[0, 1], [3]])
    with pytest.warns(DataWarning, match="3 of the 6 training examples are in no client's"):
        assert len(fedcog.partition(data)) == 2


def test_file_of_code_without_a_name_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"name of a function in the file, --dataset m\.py:Name"):
        Experiment(dataset="m.py")


def test_files_with_similar_names_are_different_code(tmp_path: Path) -> None:
    for number, name in enumerate(["d-1.py", "d_1.py", "daten/ä.py", "daten/ö.py"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def load():\n    return [[{number}.0], [1.0]], [0, 1]\n")
        data = fedcog.load_dataset(f"{path}:load")
        assert float(data.train_x[0, 0]) == number


def test_damaged_array_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, train_x=np.zeros((50, 4)), train_y=np.arange(50) % 2)
    content = bytearray(path.read_bytes())
    for position in range(60, len(content), 7):
        damaged = content.copy()
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):  # and no other error
            read_arrays(path)
    header = b"\x93NUMPY\x01\x00" + (5000).to_bytes(2, "little") + b"(" * 5000
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train_x.npy", header)
    with pytest.raises(DataError, match="cannot be read"):
        read_arrays(path)


def test_paths_are_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("digits.npz", train_x=np.zeros((4, 2), "f4"), train_y=[0, 1, 0, 1])
    assert fedcog.load_dataset(Path("digits.npz")).name == "digits"
    with pytest.raises(DataError, match="digits"):
        fedcog.load_dataset(Path("digits"))  # a folder, not the data set of this name


def test_index_file_that_names_a_client_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "parts.json"
    path.write_text('{"ann": [0], "bob": [1], "ann": [2]}')
    with pytest.raises(DataError, match="it names 'ann' twice"):
        read_client_indices(path)
