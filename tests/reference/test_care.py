"""CARE against the code's chunked loss in plain loops, the card's values, and the views that it needs."""

import dataclasses
import math

import pytest
import torch

from ssl_bench.errors import ConfigError
from ssl_bench.methods.care import equivariance
from ssl_bench.records import Batch
from ssl_bench.views import build_views
from tests.reference.tiny import EXACT, bare_method, empty_batch, randn, record_outputs, tiny_batch, tiny_method

F = torch.tensor([[1, 0], [0, 1], [0.6, 0.8]], dtype=torch.float64)
F_PRIME = torch.tensor([[0.8, 0.6], [-0.6, 0.8], [1, 0]], dtype=torch.float64)
FOUR = torch.cat([F, torch.tensor([[0.8, -0.6]], dtype=torch.float64)])
FOUR_PRIME = torch.cat([F_PRIME, torch.tensor([[0, 1]], dtype=torch.float64)])


def units(rows):
    return [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in rows.tolist()]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def contrast_oracle(z_1, z_2, temperature):
    z, num = units(torch.cat([z_1, z_2])), len(z_1)
    total = 0.0
    for i in range(2 * num):
        positive = math.exp(dot(z[i], z[(i + num) % (2 * num)]) / temperature)
        others = (j for j in range(2 * num) if j not in (i, (i + num) % (2 * num)))
        negatives = sum(math.exp(dot(z[i], z[j]) / temperature) for j in others)
        total -= math.log(positive / (positive + negatives))
    return total / (2 * num)


def equivariance_oracle(z_a, z_b, chunk_size):
    """Twice the squared differences of the Gram matrices of each chunk, self left out, as a mean over images."""
    a, b = units(z_a), units(z_b)
    total = 0.0
    for start in range(0, len(a), chunk_size):
        chunk = range(start, min(start + chunk_size, len(a)))
        total += sum(2 * (dot(a[i], a[j]) - dot(b[i], b[j])) ** 2 for i in chunk for j in chunk if i != j)
    return total / len(a)


def term_of(z_a, z_b, chunk_size):
    return equivariance(z_a, z_b, z_a, z_b, chunk_size=chunk_size).mean()


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(randn(*shape, seed=seed).detach(), dim=1)


def test_hand_computed_values():
    method = bare_method("care", temperature=0.5, equivariance_weight=0.01, chunk_size=3)
    output = method.loss((F, F_PRIME, F, F_PRIME), empty_batch(3))
    assert output.terms["equivariance"].item() == pytest.approx(2.6666666667, abs=1e-9)
    assert output.terms["contrast"].item() == pytest.approx(1.2921383277, abs=1e-9)
    assert output.total.item() == pytest.approx(1.3188049944, abs=1e-9)
    assert term_of(FOUR, FOUR_PRIME, 2).item() == pytest.approx(0, abs=1e-12)
    assert term_of(FOUR, FOUR_PRIME, 4).item() == pytest.approx(4, abs=1e-9)


@pytest.mark.parametrize(("num", "chunk_size"), [(4, 2), (6, 6), (8, 16), (11, 4)])
def test_loss_equals_the_loop_oracle(num, chunk_size):
    z = [randn(num, 5, seed=seed) for seed in range(4)]
    method = bare_method("care", temperature=0.3, equivariance_weight=0.7, chunk_size=chunk_size)
    expected = contrast_oracle(*z[:2], 0.3) + 0.7 * equivariance_oracle(*z[2:], chunk_size)
    torch.testing.assert_close(method.loss(tuple(z), empty_batch(num)).total.item(), expected, **EXACT)


@pytest.mark.parametrize("reflect", [False, True])
def test_any_orthogonal_map_of_all_images_costs_nothing(reflect):
    z, rotation = unit(8, 4), torch.linalg.qr(randn(4, 4, seed=1).detach()).Q
    if (torch.linalg.det(rotation) < 0) != reflect:
        rotation[:, 0] *= -1
    assert term_of(z, z @ rotation.T, 4).item() == pytest.approx(0, abs=1e-25)
    assert term_of(z, unit(8, 4, seed=2), 4) > 1e-2


def test_term_is_symmetric_and_blind_to_the_order_within_a_chunk():
    z_a, z_b = unit(8, 4), unit(8, 4, seed=1)
    expected = term_of(z_a, z_b, 4)
    order = torch.tensor([2, 0, 3, 1, 7, 4, 6, 5])
    torch.testing.assert_close(term_of(z_b, z_a, 4), expected, **EXACT)
    torch.testing.assert_close(term_of(z_a[order], z_b[order], 4), expected, **EXACT)


