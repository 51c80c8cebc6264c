"""Stores, splits, the embedded images, torchvision conversion, and the order of batches."""

import pickle

import numpy as np
import pytest
import torch

from ssl_bench.data import GlobalBatchLoader, ImageStore, load_dataset
from ssl_bench.data.splits import carve_validation
from ssl_bench.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def mini():
    return load_dataset("fashion_mnist_mini")


def test_embedded_images_are_stratified_and_whole(mini):
    train, validation, test = (mini.split(name) for name in ("train", "validation", "test"))
    assert [len(s) for s in (train, validation, test)] == [9000, 1000, 2000]
    for store, each in ((train, 900), (validation, 100), (test, 200)):
        assert np.bincount(store.labels).tolist() == [each] * 10
    assert mini.fingerprint == "19076308fbaa0628"


def test_stated_statistics_are_those_of_the_training_images(mini):
    pixels = mini.split("train").images / 255.0
    # the numbers are written with four decimals, and are those of all 60,000 images
    assert pixels.mean() == pytest.approx(mini.mean[0], abs=2e-3)
    assert pixels.std() == pytest.approx(mini.std[0], abs=2e-3)


def test_unknown_split_names_the_nearest(mini):
    with pytest.raises(ConfigError, match="Did you mean 'validation'"):
        mini.split("validatoin")


@pytest.mark.parametrize("labels", [[0, 1, 2, 9] * 5, [7], [3, 3, 3], [0, 1, 1, 1]])
def test_validation_is_stratified_and_leaves_single_images_in_train(labels):
    labels = np.array(labels)
    train, validation = carve_validation(labels)
    assert sorted([*train, *validation]) == list(range(len(labels)))
    for label in np.unique(labels):
        count = (labels == label).sum()
        assert (labels[validation] == label).sum() == (0 if count == 1 else max(1, round(0.1 * count)))
        assert (labels[train] == label).sum() >= 1


def test_stores_refuse_what_does_not_fit():
    with pytest.raises(DataError, match="one label an image"):
        ImageStore(np.zeros((3, 1, 4, 4), np.uint8), np.zeros(2))
    with pytest.raises(DataError, match="uint8"):
        ImageStore(np.zeros((3, 4, 4), np.uint8), np.zeros(3))


def loader(store, **changes):
    arguments = {
        "global_batch_size": 8, "seed": 3, "with_labels": False, "accumulate_grad_batches": 1, "num_workers": 0,
        "crop": None, "position": lambda: (0, 0),
    }  # fmt: skip
    return GlobalBatchLoader(store, **{**arguments, **changes})


@pytest.fixture
def store():
    return ImageStore(np.arange(33, dtype=np.uint8).repeat(4).reshape(33, 1, 2, 2), np.arange(33) % 3)


def test_an_epoch_visits_each_image_once_and_drops_the_incomplete_batch(store):
    index = torch.cat([batch.index for batch in loader(store)])
    assert len(index) == len(set(index.tolist())) == 32
    assert len(loader(store)) == 4


def test_order_depends_on_seed_and_epoch_alone(store):
    def order(**changes):
        return torch.cat([batch.index for batch in loader(store, **changes)]).tolist()

    assert order() == order()
    assert order(seed=4) != order()
    assert order(position=lambda: (1, 0)) != order()


def test_images_belong_to_their_indices(store):
    for batch in loader(store, with_labels=True):
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        assert batch.labels.tolist() == (batch.index % 3).tolist()
    assert next(iter(loader(store))).labels is None


def test_a_start_in_mid_epoch_continues_the_order(store):
    whole = [batch.index.tolist() for batch in loader(store)]
    assert [batch.index.tolist() for batch in loader(store, position=lambda: (0, 3))] == whole[3:]


def test_accumulation_divides_the_same_global_batches(store):
    whole = [batch.index for batch in loader(store)]
    halves = [batch.index for batch in loader(store, accumulate_grad_batches=2)]
    for i, batch in enumerate(whole):
        assert torch.cat(halves[2 * i : 2 * i + 2]).tolist() == batch.tolist()


def test_batches_that_do_not_divide_or_exceed_the_data_are_refused(store):
    with pytest.raises(ConfigError, match="multiple of world size x accumulation"):
        loader(store, accumulate_grad_batches=3)
    with pytest.raises(DataError, match="at least one global batch"):
        loader(store, global_batch_size=64)


def test_cifar_files_become_stores(tmp_path, monkeypatch):
    """CIFAR-10 in torchvision's own file layout; checksums are torchvision's business."""
    folder = tmp_path / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    raw = {}
    for name in names:
        raw[name] = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        content = {"data": raw[name], "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a: True)
    dataset = load_dataset("cifar10", root=tmp_path)
    assert [len(dataset.split(name)) for name in ("train", "validation", "test")] == [90, 10, 20]
    assert np.array_equal(dataset.split("test").images.reshape(20, -1), raw["test_batch"])
    assert load_dataset("cifar10", root=tmp_path).fingerprint == dataset.fingerprint


def test_missing_network_says_what_to_do(tmp_path, monkeypatch):
    def unreachable(self):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR100.download", unreachable)
    with pytest.raises(DataError, match=r"must be on disk or downloadable.*no network.*Download it"):
        load_dataset("cifar100", root=tmp_path).split("train")
