"""MoCo v2 against the paper's equation in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.losses.contrastive import info_nce_with_queue
from tests.reference.tiny import EXACT, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"projector_widths": (8, 4), "queue_size": 16, "temperature": 0.2, "target_momentum": 0.9}


def oracle(q, k, queue, t):
    total = 0.0
    for q_i, k_i in zip(q.tolist(), k.tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(q_i, c, strict=True)) / t for c in [k_i, *queue.tolist()]]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[0]
    return total / len(q)


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("num", "width", "size"), [(1, 2, 3), (5, 4, 9)])
def test_loss_equals_the_loop_oracle(num, width, size):
    q, k, queue = (unit(randn(n, width, seed=n)) for n in (num, num + 20, size + 40))
    k = k[:num]
    got = info_nce_with_queue(q, k, queue, temperature=0.2).mean()
    torch.testing.assert_close(got.item(), oracle(q, k, queue, 0.2), **EXACT)


def test_hand_computed_value():
    q, k = torch.tensor([[1, 0], [0.6, 0.8]]).double(), torch.tensor([[0.8, 0.6], [0, 1]]).double()
    queue = torch.tensor([[1, 0], [0, 1], [-1, 0]]).double()
    assert info_nce_with_queue(q, k, queue, temperature=0.2).mean().item() == pytest.approx(1.0902941454, abs=1e-7)


@pytest.mark.parametrize(("size", "value"), [(4096, 8.3180102775), (65536, 11.0903701476)])
def test_collapse_is_the_log_of_the_candidates(size, value):
    one = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    got = info_nce_with_queue(one, one, one.expand(size, 2), temperature=0.2)
    assert got.item() == pytest.approx(value, abs=1e-9)


def test_invariant_to_rotation_and_to_the_queues_order():
    q, k, queue = unit(randn(4, 3)), unit(randn(4, 3, seed=1)), unit(randn(8, 3, seed=2))
    rotation = torch.linalg.qr(randn(3, 3, seed=3).detach()).Q
    base = info_nce_with_queue(q, k, queue, temperature=0.1)
    torch.testing.assert_close(
        info_nce_with_queue(q @ rotation, k @ rotation, queue @ rotation, temperature=0.1), base, **EXACT
    )
    torch.testing.assert_close(info_nce_with_queue(q, k, queue.flip(0), temperature=0.1), base, **EXACT)


@pytest.mark.parametrize("symmetric", [False, True])
def test_method_uses_the_old_queue_and_the_target(symmetric):
    method, batch = tiny_method("moco_v2", symmetric=symmetric, **SMALL), tiny_batch(6)
    queue = method.queue.rows.clone()
    total = method.loss(batch.views, batch).total
    q = [unit(method.projector(method.backbone(view))) for view in batch.views]
    k = [unit(method.target(view)) for view in batch.views]
    expected = oracle(q[0], k[1], queue, 0.2) + (oracle(q[1], k[0], queue, 0.2) if symmetric else 0.0)
    torch.testing.assert_close(total.item(), expected, **EXACT)
    assert torch.equal(method.queue.rows, queue), "keys are enqueued after the step only"
    method.after_optimizer_step(1, 10)
    newest = torch.cat([k[1], k[0]]) if symmetric else k[1]
    torch.testing.assert_close(method.queue.rows[: len(newest)], newest, **EXACT)


def test_no_gradient_reaches_the_target_or_the_queue_and_the_target_follows():
    method, batch = tiny_method("moco_v2", **SMALL), tiny_batch(6)
    method.loss(batch.views, batch).total.backward()
    assert all(p.grad is None for p in method.target.parameters())
    assert not method.queue.rows.requires_grad
    with torch.no_grad():
        for p in nn.Sequential(method.backbone, method.projector).parameters():
            p.fill_(1.0)
        for p in method.target.parameters():
            p.zero_()
    for wanted in (0.1, 0.19):
        method.after_optimizer_step(1, 10)
        assert all(torch.allclose(p, torch.full_like(p, wanted)) for p in method.target.parameters())


def test_queue_is_first_in_first_out_and_wraps():
    queue = tiny_method("moco_v2", **SMALL).queue
    first = queue.rows.clone()
    torch.testing.assert_close(first.norm(dim=1), torch.ones(16, dtype=torch.float64), rtol=0, atol=1e-6)
    for step in range(3):
        queue.enqueue(torch.full((6, 4), float(step), dtype=torch.float64))
    assert queue.rows[:, 0].tolist() == [2.0] * 2 + [0.0] * 4 + [1.0] * 6 + [2.0] * 4
    assert int(queue.num_enqueued) == 18


def test_a_batch_larger_than_the_queue_is_refused():
    method = tiny_method("moco_v2", **{**SMALL, "queue_size": 4})
    method.loss(tiny_batch(6).views, empty_batch(6))
    with pytest.raises(ConfigError, match="at least one global batch"):
        method.after_optimizer_step(1, 10)


def test_queue_is_in_the_state():
    assert {"queue.rows", "queue.num_enqueued"} <= set(tiny_method("moco_v2", **SMALL).state_dict())
