import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ssl_bench.errors import ConfigError, DivergedError
from ssl_bench.evaluation import EvaluationContext
from ssl_bench.evaluation.labels import label_subset
from ssl_bench.evaluation.loading import JoinedStore
from ssl_bench.evaluation.protocols import finetune
from ssl_bench.evaluation.protocols.finetune import Classifier, FineTune, layer_groups, layer_ids
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.optim import apply_schedule, build_optimizer, scaled_lr
from tests.unit.evaluation.fakes import FakeDataset, tiny_net


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(finetune, "MIN_STEPS", 1)


def quick(**arguments):
    return FineTune(**{"epochs": 2, "search_epochs": 1, "base_lrs": (0.1, 0.3), "global_batch_size": 16, **arguments})


def vit(name="vit_micro", image_size=8):
    torch.manual_seed(0)
    return build_backbone(name, in_channels=1, image_size=image_size)


# ---- label subsets ---------------------------------------------------------------------------------


LABELS = torch.tensor([0] * 100 + [1] * 30 + [2] * 4 + [9])


def subset(fraction, seed=0, split="train", fingerprint="f"):
    return label_subset(LABELS, fraction, fingerprint=fingerprint, split=split, seed=seed)


def test_subsets_are_stratified_with_one_image_at_least():
    assert torch.bincount(LABELS[subset(0.1)], minlength=10).tolist() == [10, 3, 1, 0, 0, 0, 0, 0, 0, 1]
    assert torch.bincount(LABELS[subset(0.01)], minlength=10).tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert subset(1.0).tolist() == list(range(len(LABELS)))


def test_subsets_are_nested_and_unique():
    smaller: set[int] = set()
    for fraction in (0.01, 0.03, 0.1, 0.35, 0.9, 1.0):
        indices = subset(fraction).tolist()
        assert len(set(indices)) == len(indices)
        assert smaller <= set(indices)
        smaller = set(indices)


def test_subset_is_a_fixed_function_of_its_arguments():
    assert torch.equal(subset(0.1), subset(0.1))
    for other in (subset(0.1, seed=1), subset(0.1, split="validation"), subset(0.1, fingerprint="g")):
        assert not torch.equal(subset(0.1), other)
    # integer hashing: the same on every machine and in every version, else published subsets would move
    assert subset(0.05).tolist() == [10, 20, 36, 64, 88, 102, 116, 132, 134]


def test_halves_round_up_whatever_their_binary_form():
    labels = torch.zeros(10, dtype=torch.int64)
    sizes = [len(label_subset(labels, f, fingerprint="f", split="train", seed=0)) for f in (0.15, 0.25, 0.35, 0.45)]
    assert sizes == [2, 3, 4, 5]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"in \(0, 1\]"):
        subset(fraction)
    with pytest.raises(ConfigError, match="label_fractions"):
        FineTune(label_fractions=(fraction,))


def test_joined_store_gives_the_images_in_the_asked_order():
    data = FakeDataset()
    first, second = data.stores["train"], data.stores["validation"]
    joined = JoinedStore(first, second)
    order = torch.tensor([40, 0, 44, 32, 33, 5])
    expected = torch.stack([(first.take([i]) if i < 33 else second.take([i - 33]))[0] for i in order.tolist()])
    assert torch.equal(joined.take(order), expected)
    assert len(joined) == 45


# ---- layer groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "expected"),
    [(0.65, (0.003697205891, 0.005688009063, 0.65, 1.0)), (0.75, (0.02375726402, 0.03167635202, 0.75, 1.0))],
)
def test_rate_factors_of_twelve_blocks(decay, expected):
    model = Classifier(vit("vit_tiny"), 3, seed=0)
    factors = {}
    for group in layer_groups(model, decay):
        for name, _ in group.parameters:
            factors[name] = group.lr_factor
    embedding, first, last, head = expected
    for name, factor in factors.items():
        if name.startswith(("backbone.patch_embed", "backbone.cls_token")):
            assert factor == pytest.approx(embedding, rel=1e-9)
        elif name.startswith("backbone.blocks."):
            block = int(name.split(".")[2])
            assert factor == pytest.approx(decay ** (12 - block), rel=1e-12)
        else:
            assert name.startswith(("backbone.norm", "norm.", "head."))
            assert factor == head
    assert factors["backbone.blocks.0.norm1.weight"] == pytest.approx(first, rel=1e-9)
    assert factors["backbone.blocks.11.norm1.weight"] == pytest.approx(last, rel=1e-9)


