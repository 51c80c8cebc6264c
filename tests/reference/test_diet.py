"""DIET against its equations in plain loops, and the card's values."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ssl_bench.data import GlobalBatchLoader, load_dataset
from ssl_bench.errors import ConfigError
from ssl_bench.methods.diet import index_cross_entropy
from tests.reference.tiny import EXACT, empty_batch, randn, tiny_batch, tiny_method

LOGITS = torch.tensor([[2, 0, -1, 0.5], [0, 1, 0, -2]], dtype=torch.float64)


def targets_of(index, num, smoothing):
    return [(1 - smoothing) * (c == index) + smoothing / num for c in range(num)]


def oracle(logits, index, smoothing):
    total = 0.0
    for row, n in zip(logits.tolist(), index, strict=True):
        log_sum = math.log(sum(math.exp(x) for x in row))
        total -= sum(t * (x - log_sum) for t, x in zip(targets_of(n, len(row), smoothing), row, strict=True))
    return total / len(logits)


def with_index(batch, index):
    return dataclasses.replace(batch, index=torch.tensor(index))


def linear_method(width, num_samples, **arguments):
    """The method on features: its views are its embeddings."""
    method = tiny_method("diet", num_views=1, **arguments)
    method.backbone = nn.Identity()
    method.classifier = nn.Linear(width, num_samples, bias=False).double()
    return method


@pytest.mark.parametrize(("smoothing", "value"), [(0.8, 1.6110369028), (0.0, 0.4610369028)])
def test_hand_computed_values(smoothing, value):
    got = index_cross_entropy(LOGITS, torch.tensor([0, 1]), label_smoothing=smoothing)
    assert got.mean().item() == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.8])
def test_zero_logits_give_the_log_of_the_classes(smoothing):
    zero = torch.zeros(1, 4, dtype=torch.float64)
    got = index_cross_entropy(zero, torch.tensor([2]), label_smoothing=smoothing)
    assert got.item() == pytest.approx(math.log(4), abs=1e-12)


@pytest.mark.parametrize(
    ("num", "margin", "value"), [(4, 0.6931471806, 1.3321790402), (50_000, 9.4335639201, 9.1560581147)]
)
def test_minimum_is_the_entropy_of_the_smoothed_target(num, margin, value):
    def at(x):
        logits = torch.zeros(1, num, dtype=torch.float64)
        logits[0, 1] = x
        return index_cross_entropy(logits, torch.tensor([1]), label_smoothing=0.8).item()

    assert at(margin) == pytest.approx(value, abs=1e-9)
    assert at(margin) < min(at(margin - 0.01), at(margin + 0.01))


@pytest.mark.parametrize(("num", "num_samples", "smoothing"), [(1, 2, 0.8), (6, 9, 0.8), (6, 9, 0.0)])
def test_loss_equals_the_loop_oracle(num, num_samples, smoothing):
    method = linear_method(5, num_samples, label_smoothing=smoothing)
    features = randn(num, 5)
    index = [(7 * i + 1) % num_samples for i in range(num)]
    total = method.loss((features,), with_index(empty_batch(num), index)).total.item()
    logits = torch.tensor(
        [
            [sum(w * f for w, f in zip(row, x, strict=True)) for row in method.classifier.weight.tolist()]
            for x in features.tolist()
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(total, oracle(logits, index, smoothing), **EXACT)


def test_gradient_at_zero_logits_raises_only_the_own_row():
    method = linear_method(3, 5)
    nn.init.zeros_(method.classifier.weight)
    feature = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    method.loss((feature,), with_index(empty_batch(1), [3])).total.backward()
    target = torch.tensor(targets_of(3, 5, 0.8), dtype=torch.float64)
    torch.testing.assert_close(method.classifier.weight.grad, (0.2 - target)[:, None] * feature, **EXACT)
    along = method.classifier.weight.grad @ feature[0]
    assert [row for row in range(5) if along[row] < 0] == [3]


def test_relabeling_images_and_rows_together_leaves_the_loss():
    method, features, index = linear_method(5, 8), randn(6, 5), [4, 0, 7, 2, 3, 1]
    base = method.loss((features,), with_index(empty_batch(6), index)).total.item()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))  # the new index of each image
    with torch.no_grad():
        method.classifier.weight[order] = method.classifier.weight.clone()
    relabeled = with_index(empty_batch(6), order[index].tolist())
    torch.testing.assert_close(method.loss((features,), relabeled).total.item(), base, **EXACT)


def test_method_classifies_the_embedding_and_the_harness_fills_in_the_classes():
    method = tiny_method("diet", num_views=1)
    assert method.classifier.weight.shape == (32, method.backbone.embed_dim)
    assert method.classifier.bias is None
    batch = with_index(tiny_batch(6, num_views=1), [31, 0, 5, 9, 30, 2])
    logits = method.classifier(method.backbone(batch.views[0]))
    total = method.loss(batch.views, batch).total
    torch.testing.assert_close(total.item(), oracle(logits, batch.index.tolist(), 0.8), **EXACT)
    total.backward()
    assert all(p.grad.abs().max() > 0 for p in method.parameters())


def test_index_names_the_same_image_in_every_epoch_and_covers_the_split():
    store = load_dataset("fashion_mnist_mini").split("train")
    for epoch in (0, 1):
        loader = GlobalBatchLoader(
            store,
            lambda epoch=epoch: (epoch, 0),
            global_batch_size=500,
            seed=0,
            with_labels=False,
            accumulate_grad_batches=1,
            num_workers=0,
            crop=None,
        )
        batches = list(loader)
        assert all(torch.equal(batch.images, store.take(batch.index)) for batch in batches)
        index = torch.cat([batch.index for batch in batches])
        assert index.tolist() != sorted(index.tolist())
        assert sorted(index.tolist()) == list(range(len(store)))


def test_a_split_of_another_size_does_not_load():
    state = tiny_method("diet", num_views=1).state_dict()
    state["classifier.weight"] = state["classifier.weight"][:-1]
    with pytest.raises(RuntimeError, match="size mismatch"):
        tiny_method("diet", num_views=1).load_state_dict(state)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_impossible_smoothing_is_refused(smoothing):
    with pytest.raises(ConfigError, match=r"lie in \[0, 1\)"):
        tiny_method("diet", num_views=1, label_smoothing=smoothing)
