import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF

from ssl_bench.data.store import ImageStore
from ssl_bench.errors import ConfigError, RegistryError
from ssl_bench.evaluation import EvaluationContext
from ssl_bench.evaluation.other_datasets import (
    MatchedDataset,
    ReformattedStore,
    RoundTripDataset,
    chosen_datasets,
    round_trip,
)
from tests.unit.evaluation.fakes import FakeDataset, tiny_net

EVERY = torch.arange(4)


class ColorDataset(FakeDataset):
    name = "color"
    channels, image_size, mean, std = 3, 12, (0.4,) * 3, (0.2,) * 3

    def __init__(self):
        super().__init__(seed=5)
        self.fingerprint = "color"
        rng = np.random.default_rng(0)
        for split, store in self.stores.items():
            images = rng.integers(0, 256, (len(store), 3, 12, 12)).astype(np.uint8)
            self.stores[split] = ImageStore(images, store.labels)


class LargeStore:
    is_large = True
    labels = np.zeros(4, dtype=np.int64)

    def decode(self, index):
        return torch.full((3, 5, 9), index, dtype=torch.uint8)


def test_names_and_mappings_are_read_as_in_a_study():
    plain, folder = chosen_datasets(
        ["svhn", {"name": "image_folder", "arguments": {"path": "some/flowers"}, "metric": "top1"}],
        protocol="transfer",
        options=("metric",),
    )
    assert (plain.name, plain.label, plain.arguments, plain.options) == ("svhn", "svhn", {}, {})
    assert (folder.name, folder.label) == ("image_folder", "flowers")
    assert folder.arguments == {"path": "some/flowers"}
    assert folder.options == {"metric": "top1"}


@pytest.mark.parametrize(
    ("datasets", "error", "match"),
    [
        ((), ConfigError, "at least one dataset, got none .protocol ood"),
        (("svnh",), RegistryError, "Did you mean 'svhn'"),
        (("svhn", {"name": "svhn"}), ConfigError, r"\['svhn'\] stand there twice"),
        (({"arguments": {}},), ConfigError, "must have a name"),
        (({"name": "svhn", "argument": {}},), ConfigError, "Did you mean 'arguments'"),
    ],
)
def test_wrong_choices_are_refused(datasets, error, match):
    with pytest.raises(error, match=match):
        chosen_datasets(datasets, protocol="ood")


def test_gray_is_repeated_and_color_becomes_torchvisions_gray():
    gray = FakeDataset().stores["test"]
    assert torch.equal(ReformattedStore(gray, 3).take(EVERY), gray.take(EVERY).expand(-1, 3, -1, -1))
    assert torch.equal(ReformattedStore(gray, 1).take(EVERY), gray.take(EVERY))
    color = ColorDataset().stores["test"]
    expected = TF.rgb_to_grayscale(color.take(EVERY))  # truncates, where ours rounds
    difference = ReformattedStore(color, 1).take(EVERY).int() - expected.int()
    assert set(difference.unique().tolist()) == {0, 1}
    back = ReformattedStore(ReformattedStore(gray, 3), 1).take(EVERY)
    assert torch.equal(back, gray.take(EVERY))


def test_size_is_changed_as_torchvision_does():
    color = ColorDataset().stores["test"]
    found = ReformattedStore(color, 3, (7, 5)).take(EVERY)
    expected = TF.resize(color.take(EVERY), [7, 5], TF.InterpolationMode.BICUBIC, antialias=True)
    assert found.dtype == torch.uint8
    assert int((found.int() - expected.int()).abs().max()) <= 1  # its bytes are interpolated in fixed point
    assert torch.equal(ReformattedStore(color, 3, (12, 12)).take(EVERY), color.take(EVERY))


def test_large_images_keep_their_size():
    store = ReformattedStore(LargeStore(), 1)
    assert store.is_large
    assert len(store) == 4
    assert store.decode(3).shape == (1, 5, 9)
    assert store.decode(3).unique().tolist() == [3]


def test_a_matched_dataset_is_seen_in_the_format_of_the_backbones_own(tmp_path):
    own, other = FakeDataset(), ColorDataset()
    matched = MatchedDataset(other, own)
    context = EvaluationContext(tiny_net(), own, work_dir=tmp_path)
    found = context.on(matched).features("test")
    gray = ReformattedStore(other.stores["test"], 1).take(torch.arange(14)).float()
    images = torch.nn.functional.interpolate(gray, size=(8, 8), mode="bicubic", antialias=True).clamp(0, 255)
    with torch.no_grad():
        expected = tiny_net().eval()((images / 255 - 0.5) / 0.25)  # the mean and deviation of the backbone's own
    torch.testing.assert_close(found.features, expected, rtol=1e-4, atol=1e-5)
    assert found.labels.tolist() == other.stores["test"].labels.tolist()
    assert matched.describe() == {
        "dataset": "color", "fingerprint": "color", "own_format": [3, 12], "seen_format": [1, 8],
    }  # fmt: skip


def test_fingerprints_tell_formats_apart():
    own, other = FakeDataset(), ColorDataset()
    names = {
        own.fingerprint,
        MatchedDataset(other, own).fingerprint,
        other.fingerprint,
        RoundTripDataset(own, 3, 12).fingerprint,
        RoundTripDataset(own, 1, 12).fingerprint,
    }
    assert len(names) == 5
    assert MatchedDataset(own, own).fingerprint == own.fingerprint


def test_a_round_trip_returns_to_the_format_and_loses_what_the_way_cannot_hold(tmp_path):
    own, other = FakeDataset(), ColorDataset()
    way = round_trip(other, own)  # through 1 channel and 8 px
    images = way.split("test").take(EVERY)
    assert images.shape == (4, 3, 8, 8)  # the evaluation view brings the size back
    assert torch.equal(images[:, 0], images[:, 2])
    context = EvaluationContext(tiny_net(), own, work_dir=tmp_path)
    there = context.on(round_trip(own, other)).features("test").features
    assert there.shape == context.features("test").features.shape
    assert not torch.equal(there, context.features("test").features)
    assert round_trip(own, FakeDataset(seed=1)) is None
    other.stores["test"] = LargeStore()
    assert round_trip(own, other) is None
