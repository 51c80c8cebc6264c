"""Small float64 instances of methods, for comparison with oracles."""

import dataclasses

import torch
from torch import nn

from ssl_bench.methods import METHODS
from ssl_bench.methods._build import build_method
from ssl_bench.nn.backbone import build_backbone
from ssl_bench.records import Batch

# float64 sums of fewer than 2^16 terms of order 1 differ by less than 2^16 * 2^-53 = 7e-12 in another order
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def tiny_method(name, *, seed=0, num_classes=3, num_views=2, **arguments):
    """The method on a conv4 of width 2 (or the smallest ViT) for 16 px, in float64 and training mode."""
    torch.manual_seed(seed)
    kind, small = ("conv4", {"width": 2}) if "cnn" in METHODS.get(name).backbones else ("vit_micro", {})
    backbone = build_backbone(kind, in_channels=1, image_size=16, **small)
    facts = {"num_classes": num_classes, "num_samples": 32, "num_views": num_views}
    return build_method(name, backbone, seed=seed, facts=facts, arguments=arguments).double().train()


def bare_method(name, heads=("projector",), **arguments):
    """The method without networks: its views are its projections, so that the loss is a function of them."""
    method = tiny_method(name, **arguments)
    for part in ("backbone", *heads):
        setattr(method, part, nn.Identity())
    return method


def tiny_batch(num=6, *, num_views=2, labels=None, seed=1):
    """Random images of 16 px as views."""
    generator = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(num, 1, 16, 16, generator=generator, dtype=torch.float64) for _ in range(num_views))
    batch = empty_batch(num, labels=labels)
    return dataclasses.replace(batch, views=views)


def empty_batch(num, *, labels=None):
    """A batch of `num` samples without pixels."""
    images = torch.zeros(num, 1, 1, 1, dtype=torch.uint8)
    return Batch(images=images, index=torch.arange(num), epoch=0, seed=0, labels=labels)


def randn(*shape, seed=0):
    """Float64 normal numbers that require gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def record_outputs(module):
    """List that fills with the outputs of every later forward pass."""
    outputs = []
    module.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    return outputs
