"""The untrained baseline is the backbone as its seed draws it."""

import pytest
import torch

from tests.reference.tiny import tiny_batch, tiny_method


def test_nothing_is_trained_and_the_seed_decides():
    first, again, other = tiny_method("random_init"), tiny_method("random_init"), tiny_method("random_init", seed=1)
    assert not first.trainable
    assert not first.uses_labels
    assert {name.split(".")[0] for name, _ in first.named_parameters()} == {"backbone"}
    images = tiny_batch(3).views[0]
    assert torch.equal(first.embed(images), again.embed(images))
    assert not torch.equal(first.embed(images), other.embed(images))


def test_embedding_is_the_backbones_in_evaluation_mode():
    method, images = tiny_method("random_init"), tiny_batch(3).views[0]
    embedding = method.embed(images)
    assert method.training
    assert torch.equal(embedding, method.backbone.eval()(images))


def test_it_has_no_loss():
    method, batch = tiny_method("random_init"), tiny_batch(3)
    with pytest.raises(NotImplementedError):
        method.loss(batch.views, batch)
