"""Data of the user's own: folders of images, .npz files, data sets of others; trained on and measured."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from wideflat.cli import main
from wideflat.data import DataError, from_datasets, from_folder, from_npz
from wideflat.data.own import load_own
from wideflat.presets import preset
from wideflat.training.flatness import images_of_run
from wideflat.training.runs import Run


def photo(path, shade, size=(20, 24)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


@pytest.fixture
def photos(tmp_path):
    for part, count in (("train", 24), ("test", 8)):
        for name, shade in (("dark", 40), ("light", 200)):
            for k in range(count):
                photo(tmp_path / "photos" / part / name / f"{k}.png", shade + k)
    return tmp_path / "photos"


@pytest.fixture
def digits(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 16, 16)).astype(np.uint8)
    y = np.arange(40) % 3
    np.savez(tmp_path / "digits.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    return tmp_path / "digits.npz"


def test_a_folder_gives_its_classes_its_pixels_and_its_parts(photos):
    data = from_folder(photos, 16)
    assert data.classes == ("dark", "light") and data.train.images.shape == (48, 3, 16, 16) and len(data.test) == 16
    assert data.train.images[0].unique().item() == 40 and data.train.images[-1].unique().item() == 200 + 9  # by name
    assert data.train.targets.tolist() == [0] * 24 + [1] * 24 and data.name == "folder:photos"


def test_the_square_in_the_middle_is_taken(tmp_path):
    for name in ("a", "b"):
        for part in ("train", "val"):
            wide = np.zeros((10, 30, 3), np.uint8)
            wide[:, 10:20] = 255
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(wide).save(tmp_path / part / name / "wide.png")
    assert from_folder(tmp_path, 10).train.images.min() == 255


def test_without_parts_one_image_in_five_is_for_testing_and_always_the_same(tmp_path):
    for name in ("a", "b"):
        for k in range(100):
            photo(tmp_path / name / f"{k}.png", k, (4, 4))
    data, again = from_folder(tmp_path, 4), from_folder(tmp_path, 4)
    assert len(data.train) + len(data.test) == 200 and 20 <= len(data.test) <= 60 and data.digest == again.digest


def test_an_npz_file_in_each_of_its_layouts_is_the_same_data(tmp_path, digits):
    grey = from_npz(digits)
    assert grey.channels == 1 and grey.num_classes == 3 and grey.train.images.shape == (40, 1, 16, 16)
    arrays = dict(np.load(digits))
    named = dict(zip(("train_images", "train_labels", "test_images", "test_labels"), arrays.values(), strict=True))
    np.savez(tmp_path / "first.npz", **{k: v[:, None] for k, v in named.items()})
    np.savez(tmp_path / "last.npz", **{k: v[..., None] if v.ndim == 3 else v for k, v in arrays.items()})
    assert {from_npz(tmp_path / name).digest for name in ("first.npz", "last.npz")} == {grey.digest}


def test_data_sets_of_torch_and_of_hugging_face_are_read():
    x, y = torch.rand(6, 3, 8, 8), [0, 1, 2, 0, 1, 2]
    pairs = from_datasets(torch.utils.data.TensorDataset(x, torch.tensor(y)), list(zip(x, y, strict=True)))
    assert torch.equal(pairs.train.images, (x * 255).round().byte()) and pairs.num_classes == 3
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pairs.train.images]
    rows = [{"img": image, "label": label} for image, label in zip(images, y, strict=True)]
    assert torch.equal(from_datasets(rows, rows).train.images, pairs.train.images)
    assert from_datasets(rows, rows, size=4, classes="abc").train.images.shape == (6, 3, 4, 4)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "empty"),
        ([(torch.randn(3, 8, 8), 0)], "leave out normalisation"),
        ([(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 9, 9), 0)], "give size="),
        ([{"pixels": 1}], r"it has \['pixels'\]"),
        ([(torch.zeros(3, 8, 8), -1)], "label of item 0"),
        ([3], "must be \\(image, label\\)"),
    ],
)
def test_data_sets_that_cannot_be_meant_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        from_datasets(pairs, pairs)


def test_damaged_and_missing_data_are_named(tmp_path, photos, digits):
    (photos / "train" / "dark" / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3\.png is not an image"):
        from_folder(photos)
    for place, message in [
        (tmp_path / "none", "there is no folder"),
        (tmp_path, "at least two"),
        (photos / "train" / "dark", "at least two"),
    ]:
        with pytest.raises(DataError, match=message):
            from_folder(place)
    arrays = dict(np.load(digits))
    for change, message in [
        ({"x_train": arrays["x_train"].astype(float)}, "uint8"),
        ({"x_train": arrays["x_train"][:, :, :9]}, "uint8 images"),
        ({"y_train": arrays["y_train"][:-1]}, "40 whole numbers"),
        ({"y_train": arrays["y_train"] - 1}, "from 0 on"),
        ({"classes": np.array(["zero", "one"])}, "0 to 1"),
    ]:
        np.savez(tmp_path / "bad.npz", **(arrays | change))
        with pytest.raises(DataError, match=message):
            load_own(f"npz:{tmp_path / 'bad.npz'}", 32)
    np.savez(tmp_path / "bad.npz", x=arrays["x_train"])
    with pytest.raises(DataError, match="must have the arrays x_train"):
        from_npz(tmp_path / "bad.npz")


def test_an_enormous_image_is_refused_before_it_is_decoded(tmp_path, photos, monkeypatch):
    monkeypatch.setattr("wideflat.data.own.MOST_PIXELS", 400)
    with pytest.raises(DataError, match="20 x 24 pixels"):
        from_folder(photos)


def test_a_preset_takes_classes_and_channels_from_the_data(digits):
    cell = preset("cifar10-resnet18").with_data(from_npz(digits))
    assert cell.dataset == "npz" and cell.num_classes == 3 and dict(cell.model_arguments)["in_channels"] == 1
    assert cell.build_model()(torch.zeros(2, 1, 16, 16)).shape == (2, 3)


def test_train_then_measure_on_own_data_and_an_own_network(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def network(num_classes, image_size):\n"
        "    return nn.Sequential(nn.AvgPool2d(image_size // 2), nn.Flatten(), nn.Linear(12, num_classes))\n"
    )
    own = ["--data", "folder:photos", "--build", "mine:network"]
    train = ["-q", "train", "cifar10-smallconvnet", *own, "--epochs", "2", "--out", "run", "--no-tensorboard"]
    assert main(train) == 0
    said = capsys.readouterr().out
    assert "next: wideflat local-energy run --build mine:network" in said and "paper" not in said
    run = Run.open("run")
    assert run.config["data"]["name"] == "folder:photos" and images_of_run(run).num_classes == 2
    measure = ["-q", "local-energy", "run", "--build", "mine:network", "--sigmas", "0.1", "--max-passes", "1", "--json"]
    assert main(measure) == 0 and json.loads(capsys.readouterr().out)["all"]["sigmas"] == [0.1]
    photo(photos / "train" / "dark" / "0.png", 7)
    assert main(measure) == 1 and "its images or labels have changed" in capsys.readouterr().err
    assert main(train) == 1 and "digest" in capsys.readouterr().err
