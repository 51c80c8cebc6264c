"""alpha-ReQ against hand-computed values, numpy and spectra that follow a power law."""

import math

import numpy as np
import pytest
import torch

from ssl_bench.evaluation.diagnostics.power_law import alpha_req

SHORT = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05], dtype=torch.float64)


@pytest.mark.parametrize(("first", "last"), [(1, 200), (4, 100), (50, 51)])
def test_an_exact_power_law_gives_its_exponent(first, last):
    eigenvalues = torch.arange(1, 201, dtype=torch.float64) ** -1.3
    assert alpha_req(eigenvalues, first=first, last=last) == pytest.approx(1.3, abs=1e-10)
    assert alpha_req(1e-5 * eigenvalues, first=first, last=last) == pytest.approx(1.3, abs=1e-10)


def test_weights_fall_with_the_rank():
    assert alpha_req(SHORT, first=1, last=5) == pytest.approx(1.67232413965, abs=1e-10)  # 1.84727694272 unweighted


def test_the_fit_equals_numpys():
    eigenvalues = torch.rand(150, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sort().values.flip(0)
    n = np.arange(4, 101)
    slope, _ = np.polyfit(np.log(n), np.log(eigenvalues.numpy()[3:100]), 1, w=n**-0.5)  # numpy squares the weights
    assert alpha_req(eigenvalues) == pytest.approx(-slope, rel=1e-9)


def test_the_fit_ends_at_the_spectrums_end():
    eigenvalues = torch.arange(1, 11, dtype=torch.float64) ** -2.0
    assert alpha_req(eigenvalues) == pytest.approx(2.0, abs=1e-10)
    assert alpha_req(torch.cat([eigenvalues, torch.zeros(90)])) == pytest.approx(2.0, abs=1e-10)
    assert math.isnan(alpha_req(eigenvalues[:4]))
    assert math.isnan(alpha_req(torch.zeros(100)))
