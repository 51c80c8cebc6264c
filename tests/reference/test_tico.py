"""TiCo against the paper's equations in plain loops, and the card's values."""

import pytest
import torch
from torch import nn

from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, tiny_batch, tiny_method

SMALL = {"hidden_dim": 8, "projection_dim": 4}


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def oracle(a, b, memory, beta, rho):
    """Loss and new memory from unit rows, entry by entry."""
    a, b, memory = a.tolist(), b.tolist(), memory.tolist()
    num, dim = len(a), len(a[0])
    new = [
        [beta * memory[p][q] + (1 - beta) * sum(r[p] * r[q] for r in a) / num for q in range(dim)] for p in range(dim)
    ]
    invariance = 1 - sum(x * y for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True)) / num
    contrast = sum(r[p] * new[p][q] * r[q] for r in a for p in range(dim) for q in range(dim)) / num
    return invariance + rho * contrast, new


class Fixed(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, view):
        return self.answer

    def update(self, online, momentum):
        pass


def step(method, a, b):
    method.target = Fixed(b)
    total = method.loss((a, b), empty_batch(len(a))).total
    method.after_optimizer_step(1, 10)
    return total


def test_hand_computed_values_of_two_steps():
    a, b = torch.tensor([[1, 0], [0.6, 0.8]]).double(), torch.tensor([[0.8, 0.6], [0, 1]]).double()
    method = bare_method("tico", hidden_dim=4, projection_dim=2)
    assert step(method, a, b).item() == pytest.approx(0.744, abs=1e-7)
    torch.testing.assert_close(
        method.second_moment, torch.tensor([[0.068, 0.024], [0.024, 0.032]]).double(), rtol=0, atol=1e-7
    )
    assert step(method, b, a).item() == pytest.approx(1.140288, abs=1e-7)
    torch.testing.assert_close(
        method.second_moment, torch.tensor([[0.0932, 0.0456], [0.0456, 0.0968]]).double(), rtol=0, atol=1e-7
    )


def test_collapse_rises_from_a_tenth_of_rho_to_rho():
    same = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    method = bare_method("tico", hidden_dim=4, projection_dim=2)
    values = [step(method, same, same).item() for _ in range(200)]
    assert values[0] == pytest.approx(0.8, abs=1e-12)
    assert values[-1] == pytest.approx(8.0, abs=1e-6)  # 8 (1 - 0.9^200)


@pytest.mark.parametrize("num", [2, 7])
def test_method_equals_the_loop_oracle_over_two_steps(num):
    method = tiny_method("tico", **SMALL)
    memory = torch.zeros(4, 4, dtype=torch.float64)
    for seed in (1, 2):
        batch = tiny_batch(num, seed=seed)
        total = method.loss(batch.views, batch).total
        a, b = unit(method.projector(method.backbone(batch.views[0]))), unit(method.target(batch.views[1]))
        expected, new = oracle(a, b, memory, 0.9, 8.0)
        torch.testing.assert_close(total.item(), expected, **EXACT)
        method.after_optimizer_step(seed, 10)
        memory = torch.tensor(new, dtype=torch.float64)
        torch.testing.assert_close(method.second_moment, memory, **EXACT)
        assert memory.trace().item() == pytest.approx(1 - 0.9**seed, abs=1e-9)


def test_gradient_goes_through_the_explicit_rows_only():
    a, b = unit(randn(5, 3)).detach().requires_grad_(), unit(randn(5, 3, seed=1)).detach()
    method = bare_method("tico", hidden_dim=4, projection_dim=3)
    method.target = Fixed(b)
    method.loss((a, b), empty_batch(5)).total.backward()
    moment = 0.1 * a.detach().T @ a.detach() / 5
    explicit = (-b + 2 * 8 * a.detach() @ moment) / 5
    tangent = explicit - (explicit * a.detach()).sum(1, keepdim=True) * a.detach()  # through the normalization
    torch.testing.assert_close(a.grad, tangent, **EXACT)


def test_memory_is_in_the_state_and_not_moved_by_the_loss():
    method, batch = tiny_method("tico", **SMALL), tiny_batch(4)
    method.loss(batch.views, batch)
    assert torch.equal(method.state_dict()["second_moment"], torch.zeros(4, 4, dtype=torch.float64))
