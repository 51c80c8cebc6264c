"""Small datasets, backbones and contexts for the tests of the evaluation room."""

import types

import numpy as np
import torch
from torch import nn

from ssl_bench.data.store import ImageStore
from ssl_bench.evaluation.features import FeatureSet
from ssl_bench.nn.backbone import Backbone


class FakeDataset:
    """Images whose brightness says the class, with a record of which splits were asked for."""

    name = "fake"
    channels, image_size, mean, std = 1, 8, (0.5,), (0.25,)
    family = "small"

    def __init__(self, sizes=(33, 12, 14), num_classes=3, seed=0, labels=None):
        self.num_classes = num_classes
        self.fingerprint = f"fake-{sizes}-{num_classes}-{seed}"
        self.asked = []
        rng = np.random.default_rng(seed)
        self.stores = {}
        for place, (split, size) in enumerate(zip(("train", "validation", "test"), sizes, strict=True)):
            y = np.arange(size) % num_classes if labels is None else np.asarray(labels[place])
            noise = rng.integers(0, 60, (size, 1, 8, 8))
            images = (y[:, None, None, None] * (180 // max(num_classes, 1)) + noise).astype(np.uint8)
            self.stores[split] = ImageStore(images, y)

    def split(self, name):
        self.asked.append(name)
        return self.stores[name]


class TinyNet(Backbone):
    """Convolution, batch norm, dropout: everything whose mode matters."""

    def __init__(self, width=4):
        super().__init__()
        self.embed_dim = width * 4
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )

    def forward(self, images):
        return self.net(images)


def tiny_net(seed=0, **arguments):
    torch.manual_seed(seed)
    net = TinyNet(**arguments)
    with torch.no_grad():
        net.net[1].running_mean.uniform_(-0.1, 0.1)
        net.net[1].running_var.uniform_(0.5, 2.0)
    return net


def feature_set(features, labels):
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return FeatureSet(torch.as_tensor(features, dtype=torch.float32), labels, torch.arange(len(labels)))


class StubContext:
    """Features given directly; `asked` records the order in which splits were read."""

    def __init__(self, work_dir, num_classes, *, train, validation, test, seed=0):
        self.sets = {"train": feature_set(*train), "validation": feature_set(*validation), "test": feature_set(*test)}
        self.dataset = types.SimpleNamespace(num_classes=num_classes)
        self.work_dir, self.seed, self.device, self.writes = work_dir, seed, torch.device("cpu"), True
        self.asked = []

    def features(self, split):
        self.asked.append(split)
        return self.sets[split]


def clusters(num, num_classes=3, dim=6, *, seed=0, spread=0.6, labels=None):
    """Features around one center a class; the centers do not depend on the seed."""
    centers = torch.randn(10, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(num) % num_classes if labels is None else torch.as_tensor(labels)
    noise = torch.randn(len(labels), dim, generator=torch.Generator().manual_seed(seed))
    return centers[labels] + spread * noise, labels


def splits(sizes=(60, 30, 30), **arguments):
    train, validation, test = (clusters(size, seed=i, **arguments) for i, size in enumerate(sizes))
    return {"train": train, "validation": validation, "test": test}
