"""MoCo v3 against the paper's equation in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.optim import momentum_schedule
from tests.reference.tiny import EXACT, bare_method, empty_batch, tiny_batch, tiny_method

SMALL = {"hidden_dim": 8, "projection_dim": 4}


def contrast(q, k, t):
    """2 t times the mean cross entropy of each query's own key among all keys."""
    total = 0.0
    for i, q_i in enumerate(q.tolist()):
        logits = [sum(a * b for a, b in zip(q_i, k_j, strict=True)) / t for k_j in k.tolist()]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[i]
    return 2 * t * total / len(q)


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


class Fixed(nn.Module):
    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, view):
        (answer,) = (k for v, k in self.answers if v is view)
        return answer


def loss_of(q_1, q_2, k_1, k_2, temperature):
    method = bare_method("moco_v3", heads=("projector", "predictor"), temperature=temperature, **SMALL)
    method.target = Fixed([(q_1, k_1), (q_2, k_2)])
    return method.loss((q_1, q_2), empty_batch(len(q_1))).total.item()


Q_1, K_2 = torch.tensor([[1, 0], [0.6, 0.8]]).double(), torch.tensor([[1, 0], [-0.6, 0.8]]).double()
Q_2, K_1 = torch.tensor([[0, 1], [0.8, -0.6]]).double(), torch.tensor([[0.8, 0.6], [0, 1]]).double()


@pytest.mark.parametrize(("temperature", "value"), [(0.2, 1.6646733486), (1.0, 3.1897850305)])
def test_hand_computed_values(temperature, value):
    assert loss_of(Q_1, Q_2, K_1, K_2, temperature) == pytest.approx(value, abs=1e-7)


def test_hand_computed_directions():
    assert contrast(Q_1, K_2, 0.2) == pytest.approx(0.3568472295, abs=1e-7)
    assert contrast(Q_2, K_1, 0.2) == pytest.approx(1.3078261191, abs=1e-7)


def test_collapse_is_four_t_log_n():
    same = torch.ones(8, 3, dtype=torch.float64)
    assert loss_of(same, same.clone(), same, same, 0.2) == pytest.approx(4 * 0.2 * math.log(8), abs=1e-10)


@pytest.mark.parametrize("num", [2, 7])
def test_method_equals_the_loop_oracle(num):
    method, batch = tiny_method("moco_v3", temperature=0.3, **SMALL), tiny_batch(num)
    total = method.loss(batch.views, batch).total
    q = [unit(method.predictor(method.projector(method.backbone(view)))) for view in batch.views]
    k = [unit(method.target(view)) for view in batch.views]
    torch.testing.assert_close(total.item(), contrast(q[0], k[1], 0.3) + contrast(q[1], k[0], 0.3), **EXACT)


def test_no_gradient_into_the_target_which_has_no_predictor():
    method, batch = tiny_method("moco_v3", **SMALL), tiny_batch(4)
    method.loss(batch.views, batch).total.backward()
    assert all(p.grad is None for p in method.target.parameters())
    online = sum(p.numel() for part in (method.backbone, method.projector) for p in part.parameters())
    assert sum(p.numel() for p in method.target.parameters()) == online


def test_momentum_rises_along_the_cosine():
    assert [momentum_schedule(0.99, 1.0, step, 100) for step in (0, 50, 100)] == pytest.approx([0.99, 0.995, 1.0])


def test_heads_follow_the_backbones_kind():
    cnn = tiny_method("moco_v3", **SMALL)
    assert sum(isinstance(m, nn.Linear) for m in cnn.projector) == 2
    assert not isinstance(cnn.predictor[-1], nn.BatchNorm1d)
    assert isinstance(cnn.projector[-1], nn.BatchNorm1d)
    assert not cnn.projector[-1].affine
    assert all(m.bias is None for head in (cnn.projector, cnn.predictor) for m in head if isinstance(m, nn.Linear))


def test_a_vits_patch_projection_is_frozen():
    from ssl_bench.methods._build import build_method
    from ssl_bench.nn.backbone import build_backbone

    vit = build_backbone("vit_micro", in_channels=1, image_size=16)
    method = build_method("moco_v3", vit, seed=0, facts={}, arguments=SMALL).double().train()
    batch = tiny_batch(4)
    method.loss(batch.views, batch).total.backward()
    assert all(p.grad is None for p in method.backbone.patch_embed.parameters())
    assert "backbone.patch_embed.weight" not in dict(method.trainable_parameters())
    assert isinstance(method.predictor[-1], nn.BatchNorm1d)
