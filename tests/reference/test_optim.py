"""LARS against plain loops, torch's optimizers behind recipes, schedules against their formulas."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.methods import METHODS
from ssl_bench.optim import (
    ParameterGroup,
    apply_schedule,
    build_optimizer,
    cosine,
    lr_factor,
    momentum_schedule,
    scaled_lr,
)
from ssl_bench.records import Recipe
from tests.reference.tiny import tiny_method

RECIPE = Recipe(views="simclr", optimizer="lars", base_lr=0.4, weight_decay=0.01, lars_trust=0.1, global_batch_size=128)


def norm(values):
    return math.sqrt(sum(v * v for v in values))


def lars_oracle(weights, gradients, *, lrs, momentum, trust, decay, clip, adapted):
    """Weights after one step a gradient, element by element, from the formulas in the cards."""
    weights, buffer = list(weights), [0.0] * len(weights)
    for gradient, lr in zip(gradients, lrs, strict=True):
        update = [g + decay * w for g, w in zip(gradient, weights, strict=True)]
        ratio = 1.0
        if adapted and norm(weights) and norm(gradient if clip else update):
            if clip:
                ratio = min(1.0, trust * norm(weights) / (norm(gradient) + decay * norm(weights)) / lr)
            else:
                ratio = trust * norm(weights) / norm(update)
        buffer = [momentum * m + ratio * u for m, u in zip(buffer, update, strict=True)]
        weights = [w - lr * m for w, m in zip(weights, buffer, strict=True)]
    return weights


def run(recipe, parameters, gradients, lrs=None):
    optimizer = build_optimizer([ParameterGroup([(str(i), p) for i, p in enumerate(parameters)])], recipe)
    for step, row in enumerate(gradients):
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            if lrs is not None:
                group["lr"] = lrs[step]
        optimizer.step()
    return optimizer


def draw(*shapes, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_lars_equals_the_loop_oracle(clip, exclude, scale):
    shapes = [(3, 4), (4,), (2, 3, 2)]
    parameters = [nn.Parameter(p) for p in draw(*shapes)]
    start = [p.detach().flatten().tolist() for p in parameters]
    gradients = [draw(*shapes, seed=step + 1, scale=scale) for step in range(4)]
    lrs = [0.05, 0.2, 0.4, 0.01]
    recipe = dataclasses.replace(RECIPE, lars_clip=clip, exclude_bias_and_norm=exclude)
    run(recipe, parameters, gradients, lrs)
    for i, parameter in enumerate(parameters):
        excluded = exclude and parameter.ndim == 1
        expected = lars_oracle(
            start[i],
            [row[i].flatten().tolist() for row in gradients],
            lrs=lrs,
            momentum=0.9,
            trust=0.1,
            decay=0.0 if excluded else 0.01,
            clip=clip,
            adapted=not excluded,
        )
        # float64, four steps of a few dozen operations
        assert parameter.detach().flatten().tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_lars_cap_makes_small_gradients_move_by_at_most_the_learning_rate():
    gradient = torch.full((2, 2), 1e-6, dtype=torch.float64)
    recipe = dataclasses.replace(RECIPE, lars_clip=True, weight_decay=0.0, lr_scaling="none")
    (parameter,) = parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]
    run(recipe, parameters, [[gradient]])
    torch.testing.assert_close(parameter.detach(), 1 - 0.4 * gradient, rtol=0, atol=1e-15)
    (parameter,) = parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]
    run(dataclasses.replace(recipe, lars_clip=False), parameters, [[gradient]])
    # unclipped, the step is lr * trust * ||w|| = 0.4 * 0.1 * 2, spread over four equal entries
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 0.04), rtol=0, atol=1e-15)


@pytest.mark.parametrize("clip", [False, True])
def test_lars_steps_plainly_where_a_norm_is_zero(clip):
    recipe = dataclasses.replace(RECIPE, lars_clip=clip, weight_decay=0.0, lr_scaling="none")
    zero_weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    zero_gradient = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    run(recipe, [zero_weight, zero_gradient], [[torch.ones(2, 2).double(), torch.zeros(2, 2).double()]])
    torch.testing.assert_close(zero_weight.detach(), torch.full((2, 2), -0.4, dtype=torch.float64))
    assert torch.equal(zero_gradient.detach(), torch.ones(2, 2, dtype=torch.float64))


def test_lars_without_adaptation_is_torch_sgd():
    shapes = [(3,), (5,)]
    ours = [nn.Parameter(p) for p in draw(*shapes)]
    theirs = [nn.Parameter(p) for p in draw(*shapes)]
    gradients = [draw(*shapes, seed=step + 1) for step in range(3)]
    run(RECIPE, ours, gradients)
    sgd = torch.optim.SGD(theirs, lr=0.2, momentum=0.9)
    for row in gradients:
        for parameter, gradient in zip(theirs, row, strict=True):
            parameter.grad = gradient
        sgd.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


def test_lars_resumes_from_its_state_dict_and_skips_missing_gradients():
    shapes = [(3, 2)]
    gradients = [draw(*shapes, seed=step + 1) for step in range(4)]
    whole = [nn.Parameter(p) for p in draw(*shapes)]
    run(RECIPE, whole, gradients)
    parts = [nn.Parameter(p) for p in draw(*shapes)]
    state = run(RECIPE, parts, gradients[:2]).state_dict()
    optimizer = build_optimizer([ParameterGroup([("0", parts[0])])], RECIPE)
    optimizer.load_state_dict(state)
    for row in gradients[2:]:
        parts[0].grad = row[0]
        optimizer.step()
    assert torch.equal(parts[0], whole[0])
    parts[0].grad = None
    optimizer.step()
    assert torch.equal(parts[0], whole[0])


def test_rates_are_scaled_once():
    recipe = Recipe(views="simclr", base_lr=0.3, global_batch_size=1024)
    assert scaled_lr(recipe) == pytest.approx(1.2)
    assert scaled_lr(dataclasses.replace(recipe, lr_scaling="sqrt")) == pytest.approx(0.6)
    assert scaled_lr(dataclasses.replace(recipe, lr_scaling="none")) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "cls", "settings"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.95)}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    ],
)
def test_recipes_reach_torchs_optimizers(name, cls, settings):
    recipe = Recipe(
        views="simclr", optimizer=name, base_lr=0.1, weight_decay=0.05, momentum=0.8, nesterov=True, betas=(0.8, 0.95)
    )
    ours, theirs = (nn.Linear(3, 2).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    named = list(ours.named_parameters())
    optimizer = build_optimizer([ParameterGroup(named)], recipe)
    assert type(optimizer) is cls
    groups = [{"params": [theirs.weight], "weight_decay": 0.05}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = cls(groups, lr=0.1, **settings)
    for step in range(3):
        x = draw((4, 3), seed=step)[0]
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [n for n in METHODS.names() if METHODS.get(n).trainable])
def test_every_trainable_parameter_is_in_exactly_one_group(name):
    arguments = dict(METHODS.get(name).default_arguments("small"))
    if "num_clusters" in arguments:
        arguments["num_clusters"] = 8  # the tiny dataset has 32 images
    method = tiny_method(name, **arguments)
    optimizer = build_optimizer(method.parameter_groups(), METHODS.get(name).recipes["small"])
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    trainable = [id(p) for p in method.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trainable)
    for group in optimizer.param_groups:
        if METHODS.get(name).recipes["small"].exclude_bias_and_norm:
            assert len({p.ndim > 1 for p in group["params"]}) == 1
            assert group["adapted"] or group["weight_decay"] == 0


def test_groups_carry_their_own_rate_and_decay():
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    recipe = Recipe(views="simclr", base_lr=0.1, weight_decay=0.04, end_weight_decay=0.4, warmup_epochs=0)
    groups = [ParameterGroup([("a", a)]), ParameterGroup([("b", b)], lr_factor=0.5, scheduled=False, weight_decay=0.02)]
    optimizer = build_optimizer(groups, recipe)
    apply_schedule(optimizer, recipe, 10, 10, 5)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == pytest.approx((0.0, 0.4))
    assert (second["lr"], second["weight_decay"]) == pytest.approx((0.05, 0.2))


@pytest.mark.parametrize(("share", "expected"), [(0, 0.996), (0.25, 0.9965857864), (0.5, 0.998), (1, 1.0)])
def test_target_momentum_of_byol(share, expected):
    assert momentum_schedule(0.996, 1.0, round(400 * share), 400) == pytest.approx(expected, abs=1e-10)
    k, num = 400 * share, 400
    assert momentum_schedule(0.996, 1.0, int(k), num) == pytest.approx(
        1 - (1 - 0.996) * (math.cos(math.pi * k / num) + 1) / 2, abs=1e-12
    )


def test_cosine_is_clamped_to_its_ends():
    assert cosine(3.0, 1.0, -0.5) == 3.0
    assert cosine(3.0, 1.0, 0.5) == pytest.approx(2.0)
    assert cosine(3.0, 1.0, 1.5) == 1.0


def test_learning_rate_warms_up_linearly_then_falls_along_a_half_cosine():
    recipe = Recipe(views="simclr", warmup_start_lr=0.01, end_lr_factor=0.1)
    factors = [lr_factor(recipe, step, 100, 20, 0.2) for step in range(101)]
    for step in range(20):
        assert 0.2 * factors[step] == pytest.approx(0.01 + (0.2 - 0.01) * step / 20)
    for step in range(20, 101):
        assert factors[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 20) / 80)) / 2)
    assert factors[100] == pytest.approx(0.1)


def test_constant_and_step_schedules():
    constant = Recipe(views="simclr", schedule="constant")
    assert [lr_factor(constant, step, 10, 0, 1.0) for step in (0, 5, 9)] == [1.0, 1.0, 1.0]
    step = Recipe(views="simclr", schedule="step", milestones=(0.5, 0.75), step_factor=0.2)
    factors = [lr_factor(step, k, 8, 0, 1.0) for k in range(8)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.2, 0.2, 0.04, 0.04])


def test_warmup_counts_epochs_and_must_be_shorter_than_training():
    recipe = Recipe(views="simclr", base_lr=0.4, warmup_epochs=2.0)
    optimizer = build_optimizer([ParameterGroup([("a", nn.Parameter(torch.ones(1, 1)))])], recipe)
    apply_schedule(optimizer, recipe, 5, 40, 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * 5 / 10)
    with pytest.raises(ConfigError, match="warmup_epochs"):
        apply_schedule(optimizer, recipe, 0, 10, 5)
