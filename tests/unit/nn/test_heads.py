import pytest
import torch
from torch import nn

from ssl_bench.nn.heads import mlp


def kinds(head):
    return [type(layer).__name__ for layer in head]


def test_layers_stand_in_order():
    head = mlp(4, (8, 6, 3), hidden_bias=False)
    assert kinds(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert [m.weight.shape for m in head if isinstance(m, nn.Linear)] == [(8, 4), (6, 8), (3, 6)]
    assert head(torch.randn(5, 4)).shape == (5, 3)


def test_one_width_is_a_linear_layer():
    assert kinds(mlp(4, (3,))) == ["Linear"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("hidden_bias", [True, False])
@pytest.mark.parametrize("last_bias", [True, False])
def test_biases(norm, hidden_bias, last_bias):
    first, *_, last = mlp(4, (8, 3), norm=norm, hidden_bias=hidden_bias, last_bias=last_bias)
    assert (first.bias is not None) == (hidden_bias or not norm)  # a layer without batch norm needs its bias
    assert (last.bias is not None) == last_bias


def test_activation_can_be_chosen():
    assert kinds(mlp(4, (8, 3), activation=nn.GELU)) == ["Linear", "BatchNorm1d", "GELU", "Linear"]


@pytest.mark.parametrize(
    ("last_norm", "affine", "shift_is_trained"),
    [(True, True, True), ("no_bias", True, False), ("no_affine", False, None)],
)
def test_output_norm(last_norm, affine, shift_is_trained):
    norm = mlp(4, (8, 3), last_norm=last_norm)[-1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.affine == affine
    if affine:
        assert norm.bias.requires_grad == shift_is_trained
        assert torch.equal(norm.bias, torch.zeros(3))
