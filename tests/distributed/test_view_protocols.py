"""Protocols that run the network on altered images: two ranks give the single process's figures."""

from pathlib import Path

import pytest

from ssl_bench.evaluation import EvaluationContext
from ssl_bench.evaluation.protocols import rmqm
from ssl_bench.evaluation.protocols.rmqm import RMQM
from ssl_bench.evaluation.protocols.view_geometry import ViewGeometry
from tests.distributed_harness import run_on_ranks
from tests.unit.evaluation.fakes import FakeDataset, tiny_net


@pytest.fixture(autouse=True)
def _restore_batch(monkeypatch):
    monkeypatch.setattr(rmqm, "MAX_BATCH", rmqm.MAX_BATCH)


def rows_on_rank(rank, world_size, folder):
    context = EvaluationContext(tiny_net(), FakeDataset(), work_dir=Path(folder) / str(rank), batch_size=5)
    rmqm.MAX_BATCH = 5  # three batches
    rows = ViewGeometry(num_views=4).run(context) + RMQM(noise_levels=4, attack_levels=4).run(context)
    return {row.metric: (row.value, row.n_test) for row in rows}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_equal_the_single_process(world_size, tmp_path):
    single = rows_on_rank(0, 1, str(tmp_path))
    for found in run_on_ranks(world_size, rows_on_rank, str(tmp_path)):
        for metric, (value, n_test) in single.items():
            assert found[metric][0] == pytest.approx(value, rel=1e-4)  # float32 roundings of other batches
            assert found[metric][1] == n_test
