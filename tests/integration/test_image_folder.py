"""A folder of images as users have it: every mode, broken files, hidden folders, empty classes."""

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_bench.data import load_dataset
from ssl_bench.data.datasets.image_folder import read_rgb
from ssl_bench.errors import ConfigError, DataError


def picture(path, mode="RGB", size=(40, 30), value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "images"
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            for i in range(6):
                picture(root / part / name / f"{i}.png", value=40 * (1 + (name == "bee")))
    return root


def load(folder, tmp_path, **arguments):
    return load_dataset("image_folder", root=tmp_path / "data", path=str(folder), **{"image_size": 32, **arguments})


def test_every_mode_becomes_three_channels_in_range(folder, tmp_path):
    train = folder / "train" / "ant"
    for mode, name in (
        ("RGBA", "a.png"),
        ("CMYK", "b.jpg"),
        ("P", "c.gif"),
        ("L", "d.png"),
        ("1", "e.png"),
        ("LA", "f.png"),
    ):
        picture(train / name, mode)
    Image.fromarray(np.full((30, 40), 32768, dtype=np.uint16)).save(train / "g.png")
    dataset = load(folder, tmp_path)
    assert dataset.report["unreadable"] == {}
    assert dataset.report["images"] == {"train": 19, "test": 12}
    images = dataset.split("train").images
    assert images.shape[1:] == (3, 32, 32)
    assert images.dtype == np.uint8


def test_sixteen_bit_gray_keeps_its_level(tmp_path):
    Image.fromarray(np.full((4, 4), 32768, dtype=np.uint16)).save(tmp_path / "gray.png")
    assert read_rgb(tmp_path / "gray.png").tolist() == [[[128] * 3] * 4] * 4  # 32768 / 65535 * 255 = 127.5, to even


def test_broken_files_are_set_aside_with_their_path(folder, tmp_path):
    train = folder / "train" / "ant"
    (train / "empty.jpg").write_bytes(b"")
    whole = (train / "0.png").read_bytes()
    (train / "torn.png").write_bytes(whole[: len(whole) // 2])
    dataset = load(folder, tmp_path)
    assert sorted(path.rsplit("/", 1)[1] for path in dataset.report["unreadable"]) == ["empty.jpg", "torn.png"]
    assert len(dataset.split("train")) + len(dataset.split("validation")) == 12


def test_hidden_folders_are_passed_over_and_class_ids_agree(folder, tmp_path):
    picture(folder / "train" / ".ipynb_checkpoints" / "x.png")
    (folder / "train" / "ant" / ".DS_Store").write_bytes(b"x")
    (folder / "train" / "aaa_empty").mkdir()
    dataset = load(folder, tmp_path)
    assert dataset.class_names == ("aaa_empty", "ant", "bee")
    assert dataset.report["empty_classes"]["train"] == ["aaa_empty"]
    assert set(dataset.split("test").labels.tolist()) == set(dataset.split("train").labels.tolist()) == {1, 2}


def test_without_a_test_folder_a_fixed_part_becomes_one(folder, tmp_path):
    a, b = (load(folder / "train", tmp_path / name) for name in "ab")
    counts = [len(a.split(name)) for name in ("train", "validation", "test")]
    assert sum(counts) == 12
    assert min(counts) >= 2
    assert np.array_equal(a.split("test").images, b.split("test").images)


def test_large_images_are_decoded_where_they_are_needed(folder, tmp_path):
    store = load(folder, tmp_path, image_size=224).split("train")
    assert store.is_large
    assert store.decode(0).shape == (3, 30, 40)
    assert store.decode(0).dtype == torch.uint8


def test_a_missing_folder_and_one_without_classes_are_refused(tmp_path):
    with pytest.raises(DataError, match="must be a folder"):
        load(tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="one folder a class"):
        load(tmp_path / "empty", tmp_path)
    with pytest.raises(ConfigError, match="does not take"):
        load(tmp_path / "empty", tmp_path, patch=3)
