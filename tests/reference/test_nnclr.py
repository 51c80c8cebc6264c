"""NNCLR against the paper's equation in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"hidden_dim": 8, "projection_dim": 4, "predictor_hidden_dim": 8, "queue_size": 16}


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def nearest(z, queue):
    picks = []
    for z_i in z.tolist():
        similarities = [sum(a * b for a, b in zip(z_i, q, strict=True)) for q in queue.tolist()]
        picks.append(similarities.index(max(similarities)))
    return picks


def oracle(neighbors, predictions, t):
    total = 0.0
    for i, n_i in enumerate(neighbors.tolist()):
        logits = [sum(a * b for a, b in zip(n_i, p, strict=True)) / t for p in predictions.tolist()]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[i]
    return total / len(neighbors)


class Table(nn.Module):
    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, z):
        (answer,) = (p for known, p in self.answers if known is z)
        return answer


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("temperature", "value"), [(0.1, 0.0162292485), (0.2, 0.1123111512)])
def test_hand_computed_value(temperature, value):
    z, p = tensor([[1, 0], [0, 1]]), tensor([[0.6, 0.8], [0, 1]])
    method = bare_method("nnclr", temperature=temperature, **{**SMALL, "projection_dim": 2, "queue_size": 3})
    method.queue.rows.copy_(tensor([[0.8, 0.6], [-0.6, 0.8], [-1, 0]]))
    assert nearest(z, method.queue.rows) == [0, 1]
    other = z.clone()
    method.predictor = Table([(z, p), (other, p)])
    assert method.loss((z, other), empty_batch(2)).total.item() == pytest.approx(value, abs=1e-7)


def test_collapse_is_the_log_of_the_batch():
    z = tensor([[1.0, 0.0]] * 4)
    method = bare_method("nnclr", heads=("projector", "predictor"), **{**SMALL, "projection_dim": 2})
    method.queue.rows.copy_(z[:1].expand(16, 2))
    assert method.loss((z, z.clone()), empty_batch(4)).total.item() == pytest.approx(math.log(4), abs=1e-12)


@pytest.mark.parametrize("num", [2, 7])
def test_method_equals_the_loop_oracle(num):
    method, batch = tiny_method("nnclr", **SMALL), tiny_batch(num)
    queue = method.queue.rows.clone()
    total = method.loss(batch.views, batch).total
    z = [method.projector(method.backbone(view)) for view in batch.views]
    p = [unit(method.predictor(projection)) for projection in z]
    neighbors = [queue[nearest(unit(projection), queue)] for projection in z]
    expected = oracle(neighbors[0], p[1], 0.2) / 2 + oracle(neighbors[1], p[0], 0.2) / 2
    torch.testing.assert_close(total.item(), expected, **EXACT)
    assert torch.equal(method.queue.rows, queue)
    method.after_optimizer_step(1, 10)
    torch.testing.assert_close(method.queue.rows[:num], unit(z[0]), **EXACT)
    assert torch.equal(method.queue.rows[num:], queue[num:])


def test_gradient_flows_through_the_predictions_only():
    method = bare_method("nnclr", heads=("projector",), **SMALL)
    z_1, z_2 = randn(5, 4), randn(5, 4, seed=1)
    p_1, p_2 = randn(5, 4, seed=2), randn(5, 4, seed=3)
    method.predictor = Table([(z_1, p_1), (z_2, p_2)])
    method.loss((z_1, z_2), empty_batch(5)).total.backward()
    assert z_1.grad is None
    assert z_2.grad is None
    assert p_1.grad.abs().max() > 1e-4


def test_invariant_to_the_predictions_length():
    method = bare_method("nnclr", heads=("projector",), **SMALL)
    z_1, z_2, p_1, p_2 = (randn(5, 4, seed=seed).detach() for seed in range(4))
    values = []
    for scale in (1.0, 7.0):
        method.predictor = Table([(z_1, p_1 * scale), (z_2, p_2 / scale)])
        values.append(method.loss((z_1, z_2), empty_batch(5)).total)
    torch.testing.assert_close(values[0], values[1], **EXACT)
