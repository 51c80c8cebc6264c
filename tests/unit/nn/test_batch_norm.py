"""Conversion and single-process behavior; tests/distributed holds the proof over ranks."""

import pytest
import timm
import torch
from torch import nn

from ssl_bench.errors import ConfigError
from ssl_bench.nn.batch_norm import GlobalBatchNorm, GlobalBatchNormAct, convert_batch_norm


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Sequential(nn.BatchNorm1d(4, affine=False))
    )


def test_conversion_keeps_parameters_names_and_modes():
    net = network()
    net[2].eval()
    before = dict(net.named_parameters())
    names = list(net.state_dict())
    converted = convert_batch_norm(net)
    assert converted is net
    assert list(net.state_dict()) == names
    assert all(before[name] is p for name, p in net.named_parameters())
    assert [type(m) for m in (net[1], net[2][0])] == [GlobalBatchNorm] * 2
    assert (net[1].training, net[2][0].training, net[1].momentum) == (True, False, 0.3)


def test_a_batch_norm_itself_is_converted():
    assert isinstance(convert_batch_norm(nn.BatchNorm2d(3)), GlobalBatchNorm)


def test_fused_conversion_takes_torchs_own():
    assert isinstance(convert_batch_norm(network(), fused=True)[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("training", [True, False])
def test_one_process_gives_torchs_batch_norm_bit_for_bit(training):
    ours, theirs = convert_batch_norm(network()).train(training), network().train(training)
    x = torch.randn(5, 3)
    assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_timms_activation_survives():
    torch.manual_seed(0)
    net = timm.create_model("regnety_002", pretrained=False, num_classes=0)
    x = torch.randn(2, 3, 32, 32)
    before = net.eval()(x)
    convert_batch_norm(net)
    assert any(isinstance(m, GlobalBatchNormAct) for m in net.modules())
    assert torch.equal(net(x), before)


def test_unknown_relatives_of_batch_norm_are_refused():
    class Odd(nn.BatchNorm1d):
        pass

    with pytest.raises(ConfigError, match="Odd"):
        convert_batch_norm(nn.Sequential(Odd(3)))
