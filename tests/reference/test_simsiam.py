"""SimSiam against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ssl_bench.optim import apply_schedule, build_optimizer
from ssl_bench.records import Recipe
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"projector_layers": 2, "projection_dim": 6, "predictor_hidden_dim": 3}


def negative_cosine(p, z):
    """Mean of -cos, coordinate by coordinate."""
    total = 0.0
    for p_i, z_i in zip(p.tolist(), z.tolist(), strict=True):
        dot = sum(a * b for a, b in zip(p_i, z_i, strict=True))
        total -= dot / math.sqrt(sum(a * a for a in p_i)) / math.sqrt(sum(b * b for b in z_i))
    return total / len(p)


class Table(nn.Module):
    """A predictor that gives a set answer for each projection."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, z):
        (answer,) = (p for known, p in self.answers if known is z)
        return answer


def loss_of(z_1, z_2, p_1, p_2):
    method = bare_method("simsiam", heads=("projector",), **SMALL)
    method.predictor = Table([(z_1, p_1), (z_2, p_2)])
    return method.loss((z_1, z_2), empty_batch(len(z_1))).total


@pytest.mark.parametrize(("num", "width"), [(2, 2), (7, 5)])
def test_loss_equals_the_loop_oracle(num, width):
    z_1, z_2, p_1, p_2 = (randn(num, width, seed=seed) for seed in range(4))
    expected = negative_cosine(p_1, z_2) / 2 + negative_cosine(p_2, z_1) / 2
    torch.testing.assert_close(loss_of(z_1, z_2, p_1, p_2).item(), expected, **EXACT)


def test_hand_computed_values():
    p_1, z_2 = torch.tensor([[1.0, 2, 2], [0, 3, 4]]).double(), torch.tensor([[2.0, 1, 2], [0, 4, -3]]).double()
    p_2, z_1 = torch.tensor([[1.0, 0, 0], [1, 1, 0]]).double(), torch.tensor([[0.0, 1, 0], [1, 1, 0]]).double()
    assert loss_of(z_1, z_2, p_1, p_2).item() == pytest.approx(-0.4722222222, abs=1e-9)
    p = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    (loss_of(z.clone(), z, p, z) * 2).backward()  # the other direction has no gradient here
    torch.testing.assert_close(p.grad, torch.tensor([[-0.128, 0.096]], dtype=torch.float64), **EXACT)


def test_perfect_alignment_is_minus_one_and_targets_get_no_gradient():
    z_1, z_2 = randn(4, 3), randn(4, 3, seed=1)
    total = loss_of(z_1, z_2, (z_2 * 3).detach().requires_grad_(), (z_1 / 2).detach().requires_grad_())
    assert total.item() == pytest.approx(-1.0, abs=1e-12)
    total.backward()
    assert z_1.grad is None
    assert z_2.grad is None


def test_method_is_the_formula_of_its_networks():
    method, batch = tiny_method("simsiam", **SMALL), tiny_batch(6)
    total = method.loss(batch.views, batch).total
    z = [method.projector(method.backbone(view)) for view in batch.views]
    p = [method.predictor(projection) for projection in z]
    expected = negative_cosine(p[0], z[1]) / 2 + negative_cosine(p[1], z[0]) / 2
    torch.testing.assert_close(total.item(), expected, **EXACT)


def test_projection_ends_in_batch_norm_without_affine_parameters():
    last = tiny_method("simsiam", **SMALL).projector[-1]
    assert isinstance(last, nn.BatchNorm1d)
    assert not last.affine


def test_the_predictors_rate_stays_constant():
    method = tiny_method("simsiam", **SMALL)
    recipe = Recipe(views="simclr", optimizer="sgd", base_lr=0.1, warmup_epochs=0)
    optimizer = build_optimizer(method.parameter_groups(), recipe)
    apply_schedule(optimizer, recipe, 50, 100, 10)
    predictor = {id(p) for p in method.predictor.parameters()}
    for group in optimizer.param_groups:
        wanted = 0.1 if id(group["params"][0]) in predictor else 0.05
        assert group["lr"] == pytest.approx(wanted)
    sizes = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert sizes == sum(p.numel() for p in method.parameters() if p.requires_grad)


def test_cosine_matches_torch():
    a, b = randn(3, 4), randn(3, 4, seed=9)
    assert negative_cosine(a, b) == pytest.approx(-F.cosine_similarity(a, b).mean().item(), abs=1e-12)
