"""Length of the minimum spanning tree against hand-computed values and scipy."""

import math

import pytest
import torch
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import pdist, squareform

from ssl_bench.evaluation.diagnostics.spanning_tree import spanning_tree_length


def test_lengths_of_known_point_sets():
    four = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert spanning_tree_length(four) == pytest.approx(4.24264068712, abs=1e-10)
    angles = 2 * math.pi * torch.arange(3, dtype=torch.float64) / 3
    assert spanning_tree_length(torch.stack([angles.cos(), angles.sin()], 1)) == pytest.approx(3.46410161514, abs=1e-10)
    assert spanning_tree_length(torch.tensor([[0.0, 0.0], [1, 0], [0, 2], [3, 3]])) == pytest.approx(6.16227766017)


def test_the_length_is_scipys():
    x = torch.randn(80, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = minimum_spanning_tree(squareform(pdist(x.numpy()))).sum()
    assert spanning_tree_length(x) == pytest.approx(expected, rel=1e-12)


def test_collapse_and_duplicates_have_no_length():
    assert spanning_tree_length(torch.full((6, 3), 0.3)) == 0.0
    pair = torch.tensor([[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 3)
    assert spanning_tree_length(pair) == pytest.approx(math.sqrt(2), abs=1e-12)
    assert spanning_tree_length(torch.tensor([[1.0, 0.0]])) == 0.0