def test_every_parameter_is_in_one_group_and_tokens_and_vectors_do_not_decay():
    model = Classifier(vit(), 3, seed=0)
    protocol = FineTune()
    optimizer = build_optimizer(layer_groups(model, 0.65), protocol._recipe("vit", 1e-3, 128, 100))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(p.numel() for g in optimizer.param_groups for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    assert len(decays) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        assert decays[id(p)] == (0.0 if p.ndim == 1 or name.endswith("cls_token") else 0.05), name


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.net."])
def test_layer_names_of_timm_and_torchvision(prefix):
    class Names(nn.Module):
        def named_parameters(self, *args, **kwargs):
            names = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight",
                     "blocks.1.mlp.fc1.bias", "norm.weight",
                     "encoder.layers.encoder_layer_1.ln_1.weight", "conv_proj.weight", "class_token",
                     "encoder.pos_embedding")  # fmt: skip
            return [(prefix + name, nn.Parameter(torch.zeros(1))) for name in names]

    assert list(layer_ids(Names()).values()) == [0, 0, 0, 1, 2, 3, 2, 0, 0, 0]


def test_vit_whose_names_do_not_tell_the_layer_is_refused():
    with pytest.raises(ConfigError, match="got the unknown"):
        layer_ids(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="got no blocks"):
        layer_ids(nn.ModuleDict({"norm": nn.LayerNorm(2)}))
    strange = vit()
    strange.gate = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"unknown \['backbone.gate'\]"):
        layer_groups(Classifier(strange, 3, seed=0), 0.65)
    assert {group.lr_factor for group in layer_groups(Classifier(strange, 3, seed=0), 1.0)} == {1.0}


def test_learned_positions_are_in_the_first_layer_without_decay():
    backbone = build_backbone("vit_micro", in_channels=1, image_size=8, position_code="learned")
    (group,) = [g for g in layer_groups(Classifier(backbone, 3, seed=0), 0.5) if g.weight_decay == 0.0]
    assert {name for name, _ in group.parameters} == {"backbone.cls_token", "backbone.position_embed"}
    assert group.lr_factor == 0.5**5


def test_vit_schedule_follows_the_card():
    """Base lr 5e-4 at batch 1024 is 2e-3; half of it midway through the warm-up; .0010005 at epoch 52.5 of 100."""
    recipe = FineTune()._recipe("vit", 5e-4, 1024, 100)
    assert scaled_lr(recipe) == pytest.approx(2e-3)
    optimizer = build_optimizer(layer_groups(Classifier(vit(), 3, seed=0), 1.0), recipe)
    for epoch, expected in ((2.5, 1e-3), (5, 2e-3), (52.5, 0.0010005), (100, 1e-6)):
        apply_schedule(optimizer, recipe, int(epoch * 10), 1000, 10)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)


# ---- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_net, vit])
def test_first_loss_is_log_of_the_classes_and_gradient_reaches_the_first_layer(make):
    model = Classifier(make(), 7, seed=0)
    loss = nn.functional.cross_entropy(model(torch.randn(5, 1, 8, 8)), torch.arange(5))
    assert float(loss.detach()) == pytest.approx(math.log(7), abs=1e-3)
    loss.backward()
    first = next(p for name, p in model.named_parameters() if name.endswith(("net.0.weight", "patch_embed.weight")))
    assert float(first.grad.norm()) > 0


def test_rows_of_each_fraction_and_stored_lists(tmp_path):
    data = FakeDataset(sizes=(120, 60, 31))
    context = EvaluationContext(tiny_net(), data, work_dir=tmp_path)
    rows = quick(label_fractions=(1.0, 0.1)).run(context)
    assert [row.metric for row in rows] == ["top1", "top5", "top1_10pct", "top5_10pct"]
    assert all(row.n_test == 31 and row.selected_on == "validation" for row in rows)
    assert rows[1].value is None
    assert (rows[0].details["n_train"], rows[0].details["n_validation"]) == (120, 60)
    assert (rows[2].details["n_train"], rows[2].details["n_validation"]) == (12, 6)
    lists = json.loads((tmp_path / "finetune_labels_10pct.json").read_text())
    assert lists["fingerprint"] == data.fingerprint
    assert len(lists["train"]) == 12
    assert max(lists["validation"]) < 60
    stored = load_file(tmp_path / "finetune_predictions.safetensors")
    for row in rows[::2]:
        assert float((stored[row.metric] == stored["labels"]).double().mean()) == row.value


