"""SwAV against the paper's equations in plain loops, and the card's values."""

import math

import pytest
import torch

from ssl_bench.losses.clustering import sinkhorn, swapped_cross_entropy
from tests.reference.tiny import EXACT, randn, tiny_batch, tiny_method

SMALL = {"hidden_dim": 8, "projection_dim": 4, "num_prototypes": 5, "queue_size": 0, "freeze_prototypes_epochs": 0}
S_1 = torch.tensor([[0.9, 0.1, 0], [0.8, 0.3, 0.1], [0.7, 0.2, 0.6], [0.6, 0.5, 0.4]]).double()
S_2 = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.1, 0.3], [0.2, 0.1, 0.7], [0.3, 0.6, 0.2]]).double()


def codes_of(scores, eps=0.05, rounds=3):
    """The official algorithm, entry by entry: (K, B) mass, rows to 1/K, columns to 1/B."""
    s = scores.tolist()
    num, k = len(s), len(s[0])
    mass = [[math.exp(s[i][j] / eps) for i in range(num)] for j in range(k)]
    total = sum(map(sum, mass))
    mass = [[x / total for x in row] for row in mass]
    for _ in range(rounds):
        mass = [[x / sum(row) / k for x in row] for row in mass]
        sums = [sum(row[i] for row in mass) for i in range(num)]
        mass = [[row[i] / sums[i] / num for i in range(num)] for row in mass]
    return torch.tensor([[mass[j][i] * num for j in range(k)] for i in range(num)], dtype=torch.float64)


def cross_entropy(codes, scores, t):
    total = 0.0
    for q, s in zip(codes.tolist(), scores.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x / t) for x in s))
        total -= sum(p * (x / t - log_sum) for p, x in zip(q, s, strict=True))
    return total / len(codes)


def test_hand_computed_codes():
    codes = sinkhorn(S_1)
    wanted = {0: (0.9990029371, 0.0009736218, 0.0000234411), 1: (0.7171233737, 0.2819579059, 0.0009187204),
              3: (0.0008324531, 0.9756769479, 0.0234905989)}  # fmt: skip
    for row, values in wanted.items():
        torch.testing.assert_close(codes[row], torch.tensor(values).double(), rtol=0, atol=1e-7)
    means = torch.tensor((0.4304307262, 0.3151204090, 0.2544488648)).double()
    torch.testing.assert_close(codes.mean(0), means, rtol=0, atol=1e-7)
    torch.testing.assert_close(
        sinkhorn(S_1, iterations=100).mean(0), torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-7
    )


def test_hand_computed_loss():
    first = swapped_cross_entropy(sinkhorn(S_1), S_2, temperature=0.1).mean().item()
    second = swapped_cross_entropy(sinkhorn(S_2), S_1, temperature=0.1).mean().item()
    assert (first, second) == pytest.approx((0.4357518175, 0.7088557792), abs=1e-7)


@pytest.mark.parametrize(("num", "k"), [(1, 3), (6, 4), (9, 20)])
def test_codes_equal_the_loop_oracle(num, k):
    scores = torch.tanh(randn(num, k)).detach()
    codes = sinkhorn(scores)
    torch.testing.assert_close(codes, codes_of(scores), **EXACT)
    torch.testing.assert_close(codes.sum(1), torch.ones(num, dtype=torch.float64), **EXACT)


def test_codes_ignore_constants_but_not_those_of_a_sample():
    base = sinkhorn(S_1)
    torch.testing.assert_close(sinkhorn(S_1 + 3.0), base, **EXACT)
    torch.testing.assert_close(sinkhorn(S_1 + torch.tensor([0.3, -0.2, 0.1])), base, **EXACT)
    assert (sinkhorn(S_1 + torch.tensor([[0.3], [0.0], [0.0], [0.0]])) - base).abs().max() > 1e-3


def test_constant_scores_give_uniform_codes_and_the_log_of_the_prototypes():
    same = torch.zeros(4, 7, dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(same), torch.full((4, 7), 1 / 7, dtype=torch.float64), **EXACT)
    assert swapped_cross_entropy(sinkhorn(same), same, temperature=0.1).mean().item() == pytest.approx(math.log(7))


@pytest.mark.parametrize("num_views", [2, 4])
def test_method_equals_the_loop_oracle(num_views):
    method = tiny_method("swav", num_views=num_views, **SMALL)
    batch = tiny_batch(6, num_views=num_views)
    scores = []
    for view in batch.views:
        z = method.projector(method.backbone(view)).detach()
        scores.append(z / z.norm(dim=1, keepdim=True) @ method.prototypes.weight.detach().T)
    expected = 0.0
    for u in range(2):
        codes = codes_of(scores[u])
        others = [cross_entropy(codes, scores[v], 0.1) for v in range(num_views) if v != u]
        expected += sum(others) / len(others) / 2
    torch.testing.assert_close(method.loss(batch.views, batch).total.item(), expected, **EXACT)


def test_prototypes_are_unit_rows_after_every_step():
    method = tiny_method("swav", **SMALL)
    with torch.no_grad():
        method.prototypes.weight.mul_(3.0)
    method.after_optimizer_step(1, 10)
    torch.testing.assert_close(method.prototypes.weight.norm(dim=1), torch.ones(5, dtype=torch.float64), **EXACT)


def test_a_full_queue_takes_part_in_the_codes():
    method = tiny_method("swav", **{**SMALL, "queue_size": 12, "queue_start_epoch": 0})
    batch = tiny_batch(6)
    z = method.projector(method.backbone(batch.views[0])).detach()
    own = z / z.norm(dim=1, keepdim=True)
    weight = method.prototypes.weight.detach()
    assert torch.equal(method._codes(0, own, 0), sinkhorn(own @ weight.T)), "an unfilled queue stays out"
    for _ in range(2):
        method.queues[0].enqueue(torch.randn(6, 4, dtype=torch.float64))
    rows = method.queues[0].rows
    torch.testing.assert_close(method._codes(0, own, 0), codes_of(torch.cat([own, rows]) @ weight.T)[:6], **EXACT)
