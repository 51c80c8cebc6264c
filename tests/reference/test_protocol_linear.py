"""The linear probe against hand-computed minimizers and scikit-learn."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from ssl_bench.evaluation.protocols.linear_sgd import train_heads
from ssl_bench.evaluation.softmax import SoftmaxRegression, Standardizer
from ssl_bench.random import epoch_permutation
from tests.unit.evaluation.fakes import clusters


def objective(x, y, weight, bias, l2):
    """J in plain float64 numpy, from its definition."""
    logits = x @ weight.T + bias
    logits = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    return losses.mean() + 0.5 * l2 * (weight**2).sum()


def solve64(x, y, num_classes, l2):
    problem = SoftmaxRegression(torch.tensor(x, dtype=torch.float64), torch.tensor(y), num_classes)
    solution = problem.solve(l2, tolerance=1e-15, max_iterations=2000)
    return solution.theta[:, :-1].numpy(), solution.theta[:, -1].numpy(), solution


def test_two_points_in_the_softmax_parametrization():
    """x = (-1, 1), y = (0, 1), C = 1: the logit difference v solves v (1 + e^v) = 4.

    With one binomial weight it would be 0.674831614342; ours penalizes the rows of both classes. The
    bias is free here and absent in the formula; by symmetry it is 0.
    """
    weight, bias, _ = solve64([[-1.0], [1.0]], [0, 1], 2, l2=1 / (1 * 2))
    difference = weight[1, 0] - weight[0, 0]
    assert difference == pytest.approx(1.042596914, abs=1e-8)
    assert 1 / (1 + np.exp(-difference)) == pytest.approx(0.7393507715, abs=1e-9)
    np.testing.assert_allclose(bias, 0, atol=1e-9)


def test_three_points_with_free_bias():
    weight, bias, solution = solve64([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], [0, 1, 2], 3, l2=1 / (1 * 3))
    expected = [[0.6066517085, -0.1076495157], [-0.1076495157, 0.6066517085], [-0.4990021928, -0.4990021928]]
    np.testing.assert_allclose(weight, expected, atol=2e-7)  # the objective is flat to 1e-14 within 1e-7
    np.testing.assert_allclose(bias, [0.0359057663, 0.0359057663, -0.0718115326], atol=2e-7)
    assert solution.objective * 3 == pytest.approx(2.193857456, abs=1e-8)  # the card's is C * sum, C n = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_objective_is_at_most_sklearns(dtype, l2):
    x, y = clusters(400, num_classes=5, dim=20, spread=1.5)
    x = torch.relu(x @ torch.randn(20, 40, generator=torch.Generator().manual_seed(3)))
    x = Standardizer.fit(x)(x)
    solution = SoftmaxRegression(x.to(dtype), y, 5).solve(l2, tolerance=1e-8, max_iterations=2000)
    assert solution.converged
    reference = LogisticRegression(C=1 / (len(y) * l2), tol=1e-8, max_iter=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations and unconverged lines are not ours
        reference.fit(x.double().numpy(), y.numpy())
    x64, y64, theta = x.double().numpy(), y.numpy(), solution.theta.numpy()
    ours = objective(x64, y64, theta[:, :-1], theta[:, -1], l2)
    theirs = objective(x64, y64, reference.coef_, reference.intercept_, l2)
    assert ours <= theirs * (1 + 1e-6)
    assert solution.objective == pytest.approx(ours, rel=1e-5)  # float32 logits carry 1e-6 each


def test_warm_start_and_cold_start_reach_one_minimum():
    x, y = clusters(300, num_classes=4, dim=12, spread=1.5)
    problem = SoftmaxRegression(Standardizer.fit(x)(x), y, 4)
    start = None
    for l2 in (1.0, 1e-1, 1e-2, 1e-3):
        warm = problem.solve(l2, start=start, tolerance=1e-8)
        start = warm
        cold = problem.solve(l2, tolerance=1e-8)
        assert warm.objective == pytest.approx(cold.objective, rel=1e-5)


def test_scaled_features_with_scaled_penalty_give_the_same_predictions():
    """h -> a h with l2 -> a^2 l2 (C -> C / a^2) leaves logits as they are."""
    x, y = clusters(200, spread=1.5)
    x = x.double()
    plain = SoftmaxRegression(x, y, 3).solve(1e-2, tolerance=1e-13)
    scaled = SoftmaxRegression(8 * x, y, 3).solve(64e-2, tolerance=1e-13)
    torch.testing.assert_close(plain.scores(x), scaled.scores(8 * x), rtol=1e-4, atol=1e-4)


def test_wide_features_without_gram_matrix_reach_the_same_minimum(monkeypatch):
    x, y = clusters(150, dim=30, spread=1.5)
    x = Standardizer.fit(x)(x)
    with_gram = SoftmaxRegression(x, y, 3).solve(1e-2, tolerance=1e-9)
    monkeypatch.setattr("ssl_bench.evaluation.softmax.MAX_GRAM", 29)
    problem = SoftmaxRegression(x, y, 3)
    assert problem.gram is None
    assert problem.solve(1e-2, tolerance=1e-9).objective == pytest.approx(with_gram.objective, rel=1e-5)


def test_more_features_than_samples():
    x, y = clusters(20, dim=60, spread=1.0)
    x = Standardizer.fit(x)(x)
    solution = SoftmaxRegression(x, y, 3).solve(1e-3)
    assert solution.converged
    assert bool((solution.scores(x).argmax(1) == y).all())


def test_no_perturbation_lowers_the_objective():
    x, y = clusters(100, spread=1.5)
    problem = SoftmaxRegression(x.double(), y, 3)
    solution = problem.solve(1e-2, tolerance=1e-14)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-1, 1e-3):
        for _ in range(20):
            moved = solution.theta + size * torch.randn(solution.theta.shape, generator=generator, dtype=torch.float64)
            assert problem.objective(moved, 1e-2) > solution.objective


@pytest.mark.parametrize("num", [64, 70])  # 70: the last 6 samples of an epoch make no whole batch
def test_sgd_heads_equal_torch_sgd(num):
    """The same batches through torch.optim.SGD and autograd in float64, one rate at a time."""
    x, y = clusters(num)
    x = x.double()
    lrs = torch.tensor([0.3, 0.01], dtype=torch.float64)
    found = train_heads(x, y, 3, lrs=lrs, epochs=4, batch_size=16, seed=3)
    start = train_heads(x, y, 3, lrs=torch.zeros(1), epochs=1, batch_size=16, seed=3)[0]
    steps = 4 * (num // 16)
    for rate, head in zip(lrs.tolist(), found, strict=True):
        layer = torch.nn.Linear(6, 3).double()
        with torch.no_grad():
            layer.weight.copy_(start[:, :-1])
            layer.bias.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
        step = 0
        for epoch in range(4):
            order = epoch_permutation(3, epoch, num)
            for batch in order[: num // 16 * 16].split(16):
                optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(layer(x[batch]), y[batch]).backward()
                optimizer.step()
                step += 1
        expected = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        # float64 summation order; initial weights N(0, .01) are drawn in float32 and then exact
        torch.testing.assert_close(head, expected, rtol=1e-10, atol=1e-12)
    assert 0.005 < float(start[:, :-1].std()) < 0.02
    assert not start[:, -1].any()
