"""Evaluation on two and three ranks: every sample once, the single process's figures."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ssl_bench.evaluation import EvaluationContext, cached_features, extract_features
from ssl_bench.evaluation.loading import JoinedStore
from ssl_bench.evaluation.protocols import finetune
from ssl_bench.evaluation.protocols.finetune import FineTune
from ssl_bench.evaluation.protocols.knn import KNN
from tests.distributed_harness import run_on_ranks
from tests.unit.evaluation.fakes import FakeDataset, StubContext, splits, tiny_net


def features_on_rank(rank, world_size):
    found = extract_features(tiny_net(), FakeDataset(), "train", batch_size=5)
    few = extract_features(tiny_net(), FakeDataset(sizes=(2, 12, 14)), "train")  # fewer images than three ranks
    return {"features": found.features, "labels": found.labels, "index": found.index, "few": few.features}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_features_equal_the_single_process(world_size):
    """33 images do not divide by 2; 2 images leave a rank of 3 without work."""
    single = features_on_rank(0, 1)
    for found in run_on_ranks(world_size, features_on_rank):
        assert torch.equal(found["labels"], single["labels"])
        assert torch.equal(found["index"], torch.arange(33))
        # other batch sizes may sum convolutions in another order: a few float32 roundings
        torch.testing.assert_close(found["features"], single["features"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["few"], single["few"], rtol=1e-5, atol=1e-6)


def cached_on_rank(rank, world_size, folder):
    """Rank 1 cannot see the cache that rank 0 has: both must extract, none may hang."""
    own = Path(folder) / ("shared" if rank == 0 else "empty")
    found = cached_features(tiny_net(), FakeDataset(), "test", folder=own)
    return found.features


def test_ranks_agree_on_whether_to_extract(tmp_path):
    single = cached_features(tiny_net(), FakeDataset(), "test", folder=tmp_path / "shared").features
    for found in run_on_ranks(2, cached_on_rank, str(tmp_path)):
        torch.testing.assert_close(found, single, rtol=1e-5, atol=1e-6)


def knn_on_rank(rank, world_size, folder):
    context = StubContext(Path(folder), 3, **splits(sizes=(60, 30, 31), spread=2.0))
    context.writes = rank == 0
    rows = KNN(ks=(5, 20)).run(context)
    return [[row.value or 0.0, row.n_test] for row in rows]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_knn_rows_equal_the_single_process(world_size, tmp_path):
    single = knn_on_rank(0, 1, str(tmp_path))
    assert single[0][1] == 31
    for found in run_on_ranks(world_size, knn_on_rank, str(tmp_path)):
        assert found == single


def finetune_on_rank(rank, world_size, folder):
    finetune.MIN_STEPS = 1
    net = tiny_net().double()
    net.net[3].p = 0.0  # dropout would differ between ranks
    context = EvaluationContext(net, FakeDataset(), work_dir=Path(folder))
    stores = context.dataset.stores
    protocol = FineTune(epochs=2, base_lrs=(0.3,), global_batch_size=15)  # 15 does not divide by 2
    original = finetune.Classifier
    finetune.Classifier = lambda *a, **k: original(*a, **k).double()
    # exact views: the pipeline's float32 may round differently in batches of other sizes
    context.views = lambda name: lambda batch: dataclasses.replace(batch, views=(batch.images.double() / 255 - 0.5,))
    try:
        model = protocol._train(context, JoinedStore(stores["train"], stores["validation"]), torch.arange(45), 0.3, 2)
    finally:
        finetune.Classifier = original
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_finetuned_weights_equal_the_single_process(tmp_path):
    """Float64, so that only summation order differs: 1e-16 a step, amplified by a few steps of training."""
    single = finetune_on_rank(0, 1, str(tmp_path))
    for found in run_on_ranks(2, finetune_on_rank, str(tmp_path)):
        for name, value in single.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
