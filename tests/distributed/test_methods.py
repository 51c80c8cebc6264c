"""Every trainable method: several ranks on different data equal one process, in value, gradient and state."""

import importlib
from unittest import mock

import pytest
import torch

from ssl_bench import distributed
from ssl_bench.checking import points
from ssl_bench.checking.distributed import compare_ranks, relative_error, run_steps
from ssl_bench.checking.main import RANK_TOLERANCE
from ssl_bench.methods import METHODS
from tests.distributed_harness import run_on_ranks

NAMES = [name for name in METHODS.names() if METHODS.get(name).trainable]


@pytest.fixture(scope="module")
def errors():
    return compare_ranks(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_one_process(errors, name):
    assert not isinstance(errors[name], str), errors[name]
    assert errors[name] <= RANK_TOLERANCE


def test_a_method_that_breaks_is_reported_by_name(monkeypatch):
    def fail(name, dataset):
        raise ValueError("no such luck")

    monkeypatch.setattr("ssl_bench.checking.distributed.run_steps", fail)
    assert compare_ranks(["simclr"]) == {"simclr": "one process: ValueError: no such luck"}


def local(x):
    return x


def own_gradient(x):
    """The gathered batch of which only this rank's own rows carry gradient, the usual mistake."""
    rows = distributed.local_slice(len(x), x.device)
    everything = distributed.gather(x)
    return torch.cat([everything[: rows.start], x, everything[rows.stop :]])


# a module, its attribute, what replaces it, and whether the loss itself is off or only its gradient
MUTATIONS = {
    "gradient of own rows only": ("ssl_bench.methods.{}", "gather_with_grad", own_gradient, False),
    "statistics of one rank": ("ssl_bench.methods.{}", "gather_with_grad", local, True),
    "batch norm of one rank": ("ssl_bench.checking.distributed", "convert_batch_norm", local, True),
}


def mutated(rank, world_size):
    """Two steps of each method under each mutation."""
    results = {}
    for mutation, (module, attribute, replacement, _) in MUTATIONS.items():
        for name in ("vicreg", "barlow_twins"):
            with mock.patch.object(importlib.import_module(module.format(name)), attribute, replacement):
                results[f"{mutation} {name}"] = run_steps(name, points.small_dataset())
    return results


@pytest.mark.slow
def test_mutations_would_be_noticed():
    results = run_on_ranks(2, mutated)[0]
    for mutation, (*_, value_differs) in MUTATIONS.items():
        for name in ("vicreg", "barlow_twins"):
            one, ranks = run_steps(name, points.small_dataset()), results[f"{mutation} {name}"]
            assert relative_error(ranks, one) > 100 * RANK_TOLERANCE, (mutation, name)
            loss_error = abs(ranks[0]["loss"] / one[0]["loss"] - 1)
            assert (loss_error > 100 * RANK_TOLERANCE) == value_differs, (mutation, name)
