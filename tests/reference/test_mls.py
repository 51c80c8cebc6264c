"""MLS against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.methods.mls import multi_label_loss, nearest_labels
from tests.reference.tiny import EXACT, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"projector_widths": (8, 4), "queue_size": 16, "num_neighbors": 3, "target_momentum": 0.9}
G_1 = torch.tensor([[1, 0]], dtype=torch.float64)
Z_1 = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
Z_2 = torch.tensor([[0.8, 0.6]], dtype=torch.float64)
Q_G = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [-1, 0]], dtype=torch.float64)
Q_Z = torch.tensor([[1, 0], [0, 1], [0.8, -0.6], [-0.6, -0.8]], dtype=torch.float64)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(row):
    norm = math.sqrt(dot(row, row))
    return [x / norm for x in row]


def oracle_labels(embedding, queue, k):
    labels = []
    for g in embedding.tolist():
        similarity = [dot(g, row) for row in queue.tolist()]
        nearest = sorted(range(len(similarity)), key=lambda j: -similarity[j])[:k]
        labels.append([float(j in nearest) for j in range(len(similarity))])
    return labels


def oracle_multi_label(z, queue, labels, t):
    values = []
    for row, y in zip(z.tolist(), labels, strict=True):
        total = 0.0
        for q, y_j in zip(queue.tolist(), y, strict=True):
            sigma = 1 / (1 + math.exp(-dot(unit(row), q) / t))
            total -= math.log(sigma) if y_j else math.log(1 - sigma)
        values.append(total / len(queue))
    return sum(values) / len(values)


def oracle_nce(z_1, z_2, queue, t):
    values = []
    for a, b in zip(z_1.tolist(), z_2.tolist(), strict=True):
        logits = [dot(unit(a), unit(b)) / t] + [dot(unit(a), q) / t for q in queue.tolist()]
        values.append(math.log(sum(math.exp(x) for x in logits)) - logits[0])
    return sum(values) / len(values)


class Apply(nn.Module):
    """A function in the place of a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def bare(embedding_width, projection_width, **arguments):
    """The method whose views are its embeddings, and whose projections are the last columns of those."""
    method = tiny_method("mls", **{**SMALL, **arguments})
    method.backbone = method.target_backbone = nn.Identity()
    method.projector = method.target_projector = Apply(lambda x: x[:, embedding_width:])
    size = len(method.embeddings.rows)
    method.embeddings.rows = randn(size, embedding_width + projection_width, seed=5).detach()
    method.projections.rows = nn.functional.normalize(randn(size, projection_width, seed=6).detach())
    return method


def test_hand_computed_values():
    labels = nearest_labels(G_1, Q_G, num_neighbors=2)
    assert labels.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    value = multi_label_loss(Z_1, Q_Z, labels, temperature=0.2)
    assert value.item() == pytest.approx(0.1916499521, abs=1e-9)
    method = tiny_method("mls", **{**SMALL, "queue_size": 4, "num_neighbors": 2})
    method.backbone, method.target_backbone = nn.Identity(), nn.Identity()
    method.projector, method.target_projector = Apply(lambda g: Z_1), Apply(lambda g: Z_2)
    method.embeddings.rows, method.projections.rows = Q_G, Q_Z
    output = method.loss((G_1, G_1), empty_batch(1))
    assert output.terms["info_nce"].item() == pytest.approx(0.4842227141, abs=1e-9)
    assert output.terms["multi_label"].item() == pytest.approx(0.1916499521, abs=1e-9)
    assert output.total.item() == pytest.approx(0.5800476901, abs=1e-9)


@pytest.mark.parametrize("k", [1, 3, 16])
def test_loss_equals_the_loop_oracle(k):
    method = bare(3, 4, num_neighbors=k, multi_label_weight=0.7)
    v_1, v_2 = randn(5, 7), randn(5, 7, seed=1)
    queue = method.projections.rows
    labels = oracle_labels(v_1, method.embeddings.rows, k)
    expected = oracle_nce(v_1[:, 3:], v_2[:, 3:], queue, 0.2)
    expected += 0.7 * oracle_multi_label(v_1[:, 3:], queue, labels, 0.2)
    torch.testing.assert_close(method.loss((v_1, v_2), empty_batch(5)).total.item(), expected, **EXACT)


