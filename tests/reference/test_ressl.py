"""ReSSL against the paper's equation in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.losses.relational import relational_cross_entropy
from tests.reference.tiny import EXACT, randn, tiny_batch, tiny_method

SMALL = {"projector_widths": (8, 4), "queue_size": 16}
TEMPERATURES = {"query_temperature": 0.1, "key_temperature": 0.04}


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def softmax(row, t):
    top = max(row)
    powers = [math.exp((x - top) / t) for x in row]
    return [p / sum(powers) for p in powers]


def oracle(q, k, queue, t_q, t_k):
    total = 0.0
    for q_i, k_i in zip(q.tolist(), k.tolist(), strict=True):
        target = softmax([sum(a * b for a, b in zip(k_i, m, strict=True)) for m in queue.tolist()], t_k)
        student = softmax([sum(a * b for a, b in zip(q_i, m, strict=True)) for m in queue.tolist()], t_q)
        total -= sum(p * math.log(s) for p, s in zip(target, student, strict=True) if p)
    return total / len(q)


@pytest.mark.parametrize(("num", "size"), [(1, 3), (6, 11)])
def test_loss_equals_the_loop_oracle(num, size):
    q, k, queue = unit(randn(num, 4)), unit(randn(num, 4, seed=1)), unit(randn(size, 4, seed=2))
    got = relational_cross_entropy(q, k, queue, **TEMPERATURES).mean()
    torch.testing.assert_close(got.item(), oracle(q, k, queue, 0.1, 0.04), **EXACT)


def test_hand_computed_values():
    q, k = torch.tensor([[1, 0], [0.6, 0.8]]).double(), torch.tensor([[0.8, 0.6], [0, 1]]).double()
    queue = torch.tensor([[1, 0], [0, 1], [-1, 0]]).double()
    assert relational_cross_entropy(q, k, queue, **TEMPERATURES).mean().item() == pytest.approx(0.0969513269, abs=1e-7)
    assert relational_cross_entropy(k, k, queue, **TEMPERATURES).mean().item() == pytest.approx(0.0702023040, abs=1e-7)


def test_collapse_is_the_log_of_the_queue():
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    got = relational_cross_entropy(one, one, one.expand(50, 2), **TEMPERATURES)
    assert got.item() == pytest.approx(math.log(50), abs=1e-10)


def test_invariant_to_joint_rotation():
    q, k, queue = unit(randn(4, 3)), unit(randn(4, 3, seed=1)), unit(randn(8, 3, seed=2))
    rotation = torch.linalg.qr(randn(3, 3, seed=3).detach()).Q
    rotated = relational_cross_entropy(q @ rotation, k @ rotation, queue @ rotation, **TEMPERATURES)
    torch.testing.assert_close(rotated, relational_cross_entropy(q, k, queue, **TEMPERATURES), **EXACT)


def test_method_takes_the_strong_view_as_query_and_the_old_queue():
    method, batch = tiny_method("ressl", **SMALL), tiny_batch(6)
    queue = method.queue.rows.clone()
    total = method.loss(batch.views, batch).total
    q = unit(method.projector(method.backbone(batch.views[0])))
    k = unit(method.target(batch.views[1]))
    torch.testing.assert_close(total.item(), oracle(q, k, queue, 0.1, 0.04), **EXACT)
    total.backward()
    assert all(p.grad is None for p in method.target.parameters())
    method.after_optimizer_step(1, 10)
    torch.testing.assert_close(method.queue.rows[:6], k, **EXACT)
