import pytest
import torch
from torch import nn

from ssl_bench.nn.target import TargetNetwork


def filled(value):
    online = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.fill_(value)
    return online


def test_average_follows_the_online_network():
    online, target = filled(1.0), TargetNetwork(filled(0.0))
    for expected in (0.1, 0.19, 0.271):
        target.update(online, 0.9)
        for parameter in target.parameters():
            # three float32 interpolations of numbers below 1
            torch.testing.assert_close(parameter, torch.full_like(parameter, expected), rtol=0, atol=3e-7)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_extreme_momenta_copy_and_freeze(momentum, expected):
    target = TargetNetwork(filled(0.0))
    target.update(filled(1.0), momentum)
    assert all(torch.equal(p, torch.full_like(p, expected)) for p in target.parameters())


def test_target_is_an_independent_copy_without_gradient():
    online = nn.Linear(2, 3)
    target = TargetNetwork(online)
    x = torch.ones(4, 2, requires_grad=True)
    assert torch.equal(target(x), online(x))
    assert not target(x).requires_grad
    assert not any(p.requires_grad for p in target.parameters())
    assert all(p.requires_grad for p in online.parameters())
    with torch.no_grad():
        online.weight.add_(1.0)
    assert not torch.equal(target(x), online(x))


def test_buffers_are_the_targets_own():
    online = filled(1.0)
    target = TargetNetwork(online)
    online(torch.randn(8, 2))
    before = target.module[1].running_mean.clone()
    target.update(online, 0.5)
    assert torch.equal(target.module[1].running_mean, before)
    target(torch.randn(8, 2))
    assert not torch.equal(target.module[1].running_mean, before)


def test_state_dict_restores_weights_and_statistics():
    target = TargetNetwork(filled(0.0))
    target.update(filled(1.0), 0.9)
    target(torch.randn(8, 2))
    restored = TargetNetwork(filled(5.0))
    restored.load_state_dict(target.state_dict())
    x = torch.randn(3, 2)
    assert torch.equal(restored.eval()(x), target.eval()(x))


def test_networks_of_different_shape_are_refused():
    target = TargetNetwork(nn.Linear(2, 3))
    with pytest.raises(RuntimeError):
        target.update(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), 0.9)
