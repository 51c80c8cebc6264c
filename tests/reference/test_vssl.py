"""VSSL (the variant that its docstring states) against the equations in plain loops, and the card's values."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.methods.vssl import GaussianHead, cosine_terms, gaussian_terms
from ssl_bench.nn.target import TargetNetwork
from ssl_bench.random import normal
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

HEADS = {"hidden_dim": 12, "latent_dim": 5}
MU_S = torch.tensor([[0.5, -1], [1, 0]], dtype=torch.float64)
VAR_S = torch.tensor([[0.25, 1], [0.5, 2]], dtype=torch.float64)
MU_T = torch.tensor([[0, -1], [0.5, 0.5]], dtype=torch.float64)
VAR_T = torch.ones(2, 2, dtype=torch.float64)


def parts(output):
    """Means and variances, as lists of rows."""
    mu, log_variance = output.chunk(2, 1)
    return mu.tolist(), [[math.exp(x) for x in row] for row in log_variance.tolist()]


def log_density(z, mu, variance):
    return sum(
        -((x - m) ** 2) / (2 * v) - math.log(2 * math.pi * v) / 2 for x, m, v in zip(z, mu, variance, strict=True)
    )


def expected_log_density(mu_s, var_s, mu_t, var_t):
    """E_q ln p, exact since ln p is quadratic: the two-point rule mu +- sigma in each coordinate."""
    total = log_density(mu_s, mu_t, var_t)
    for j, v in enumerate(var_s):
        up, down = list(mu_s), list(mu_s)
        up[j] += math.sqrt(v)
        down[j] -= math.sqrt(v)
        total += (log_density(up, mu_t, var_t) + log_density(down, mu_t, var_t)) / 2 - log_density(mu_s, mu_t, var_t)
    return total


def gaussian_oracle(student, teacher, beta):
    """-E_q ln p + beta (E_q ln q - E_q ln p), averaged over rows."""
    total = 0.0
    for mu_s, var_s, mu_t, var_t in zip(*parts(student), *parts(teacher), strict=True):
        cross = expected_log_density(mu_s, var_s, mu_t, var_t)
        total += -cross + beta * (expected_log_density(mu_s, var_s, mu_s, var_s) - cross)
    return total / len(student)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def cosine_oracle(student, teacher, noise, beta):
    total = 0.0
    for mu_s, var_s, mu_t, var_t, eps in zip(*parts(student), *parts(teacher), noise.tolist(), strict=True):
        draw = [m + math.sqrt(v) * e for m, v, e in zip(mu_s, var_s, eps, strict=True)]
        total += -cosine(draw, mu_t) + beta * (1 - cosine(mu_s, mu_t) + 1 - cosine(var_s, var_t))
    return total / len(student)


class Fixed(nn.Module):
    """A teacher that gives a set answer for each view."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def forward(self, view):
        (answer,) = (t for v, t in self.answers if v is view)
        return answer


def loss_of(s_1, s_2, t_1, t_2, **arguments):
    method = bare_method("vssl", heads=("head",), **arguments)
    method.target = Fixed([(s_1, t_1), (s_2, t_2)])
    return method.loss((s_1, s_2), empty_batch(len(s_1)))


def joined(mu, variance):
    return torch.cat([mu, variance.log()], 1)


def test_hand_computed_values():
    likelihood, divergence = gaussian_terms(joined(MU_S, VAR_S), joined(MU_T, VAR_T))
    assert divergence.tolist() == pytest.approx([0.4431471806, 0.5], abs=1e-9)
    assert divergence.mean().item() == pytest.approx(0.4715735903, abs=1e-9)
    assert likelihood.mean().item() == pytest.approx(2.9628770664, abs=1e-9)
    certain = torch.full_like(VAR_S, 1e-12)
    likelihood, _ = gaussian_terms(joined(MU_S, certain), joined(MU_T, VAR_T))
    assert likelihood.mean().item() == pytest.approx(2.0253770664, abs=1e-9)
    negative, divergence = cosine_terms(joined(MU_S, VAR_S), joined(MU_T, VAR_T), torch.zeros_like(MU_S))
    assert divergence.mean().item() == pytest.approx(0.1992330139 + 0.1425070743, abs=1e-9)
    assert 1 + negative.mean().item() == pytest.approx(0.1992330139, abs=1e-9)  # without noise the draw is the mean


@pytest.mark.parametrize(("num", "width"), [(2, 1), (6, 4)])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_gaussian_loss_equals_the_loop_oracle_of_both_directions(num, width, beta):
    s_1, s_2, t_1, t_2 = (randn(num, 2 * width, seed=seed) for seed in range(4))
    expected = (gaussian_oracle(s_1, t_2, beta) + gaussian_oracle(s_2, t_1, beta)) / 2
    torch.testing.assert_close(loss_of(s_1, s_2, t_1, t_2, divergence_weight=beta).total.item(), expected, **EXACT)


