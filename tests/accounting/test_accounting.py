"""Accounting against formulas, against Opacus, and against simulation."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from sfumato import accounting
from sfumato.accounting import SampledGaussian, Selection
from sfumato.errors import ConfigError

TYPICAL = [(0.01, 1.0, 1000), (0.08192, 3.0, 1843), (0.05, 0.8, 300), (0.3, 8.0, 500)]


def event(rate: float, sigma: float, steps: int, *, discrete: bool = False) -> SampledGaussian:
    return SampledGaussian(noise_multiplier=sigma, sampling_rate=rate, num_steps=steps, discrete=discrete)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of μ-GDP by bisection of its formula."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        value = stats.norm.cdf(-middle / mu + mu / 2) - math.exp(min(middle, 700)) * stats.norm.cdf(
            -middle / mu - mu / 2
        )
        low, high = (middle, high) if value > delta else (low, middle)
    return high


def one_step_delta(rate: float, sigma: float, epsilon: float, *, replace: bool = False) -> float:
    """Hockey-stick divergence of one sampled step, integrated numerically: the larger of both directions."""

    x = np.linspace(-12 * sigma - 2, 12 * sigma + 2, 20001)

    def mixture(shift: float) -> np.ndarray:
        return (1 - rate) * stats.norm.pdf(x, 0, sigma) + rate * stats.norm.pdf(x, shift, sigma)

    pair = mixture(1.0), mixture(-1.0) if replace else stats.norm.pdf(x, 0, sigma)
    return max(
        float(integrate.simpson(np.maximum(0.0, first - math.exp(epsilon) * second), x=x))
        for first, second in (pair, pair[::-1])
    )


def test_full_batches_are_exact_gaussian_composition():
    """μ² adds up over steps and other releases: T/σ² + 1/200²."""
    events = [event(1.0, 30.0, 60), SampledGaussian(noise_multiplier=200.0)]
    mu = math.sqrt(60 / 900 + 1 / 200**2)
    assert accounting.mu_gdp(events, delta=1e-5) == (pytest.approx(mu, rel=1e-12), "exact")
    assert accounting.epsilon(events, delta=1e-5) == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-6)
    assert accounting.epsilon(events[:1], delta=1e-5) < gaussian_epsilon(mu, 1e-5) * (1 - 1e-5)


@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 1.0), (0.5, 2.0), (0.02, 0.7)])
@pytest.mark.parametrize("neighbouring", ["add-or-remove", "replace-one"])
def test_one_step_agrees_with_numeric_integration(rate, sigma, neighbouring):
    for epsilon in (0.1, 0.5, 1.0):
        expected = one_step_delta(rate, sigma, epsilon, replace=neighbouring == "replace-one")
        found = accounting.delta([event(rate, sigma, 1)], epsilon=epsilon, neighbouring=neighbouring)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-9)
        assert found >= expected * (1 - 1e-4) - 1e-9  # never below


@pytest.mark.parametrize(("rate", "sigma", "steps"), TYPICAL)
def test_rdp_agrees_with_opacus(rate, sigma, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import RDPAccountant

        theirs = RDPAccountant()
        theirs.history = [(sigma, rate, steps)]
        expected = theirs.get_epsilon(1e-5)
    assert accounting.epsilon([event(rate, sigma, steps)], delta=1e-5, accountant="rdp") == pytest.approx(
        expected, rel=0.01
    )


@pytest.mark.parametrize(("rate", "sigma", "steps"), TYPICAL)
def test_pld_agrees_with_opacus_prv(rate, sigma, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant

        theirs = PRVAccountant()
        theirs.history = [(sigma, rate, steps)]
        expected = theirs.get_epsilon(1e-5, eps_error=0.01)
    ours = accounting.epsilon([event(rate, sigma, steps)], delta=1e-5)
    assert ours == pytest.approx(expected, rel=0.01, abs=0.011)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(1e-3, 0.9),
    sigma=st.floats(0.6, 20.0),
    steps=st.integers(1, 3000),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
def test_pld_is_at_most_rdp_and_grows_with_steps_and_rate(rate, sigma, steps, delta):
    def epsilon(
        rate: float = rate, sigma: float = sigma, steps: int = steps, accountant: str = "pld"
    ) -> float:
        return accounting.epsilon([event(rate, sigma, steps)], delta=delta, accountant=accountant)

    slack = 1 + 2e-3  # discretisation rounds upwards
    assert epsilon() <= epsilon(accountant="rdp") * slack + 1e-6
    assert epsilon() <= epsilon(steps=2 * steps) * slack + 1e-6
    assert epsilon(rate=rate / 2) <= epsilon() * slack + 1e-6
    assert epsilon(sigma=2 * sigma) <= epsilon() * slack + 1e-6


def test_replacing_costs_more_than_removing_and_at_most_a_group_of_two():
    for accountant in ("pld", "rdp"):
        events = [event(0.05, 2.0, 200)]
        one = accounting.epsilon(events, delta=1e-5, accountant=accountant)
        replaced = accounting.epsilon(events, delta=1e-5, accountant=accountant, neighbouring="replace-one")
        assert one < replaced < 4 * one
    full = accounting.epsilon([event(1.0, 2.0, 3)], delta=1e-5, neighbouring="replace-one")
    assert full == pytest.approx(accounting.epsilon([event(1.0, 1.0, 3)], delta=1e-5), rel=1e-9)
    tight = accounting.epsilon([event(0.05, 2.0, 200)], delta=1e-5, neighbouring="replace-one")
    loose = accounting.epsilon(
        [event(0.05, 2.0, 200)], delta=1e-5, neighbouring="replace-one", accountant="rdp"
    )
    assert tight < loose


def test_delta_and_epsilon_are_inverse():
    for accountant in ("pld", "rdp"):
        events = [event(0.05, 1.5, 500)]
        epsilon = accounting.epsilon(events, delta=1e-6, accountant=accountant)
        assert accounting.delta(events, epsilon=epsilon, accountant=accountant) == pytest.approx(
            1e-6, rel=1e-3
        )


def test_mixed_events_compose():
    mixed = [event(0.05, 2.0, 300), event(1.0, 50.0, 4), event(0.1, 4.0, 100)]
    whole = accounting.epsilon(mixed, delta=1e-5)
    parts = [accounting.epsilon([one], delta=1e-5 / 3) for one in mixed]
    assert max(accounting.epsilon([one], delta=1e-5) for one in mixed) < whole < sum(parts)
    split = [event(0.05, 2.0, 100), event(0.05, 2.0, 200), *mixed[1:]]
    assert accounting.epsilon(split, delta=1e-5) == whole


def test_no_noise_has_no_bound_and_no_events_cost_nothing():
    assert accounting.epsilon([event(0.1, 0.0, 1)], delta=1e-5) == math.inf
    assert accounting.delta([event(0.1, 0.0, 1)], epsilon=3.0) == 1.0
    assert accounting.mu_gdp([event(0.1, 0.0, 1)], delta=1e-5) == (math.inf, "exact")
    for nothing in ([], [event(0.1, 1.0, 0)]):
        assert accounting.epsilon(nothing, delta=1e-5) == 0.0
        assert accounting.delta(nothing, epsilon=0.0) == 0.0
        assert accounting.mu_gdp(nothing, delta=1e-5) == (0.0, "exact")


def test_a_fitted_mu_bounds_the_curve_and_the_central_limit_does_not_always():
    events = [event(0.02, 0.7, 500)]
    mu, kind = accounting.mu_gdp(events, delta=1e-6)
    assert kind == "fitted"
    for epsilon in np.linspace(0, accounting.epsilon(events, delta=1e-6), 30):
        here = accounting.delta(events, epsilon=float(epsilon))
        bound = stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * stats.norm.cdf(
            -epsilon / mu - mu / 2
        )
        assert here <= bound * (1 + 1e-3) + 1e-12
    assert accounting.mu_clt(events[0]) < mu


def test_the_trade_off_curve_of_full_batches_is_gaussian():
    events = [event(1.0, 10.0, 100)]  # μ = 1
    rates = [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0]
    found = accounting.trade_off(events, rates)
    exact = [stats.norm.cdf(stats.norm.ppf(1 - rate) - 1.0) for rate in rates]
    assert found == pytest.approx(exact, abs=5e-3)
    assert all(
        one <= other + 1e-9 for one, other in zip(found, exact, strict=True)
    )  # a lower bound on errors
    assert found != pytest.approx(accounting.trade_off([event(1.0, 9.0, 100)], rates), abs=5e-3)


def test_a_group_in_full_batches_is_a_larger_mu():
    found, how = accounting.group_epsilon([event(1.0, 30.0, 60)], delta=1e-5, group_size=3)
    assert how == "exact"
    assert found == pytest.approx(gaussian_epsilon(3 * math.sqrt(60) / 30, 1e-5), rel=1e-6)


def test_a_group_of_one_is_one_unit_and_larger_groups_cost_more():
    events = [event(0.05, 2.0, 300)]
    found = [accounting.group_epsilon(events, delta=1e-5, group_size=m) for m in (1, 2, 4)]
    assert [how for _, how in found] == ["mixture"] * 3
    values = [value for value, _ in found]
    assert values[0] == pytest.approx(accounting.epsilon(events, delta=1e-5), rel=1e-3)
    assert values[0] < values[1] < values[2]
    assert values[1] > 2 * values[0]  # groups cost more than proportionally at a fixed δ


def test_a_tight_group_bound_is_below_the_generic_one():
    events = [event(0.05, 2.0, 100)]
    tight, _ = accounting.group_epsilon(events, delta=1e-5, group_size=2)

    def generic(m: int) -> float:
        low, high = 0.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            bound = accounting.delta(events, epsilon=middle) * sum(math.exp(i * middle) for i in range(m))
            low, high = (middle, high) if bound > 1e-5 else (low, middle)
        return m * high

    assert tight < generic(2)
    chained, how = accounting.group_epsilon(
        [Selection(events=tuple(events), mean_runs=1.0)], delta=1e-5, group_size=2, accountant="rdp"
    )
    assert how == "generic"
    assert chained > tight


def test_choosing_among_runs_costs_more_than_one_run_and_less_than_all():
    run = event(0.05, 2.0, 300)
    one = accounting.epsilon([run], delta=1e-5, accountant="rdp")
    best = accounting.epsilon([Selection(events=(run,), mean_runs=20.0)], delta=1e-5, accountant="rdp")
    every = accounting.epsilon([event(0.05, 2.0, 300 * 20)], delta=1e-5, accountant="rdp")
    assert one < best < every
    more = accounting.epsilon([Selection(events=(run,), mean_runs=100.0)], delta=1e-5, accountant="rdp")
    assert best < more


def test_a_counted_search_follows_the_theorem():
    """Theorem 2 of Papernot and Steinke for the geometric case, by hand: γ = 1/mean, η = 1."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon

    orders = np.array(DEFAULT_RDP_ORDERS)
    rdp = 40 * orders / (2 * 8.0**2)
    mean = 10.0
    constant = 2 * np.min((1 - 1 / orders) * rdp + math.log(mean) / orders)
    total = rdp + constant + math.log(mean) / (orders - 1)
    total = np.array([total[orders >= order].min() for order in orders])
    expected, _ = compute_epsilon(orders, total, 1e-5)
    found = accounting.epsilon(
        [Selection(events=(event(1.0, 8.0, 40),), mean_runs=mean)], delta=1e-5, accountant="rdp"
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_discrete_noise_costs_what_continuous_noise_costs_at_whole_orders():
    discrete = accounting.epsilon([event(0.05, 2.0, 300, discrete=True)], delta=1e-5, accountant="rdp")
    continuous = accounting.epsilon([event(0.05, 2.0, 300)], delta=1e-5, accountant="rdp")
    assert continuous <= discrete < 1.05 * continuous


def test_whole_order_divergences_of_a_sampled_discrete_gaussian_are_the_continuous_ones():
    """The claim behind discrete accounting, summed over the lattice: both directions, σ = 3, shift 2."""
    values = np.arange(-300, 301)

    def log_probability(centre: float) -> np.ndarray:
        return -((values - centre) ** 2) / 18.0 - special.logsumexp(-(values**2) / 18.0)

    base, shifted = log_probability(0.0), log_probability(2.0)
    for rate in (0.1, 0.6):
        mixture = np.logaddexp(math.log(1 - rate) + base, math.log(rate) + shifted)
        for order in (2, 3, 8):
            forward = special.logsumexp(order * mixture + (1 - order) * base) / (order - 1)
            backward = special.logsumexp(order * base + (1 - order) * mixture) / (order - 1)
            terms = [
                math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * math.exp((k * k - k) * 4 / 18.0)
                for k in range(order + 1)
            ]
            continuous = math.log(sum(terms)) / (order - 1)
            assert forward == pytest.approx(continuous, rel=1e-9)
            assert backward <= forward


@pytest.mark.parametrize("target", [0.3, 1.0, 8.0])
def test_calibration_spends_the_budget_and_not_more(target):
    def by_noise(sigma: float) -> float:
        return accounting.epsilon([event(0.05, sigma, 500)], delta=1e-5)

    sigma = accounting.solve_noise_multiplier(by_noise, target)
    assert 0.998 * target <= by_noise(sigma) <= target
    assert by_noise(sigma * 0.995) > target

    def by_steps(steps: float) -> float:
        return accounting.epsilon([event(0.05, 4.0, int(steps))], delta=1e-5)

    steps = accounting.solve_num_steps(by_steps, target)
    assert by_steps(steps) <= target < by_steps(steps + max(2, steps // 100))

    def by_batch(size: float) -> float:
        return accounting.epsilon([event(size / 10_000, 4.0, 100)], delta=1e-5)

    size = accounting.solve_batch_size(by_batch, target, num_examples=10_000)
    assert by_batch(size) <= target
    assert size == 10_000 or by_batch(size + max(2, size // 100)) > target


def test_a_budget_that_allows_nothing_is_refused():
    def by_steps(steps: float) -> float:
        return accounting.epsilon([event(0.5, 0.5, int(steps))], delta=1e-5)

    with pytest.raises(ConfigError, match="impossible-budget"):
        accounting.solve_num_steps(by_steps, 0.1)
    with pytest.raises(ConfigError, match="epsilon-out-of-range"):
        accounting.solve_num_steps(by_steps, 0.0)
    with pytest.raises(ConfigError, match="impossible-budget"):
        accounting.solve_noise_multiplier(lambda sigma: 5.0, 1.0)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_no_small_probability_is_refused(delta):
    with pytest.raises(ConfigError, match="delta-out-of-range"):
        accounting.epsilon([event(0.1, 1.0, 1)], delta=delta)


def test_what_an_accountant_cannot_count_is_refused():
    run = event(0.1, 1.0, 5)
    with pytest.raises(ConfigError, match="needs-rdp"):
        accounting.epsilon([Selection(events=(run,), mean_runs=3)], delta=1e-5)
    with pytest.raises(ConfigError, match="needs-rdp"):
        accounting.epsilon([event(0.1, 1.0, 5, discrete=True)], delta=1e-5)
    with pytest.raises(ConfigError, match="search-needs-add-or-remove"):
        accounting.epsilon(
            [Selection(events=(run,), mean_runs=3)], delta=1e-5, accountant="rdp", neighbouring="replace-one"
        )
    with pytest.raises(ConfigError, match="unknown-accountant"):
        accounting.epsilon([run], delta=1e-5, accountant="moments")
    with pytest.raises(ConfigError, match="unknown-neighbouring"):
        accounting.epsilon([run], delta=1e-5, neighbouring="swap")
    with pytest.raises(ConfigError, match="epsilon-out-of-range"):
        accounting.delta([run], epsilon=-1.0)
    with pytest.raises(ConfigError, match="group-out-of-range"):
        accounting.group_epsilon([run], delta=1e-5, group_size=0)


def test_events_that_cannot_happen_are_refused():
    for values, code in [
        ({"noise_multiplier": -1.0}, "noise-out-of-range"),
        ({"noise_multiplier": math.nan}, "noise-out-of-range"),
        ({"noise_multiplier": 1.0, "sampling_rate": 0.0}, "sampling-rate-out-of-range"),
        ({"noise_multiplier": 1.0, "sampling_rate": 1.5}, "sampling-rate-out-of-range"),
        ({"noise_multiplier": 1.0, "num_steps": -1}, "num-steps-out-of-range"),
    ]:
        with pytest.raises(ConfigError, match=code):
            SampledGaussian(**values)
    with pytest.raises(ConfigError, match="search-out-of-range"):
        Selection(events=(), mean_runs=0.5)


def test_events_survive_a_file():
    run = event(0.1, 1.5, 5, discrete=True)
    for one in (
        run,
        Selection(events=(run,), mean_runs=3.0),
        Selection(events=(run,), mean_runs=3.0, shape=math.inf),
    ):
        assert accounting.event_from_dict(accounting.event_to_dict(one)) == one
    with pytest.raises(ConfigError, match="unknown-event"):
        accounting.event_from_dict({"kind": "laplace"})
