"""Regularizers against their equations, and how their terms join a method's loss."""

import dataclasses
import inspect
import math

import pytest
import torch

from ssl_bench.config.study import parse_study
from ssl_bench.errors import ConfigError
from ssl_bench.methods import METHODS
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.regularizers import REGULARIZERS
from ssl_bench.regularizers.dispersive import Dispersive
from ssl_bench.regularizers.e2mc import E2MC
from ssl_bench.regularizers.ldreg import LDReg
from ssl_bench.regularizers.variance import Variance
from ssl_bench.sweep.plan import plan
from tests.distributed_harness import run_on_ranks
from tests.reference.tiny import EXACT, randn, record_outputs, tiny_batch

Z = torch.tensor([[1, 0], [0, 2], [-1, 1]], dtype=torch.float64)
NAMES = REGULARIZERS.names()


def attached(name, *, weight=0.5, layer="embedding", start_epoch=0, **arguments):
    return {"name": name, "weight": weight, "layer": layer, "start_epoch": start_epoch, "arguments": arguments}


def method_with(*regularizers, name="byol"):
    torch.manual_seed(0)
    kind, small = ("conv4", {"width": 2}) if "cnn" in METHODS.get(name).backbones else ("vit_micro", {})
    backbone = build_backbone(kind, in_channels=1, image_size=16, **small)
    facts = {"num_classes": 3, "num_samples": 32, "num_views": 2}
    method = build_method(name, backbone, seed=0, facts=facts, arguments={}, regularizers=regularizers)
    return method.double().train()


@pytest.mark.parametrize("name", NAMES)
def test_constructor_arguments_are_keyword_only_typed_and_documented(name):
    cls = REGULARIZERS.get(name)
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"    {parameter.name}: " in (cls.__doc__ or ""), f"document {parameter.name}"


@pytest.mark.parametrize("name", NAMES)
def test_term_has_a_finite_gradient_on_ordinary_and_collapsed_features(name):
    term = REGULARIZERS.get(name)()
    for views in [(randn(8, 4), randn(8, 4, seed=1)), (torch.zeros(8, 4).double().requires_grad_(),) * 2]:
        value = term(views)
        assert value.shape == ()
        value.backward()
        assert torch.isfinite(value)
        assert all(torch.isfinite(view.grad).all() for view in views)