def test_cosine_loss_equals_the_loop_oracle_with_a_draw_a_view():
    s_1, s_2, t_1, t_2 = (randn(6, 8, seed=seed) for seed in range(4))
    noise = [normal(empty_batch(6).keys("latent"), 4, f"view{v}") for v in range(2)]
    expected = (cosine_oracle(s_1, t_2, noise[0], 0.5) + cosine_oracle(s_2, t_1, noise[1], 0.5)) / 2
    got = loss_of(s_1, s_2, t_1, t_2, form="cosine", divergence_weight=0.5).total.item()
    torch.testing.assert_close(got, expected, **EXACT)
    assert not torch.equal(*noise)


def test_divergence_is_zero_at_equality_and_positive_elsewhere():
    q, p = randn(50, 6), randn(50, 6, seed=1)
    torch.testing.assert_close(gaussian_terms(q, q)[1], torch.zeros(50, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(cosine_terms(q, q, q[:, :3])[1], torch.zeros(50, dtype=torch.float64), **EXACT)
    assert (gaussian_terms(q, p)[1] > 0).all()
    assert (cosine_terms(q, p, q[:, :3])[1] > 0).all()


def test_gradient_to_the_mean_is_scaled_by_the_teachers_variance():
    q, p = randn(4, 6), randn(4, 6, seed=1).detach()
    gaussian_terms(q, p)[1].sum().backward()
    expected = (q[:, :3] - p[:, :3]) / p[:, 3:].exp()
    torch.testing.assert_close(q.grad[:, :3], expected.detach(), **EXACT)


def test_best_student_variance_is_half_the_teachers():
    mean = torch.zeros(1, 1, dtype=torch.float64)
    log_s = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    likelihood, divergence = gaussian_terms(torch.cat([mean, log_s], 1), torch.zeros(1, 2, dtype=torch.float64))
    (likelihood + divergence).sum().backward()
    torch.testing.assert_close(log_s.grad, torch.zeros_like(log_s), **EXACT)


def test_head_normalizes_means_and_bounds_log_variances():
    head = GaussianHead(4, 8, 3, (-0.1, 0.05)).double()
    x = randn(50, 4).detach()
    raw_mean = head.layers(x)[:, :3]
    mean, log_variance = head(x).chunk(2, 1)
    scale = (raw_mean.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(mean, (raw_mean - raw_mean.mean(0)) / scale, **EXACT)
    assert log_variance.min() == -0.1
    assert log_variance.max() == 0.05


def test_method_meets_the_teachers_gaussian_of_the_other_view():
    method, batch = tiny_method("vssl", **HEADS), tiny_batch(6)
    with torch.no_grad():
        for parameter in method.target.parameters():
            parameter.mul_(1.3)  # a teacher unlike the student
    students = record_outputs(method.head)
    total = method.loss(batch.views, batch).total
    teachers = [method.target(view) for view in batch.views]
    expected = (gaussian_oracle(students[0], teachers[1], 1) + gaussian_oracle(students[1], teachers[0], 1)) / 2
    torch.testing.assert_close(total.item(), expected, **EXACT)
    torch.testing.assert_close(method.loss(batch.views[::-1], batch).total, total, **EXACT)


def test_draws_are_those_of_the_samples_keys():
    method, batch = tiny_method("vssl", form="cosine", **HEADS), tiny_batch(6)
    total = method.loss(batch.views, batch).total
    assert torch.equal(total, method.loss(batch.views, batch).total)
    later = dataclasses.replace(batch, epoch=1)
    assert not torch.equal(total, method.loss(later.views, later).total)


def test_teacher_has_no_gradient_and_the_student_has():
    method, batch = tiny_method("vssl", **HEADS), tiny_batch(6)
    method.loss(batch.views, batch).total.backward()
    for name, parameter in method.named_parameters():
        assert (parameter.grad is None) == name.startswith("target."), name


def test_teacher_follows_with_the_scheduled_momentum():
    student, teacher = nn.Linear(1, 1), TargetNetwork(nn.Linear(1, 1))
    nn.init.ones_(student.weight)
    nn.init.zeros_(teacher.module.weight)
    teacher.update(student, 0.9)
    assert teacher.module.weight.item() == pytest.approx(0.1, abs=1e-7)
    method = tiny_method("vssl", target_momentum=0.9, **HEADS)
    before = [p.clone() for p in method.target.module.parameters()]
    online = nn.Sequential(method.backbone, method.head)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(1.0)
    method.after_optimizer_step(2, 4)  # half of training: 1 - 0.1 (1 + cos(pi / 2)) / 2 = 0.95
    for t, start, o in zip(method.target.module.parameters(), before, online.parameters(), strict=True):
        torch.testing.assert_close(t, 0.95 * start + 0.05 * o, rtol=0, atol=1e-9)


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="`form` must be gaussian or cosine"):
        tiny_method("vssl", form="student")