def test_learns_and_leaves_the_backbone_alone(tmp_path):
    net = tiny_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    context = EvaluationContext(net, FakeDataset(sizes=(120, 60, 60)), work_dir=tmp_path)
    digest = context.backbone_sha256
    row = quick(epochs=8).run(context)[0]
    assert row.value > 0.6  # chance is 1/3; brightness tells the class
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(torch.equal(before[name], value) for name, value in context.backbone().state_dict().items())
    assert context.backbone_sha256 == digest


def test_same_seed_same_predictions(tmp_path):
    def predictions(seed):
        context = EvaluationContext(tiny_net(), FakeDataset(), work_dir=tmp_path, seed=seed)
        torch.manual_seed(5)  # dropout is the backbone's own and draws from torch's generator
        quick().run(context)
        return load_file(tmp_path / "finetune_predictions.safetensors")["top1"]

    assert torch.equal(predictions(0), predictions(0))


def test_frozen_parameters_are_trained_again(tmp_path):
    net = tiny_net().requires_grad_(False)
    context = EvaluationContext(net, FakeDataset(), work_dir=tmp_path)
    model = quick()._train(context, JoinedStore(*list(context.dataset.stores.values())[:2]), torch.arange(45), 0.3, 1)
    assert not torch.equal(model.backbone.net[0].weight, net.net[0].weight)


def test_test_split_is_read_once_after_every_choice_and_the_last_epoch_counts(tmp_path, monkeypatch):
    """Scores are asked for once a rate on validation and once on test: no epoch is picked by looking."""
    data = FakeDataset()
    seen = []
    original = finetune._scores

    def spy(model, store, context, index=None):
        seen.append((len(store), None if index is None else len(index), model.num_steps, data.asked.count("test")))
        return original(model, store, context, index)

    monkeypatch.setattr(finetune, "_scores", spy)
    quick(epochs=3).run(EvaluationContext(tiny_net(), data, work_dir=tmp_path))
    steps = 33 // 16
    assert seen == [(45, 12, steps, 0), (45, 12, steps, 0), (14, None, 3 * (45 // 16), 1)]


def test_one_rate_needs_no_search(tmp_path):
    row = quick(base_lrs=(0.1,)).run(EvaluationContext(tiny_net(), FakeDataset(), work_dir=tmp_path))[0]
    assert row.selected_on == "none"
    assert row.details["validation_top1"] == []


def test_small_sets_train_in_one_batch_and_at_least_the_minimum_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "MIN_STEPS", 7)
    data = FakeDataset(sizes=(9, 3, 5))
    row = quick(global_batch_size=128, base_lrs=(0.1,)).run(EvaluationContext(tiny_net(), data, work_dir=tmp_path))[0]
    assert row.details["num_steps"] == 7
    assert row.details["global_batch_size"] == 12


def test_missing_classes_are_listed(tmp_path):
    data = FakeDataset(sizes=(8, 4, 4), num_classes=10, labels=([0, 1, 2, 9] * 2, [0, 1, 2, 9], [9] * 4))
    rows = quick(label_fractions=(0.01,)).run(EvaluationContext(tiny_net(), data, work_dir=tmp_path))
    assert rows[0].details["classes_missing_in_train"] == [3, 4, 5, 6, 7, 8]
    assert rows[0].details["n_labels"] == 8  # one a class in train and in validation
    assert rows[1].value is not None  # ten classes: top-5 is defined


def test_divergence_is_an_error_in_the_end_and_a_loss_in_the_search(tmp_path):
    context = EvaluationContext(tiny_net(), FakeDataset(), work_dir=tmp_path)
    with pytest.raises(DivergedError, match="smaller base_lrs"):
        quick(base_lrs=(1e30,)).run(context)
    row = quick(base_lrs=(1e30, 0.1)).run(context)[0]
    assert row.details["base_lr"] == 0.1
    assert row.details["validation_top1"][0] == 0.0


def test_vit_and_pixels_run(tmp_path):
    data = FakeDataset()
    for name, net in (("vit", vit()), ("pixels", build_backbone("pixels", in_channels=1, image_size=8))):
        row = quick(base_lrs=(1e-3,)).run(EvaluationContext(net, data, work_dir=tmp_path / name))[0]
        assert row.details["optimizer"] == ("adamw" if name == "vit" else "sgd")
        assert row.n_test == 14


@pytest.mark.parametrize(
    "arguments",
    [{"epochs": 0}, {"search_epochs": 0}, {"global_batch_size": 0}, {"base_lrs": ()}, {"layer_decay": 0.0}],
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        FineTune(**arguments)
