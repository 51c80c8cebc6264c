"""Relational reasoning against its equations in plain loops, and the card's values."""

import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.methods.relational_reasoning import AGGREGATIONS, focal_cross_entropy
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

LOGITS = torch.tensor([2, -1, 0.5, -3], dtype=torch.float64)
TARGETS = torch.tensor([1, 0, 1, 0], dtype=torch.float64)


def focal(logit, target, gamma):
    p = 1 / (1 + math.exp(-logit))
    p_t = p if target else 1 - p
    return 0.5 * (1 - p_t) ** gamma * -math.log(p_t)


def pairs_of(num, num_views):
    """(view, image, other view, other image, target) of every pair."""
    pairs, shift = [], 1
    for k in range(num_views):
        for other in range(k + 1, num_views):
            for i in range(num):
                pairs.append((k, i, other, i, 1))
                pairs.append((k, i, other, (i - shift) % num, 0))
            shift = shift + 1 if shift + 1 < num else 1
    return pairs


class Recorder(nn.Module):
    """A head that keeps its input and answers with a fixed linear function of it."""

    def forward(self, pairs):
        self.pairs = pairs
        weights = torch.linspace(-1, 1, pairs.shape[1], dtype=pairs.dtype)
        return (pairs * weights).sum(1, keepdim=True)


def with_recorder(num_views, **arguments):
    method = bare_method("relational_reasoning", heads=(), num_views=num_views, **arguments)
    method.head = Recorder()
    return method


def test_hand_computed_values():
    plain = 2 * focal_cross_entropy(LOGITS, TARGETS, gamma=0)
    assert plain.mean().item() == pytest.approx(0.2407135086, abs=1e-9)
    assert focal_cross_entropy(LOGITS, TARGETS, gamma=2).mean().item() == pytest.approx(0.0115180493, abs=1e-9)
    zero = torch.zeros(1, dtype=torch.float64)
    assert 2 * focal_cross_entropy(zero, zero, gamma=0).item() == pytest.approx(math.log(2), abs=1e-12)
    assert focal_cross_entropy(zero, zero, gamma=2).item() == pytest.approx(0.0866433976, abs=1e-9)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3.5])
def test_focal_term_and_its_gradient_equal_the_formula(gamma):
    logits = randn(12, seed=3)
    targets = (torch.arange(12) % 2).double()
    expected = [focal(x, t, gamma) for x, t in zip(logits.tolist(), targets.tolist(), strict=True)]
    torch.testing.assert_close(focal_cross_entropy(logits, targets, gamma=gamma).tolist(), expected, **EXACT)
    assert torch.autograd.gradcheck(lambda x: focal_cross_entropy(x, targets, gamma=gamma), (logits,))


def test_focal_term_of_large_logits_is_finite():
    logits = torch.tensor([90.0, -90.0, 90.0, -90.0], requires_grad=True)
    value = focal_cross_entropy(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]), gamma=2)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor([0.0, 0.0, 45.0, 45.0]))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize(("num", "num_views"), [(2, 4), (3, 3), (5, 2), (6, 5)])
def test_loss_equals_the_loop_oracle(num, num_views, aggregation):
    features = [randn(num, 4, seed=v).detach() for v in range(num_views)]
    method = with_recorder(num_views, aggregation=aggregation)
    total = method.loss(tuple(features), empty_batch(num)).total.item()
    join = {
        "cat": lambda a, b: a + b,
        "sum": lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        "mean": lambda a, b: [(x + y) / 2 for x, y in zip(a, b, strict=True)],
        "max": lambda a, b: [max(x, y) for x, y in zip(a, b, strict=True)],
    }[aggregation]
    expected = []
    for k, i, other, j, target in pairs_of(num, num_views):
        pair = join(features[k][i].tolist(), features[other][j].tolist())
        logit = sum(x * (-1 + 2 * n / (len(pair) - 1)) for n, x in enumerate(pair))
        expected.append(focal(logit, target, 2))
    torch.testing.assert_close(total, sum(expected) / len(expected), **EXACT)


@pytest.mark.parametrize("num_views", range(2, 7))
@pytest.mark.parametrize("num", range(2, 10))
def test_pairs_are_the_papers_and_negatives_are_of_different_images(num, num_views):
    method = with_recorder(num_views)
    labels = [torch.tensor([[float(v), float(i)] for i in range(num)]) for v in range(num_views)]
    method.loss(tuple(labels), empty_batch(num))
    rows = method.head.pairs.int().tolist()
    positives, negatives = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert len(rows) == num * num_views * (num_views - 1)
    assert all(i == j for _, i, _, j in positives)
    assert all(i != j for _, i, _, j in negatives)
    expected = [(pair[:4], pair[4]) for pair in pairs_of(num, num_views)]
    assert sorted(positives) == sorted(list(pair) for pair, target in expected if target)
    assert sorted(negatives) == sorted(list(pair) for pair, target in expected if not target)


@pytest.mark.parametrize(("num_views", "rows"), [(4, 768), (32, 63488)])
def test_row_counts_of_64_images(num_views, rows):
    method = with_recorder(num_views)
    method.loss((torch.zeros(64, 1),) * num_views, empty_batch(64))
    assert len(method.head.pairs) == rows


def test_shifts_of_three_images_and_three_views():
    shifts = {(k, other): (i - j) % 3 for k, i, other, j, target in pairs_of(3, 3) if not target}
    assert shifts == {(0, 1): 1, (0, 2): 2, (1, 2): 1}


def test_only_concatenation_sees_the_order():
    a, b = randn(3, 4).detach(), randn(3, 4, seed=1).detach()
    for name, aggregate in AGGREGATIONS.items():
        assert torch.equal(aggregate(a, b), aggregate(b, a)) == (name != "cat")


def test_method_is_the_formula_of_its_logits_and_zero_weights_give_ln_2():
    method = tiny_method("relational_reasoning", num_views=3, hidden_dim=8)
    batch = tiny_batch(5, num_views=3)
    logits = record_outputs(method.head)
    total = method.loss(batch.views, batch).total
    assert len(logits) == 1  # one forward pass: one batch for batch norm
    rows = logits[0][:, 0].tolist()
    expected = [focal(x, n < len(rows) // 2, 2) for n, x in enumerate(rows)]
    torch.testing.assert_close(total.item(), sum(expected) / len(rows), **EXACT)
    total.backward()
    assert all(p.grad.abs().max() > 0 for p in method.backbone.parameters())
    nn.init.zeros_(method.head[-1].weight)
    nn.init.zeros_(method.head[-1].bias)
    assert method.loss(batch.views, batch).total.item() == pytest.approx(0.0866433976, abs=1e-9)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        tiny_method("relational_reasoning", num_views=1)
    with pytest.raises(ConfigError, match="cat, sum, mean, max, got 'min'"):
        tiny_method("relational_reasoning", aggregation="min")
