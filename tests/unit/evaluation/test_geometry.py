import math

import pytest
import torch
from torch.nn.functional import normalize

from ssl_bench.errors import ConfigError, DataError
from ssl_bench.evaluation.diagnostics import intrinsic_dimension as dims
from ssl_bench.evaluation.diagnostics.cluster_learnability import cluster_learnability
from ssl_bench.evaluation.diagnostics.geometry import covariance_eigenvalues, uniformity
from ssl_bench.evaluation.diagnostics.power_law import alpha_req
from ssl_bench.evaluation.diagnostics.spanning_tree import spanning_tree_length
from ssl_bench.evaluation.protocols.geometry import Geometry
from tests.unit.evaluation.fakes import StubContext, splits

METRICS = {
    "participation_ratio",
    "stable_rank",
    "alpha_req",
    "uniformity",
    "mst_mean_edge",
    "lid_mle",
    "lid_moments",
    "two_nn",
    "cluster_learnability",
}


def run(tmp_path, features, **arguments):
    sets = splits()
    sets["train"] = (features, torch.full((len(features),), -1))  # labels are not needed
    context = StubContext(tmp_path, 3, **sets, seed=5)
    rows = {row.metric: row for row in Geometry(**arguments).run(context)}
    assert context.asked == ["train"]
    assert set(rows) == METRICS
    return rows


def test_rows_are_the_functions_of_the_training_features(tmp_path):
    x = splits(dim=8)["train"][0]
    rows = run(tmp_path, x, k=7)
    unit = normalize(x.double())
    distances = dims.neighbor_distances(x, 7)
    assert rows["alpha_req"].value == pytest.approx(alpha_req(covariance_eigenvalues(x)), rel=1e-12)
    assert rows["uniformity"].value == pytest.approx(float(uniformity(unit)), rel=1e-12)
    assert rows["mst_mean_edge"].value == pytest.approx(spanning_tree_length(unit) / 59, rel=1e-12)
    mle, moments = dims.local_dimension_mle(distances), dims.local_dimension_moments(distances)
    assert rows["lid_mle"].value == pytest.approx(dims.geometric_mean(mle), rel=1e-9)
    assert rows["lid_moments"].value == pytest.approx(dims.geometric_mean(moments), rel=1e-9)
    assert rows["two_nn"].value == pytest.approx(dims.two_nn(distances), rel=1e-9)
    assert rows["cluster_learnability"].value == cluster_learnability(x, num_clusters=7, seed=5)[0]


def test_rows_state_their_settings(tmp_path):
    rows = run(tmp_path, splits(dim=8)["train"][0])
    assert all(row.split == "train" and row.selected_on == "none" and not row.note for row in rows.values())
    assert all(row.details["layer"] == "embedding" and row.details["embed_dim"] == 8 for row in rows.values())
    assert {name for name, row in rows.items() if not row.higher_is_better} == {"alpha_req", "uniformity"}
    assert {row.n_test for name, row in rows.items() if name != "cluster_learnability"} == {60}
    assert rows["cluster_learnability"].n_test == 30
    assert rows["lid_mle"].details["k"] == 59  # fewer samples than neighbors asked
    assert rows["alpha_req"].details["ranks"] == [4, 8]


def test_sample_limit_takes_evenly_spaced_samples(tmp_path):
    x = splits()["train"][0]
    few, same = run(tmp_path, x, num_samples=20), run(tmp_path, x[::3])
    assert {name: row.value for name, row in few.items()} == {name: row.value for name, row in same.items()}
    assert few["uniformity"].n_test == 20


def test_constant_features_are_reported_not_refused(tmp_path):
    rows = run(tmp_path, torch.full((60, 6), 2.0))
    assert rows["participation_ratio"].value == rows["stable_rank"].value == 0.0
    assert rows["uniformity"].value == rows["mst_mean_edge"].value == 0.0
    assert rows["cluster_learnability"].value == 1.0
    assert "one cluster" in rows["cluster_learnability"].note
    for name in ("alpha_req", "lid_mle", "lid_moments", "two_nn"):
        assert rows[name].value is None
        assert rows[name].note
    assert "there are 1" in rows["two_nn"].note


def test_duplicates_count_once_in_dimensions(tmp_path):
    x = splits()["train"][0]
    once, twice = run(tmp_path, x, k=5), run(tmp_path, torch.cat([x, x]), k=5)
    for name in ("lid_mle", "lid_moments", "two_nn"):
        assert twice[name].value == pytest.approx(once[name].value, rel=1e-9)
        assert twice[name].details["n_distinct"] == 60
    assert twice["mst_mean_edge"].details["mst_length"] == pytest.approx(once["mst_mean_edge"].details["mst_length"])


def test_equidistant_and_zero_embeddings_are_named(tmp_path):
    rows = run(tmp_path, torch.eye(6))
    assert rows["lid_mle"].value is None
    assert "one distance" in rows["lid_mle"].note
    x = splits()["train"][0].clone()
    x[:4] = 0
    assert "4 samples have a zero embedding" in run(tmp_path, x)["uniformity"].note


def test_two_samples_are_enough_for_what_two_can_tell(tmp_path):
    rows = run(tmp_path, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert rows["mst_mean_edge"].value == pytest.approx(math.sqrt(2))
    assert rows["two_nn"].value is None


def test_wrong_settings_and_too_few_samples_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_samples"):
        Geometry(num_samples=1)
    with pytest.raises(ConfigError, match="`k`"):
        Geometry(k=1)
    with pytest.raises(DataError, match="at least 2"):
        run(tmp_path, torch.ones(1, 3))
    with pytest.raises(DataError, match="finite"):
        run(tmp_path, torch.full((5, 3), math.nan))