def test_orthogonal_projections_give_ln_2_for_any_labels():
    queue = torch.tensor([[0, 1], [0, -1], [0, 1]], dtype=torch.float64)
    for labels in ([0, 0, 0], [1, 0, 1], [1, 1, 1]):
        value = multi_label_loss(G_1, queue, torch.tensor([labels], dtype=torch.float64), temperature=0.2)
        assert value.item() == pytest.approx(math.log(2), abs=1e-12)


def test_joint_permutation_of_both_queues_leaves_the_loss():
    method = bare(3, 4)
    views = (randn(5, 7), randn(5, 7, seed=1))
    base = method.loss(views, empty_batch(5)).total
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    method.embeddings.rows = method.embeddings.rows[order]
    method.projections.rows = method.projections.rows[order]
    torch.testing.assert_close(method.loss(views, empty_batch(5)).total, base, **EXACT)


def test_labels_have_k_ones_ignore_the_norm_and_pass_no_gradient():
    g, queue = randn(6, 5), randn(20, 5, seed=1)
    labels = nearest_labels(g, queue, num_neighbors=4)
    assert labels.sum(1).tolist() == [4.0] * 6
    assert not labels.requires_grad
    scale = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    assert torch.equal(nearest_labels(g * scale, queue, num_neighbors=4), labels)


def test_method_uses_the_old_queues_and_the_target():
    method, batch = tiny_method("mls", **SMALL), tiny_batch(6)
    rows_g, rows_z = method.embeddings.rows.clone(), method.projections.rows.clone()
    total = method.loss(batch.views, batch).total
    g_1, g_2 = method.backbone(batch.views[0]), method.target_backbone(batch.views[1])
    z_1, z_2 = method.projector(g_1), method.target_projector(g_2)
    expected = oracle_nce(z_1, z_2, rows_z, 0.2)
    expected += 0.5 * oracle_multi_label(z_1, rows_z, oracle_labels(g_1, rows_g, 3), 0.2)
    torch.testing.assert_close(total.item(), expected, **EXACT)
    assert torch.equal(method.embeddings.rows, rows_g)
    assert torch.equal(method.projections.rows, rows_z)
    total.backward()
    assert all(p.grad is None for p in method.target_backbone.parameters())
    assert all(p.grad is None for p in method.target_projector.parameters())
    assert all(p.grad.abs().max() > 0 for p in method.backbone.parameters())


def test_both_queues_take_the_same_images_in_order_and_wrap():
    method = tiny_method("mls", **SMALL)
    for step in range(3):
        batch = tiny_batch(6, seed=step + 1)
        method.loss(batch.views, batch)
        with torch.no_grad():
            g = method.target_backbone(batch.views[1])
            z = method.target_projector(g)
        method.after_optimizer_step(step + 1, 10)
        places = [(6 * step + i) % 16 for i in range(6)]
        for queue, rows in ((method.embeddings, g), (method.projections, z)):
            wanted = torch.tensor([unit(row) for row in rows.tolist()], dtype=torch.float64)
            torch.testing.assert_close(queue.rows[places], wanted, **EXACT)
    assert method.embeddings.num_enqueued.item() == method.projections.num_enqueued.item() == 18


def test_target_follows_both_parts():
    method = tiny_method("mls", **SMALL)
    pairs = ((method.backbone, method.target_backbone), (method.projector, method.target_projector))
    with torch.no_grad():
        for online, target in pairs:
            for p, q in zip(online.parameters(), target.parameters(), strict=True):
                p.fill_(1.0)
                q.zero_()
    method.after_optimizer_step(1, 10)
    for _, target in pairs:
        assert all(torch.allclose(p, torch.full_like(p, 0.1)) for p in target.parameters())


def test_queues_are_in_the_state():
    keys = {f"{queue}.{part}" for queue in ("embeddings", "projections") for part in ("rows", "num_enqueued")}
    assert keys <= set(tiny_method("mls", **SMALL).state_dict())


@pytest.mark.parametrize("k", [0, 17])
def test_impossible_numbers_of_neighbors_are_refused(k):
    with pytest.raises(ConfigError, match="between 1 and its queue_size 16"):
        tiny_method("mls", **{**SMALL, "num_neighbors": k})
