"""Values of the statistics card, hand-computed, and simulations with known truth."""

import math

import numpy as np
import pytest
from scipy import stats

from ssl_bench.results import statistics as st

SCORES = np.array([[0.701, 0.805, 0.602, 0.900], [0.710, 0.798, 0.611, 0.895], [0.694, 0.812, 0.590, 0.904]])
RANKED = [
    [0.80, 0.78, 0.75], [0.70, 0.72, 0.65], [0.90, 0.88, 0.85],
    [0.60, 0.61, 0.55], [0.95, 0.95, 0.90], [0.50, 0.48, 0.47],
]  # fmt: skip
EXACT = 1e-11  # the card prints 12 digits


def test_summary_of_one_task_is_the_cards():
    s = st.summarize(SCORES[:, 0].tolist())
    assert s.n == 3
    assert s.std == pytest.approx(0.00802080627701, abs=EXACT)
    assert s.std / math.sqrt(3) == pytest.approx(0.00463081466315, abs=EXACT)
    assert s.high - s.mean == pytest.approx(0.0199247873514, abs=EXACT)
    assert s.mean - s.low == pytest.approx(0.0199247873514, abs=EXACT)


def test_summary_is_independent_of_order_and_has_no_interval_for_one_value():
    values = [0.1, 0.7, 0.30000000001, 0.2, 1e-17]
    assert st.summarize(values) == st.summarize(values[::-1])
    assert st.summarize([0.5]) == st.Summary(1, 0.5, None, None, None)
    assert st.summarize([]) == st.Summary(0, None, None, None, None)
    assert st.summarize([0.99] * 3) == st.Summary(3, 0.99, 0.0, 0.99, 0.99)  # not 1e-16


def test_aggregates_are_the_cards():
    assert SCORES.mean() == pytest.approx(0.751833333333, abs=EXACT)
    assert st.iqm(SCORES) == pytest.approx(0.753333333333, abs=EXACT)
    assert st.optimality_gap(SCORES, 0.85) == pytest.approx(0.110583333333, abs=EXACT)


def test_stratified_bootstrap_resamples_within_tasks():
    seen = set()

    def spy(replicates):
        for replicate in replicates:
            assert set(replicate[:, 0]) <= {0.1, 0.3}
            assert set(replicate[:, 1]) <= {0.5, 0.9}
        values = np.array([st.iqm(replicate) for replicate in replicates])
        seen.update(np.round(values, 9))
        spy.values.append(values)
        return values

    spy.values = []
    low, high = st.stratified_bootstrap(np.array([[0.1, 0.5], [0.3, 0.9]]), spy, replicates=4000)
    values = np.round(np.concatenate(spy.values), 9)
    # the card's sixteen equiprobable resamples; four standard errors of a share of 4000 draws
    for value, share in {0.3: 3 / 16, 0.4: 9 / 16, 0.5: 1 / 16, 0.6: 3 / 16}.items():
        assert (values == value).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))
    assert seen == {0.3, 0.4, 0.5, 0.6}
    assert (low, high) == pytest.approx((0.3, 0.6))


def test_bootstrap_uses_its_own_generator():
    np.random.seed(0)  # noqa: NPY002 - the global generator must not matter
    first = st.stratified_bootstrap(SCORES, replicates=500)
    np.random.seed(1)  # noqa: NPY002
    assert st.stratified_bootstrap(SCORES, replicates=500) == first


def test_probability_of_improvement_is_the_cards():
    a = np.array([[0.72, 0.55], [0.70, 0.58], [0.71, 0.57]])
    b = np.array([[0.71, 0.60], [0.69, 0.56], [0.68, 0.59]])
    assert st.probability_of_improvement(a[:, :1], b[:, :1]) == pytest.approx(0.833333333333, abs=EXACT)
    assert st.probability_of_improvement(a[:, 1:], b[:, 1:]) == pytest.approx(0.222222222222, abs=EXACT)
    assert st.probability_of_improvement(a, b) == pytest.approx(0.527777777778, abs=EXACT)
    assert st.probability_of_improvement(a, b) + st.probability_of_improvement(b, a) == pytest.approx(1, abs=EXACT)
    assert st.probability_of_improvement(a, a) == 0.5


def test_performance_profile_counts_strictly_above():
    assert st.performance_profile(SCORES, [0.0, 0.602, 0.8, 0.904]) == [1.0, 10 / 12, 5 / 12, 0.0]


def test_rank_test_is_the_cards():
    test = st.rank_test(RANKED)
    assert test.mean_ranks == pytest.approx((1.416666667, 1.583333333, 3), abs=1e-9)
    assert test.chi2 == pytest.approx(9.08333333333, abs=EXACT)
    assert test.chi2_tie_corrected == pytest.approx(9.47826086957, abs=EXACT)
    assert test.f == pytest.approx(15.5714285714, abs=1e-10)
    assert test.p == pytest.approx(0.000848257603634, abs=EXACT)
    # 2.343701 of the card has seven digits; CD is q / sqrt(3)
    assert test.critical_difference == pytest.approx(1.35313616445, abs=1e-6)
    assert test.chi2_tie_corrected == pytest.approx(stats.friedmanchisquare(*np.transpose(RANKED)).statistic)


@pytest.mark.parametrize(("k", "q"), [(2, 1.959964), (3, 2.343701), (4, 2.569032), (5, 2.727774), (6, 2.849705),
                                      (8, 3.030878), (10, 3.163684)])  # fmt: skip
