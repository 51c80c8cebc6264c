"""Supervised cross entropy against plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.errors import DataError
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, -1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def oracle(logits, labels, smoothing=0.0):
    """Mean over labelled rows of -sum_k q_k log softmax(s)_k."""
    values = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if label < 0:
            continue
        log_sum = math.log(sum(math.exp(x) for x in row))
        num = len(row)
        q = [(1 - smoothing) * (k == label) + smoothing / num for k in range(num)]
        values.append(-sum(q_k * (x - log_sum) for q_k, x in zip(q, row, strict=True)))
    return sum(values) / len(values)


def output_of(logits, labels, smoothing=0.0):
    method = bare_method("supervised", heads=("head",), num_classes=logits.shape[1], label_smoothing=smoothing)
    return method.loss((logits,), empty_batch(len(logits), labels=labels))


def loss_of(logits, labels, smoothing=0.0):
    return output_of(logits, labels, smoothing).total


@pytest.mark.parametrize(("num", "classes"), [(1, 2), (5, 3), (16, 10)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_the_loop_oracle(num, classes, smoothing):
    logits = 3 * randn(num, classes)
    labels = torch.arange(num) % classes
    labels[1::3] = -1
    got = loss_of(logits, labels, smoothing).item()
    torch.testing.assert_close(got, oracle(logits, labels, smoothing), **EXACT)


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 2.2367449341), (0.1, 2.2034116008)])
def test_hand_computed_values(smoothing, expected):
    assert loss_of(LOGITS, LABELS, smoothing).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_zero_logits_cost_log_of_the_classes(smoothing):
    logits = torch.zeros(4, 10, dtype=torch.float64)
    assert loss_of(logits, torch.arange(4), smoothing).item() == pytest.approx(2.3025850930, abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_is_probability_minus_target_over_the_labelled(smoothing):
    logits = randn(4, 3)
    labels = torch.tensor([0, -1, 2, 1])
    loss_of(logits, labels, smoothing).backward()
    target = torch.nn.functional.one_hot(labels.clamp(min=0), 3).double() * (1 - smoothing) + smoothing / 3
    expected = (logits.detach().softmax(1) - target) / 3
    expected[1] = 0
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits.grad.sum(1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)


def test_invariances():
    logits, labels = randn(5, 4).detach(), torch.tensor([0, 3, 1, 2, 1])
    reference = loss_of(logits, labels)
    order = torch.tensor([2, 0, 3, 1])
    for changed in (
        (logits + torch.arange(5.0)[:, None], labels),
        (logits[:, order], order.argsort()[labels]),
        (logits.repeat(2, 1), labels.repeat(2)),
        (torch.cat([logits, randn(3, 4, seed=1).detach()]), torch.cat([labels, torch.tensor([-1, -1, -1])])),
    ):
        torch.testing.assert_close(loss_of(*changed), reference, **EXACT)


def test_accuracy_counts_labelled_images_only():
    output = output_of(LOGITS.repeat(2, 1), torch.tensor([0, 2, -1, 1]))
    assert output.terms["accuracy"].item() == pytest.approx(2 / 3)


def test_a_batch_without_labels_is_refused():
    with pytest.raises(DataError, match="needs labels"):
        loss_of(LOGITS, torch.tensor([-1, -1]))


def test_method_classifies_the_embedding_of_its_one_view():
    labels = torch.tensor([0, 1, 2, 0])
    method, batch = tiny_method("supervised"), tiny_batch(4, num_views=1, labels=labels)
    total = method.loss(batch.views, batch).total
    embedding = tiny_method("supervised").backbone(batch.views[0])
    logits = embedding @ method.head.weight.T + method.head.bias
    torch.testing.assert_close(total.item(), oracle(logits, labels), **EXACT)
    assert method.uses_labels
    assert type(method).recipes["small"].views == "supervised"
