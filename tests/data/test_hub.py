"""Tests of data sets that Hugging Face `datasets` reads: from disk, and from its cache."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedcog
from fedcog import DataError, Experiment
from fedcog.cli.main import main

datasets = pytest.importorskip("datasets")


def image(value: int, mode: str = "L", size: tuple[int, int] = (6, 5)) -> Image.Image:
    return Image.new(mode, size, value if mode == "L" else (value, 0, 0))


def image_table(count: int, **columns: list[Any]) -> Any:
    values = {"picture": [image(number) for number in range(count)]} | columns
    table = datasets.Dataset.from_dict(values)
    features = table.features.copy()
    features["picture"] = datasets.Image()
    features["kind"] = datasets.ClassLabel(names=["cat", "dog"])
    return table.cast(features)


def save(table: Any, path: Path) -> str:
    table.save_to_disk(str(path))
    return f"hub:{path}"


def test_images_with_users_from_disk(tmp_path: Path) -> None:
    writers = ["ann", "bob", "cem", "ann", "bob", "cem"]
    splits = datasets.DatasetDict(
        {
            "train": image_table(6, kind=[0, 1, 0, 1, 0, 1], writer=writers),
            "test": image_table(3, kind=[1, 1, 0], writer=["cem", "ann", "ann"]),
        }
    )
    place = save(splits, tmp_path / "tiny")
    data = fedcog.load_dataset(place, user_column="writer")
    assert data.name == "tiny" and data.classes == ("cat", "dog")
    assert data.train_x.shape == (6, 1, 5, 6) and data.train_x.dtype == torch.uint8
    assert data.train_x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.train_y.tolist() == [0, 1, 0, 1, 0, 1] and data.test_y.tolist() == [1, 1, 0]
    assert data.user_names == ("ann", "bob", "cem")
    assert data.users is not None and data.users.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.test_users is not None and data.test_users.tolist() == [2, 0, 0]


def test_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [0, 1] * 12
    writers = [f"writer {number % 3}" for number in range(24)]
    place = save(image_table(24, kind=kinds, writer=writers), tmp_path / "tiny")
    flags = ["--dataset", place, "--user-column", "writer", "--model", "mlp", "--local-test", "0.3"]
    quick = ["--rounds", "1", "--local-steps", "2", "--batch-size", "4", "--threads", "1"]
    assert main(["run", *flags, *quick, "--out", str(tmp_path / "run"), "--plain"]) == 0
    run = fedcog.read(tmp_path / "run")
    assert (run.experiment.partition, run.experiment.clients) == ("natural", 3)
    assert run.lines[-1]["evaluated_on"] == "clients"
    assert main(["partition", *flags]) == 0
    assert "2 writer 2" in capsys.readouterr().out


def test_images_of_several_kinds_and_sizes(tmp_path: Path) -> None:
    pictures = [image(10), image(20, "RGB"), image(30, "L", (8, 8))]
    table = image_table(3, kind=[0, 1, 1], picture=pictures)
    place = save(table, tmp_path / "mixed")
    with pytest.raises(DataError, match=r"2 sizes, such as 5x6 and 8x8.*--image-size"):
        fedcog.load_dataset(place)
    data = fedcog.load_dataset(place, image_size=4)
    assert data.train_x.shape == (3, 3, 4, 4)
    assert data.train_x[:, :, 0, 0].tolist() == [[10, 10, 10], [20, 0, 0], [30, 30, 30]]


def test_columns_of_numbers_and_tokens(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict(
        {"x": [[0.5, 1.0], [2.0, 3.0]], "ids": [[1, 2, 3], [4, 5, 6]], "label": ["no", "yes"]}
    )
    place = save(table, tmp_path / "numbers")
    with pytest.raises(DataError, match=r"2 columns that may be inputs.*--input-column"):
        fedcog.load_dataset(place)
    data = fedcog.load_dataset(place, input_column="x")
    assert data.train_x.tolist() == [[0.5, 1.0], [2.0, 3.0]] and data.classes == ("no", "yes")
    assert len(data.test_y) == 0
    tokens = fedcog.load_dataset(place, input_column="ids")
    assert tokens.train_x.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tokens.train_x.dtype == torch.int64


def test_arrays_of_bytes_are_images(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    features = datasets.Features(
        {"pixels": datasets.Array3D((3, 4, 5), "uint8"), "y": datasets.Value("int64")}
    )
    table = datasets.Dataset.from_dict({"pixels": list(pixels), "y": [0, 1]}, features=features)
    data = fedcog.load_dataset(save(table, tmp_path / "bytes"))
    assert torch.equal(data.train_x, torch.from_numpy(pixels))


def test_lists_of_lists_of_bytes_are_images(tmp_path: Path) -> None:
    nested = datasets.Sequence(datasets.Sequence(datasets.Value("uint8")))
    features = datasets.Features({"pixels": nested, "y": datasets.Value("int64")})
    rows = {"pixels": [[[1, 2, 3], [4, 5, 6]]] * 2, "y": [0, 1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    data = fedcog.load_dataset(save(table, tmp_path / "nested"))
    assert data.train_x.shape == (2, 1, 2, 3) and data.train_x.dtype == torch.uint8


def test_test_split_without_labels_is_refused(tmp_path: Path) -> None:
    train = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "y": [0, 1]})
    splits = datasets.DatasetDict({"train": train, "test": train.remove_columns("y")})
    with pytest.raises(DataError, match=r"split 'test' of hub:.* has no column 'y'"):
        fedcog.load_dataset(save(splits, tmp_path / "unlabeled"))


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ({"text": ["a", "b"], "label": [0, 1]}, {}, "no column of inputs among text, label"),
        ({"x": [[1.0], [2.0]], "kind": [0, 1]}, {}, "no column of labels among x, kind"),
        ({"x": [[1.0], [2.0]], "y": [0, 1]}, {"user_column": "who"}, "no column 'who', but x, y"),
        ({"x": [[1], [2, 3]], "y": [0, 1]}, {}, "no arrays of numbers of one shape"),
        ({"x": [[1.0], [2.0]], "y": [0, None]}, {}, "lacks a label in some row"),
        ({"x": [[1.0], None], "y": [0, 1]}, {}, "no arrays of numbers of one shape"),
    ],
)
def test_unsuitable_tables_are_refused(
    columns: dict[str, Any], options: Any, reason: str, tmp_path: Path
) -> None:
    place = save(datasets.Dataset.from_dict(columns), tmp_path / "table")
    with pytest.raises(DataError, match=reason):
        fedcog.load_dataset(place, **options)


def test_other_folders_and_columns_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .*save_to_disk wrote"):
        fedcog.load_dataset(f"hub:{tmp_path}")
    with pytest.raises(fedcog.ConfigError, match="are for data sets of the hub"):
        Experiment(user_column="who")


def test_location_is_absolute_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = datasets.Dataset.from_dict({"x": [[0.5], [1.5]] * 20, "y": [0, 1] * 20})
    save(datasets.DatasetDict({"train": table, "test": table}), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(dataset="hub:mine", clients=2, rounds=1, local_steps=2, threads=1)
    run = fedcog.run(experiment, report=False)
    assert run.path == Path("runs/mine-fedavg-0")
    assert run.experiment.dataset == f"hub:{tmp_path / 'mine'}"


@pytest.mark.slow
def test_name_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    """A cache entry, in the layout that a download leaves, is enough."""
    table = datasets.Dataset.from_dict({"x": [[0.5], [1.5]], "y": [0, 1]})
    table.to_parquet(str(tmp_path / "table.parquet"))
    files = {"train": str(tmp_path / "table.parquet")}
    made = tmp_path / "made"
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(made))
    (source,) = (path for path in made.glob("parquet/*/0.0.0/*") if path.is_dir())
    cached = tmp_path / "cache" / "someone___tiny" / "default" / "0.0.0" / ("a1" * 20)
    shutil.copytree(source, cached)
    (cached / "parquet-train.arrow").rename(cached / "tiny-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    info |= {"dataset_name": "tiny", "config_name": "default"}
    (cached / "dataset_info.json").write_text(json.dumps(info))
    code = "import fedcog; print(fedcog.load_dataset('hub:someone/tiny').train_x.tolist())"
    offline = {
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=offline, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0.5], [1.5]]"


def test_classes_in_another_order_in_the_test_split_keep_their_names(tmp_path: Path) -> None:
    def split(names: list[str], labels: list[str]) -> Any:
        kind = datasets.ClassLabel(names=names)
        features = datasets.Features({"x": datasets.List(datasets.Value("float32")), "label": kind})
        rows = {"x": [[1.0]] * len(labels), "label": [names.index(one) for one in labels]}
        return datasets.Dataset.from_dict(rows, features=features)

    train = split(["ant", "bee", "cat"], ["bee", "ant", "cat"])
    splits = {"train": train, "test": split(["cat", "bee", "ant"], ["ant", "bee", "cat"])}
    data = fedcog.load_dataset(save(datasets.DatasetDict(splits), tmp_path / "order"))
    assert [data.classes[label] for label in data.train_y] == ["bee", "ant", "cat"]
    assert [data.classes[label] for label in data.test_y] == ["ant", "bee", "cat"]
    splits["test"] = split(["ant", "elk"], ["elk"])
    with pytest.raises(DataError, match="has class 'elk' in the test split, and not"):
        fedcog.load_dataset(save(datasets.DatasetDict(splits), tmp_path / "other"))


def test_arrays_with_channels_last_are_images(tmp_path: Path) -> None:
    pixels = np.arange(2 * 8 * 9 * 3, dtype=np.uint8).reshape(2, 8, 9, 3)
    features = datasets.Features(
        {"pixels": datasets.Array3D((8, 9, 3), "uint8"), "y": datasets.Value("int64")}
    )
    table = datasets.Dataset.from_dict({"pixels": list(pixels), "y": [0, 1]}, features=features)
    data = fedcog.load_dataset(save(table, tmp_path / "last"))
    assert torch.equal(data.train_x, torch.from_numpy(pixels).permute(0, 3, 1, 2))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pandas", "csv", "pandas:default", "../pandas", "a/b/c"])
def test_loaders_of_local_files_are_no_data_sets(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` would unpickle the files of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("train.pkl").write_bytes(pickle.dumps(Evil(tmp_path / "unpickled")))
    with pytest.raises(DataError, match=r"hub:OWNER/NAME|there is no folder"):
        fedcog.load_dataset(f"hub:{name}")
    assert not Path("unpickled").exists()
