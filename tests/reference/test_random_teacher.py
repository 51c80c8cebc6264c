"""Random teacher against the paper's equations in plain loops, and the card's values."""

import copy
import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.optim import build_optimizer
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"num_prototypes": 12, "hidden_dim": 8, "bottleneck_dim": 4}


class Answer(nn.Module):
    """A network with a set answer."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer


def softmax(row):
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def oracle(student, teacher):
    """Cross entropy and KL divergence, averaged over samples."""
    cross, divergence = 0.0, 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        for p, q in zip(softmax(t), softmax(s), strict=True):
            cross -= p * math.log(q) / len(student)
            divergence += p * math.log(p / q) / len(student)
    return cross, divergence


def output_of(student, teacher):
    method = bare_method("random_teacher", heads=("head",), **SMALL)
    method.teacher = Answer(teacher)
    return method.loss((student,), empty_batch(len(student)))


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_hand_computed_values():
    teacher = torch.tensor([[0.2, -0.1, 0.4]], dtype=torch.float64)
    student = torch.tensor([[0.0, 0.3, 0.1]], dtype=torch.float64)
    output = output_of(student, teacher)
    assert output.total.item() == pytest.approx(1.1235717593, abs=1e-9)
    assert output.terms["divergence"].item() == pytest.approx(0.0450711458, abs=1e-9)


@pytest.mark.parametrize(("num", "width"), [(1, 2), (6, 9)])
def test_loss_equals_the_loop_oracle(num, width):
    student, teacher = randn(num, width), randn(num, width, seed=1).detach()
    output = output_of(student, teacher)
    cross, divergence = oracle(student, teacher)
    torch.testing.assert_close(output.total.item(), cross, **EXACT)
    torch.testing.assert_close(output.terms["divergence"].item(), divergence, **EXACT)


def test_the_gradient_is_that_of_the_divergence():
    student, teacher = randn(3, 4), randn(3, 4, seed=1).detach()
    output_of(student, teacher).total.backward()
    expected = [
        [(q - p) / 3 for p, q in zip(softmax(t), softmax(s), strict=True)]
        for s, t in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    torch.testing.assert_close(student.grad, torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_method_is_the_formula_of_its_networks():
    method, batch = tiny_method("random_teacher", student_distance=0.5, **SMALL), tiny_batch(6, num_views=1)
    total = method.loss(batch.views, batch).total
    student = method.head(method.backbone(batch.views[0]))
    teacher = copy.deepcopy(method.teacher.module).eval()(batch.views[0])
    torch.testing.assert_close(total.item(), oracle(student, teacher)[0], **EXACT)
    assert student.abs().max() <= 1


def test_a_copy_in_evaluation_mode_has_no_gradient_and_one_in_training_mode_has():
    method, batch = tiny_method("random_teacher", student_distance=0.0, **SMALL), tiny_batch(6, num_views=1)
    assert torch.equal(weights(method.backbone), weights(method.teacher.module[0]))
    assert torch.equal(weights(method.head), weights(method.teacher.module[1]))
    sizes = []
    for training in (False, True):
        method.train(training).zero_grad()
        output = method.loss(batch.views, batch)
        output.total.backward()
        assert (output.terms["divergence"] > 1e-6) == training
        sizes.append(max(p.grad.abs().max().item() for _, p in method.trainable_parameters()))
    # softmax(s) - softmax(t) is rounding, 2^-53 a logit, and passes back through the same layers
    assert sizes[0] < 1e-9 * sizes[1]


@pytest.mark.parametrize("distance", [0.3, 1.0])
def test_student_stands_between_teacher_and_independent_weights(distance):
    start = tiny_method("random_teacher", student_distance=0.0, **SMALL)
    far = tiny_method("random_teacher", student_distance=1.0, **SMALL)
    method = tiny_method("random_teacher", student_distance=distance, **SMALL)
    teacher, others, got = (torch.cat([weights(m.backbone), weights(m.head)]) for m in (start, far, method))
    assert torch.equal(torch.cat([weights(method.teacher.module[0]), weights(method.teacher.module[1])]), teacher)
    delta = math.sqrt(distance**2 + (1 - distance) ** 2)
    assert distance != 0.3 or delta == pytest.approx(0.7615773106, abs=1e-9)
    expected = ((1 - distance) * teacher + distance * others) / delta
    # weights were drawn and combined in float32: 3 roundings of numbers below 2
    torch.testing.assert_close(got, expected, rtol=0, atol=3 * 2 * 2.0**-24)
    assert not torch.equal(teacher, others)


def test_interpolation_keeps_the_variance_of_wide_layers():
    start = tiny_method("random_teacher", student_distance=0.0, num_prototypes=64, hidden_dim=256, bottleneck_dim=64)
    half = tiny_method("random_teacher", student_distance=0.5, num_prototypes=64, hidden_dim=256, bottleneck_dim=64)
    ratio = half.head.mlp[2].weight.var() / start.head.mlp[2].weight.var()
    # 65536 normal weights: the ratio's standard deviation is about 2 / sqrt(65536) = 0.008; five of them
    assert abs(ratio.item() - 1) < 0.04


def test_the_teacher_never_changes():
    method = tiny_method("random_teacher", **SMALL)
    before = copy.deepcopy(method.teacher.state_dict())
    optimizer = build_optimizer(method.parameter_groups(), method.default_recipe("cifar"))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in method.teacher.parameters()}
    for step in range(3):
        batch = tiny_batch(6, num_views=1, seed=step)
        optimizer.zero_grad()
        method.train()
        method.loss(batch.views, batch).total.backward()
        optimizer.step()
        method.after_optimizer_step(step + 1, 3)
    assert method.training
    assert not method.teacher.training
    for key, value in method.teacher.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("distance", [-0.1, 1.5])
def test_the_distance_must_be_a_share(distance):
    with pytest.raises(ConfigError, match="student_distance"):
        tiny_method("random_teacher", student_distance=distance, **SMALL)
