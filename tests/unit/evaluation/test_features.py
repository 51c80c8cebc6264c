import pytest
import torch
from torch import nn

from ssl_bench.errors import DataError
from ssl_bench.evaluation import EvaluationContext, cached_features, extract_features
from ssl_bench.evaluation import features as module
from tests.unit.evaluation.fakes import FakeDataset, TinyNet, feature_set, tiny_net


def expected_features(net, dataset, split):
    store = dataset.stores[split]
    images = (torch.from_numpy(store.images).float() / 255 - 0.5) / 0.25
    net = net.eval()
    with torch.no_grad():
        return torch.cat([net(image[None]) for image in images])


@pytest.mark.parametrize("batch_size", [32, 1, 1000])  # 33 images: the last batch of 32 holds one
def test_every_sample_once_in_index_order(batch_size):
    dataset, net = FakeDataset(), tiny_net()
    found = extract_features(net, dataset, "train", batch_size=batch_size)
    assert found.features.shape == (33, 16)
    assert found.features.dtype == torch.float32
    assert found.index.tolist() == list(range(33))
    assert found.labels.tolist() == dataset.stores["train"].labels.tolist()
    # a convolution over another batch size may sum in another order: a few float32 roundings
    torch.testing.assert_close(found.features, expected_features(net, dataset, "train"), rtol=1e-5, atol=1e-6)


def test_backbone_is_untouched():
    net = tiny_net().train()
    net.net[3].eval()  # a mode that differs from its parent's must come back, too
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [child.training for child in net.modules()]
    extract_features(net, FakeDataset(), "train")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [child.training for child in net.modules()] == modes
    assert net.net[0].weight.grad is None


def test_modes_come_back_after_an_error():
    class Broken(TinyNet):
        def forward(self, images):
            raise RuntimeError("broken")

    net = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        extract_features(net, FakeDataset(), "train")
    assert all(child.training for child in net.modules())


def test_float32_under_autocast():
    net, dataset = tiny_net(), FakeDataset()
    plain = extract_features(net, dataset, "test")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(extract_features(net, dataset, "test").features, plain.features)


def test_output_that_is_not_one_vector_an_image_is_named():
    net = TinyNet()
    net.net[5] = nn.Identity()
    with pytest.raises(DataError, match=r"must give \(14, 16\) for 14 images, got \(14, 4, 2, 2\)"):
        extract_features(net, FakeDataset(), "test")


def test_nan_features_are_an_error_with_their_place():
    x = torch.zeros(5, 2)
    x[3, 1] = torch.nan
    with pytest.raises(DataError, match="1 of 5 samples, first at index 3"):
        feature_set(x, [0] * 5)


@pytest.fixture
def counted(monkeypatch):
    calls = []
    original = module.extract_features
    monkeypatch.setattr(module, "extract_features", lambda *a, **k: calls.append(a[2]) or original(*a, **k))
    return calls


def test_cache_is_hit_for_the_same_content(tmp_path, counted):
    first = cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path)
    again = cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path)
    assert counted == ["test"]
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.labels, again.labels)
    assert again.note == ""


def test_cache_is_missed_for_other_content(tmp_path, counted):
    cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path)
    cached_features(tiny_net(seed=1), FakeDataset(), "test", folder=tmp_path)
    cached_features(tiny_net(), FakeDataset(seed=1), "test", folder=tmp_path)
    cached_features(tiny_net(), FakeDataset(), "validation", folder=tmp_path)
    other_buffers = tiny_net()
    other_buffers.net[1].running_mean += 1
    cached_features(other_buffers, FakeDataset(), "test", folder=tmp_path)
    assert len(counted) == 5
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_cache_is_extracted_again_and_noted(tmp_path, counted, damage):
    first = cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 1  # still a valid safetensors file
    path.write_bytes({"flip": data, "cut": data[: len(data) // 2], "empty": b""}[damage])
    again = cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path)
    assert torch.equal(first.features, again.features)
    assert "damaged" in again.note
    assert counted == ["test"] * 2
    assert cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path).note == ""


def test_context_gives_fresh_copies_and_extracts_once(tmp_path, counted):
    net = tiny_net()
    context = EvaluationContext(net, FakeDataset(), work_dir=tmp_path)
    assert context.features("test") is context.features("test")
    copy = context.backbone()
    with torch.no_grad():
        copy.net[0].weight.zero_()
    assert context.backbone().net[0].weight.any()
    assert net.net[0].weight.any()
    assert counted == ["test"]


class LargeStore:
    """Images of different sizes, decoded one at a time."""

    is_large = True

    def __init__(self, num=7):
        self.labels = torch.arange(num).numpy() % 3
        self.images = [
            torch.randint(0, 256, (1, 10 + i, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
            for i in range(num)
        ]

    def __len__(self):
        return len(self.labels)

    def decode(self, index):
        return self.images[index]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_large_images_are_decoded_once_each_in_order(num_workers):
    dataset, net = FakeDataset(), tiny_net()
    store = dataset.stores["test"] = LargeStore()
    found = extract_features(net, dataset, "test", batch_size=3, num_workers=num_workers)
    alone = []
    for place in range(7):
        dataset.stores["test"] = LargeStore()
        dataset.stores["test"].images = [store.images[place]]
        dataset.stores["test"].labels = store.labels[place : place + 1]
        alone.append(extract_features(net, dataset, "test").features)
    torch.testing.assert_close(found.features, torch.cat(alone), rtol=1e-5, atol=1e-6)
    assert found.labels.tolist() == store.labels.tolist()
    assert len(found.features.unique(dim=0)) == 7