def test_nemenyi_quantiles_are_the_published(k, q):
    # half a unit of the last printed digit
    assert st.nemenyi_critical_difference(k, 1) / math.sqrt(k * (k + 1) / 6) == pytest.approx(q, abs=6e-7)


def test_rank_test_with_perfect_agreement_and_with_all_tied():
    agree = st.rank_test([[3, 2, 1]] * 4)
    assert (agree.f, agree.p) == (math.inf, 0.0)
    tied = st.rank_test([[1, 1, 1]] * 4)
    assert tied.mean_ranks == (2, 2, 2)
    assert (tied.chi2, tied.chi2_tie_corrected, tied.p) == (0, 0, 1)


def test_wilcoxon_is_the_cards():
    table = np.array(RANKED)
    assert st.wilcoxon(table[:, 0], table[:, 2]) == pytest.approx(0.03125, abs=EXACT)
    assert st.wilcoxon([0.1, 0.2], [0.1, 0.2]) == 1.0


def test_paired_comparison_of_the_cards_answers():
    a, b = [1, 1, 1, 0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 1, 0, 0, 1, 1]
    result = st.paired(a, b)
    assert result.difference == pytest.approx(0.2, abs=EXACT)
    half = stats.t.ppf(0.975, 9) * 0.133333333333
    assert (result.low, result.high) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-9)
    assert result.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    assert st.mcnemar_exact(2, 0) == 0.5
    assert st.mcnemar_exact(0, 0) == 1.0
    low, high = st.paired_bootstrap(a, b)
    assert low == 0.0
    # the mean of ten draws of {0, 1}, P(1) = .2: binomial quantiles
    assert high == pytest.approx(stats.binom.ppf(0.975, 10, 0.2) / 10)


def test_paired_edges():
    assert st.paired([0.5], [0.4]).p is None
    assert st.paired([0.5, 0.6], [0.5, 0.6]).p == 1.0
    assert st.paired([0.5, 0.75], [0.25, 0.5]).p == 0.0  # no noise at all: two deterministic baselines
    with pytest.raises(ValueError, match="share at least one seed"):
        st.paired([], [])


def test_wilson_is_the_cards():
    assert st.wilson(90, 100) == pytest.approx((0.825634338495, 0.944770862939), abs=EXACT)
    assert st.wilson(0, 10)[0] == 0.0
    with pytest.raises(ValueError, match="successes"):
        st.wilson(11, 10)


def test_holm_is_the_cards():
    assert st.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert st.holm([]) == []


def test_pareto_front_keeps_only_what_nothing_beats():
    costs, scores = [5, 1, 3, 3, 9, 1], [0.7, 0.5, 0.8, 0.8, 0.8, 0.6]
    assert st.pareto_front(costs, scores) == [5, 2]


def test_place_ranges_by_hand():
    assert st.place_ranges(3, [(0, 2), (1, 2)]) == [(1, 2), (1, 2), (3, 3)]
    assert st.place_ranges(2, []) == [(1, 2), (1, 2)]


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_t_interval_covers_the_truth_in_95_of_100(n):
    draws = np.random.default_rng(n).normal(0.85, 0.003, (4000, n))
    covered = sum(s.low <= 0.85 <= s.high for s in map(st.summarize, draws.tolist()))
    # four binomial standard errors: a correct interval fails this once in 16,000 seeds
    assert covered / 4000 == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_normal_interval_would_fail_the_coverage_test():
    draws = np.random.default_rng(3).normal(0.85, 0.003, (4000, 3))
    half = 1.96 * draws.std(axis=1, ddof=1) / math.sqrt(3)
    assert (np.abs(draws.mean(axis=1) - 0.85) <= half).mean() < 0.85


def test_equal_methods_are_rarely_called_different():
    generator, studies, wins = np.random.default_rng(0), 1000, 0
    for _ in range(studies):
        runs = generator.normal(0.8, 0.01, (6, 4)) + generator.normal(0, 0.02, (1, 4))  # methods x shared seeds
        p = [st.paired(runs[i].tolist(), runs[j].tolist()).p for i in range(6) for j in range(i)]
        wins += min(st.holm(p)) < 0.05
    assert wins / studies <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / studies)


def test_true_places_lie_in_their_ranges_and_clear_winners_are_found():
    generator, studies, misses, found = np.random.default_rng(1), 400, 0, 0
    truth = np.array([0.90, 0.80, 0.80, 0.79])
    for _ in range(studies):
        runs = (truth[:, None] + generator.normal(0, 0.005, (4, 5))).tolist()
        pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
        results = [st.paired(runs[i], runs[j]) for i, j in pairs]
        corrected = st.holm([result.p for result in results])
        wins = [
            pair if result.difference > 0 else pair[::-1]
            for pair, result, p in zip(pairs, results, corrected, strict=True)
            if p < 0.05
        ]
        ranges = st.place_ranges(4, wins)
        # places 2 and 3 are tied: either order is true
        misses += not (ranges[0][0] <= 1 and ranges[3][1] >= 4 and all(r[0] <= 2 and r[1] >= 3 for r in ranges[1:3]))
        found += ranges[0] == (1, 1)
    assert misses / studies <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / studies)
    # twenty standard deviations apart: t with 4 degrees of freedom finds it nearly always
    assert found / studies > 0.95
