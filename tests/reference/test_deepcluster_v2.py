"""DeepCluster-v2 against its algorithm in plain loops, and the card's values."""

import dataclasses
import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.losses.kmeans import nearest_centroid, spherical_kmeans
from tests.reference.tiny import EXACT, randn, tiny_batch, tiny_method

SMALL = {"hidden_dim": 8, "projection_dim": 4, "num_clusters": 5}
ROWS = torch.tensor([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], dtype=torch.float64)
START = torch.tensor([[1, 0], [0, 1]]).double()


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def lloyd(rows, centroids, iterations):
    rows, centroids = rows.tolist(), centroids.tolist()

    def assign():
        picks = []
        for row in rows:
            similarities = [sum(a * b for a, b in zip(row, c, strict=True)) for c in centroids]
            picks.append(similarities.index(max(similarities)))
        return picks

    for _ in range(iterations):
        picks = assign()
        for k in range(len(centroids)):
            members = [row for row, pick in zip(rows, picks, strict=True) if pick == k]
            if members:
                mean = [sum(values) / len(members) for values in zip(*members, strict=True)]
                norm = math.sqrt(sum(x * x for x in mean))
                centroids[k] = [x / norm for x in mean]
    return centroids, assign()


def cross_entropy(z, centroids, target, t):
    total = 0.0
    for row, y in zip(z.tolist(), target, strict=True):
        logits = [sum(a * b for a, b in zip(row, c, strict=True)) / t for c in centroids.tolist()]
        total += math.log(sum(math.exp(x) for x in logits)) - logits[y]
    return total / len(z)


def test_hand_computed_clustering():
    centroids, assignment = spherical_kmeans(ROWS, START, iterations=1)
    wanted = torch.tensor([[0.9486832981, 0.3162277660], [-0.3162277660, 0.9486832981]], dtype=torch.float64)
    torch.testing.assert_close(centroids, wanted, rtol=0, atol=1e-9)
    assert assignment.tolist() == [0, 0, 1, 1]
    assert cross_entropy(ROWS, centroids, [0, 0, 1, 1], 0.1) == pytest.approx(0.0008966850, abs=1e-9)


@pytest.mark.parametrize(("num", "clusters"), [(8, 3), (30, 7)])
def test_kmeans_equals_the_loop_oracle(num, clusters):
    rows = unit(randn(num, 4)).detach()
    got, assignment = spherical_kmeans(rows, rows[:clusters], iterations=10)
    wanted, picks = lloyd(rows, rows[:clusters], 10)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), **EXACT)
    assert assignment.tolist() == picks
    torch.testing.assert_close(got.norm(dim=1), torch.ones(clusters, dtype=torch.float64), **EXACT)


def test_an_empty_cluster_keeps_its_centroid():
    far = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
    centroids, assignment = spherical_kmeans(ROWS[:3], torch.cat([START, far]), iterations=5)
    assert torch.equal(centroids[2], far[0])
    assert 2 not in assignment.tolist()
    assert torch.isfinite(centroids).all()


def test_equal_rows_fall_into_the_lowest_cluster():
    rows = ROWS[:1].expand(4, 2)
    assert nearest_centroid(rows, rows[:3]).tolist() == [0] * 4


def test_method_clusters_what_it_saw_and_predicts_every_view():
    method = tiny_method("deepcluster_v2", **SMALL)
    batch = tiny_batch(8)
    method.loss(batch.views, batch)
    assert not method.seen.any(), "rows are remembered after the step"
    method.after_optimizer_step(1, 10)
    assert method.seen.tolist() == [True] * 8 + [False] * 24
    rows = torch.stack([unit(method.projector(method.backbone(view))).detach() for view in batch.views])
    torch.testing.assert_close(method.memory[:, :8], rows, **EXACT)

    later = dataclasses.replace(batch, epoch=1)
    total = method.loss(batch.views, later).total
    losses = []
    for head in range(3):
        points = rows[head % 2]
        centroids = method.centroids[head]
        picks = nearest_centroid(points, centroids).tolist()
        assert method.targets[head, :8].tolist() == picks
        assert method.targets[head, 8:].tolist() == [-1] * 24
        losses += [cross_entropy(view, centroids, picks, 0.1) for view in rows]
    torch.testing.assert_close(total.item(), sum(losses) / 6, **EXACT)
    torch.testing.assert_close(method.centroids.norm(dim=2), torch.ones(3, 5, dtype=torch.float64), **EXACT)


def test_clustering_happens_once_an_epoch():
    method, batch = tiny_method("deepcluster_v2", **SMALL), tiny_batch(8)
    method.loss(batch.views, batch)
    method.after_optimizer_step(1, 10)
    later = dataclasses.replace(batch, epoch=1)
    method.loss(batch.views, later)
    first = method.centroids.clone()
    method.after_optimizer_step(2, 10)
    method.loss(batch.views, later)
    assert torch.equal(method.centroids, first)


def test_prototypes_have_no_gradient_and_too_many_are_refused():
    method = tiny_method("deepcluster_v2", **SMALL)
    assert not any("centroids" in name for name, _ in method.named_parameters())
    with pytest.raises(ConfigError, match="must not exceed the training images"):
        tiny_method("deepcluster_v2", **{**SMALL, "num_clusters": 33})
