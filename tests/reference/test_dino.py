"""DINO against float64 loops written from the paper, and against values computed by hand.

Equations: Caron et al. 2021, eqs. 1-4 and section 3.2, arXiv 2104.14294. The oracle shares no code with the package.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssl_bench.losses.distillation import distillation_cross_entropy
from ssl_bench.methods.dino import DINO
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.nn.dino_head import DINOHead
from ssl_bench.optim import apply_schedule, build_optimizer
from ssl_bench.records import Batch, Recipe

CENTER = (0.05, 0.1, 0.0)
TEACHER = ((0.2, 0.1, 0.0), (0.0, 0.3, -0.1))
STUDENT = ((1.0, 0.0, -1.0), (0.5, 0.2, 0.0), (0.0, 0.3, 0.1))
Rows = list[list[float]]


# ---- the oracle ---------------------------------------------------------------------------------


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def oracle_loss(student: list[Rows], teacher: list[Rows], center: list[float], t_s: float, t_t: float) -> float:
    """Mean over pairs of different crops, teacher on the globals, and over samples; [view][sample][prototype]."""
    total, pairs = 0.0, 0
    for u in range(2):
        for v in range(len(student)):
            if u == v:
                continue
            pairs += 1
            for s_row, t_row in zip(student[v], teacher[u], strict=True):
                p = softmax([(t - c) / t_t for t, c in zip(t_row, center, strict=True)])
                q = softmax([s / t_s for s in s_row])
                total += -sum(a * math.log(b) for a, b in zip(p, q, strict=True)) / len(student[v])
    return total / pairs


def oracle_head(x: Rows, head: DINOHead) -> Rows:
    """MLP with exact GELU, unit bottleneck, unit prototypes."""
    layers = [m for m in head.mlp if isinstance(m, nn.Linear)]
    out = []
    for row in x:
        for i, layer in enumerate(layers):
            weight, bias = layer.weight.tolist(), layer.bias.tolist()
            row = [sum(w * v for w, v in zip(ws, row, strict=True)) + b for ws, b in zip(weight, bias, strict=True)]
            if i < len(layers) - 1:
                row = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row]
        length = math.sqrt(sum(v * v for v in row))
        row = [v / length for v in row]
        logits = []
        for prototype in head.prototypes.tolist():
            length = math.sqrt(sum(w * w for w in prototype))
            logits.append(sum(w * v for w, v in zip(prototype, row, strict=True)) / length)
        out.append(logits)
    return out


# ---- helpers ------------------------------------------------------------------------------------


def make_dino(backbone: str = "conv4", **arguments: Any) -> DINO:
    torch.manual_seed(0)
    settings = {"num_prototypes": 6, "hidden_dim": 8, "bottleneck_dim": 4, **arguments}
    method = DINO(build_backbone(backbone, in_channels=1, image_size=16), **settings).double()
    with torch.no_grad():  # a teacher and a center unlike their start
        for parameter in method.target.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        method.center.copy_(torch.linspace(-0.1, 0.1, settings["num_prototypes"]))
    return method


def make_batch(num: int = 4, epoch: int = 0, local: tuple[int, ...] = (8,), seed: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    views = tuple(
        torch.randn(num, 1, size, size, generator=generator, dtype=torch.float64) for size in (16, 16, *local)
    )
    index = torch.arange(num)
    return Batch(images=torch.zeros(num, 1, 16, 16, dtype=torch.uint8), index=index, epoch=epoch, seed=1, views=views)


def tensors(rows: tuple[tuple[float, ...], ...]) -> list[Tensor]:
    return [torch.tensor([row], dtype=torch.float64) for row in rows]


def probabilities(rows: tuple[tuple[float, ...], ...], center: tuple[float, ...], temperature: float) -> list[Tensor]:
    return [((t - torch.tensor(center, dtype=torch.float64)) / temperature).softmax(1) for t in tensors(rows)]


# ---- values computed by hand --------------------------------------------------------------------


@pytest.mark.parametrize(("num_views", "expected"), [(2, 5.1104906068), (3, 3.3694271550)])
def test_loss_by_hand(num_views: int, expected: float) -> None:
    teacher = probabilities(TEACHER, CENTER, 0.04)
    assert teacher[0][0].tolist() == pytest.approx([0.955077462, 0.022461269, 0.022461269], abs=1e-9)
    student = tensors(STUDENT[:num_views])
    loss = distillation_cross_entropy(student, teacher, student_temperature=0.1).item()
    assert loss == pytest.approx(expected, abs=1e-9)
    rows = [[list(row)] for row in STUDENT[:num_views]]
    assert oracle_loss(rows, [[list(row)] for row in TEACHER], list(CENTER), 0.1, 0.04) == pytest.approx(
        expected, abs=1e-9
    )


def test_center_by_hand() -> None:
    method = make_dino(num_prototypes=3)
    method.center.copy_(torch.tensor(CENTER, dtype=torch.float64))
    method._logit_means.append(torch.cat(tensors(TEACHER)).mean(0))
    method.after_optimizer_step(1, 10)
    assert method.center.tolist() == pytest.approx([0.055, 0.11, -0.005], abs=1e-9)


def test_uniform_logits_give_the_log_of_their_number() -> None:
    zero = [torch.zeros(2, 4096, dtype=torch.float64)] * 2
    teacher = [z.softmax(1) for z in zero]
    loss = distillation_cross_entropy(zero, teacher, student_temperature=0.1)
    assert loss.tolist() == pytest.approx([8.3177661667] * 2, abs=1e-9)


# ---- the method against the oracle --------------------------------------------------------------


@pytest.mark.parametrize(("backbone", "local"), [("conv4", ()), ("conv4", (8, 8, 8)), ("vit_micro", (8,))])
def test_loss_equals_the_oracle(backbone: str, local: tuple[int, ...]) -> None:
    method, batch = make_dino(backbone, teacher_temperature=0.06), make_batch(local=local)
    center = method.center.tolist()
    output = method.loss(batch.views, batch)
    # batch norm sees the crops of one size as one batch
    globals_ = torch.cat(batch.views[:2])
    student = list(method.backbone(globals_).split(4))
    if local:
        student += list(method.backbone(torch.cat(batch.views[2:])).split(4))
    student_rows = [oracle_head(x.tolist(), method.head) for x in student]
    target_head = method.target.module[1]
    assert isinstance(target_head, DINOHead)
    teacher_rows = [oracle_head(x.tolist(), target_head) for x in method.evaluation_backbone(globals_).split(4)]
    expected = oracle_loss(student_rows, teacher_rows, center, 0.1, 0.06)
    # two orders of float64 sums of at most 512 terms, divided by a temperature of 0.06
    assert output.total.item() == pytest.approx(expected, rel=1e-10)

    p = [softmax([(t - c) / 0.06 for t, c in zip(row, center, strict=True)]) for row in teacher_rows[0]]
    entropy = -sum(a * math.log(a) for row in p for a in row) / 4
    assert output.terms["teacher_entropy"].item() == pytest.approx(entropy, rel=1e-9)

    assert method.center.tolist() == center  # used before it moves
    method.after_optimizer_step(1, 10)
    rows = teacher_rows[0] + teacher_rows[1]
    means = [sum(row[k] for row in rows) / 8 for k in range(6)]
    moved = [0.9 * c + 0.1 * m for c, m in zip(center, means, strict=True)]
    assert method.center.tolist() == pytest.approx(moved, abs=1e-12)


def test_teacher_follows_after_the_step() -> None:
    method, batch = make_dino(target_momentum=0.9), make_batch()
    before = [p.clone() for p in method.target.module.parameters()]
    method.loss(batch.views, batch)
    method.after_optimizer_step(5, 10)
    weight = 1 - (1 - 0.9) * (1 + math.cos(math.pi * 5 / 10)) / 2
    online = [*method.backbone.parameters(), *method.head.parameters()]
    for old, new, student in zip(before, method.target.module.parameters(), online, strict=True):
        assert torch.allclose(new, weight * old + (1 - weight) * student, atol=1e-14)
    method.after_optimizer_step(10, 10)  # momentum 1: the teacher has come to rest
    still = [p.clone() for p in method.target.module.parameters()]
    method.after_optimizer_step(10, 10)
    assert all(torch.equal(a, b) for a, b in zip(still, method.target.module.parameters(), strict=True))


def test_accumulated_micro_steps_move_the_center_once() -> None:
    whole, parts = make_dino("vit_micro"), make_dino("vit_micro")  # no batch norm: samples do not couple
    batch = make_batch()
    whole.loss(batch.views, batch)
    for half in (slice(0, 2), slice(2, 4)):
        views = tuple(view[half] for view in batch.views)
        parts.loss(views, dataclasses.replace(batch, index=batch.index[half], views=views))
    for method in (whole, parts):
        method.after_optimizer_step(1, 10)
    assert torch.allclose(whole.center, parts.center, atol=1e-14)
    center = parts.center.clone()
    parts.after_optimizer_step(2, 10)  # nothing was seen since
    assert torch.equal(parts.center, center)


# ---- properties ---------------------------------------------------------------------------------


def test_loss_ignores_a_constant_added_to_all_logits_of_a_sample() -> None:
    teacher, student = probabilities(TEACHER, CENTER, 0.04), tensors(STUDENT)
    shifted = [s + 0.7 * (v + 1) for v, s in enumerate(student)]
    losses = [distillation_cross_entropy(x, teacher, student_temperature=0.1).item() for x in (student, shifted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    moved = probabilities(tuple(tuple(v + 0.3 for v in row) for row in TEACHER), CENTER, 0.04)
    assert distillation_cross_entropy(student, moved, student_temperature=0.1).item() == pytest.approx(
        losses[0], rel=1e-12
    )


def test_equal_distributions_reach_the_entropy_and_no_gradient() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(1)
    student = [(0.1 * logits).requires_grad_() for _ in range(2)]
    loss = distillation_cross_entropy(student, [p, p], student_temperature=0.1)
    assert torch.allclose(loss, -(p * p.log()).sum(1), atol=1e-12)
    loss.sum().backward()
    # p - q cancels up to the rounding of float64, divided by the temperature
    assert all(s.grad is not None and s.grad.abs().max() < 1e-13 for s in student)


def test_order_of_local_crops_does_not_matter() -> None:
    teacher = probabilities(TEACHER, CENTER, 0.04)
    student = tensors((*STUDENT, (0.3, -0.2, 0.1)))
    swapped = [student[0], student[1], student[3], student[2]]
    losses = [distillation_cross_entropy(x, teacher, student_temperature=0.1).item() for x in (student, swapped)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_gradient_reaches_the_student_alone() -> None:
    method, batch = make_dino(), make_batch()
    method.loss(batch.views, batch).total.backward()
    assert all(p.grad is not None for p in method.backbone.parameters())
    assert all(p.grad is not None for p in method.head.parameters())
    assert all(p.grad is None and not p.requires_grad for p in method.target.parameters())
    assert not method.center.requires_grad


def test_gradient_of_the_first_global_crop_comes_from_the_other_teacher_only() -> None:
    # dL/ds_v = sum_{u != v} (q_v - p_u) / (pairs * temperature)
    teacher, student = probabilities(TEACHER, CENTER, 0.04), [s.requires_grad_() for s in tensors(STUDENT)]
    distillation_cross_entropy(student, teacher, student_temperature=0.1).sum().backward()
    for v, s in enumerate(student):
        q = (s / 0.1).softmax(1)
        expected = sum(q - teacher[u] for u in range(2) if u != v) / (4 * 0.1)
        assert s.grad is not None
        assert torch.allclose(s.grad, expected, atol=1e-13)


def test_prototypes_keep_unit_length_and_are_frozen_at_first() -> None:
    method, batch = make_dino(), make_batch()
    optimizer = torch.optim.AdamW(method.parameters(), lr=0.1, weight_decay=0.5)
    start = method.head.prototypes.clone()
    method.loss(batch.views, batch).total.backward()
    method.on_before_optimizer_step(optimizer)
    optimizer.step()
    assert torch.equal(method.head.prototypes, start)  # neither the gradient nor weight decay moves them
    method.freeze_prototypes_epochs = 0
    method.loss(batch.views, batch).total.backward()
    method.on_before_optimizer_step(optimizer)
    optimizer.step()
    assert not torch.equal(method.head.prototypes, start)
    # unit rows: the logits of x = W_k are at most 1, reached by k itself
    unit = nn.functional.normalize(method.head.prototypes, dim=1)
    head = DINOHead(4, 8, 4, 6).double()
    head.mlp = nn.Sequential()
    head.prototypes = method.head.prototypes
    assert torch.allclose(head(3 * unit).diagonal(), torch.ones(6, dtype=torch.float64), atol=1e-14)


def test_teacher_temperature_warms_up_linearly() -> None:
    method = make_dino(teacher_temperature=0.07, warmup_teacher_temperature=0.04, warmup_teacher_epochs=30)
    expected = {0: 0.04, 10: 0.05, 20: 0.06, 29: 0.069, 30: 0.07, 99: 0.07}
    assert {epoch: method.temperature_at(epoch) for epoch in expected} == pytest.approx(expected, abs=1e-12)
    early, late = make_batch(epoch=0), make_batch(epoch=30)
    assert method.loss(early.views, early).total != method.loss(late.views, late).total


def test_weight_decay_rises_on_matrices_only() -> None:
    method = make_dino()
    recipe = Recipe(views="dino_multicrop", optimizer="adamw", weight_decay=0.04, end_weight_decay=0.4, warmup_epochs=0)
    optimizer = build_optimizer(method.parameter_groups(), recipe)
    expected = {0: 0.04, 50: 0.22, 100: 0.4}
    for step, decay in expected.items():
        apply_schedule(optimizer, recipe, step, 100, 10)
        for group in optimizer.param_groups:
            wanted = decay if group["params"][0].ndim > 1 else 0.0
            assert group["weight_decay"] == pytest.approx(wanted, abs=1e-12)
            assert len({p.ndim > 1 for p in group["params"]}) == 1


def test_teacher_is_evaluated_and_everything_that_evolves_is_state() -> None:
    method = make_dino()
    assert method.evaluation_backbone is method.target.module[0]
    assert method.evaluation_backbone is not method.backbone
    keys = set(method.state_dict())
    assert {"center", "head.prototypes", "target.module.1.prototypes"} <= keys
    other = make_dino()
    batch = make_batch()
    method.loss(batch.views, batch)
    method.after_optimizer_step(1, 10)
    other.load_state_dict(method.state_dict())
    for each in (method, other):
        each.eval()
    assert torch.equal(method.loss(batch.views, batch).total, other.loss(batch.views, batch).total)


def test_head_starts_as_in_the_official_code() -> None:
    torch.manual_seed(0)
    head = DINOHead(64, 256, 32, 1000)
    for layer in head.mlp:
        if isinstance(layer, nn.Linear):
            assert (layer.bias == 0).all()
            # 8192 or more normal draws: the deviation of their standard deviation is below 0.02 * 0.01
            assert layer.weight.std().item() == pytest.approx(0.02, abs=5 * 0.02 * 0.01)
    bound = 32**-0.5
    assert head.prototypes.abs().max() <= bound
    # uniform on [-b, b]: standard deviation b / sqrt(3), error about b * sqrt(0.0267 / 32000) / ... < 0.3 %
    assert head.prototypes.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.015)
