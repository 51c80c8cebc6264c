import pytest
import torch

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.diagnostics.geometry import rankme
from ssl_bench.evaluation.protocols.spectrum import Spectrum
from tests.unit.evaluation.fakes import StubContext, splits


def test_rows_use_train_only_and_state_their_settings(tmp_path):
    sets = splits()
    sets["train"][1][:] = -1  # labels are not needed
    context = StubContext(tmp_path, 3, **sets)
    rows = {row.metric: row for row in Spectrum().run(context)}
    assert context.asked == ["train"]
    assert set(rows) == {"rankme", "effective_rank", "collapse_std"}
    assert rows["rankme"].value == rankme(sets["train"][0])
    assert all(row.split == "train" and row.n_test == 60 and row.selected_on == "none" for row in rows.values())
    assert rows["rankme"].details["embed_dim"] == 6


def test_sample_limit_takes_evenly_spaced_samples(tmp_path):
    sets = splits()
    row = Spectrum(num_samples=20).run(StubContext(tmp_path, 3, **sets))[0]
    assert row.n_test == 20
    assert row.value == rankme(sets["train"][0][::3])


def test_constant_features_are_reported_not_refused(tmp_path):
    sets = splits()
    sets["train"] = (torch.full((60, 6), 2.0), sets["train"][1])
    rows = {row.metric: row.value for row in Spectrum().run(StubContext(tmp_path, 3, **sets))}
    assert rows["effective_rank"] == 0.0
    assert rows["collapse_std"] == pytest.approx(0.0, abs=1e-12)


def test_too_few_samples_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_samples"):
        Spectrum(num_samples=1)
    sets = splits(sizes=(1, 3, 3))
    with pytest.raises(DataError, match="at least 2"):
        Spectrum().run(StubContext(tmp_path, 3, **sets))
