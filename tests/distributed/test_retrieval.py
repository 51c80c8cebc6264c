"""Retrieval on two and three ranks: every query once, the single process's figures."""

from pathlib import Path

import pytest

from ssl_bench.evaluation.protocols.retrieval import Retrieval
from tests.distributed_harness import run_on_ranks
from tests.unit.evaluation.fakes import StubContext, splits


def retrieval_on_rank(rank, world_size, folder):
    sets = splits(sizes=(60, 30, 31), spread=2.0)  # 31 does not divide by 2 or 3
    sets["test"][1][4] = 3  # a class that the gallery lacks
    context = StubContext(Path(folder), 4, **sets)
    return [[row.value, row.n_test] for row in Retrieval(ks=(1, 10)).run(context)]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_equal_the_single_process(world_size, tmp_path):
    single = retrieval_on_rank(0, 1, str(tmp_path))
    assert single[0][1] == 30
    for found in run_on_ranks(world_size, retrieval_on_rank, str(tmp_path)):
        assert found == single