def rank_terms(rank, world_size, names):
    from ssl_bench.distributed import uneven_batches

    batch = tiny_batch(8)
    results = {}
    for name in names:
        method = method_with(attached(name, weight=1.0)).double()
        for module in method.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()  # the sum over ranks of the term is at stake here, not that of batch norm
        own = slice(0, 3) if rank == 0 else slice(3, 8)
        part = dataclasses.replace(
            batch, images=batch.images[own], index=batch.index[own], views=tuple(v[own] for v in batch.views)
        ) if world_size > 1 else batch  # fmt: skip
        with uneven_batches():
            output = method.objective(part)
        output.total.backward()
        gradient = method.backbone.state_dict(keep_vars=True)
        gradients = [p.grad for p in gradient.values() if getattr(p, "grad", None) is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        if world_size > 1:
            torch.distributed.all_reduce(flat)
            flat /= world_size
        results[name] = (output.terms[f"reg_{name}"], flat)
    return results


@pytest.mark.slow
def test_two_ranks_equal_one_process():
    one = rank_terms(0, 1, NAMES)
    for ranks in run_on_ranks(2, rank_terms, NAMES):
        for name in NAMES:
            for got, want in zip(ranks[name], one[name], strict=True):
                # float64 sums in another order, through a network
                torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_variance_is_the_sum_of_the_hinges():
    z = randn(6, 3).detach() * 0.3
    want = sum(max(0.0, 1 - math.sqrt(float(z[:, j].var()) + 1e-4)) for j in range(3)) / 3
    torch.testing.assert_close(Variance()((z, z)).item(), 2 * want, **EXACT)


def test_dispersive_equals_the_hand_computed_values():
    assert Dispersive(temperature=1.0)((Z,)).item() == pytest.approx(-0.7950325374, abs=1e-9)
    assert Dispersive(temperature=0.5)((Z,)).item() == pytest.approx(-1.0040228672, abs=1e-9)
    assert Dispersive(distance="cosine", temperature=0.5)((Z,)).item() == pytest.approx(1.2956370282, abs=1e-9)


def test_dispersive_is_zero_at_collapse_and_bounded_by_the_log_of_the_batch():
    assert Dispersive()((Z[:1].expand(3, -1),)).item() == pytest.approx(0, abs=1e-15)
    assert Dispersive()((Z * 1e3,)).item() == pytest.approx(-math.log(3), abs=1e-12)
    z = randn(5, 2)
    Dispersive()((z,)).backward()
    torch.testing.assert_close(z.grad.sum(0), torch.zeros(2).double(), rtol=0, atol=1e-14)


def test_ldreg_equals_the_hand_computed_value():
    points = torch.tensor([[0.0], [1.0], [3.0], [7.0], [15.0]], dtype=torch.float64)
    assert LDReg(k=2)((points[:2], points[2:])).item() == pytest.approx(-1.3240146413, abs=1e-9)
    assert LDReg(k=3, norm="l2")((points,)).item() == pytest.approx(-1.0395366350, abs=1e-9)


def test_e2mc_equals_the_hand_computed_value():
    z = torch.tensor([[-1, 0.5], [0, 2], [1, -0.5], [2, 0]], dtype=torch.float64)
    one = 25 * 0.0009577408 + 0.1111449645
    assert E2MC()((z, z)).item() == pytest.approx(2 * one, abs=1e-7)


def test_term_is_added_to_the_loss_with_its_weight():
    batch = tiny_batch()
    plain, regularized = method_with(), method_with(attached("variance", weight=0.5, layer="projection"))
    outputs = record_outputs(regularized.projector)
    total = regularized.objective(batch).total
    term = Variance()(tuple(outputs[:2]))
    torch.testing.assert_close(total, plain.objective(batch).total + 0.5 * term, **EXACT)


def test_views_that_pass_together_are_taken_apart():
    batch = tiny_batch()
    method = method_with(attached("variance"), name="dino")
    outputs = record_outputs(method.backbone)
    value = method.objective(batch).terms["reg_variance"]
    torch.testing.assert_close(value, Variance()(outputs[0].split(6)), **EXACT)


def test_before_its_first_epoch_the_loss_is_bitwise_the_methods_own():
    batch = tiny_batch()
    late = method_with(attached("variance", start_epoch=1))
    assert torch.equal(late.objective(batch).total, method_with().objective(batch).total)
    later = dataclasses.replace(batch, epoch=1)
    assert late.objective(later).total != method_with().objective(later).total


def test_a_method_without_the_layer_is_refused_before_training():
    with pytest.raises(ConfigError, match="needs a method with a `projector`, but DINO has none"):
        method_with(attached("variance", layer="projection"), name="dino")


def test_a_method_that_never_embeds_whole_images_is_refused():
    with pytest.raises(ConfigError, match="needs a loss that passes whole views through `backbone`"):
        method_with(attached("variance"), name="mae").objective(tiny_batch(num_views=1))


def study(**entry):
    return parse_study(
        {
            "name": "s",
            "datasets": ["fashion_mnist_mini"],
            "backbones": ["conv4"],
            "methods": ["byol", {"name": "byol", **entry}],
            "seeds": [0, 1],
            "protocols": ["knn"],
        }
    )


def test_regularized_trial_is_a_row_of_its_own():
    trials = plan(study(regularizers=[{"name": "variance", "weight": 0.1}]))
    assert len({trial.id for trial in trials}) == 4
    assert trials[2].label.startswith("byol + variance / ")
    assert trials[2].method["regularizers"] == [
        {"name": "variance", "version": 1, "weight": 0.1, "layer": "projection", "start_epoch": 0, "arguments": {}}
    ]


def test_continued_trial_starts_from_the_same_seed():
    trials = plan(study(init_from="byol", recipe={"epochs": 2}))
    assert [trial.init_from for trial in trials] == ["", "", trials[0].id, trials[1].id]
    assert trials[2].label.startswith("byol (continued) / ")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"regularizers": [{"name": "varianse", "weight": 1}]}, "Did you mean 'variance'"),
        ({"regularizers": [{"name": "variance", "weight": 0}]}, "greater than 0"),
        ({"regularizers": [{"name": "variance", "weight": 1, "arguments": {"flor": 1}}]}, "floor"),
        ({"init_from": "simclr"}, "must name one method that stands before"),
        ({"recipe": {"warmup_epochs": 8}}, "must be shorter than the training, got 8 of 8 epochs"),
    ],
)
def test_mistakes_are_named_before_anything_runs(entry, message):
    with pytest.raises(ConfigError, match=message):
        plan(study(**entry))