def test_no_gradient_where_the_gram_matrices_agree():
    z = unit(6, 3).requires_grad_()
    term_of(z, z.detach() @ torch.linalg.qr(randn(3, 3).detach()).Q, 3).backward()
    torch.testing.assert_close(z.grad, torch.zeros_like(z), rtol=0, atol=1e-14)


def test_collapse_is_finite():
    z = torch.ones(4, 3, dtype=torch.float64).requires_grad_()
    output = bare_method("care").loss((z, z, z, z), empty_batch(4))
    output.total.backward()
    assert output.total.item() == pytest.approx(math.log(7), abs=1e-12)
    assert torch.isfinite(z.grad).all()


def test_method_runs_each_view_by_itself():
    method, batch = tiny_method("care", num_views=4, chunk_size=2, equivariance_weight=0.4), tiny_batch(6, num_views=4)
    projections = record_outputs(method.projector)
    total = method.loss(batch.views, batch).total
    assert len(projections) == 4
    expected = contrast_oracle(*projections[:2], 0.5) + 0.4 * equivariance_oracle(*projections[2:], 2)
    torch.testing.assert_close(total.item(), expected, **EXACT)


def pipeline(**overrides):
    return build_views("care", image_size=16, channels=3, mean=(0.5,) * 3, std=(0.2,) * 3, overrides=overrides)


def test_views_of_a_chunk_share_their_draws():
    image = torch.randint(0, 256, (1, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    index = torch.tensor([5, 3, 8, 1, 0, 7, 2])
    batch = Batch(images=image.expand(7, -1, -1, -1), index=index, epoch=0, seed=0)
    views = pipeline(shared_by=3)(batch).views
    for view in views[2:]:
        for run in view.split(3):  # the same image under the same augmentation
            assert torch.equal(run, run[:1].expand_as(run))
        assert not torch.equal(view[0], view[3])
    assert not torch.equal(views[2][0], views[3][0])
    assert not torch.equal(views[0][0], views[0][1])


def test_shared_draws_are_those_of_the_first_image_of_the_chunk():
    images = torch.randint(0, 256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch = Batch(images=images, index=torch.tensor([5, 3, 8, 1]), epoch=2, seed=1)
    leaders = dataclasses.replace(batch, index=torch.tensor([5, 5, 8, 8]))
    alone = build_views("care", image_size=16, channels=3, mean=(0.5,) * 3, std=(0.2,) * 3, overrides={"shared_by": 4})
    alone.specs = tuple(dataclasses.replace(spec, shared_by=1) for spec in alone.specs)
    for got, expected in zip(pipeline(shared_by=2)(batch).views[2:], alone(leaders).views[2:], strict=True):
        assert torch.equal(got, expected)


def test_large_shared_views_are_mirrored_together_and_not_cropped_at_random():
    views = build_views(
        "care", image_size=112, channels=1, mean=(0.5,), std=(0.5,), overrides={"jitter_probability": 0}
    )
    image = torch.arange(128, dtype=torch.uint8).repeat(1, 128, 1)  # brighter to the right
    crops = [views.crop_in_worker(image, index, 0, 0) for index in range(32)]
    assert all(torch.equal(crop[v], crops[0][2]) for crop in crops for v in (2, 3))
    images = tuple(torch.stack(view) for view in zip(*crops, strict=True))
    spec = [dataclasses.replace(spec, blur_probability=0.0) for spec in views.specs]
    views.specs = tuple(spec)
    made = views(Batch(images=images, index=torch.arange(32), epoch=0, seed=0)).views[2]
    mirrored = made[:, 0, 0, 0] > made[:, 0, 0, -1]
    assert mirrored.any()
    assert not mirrored.all()
    for run in mirrored.split(8):
        assert run.all() or not run.any()
    cropped = build_views(
        "care", image_size=112, channels=1, mean=(0.5,), std=(0.5,), overrides={"crop_scale": [0.5, 1]}
    )
    with pytest.raises(ConfigError, match="share"):
        cropped.crop_in_worker(image, 0, 0, 0)


def test_views_that_do_not_share_their_draws_are_refused():
    class Data:
        view_pipeline = pipeline(shared_by=4)

    class Trainer:
        datamodule = Data()

    method = tiny_method("care", num_views=4, chunk_size=3)
    method.on_pretrain_start()  # without a trainer there is nothing to compare with
    method._trainer = Trainer()
    with pytest.raises(ConfigError, match="shared_by"):
        method.on_pretrain_start()
    method.chunk_size = 2
    method.on_pretrain_start()
