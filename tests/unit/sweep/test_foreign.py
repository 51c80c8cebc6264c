"""Weights trained elsewhere: which parameters are found in which layout, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file

from ssl_bench.errors import ConfigError
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.sweep.foreign import evaluate_backbone, fit_weights, read_weights


def network(seed=0):
    torch.manual_seed(seed)
    return build_backbone("conv4", in_channels=1, image_size=28)


def judge(tmp_path, **changes):
    settings = {
        "weights": None, "prefix": None, "dataset_name": "fashion_mnist_mini", "dataset_arguments": {},
        "protocols": ["knn"], "protocol_arguments": {}, "seed": 0, **changes,
    }  # fmt: skip
    return evaluate_backbone(settings.pop("backbone", "conv4"), **settings)


@pytest.mark.parametrize(
    "layout",
    [
        lambda state: state,
        lambda state: {"state_dict": state},
        lambda state: {"model": {f"module.encoder_q.{k}": v for k, v in state.items()}, "epoch": 3},
        lambda state: {f"_orig_mod.{k}": v for k, v in state.items()} | {"fc.weight": torch.zeros(3, 2)},
    ],
)
def test_every_parameter_is_found_behind_prefixes_and_nesting(tmp_path, layout):
    source, target = network(), network(1)
    torch.save(layout(source.state_dict()), tmp_path / "weights.pt")
    target.load_state_dict(fit_weights(read_weights(tmp_path / "weights.pt"), target, where="weights.pt"))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_a_momentum_pair_needs_a_prefix():
    source, other, target = network(), network(2), network(1)
    tensors = {f"online.{k}": v for k, v in source.state_dict().items()}
    tensors |= {f"target.{k}": v for k, v in other.state_dict().items()}
    with pytest.raises(ConfigError, match=r"holds this backbone 2 times.*--prefix: 'online\.', 'target\.'"):
        fit_weights(tensors, target, where="file")
    target.load_state_dict(fit_weights(tensors, target, where="file", prefix="target."))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), target.parameters(), strict=True))


def test_missing_parameters_are_counted_and_named():
    tensors = dict(list(network().state_dict().items())[:-3])
    with pytest.raises(ConfigError, match="must hold every parameter of 'conv4', but lacks"):
        fit_weights(tensors, network(), where="file")


class Opaque:
    """Stands for whatever a training code pickles into its checkpoints."""


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b""), "whole safetensors file or torch checkpoint|tensors and plain types"),
        (lambda path: path.write_bytes(b"not a checkpoint"), "whole safetensors|tensors and plain types"),
        (lambda path: torch.save({"state_dict": {"w": torch.ones(1)}, "hparams": Opaque()}, path), "run code"),
        (lambda path: torch.save({"epoch": 3}, path), "it holds none"),
        (lambda path: torch.save([1, 2], path), "it holds none"),
    ],
)
def test_files_that_hold_no_weights_are_refused_with_the_reason(tmp_path, write, message):
    path = tmp_path / "weights.pt"
    write(path)
    with pytest.raises(ConfigError, match=message):
        read_weights(path)


def test_weights_decide_the_rows(tmp_path):
    save_file(network().state_dict(), tmp_path / "weights.safetensors")
    random, loaded = judge(tmp_path), judge(tmp_path, weights=tmp_path / "weights.safetensors")
    assert [row["metric"] for row in random] == [row["metric"] for row in loaded]
    assert [row["value"] for row in random] != [row["value"] for row in loaded]
    assert all(row["n_test"] == 2000 for row in loaded if row["split"] == "test")


def test_a_folder_without_a_backbone_and_a_wrong_argument_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must hold backbone\.json"):
        judge(tmp_path, backbone=str(tmp_path))
    with pytest.raises(ConfigError, match="Unknown argument 'paht' of dataset 'image_folder'"):
        judge(tmp_path, dataset_name="image_folder", dataset_arguments={"paht": "x"})


def test_protocol_arguments_are_checked_and_reach_their_protocol(tmp_path):
    rows = judge(tmp_path, protocols=["spectrum"], protocol_arguments={"spectrum.num_samples": 100})
    assert rows[0]["n_test"] == 100
    with pytest.raises(ConfigError, match=r"Unknown argument 'num'.*num_samples"):
        judge(tmp_path, protocols=["spectrum"], protocol_arguments={"spectrum.num": 100})
    with pytest.raises(ConfigError, match=r"must read PROTOCOL.KEY=VALUE.*'knn.ks'"):
        judge(tmp_path, protocols=["spectrum"], protocol_arguments={"knn.ks": [5]})
    with pytest.raises(ConfigError, match=r"protocol 'ood' needs the argument 'datasets'"):
        judge(tmp_path, protocols=["ood"])
