"""Methods against the noise: what they compute, and that a unit moves a step by no more than before."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy.stats import beta, kstest
from torch import nn
from torch.nn.functional import cross_entropy

import oracles
from sfumato.data import mix_views
from sfumato.errors import ConfigError
from sfumato.gradients import ClippedSum
from sfumato.privacy.plan import Plan
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.training.adam_bc import AdamBC
from sfumato.training.averaging import WeightAverage
from sfumato.training.components import Components
from sfumato.training.gradient_sums import EngineSum
from sfumato.training.inputs import Units, Views
from sfumato.training.kalman import GRADIENT, MOVE, KalmanFilter
from sfumato.training.loop import fit
from small_runs import SmallNet, small_recipe, small_set

MIXED = Views(mean=(0.5,), std=(0.25,), count=3, padding=1, flip=True, mixed=4, alpha=0.4)
CPU = torch.device("cpu")
STEPS = 4


def rows_of(units: Units, indices: list[int], *, views: Views = MIXED, max_rows: int = 1000):
    draws = UnitRandomness(SeededSource(0), purpose="augmentation", step=0)
    chosen = torch.tensor(indices)
    return list(views.microbatches(units, chosen, max_rows=max_rows, randomness=draws, device=CPU))


def engine_sum(model: nn.Module, units: Units, *, clip_norm: float, views: Views = MIXED) -> EngineSum:
    source = SeededSource(5)
    return EngineSum(model=model, units=units, inputs=views, clip_norm=clip_norm, source=source, max_rows=50)


def make_plan(**changes) -> Plan:
    values = {"num_examples": 40, "batch_size": 10, "num_steps": STEPS, "noise_multiplier": 0.8}
    return Plan(**{**values, "delta": 1e-3, **changes})


def drawn_words(*shape: int) -> torch.Tensor:
    return torch.randint(2**32, (*shape, 3), generator=torch.Generator().manual_seed(1))


# DP-Mix: mixtures of one image's own views


def test_a_mixture_is_made_of_two_different_views_of_its_image_by_its_words() -> None:
    views, words = torch.rand(5, 3, 1, 2, 2), drawn_words(5, 200)
    out = mix_views(views, words, alpha=0.7)
    assert out.shape == (5, 203, 1, 2, 2)
    assert torch.equal(out[:, :3], views)
    pairs = set()
    for image in range(5):
        for number, (a, b, c) in enumerate(words[image].tolist()):
            first, second = a % 3, (a % 3 + 1 + b % 2) % 3
            pairs.add((first, second))
            weight = beta.ppf((c + 0.5) / 2**32, 0.7, 0.7)
            expected = weight * views[image, first] + (1 - weight) * views[image, second]
            torch.testing.assert_close(out[image, 3 + number], expected)
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}  # never a view with itself


def test_the_weights_of_mixtures_follow_the_beta_distribution() -> None:
    views = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1, 1)
    words = drawn_words(1, 4000)
    found = mix_views(views, words, alpha=0.4)[0, 2:].flatten()
    weight = torch.where(words[0, :, 0] % 2 == 1, found, 1 - found).numpy()
    assert kstest(weight, "beta", args=(0.4, 0.4)).pvalue > 1e-3
    assert kstest(weight, "beta", args=(0.6, 0.6)).pvalue < 1e-6  # the test can tell the difference


def test_a_units_mixtures_depend_on_no_other_unit() -> None:
    first, second = small_set(12, seed=0), small_set(12, seed=9)
    second.images[3] = first.images[3]
    parts = [rows_of(Units.images(data), [2, 3, 4])[0] for data in (first, second)]
    own = parts[0].unit_index == 1
    assert own.sum() == 7  # 3 views and 4 mixtures
    assert torch.equal(parts[0].inputs[own], parts[1].inputs[own])
    assert not torch.equal(parts[0].inputs[~own], parts[1].inputs[~own])
    assert torch.equal(parts[0].targets[own], first.labels[3].repeat(7))


@pytest.mark.parametrize("max_rows", [3, 24, 1000])
def test_mixtures_do_not_depend_on_the_units_place_or_on_microbatches(max_rows: int) -> None:
    units = Units.patients(small_set(60, seed=0, patients=9), max_images=3)
    alone = rows_of(units, [5])[0].inputs
    parts = rows_of(units, [8, 1, 5, 0], max_rows=max_rows)
    assert all(len(part.inputs) == 21 * part.num_units for part in parts)  # 3 images of 7 rows
    among = [part.inputs[part.unit_index == place] for part in parts for place in range(part.num_units)]
    assert torch.equal(among[2], alone)
    assert not torch.equal(among[1], alone)


def test_the_mixtures_of_a_patient_are_within_one_image() -> None:
    data = small_set(12, seed=0, patients=4)
    one = rows_of(Units.patients(data, max_images=3), [1])[0]
    data.images[1] = 0  # the first of the patient's three images
    other = rows_of(Units.patients(data, max_images=3), [1])[0]
    changed = (one.inputs != other.inputs).flatten(1).any(dim=1)
    assert changed.tolist() == 7 * [True] + 14 * [False]


def test_views_without_mixtures_are_what_they_were() -> None:
    units = Units.images(small_set(8, seed=0))
    plain = Views(mean=(0.5,), std=(0.25,), count=3, padding=1, flip=True)
    with_mixtures = rows_of(units, [0, 5])[0].inputs.unflatten(0, (2, 7))
    assert torch.equal(with_mixtures[:, :3].flatten(0, 1), rows_of(units, [0, 5], views=plain)[0].inputs)


@pytest.mark.parametrize(("count", "mixed", "alpha"), [(1, 2, 0.2), (0, 2, 0.2), (3, -1, 0.2), (3, 1, 0.0)])
def test_mixtures_without_two_views_are_refused(count: int, mixed: int, alpha: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Views(mean=(0.5,), std=(0.25,), count=count, mixed=mixed, alpha=alpha)
    assert caught.value.code == "bad-augmentation"


@pytest.mark.parametrize("patients", [None, 9])
def test_with_mixtures_a_unit_moves_the_sum_by_its_one_clipped_mean_gradient(patients: int | None) -> None:
    data, model, clip_norm = small_set(36, seed=0, patients=patients), SmallNet(), 0.3
    units = Units.images(data) if patients is None else Units.patients(data, max_images=2)
    sums = engine_sum(model, units, clip_norm=clip_norm)
    whole, without = sums(torch.tensor([3, 6, 8]), 0), sums(torch.tensor([3, 8]), 0)
    moved = {name: whole.gradients[name] - without.gradients[name] for name in whole.gradients}
    draws = UnitRandomness(sums.source, purpose="augmentation", step=0)
    rows = next(MIXED.microbatches(units, torch.tensor([6]), max_rows=99, randomness=draws, device=CPU))
    expected = oracles.reference(model, rows.inputs, rows.targets, unit_index=rows.unit_index)
    assert expected.norms[0] > 2 * clip_norm  # it would move the sum further
    assert oracles.distance(moved, expected.clipped_sum(clip_norm)) < 1e-5
    assert oracles.norm_of(moved) <= clip_norm
    assert whole.sensitivity == clip_norm


# AdamBC: the second moment without the noise's share


class NoData:
    """A sum over no unit: each step is pure noise."""

    num_units = 40

    def __init__(self, model: nn.Module, clip_norm: float) -> None:
        self.model, self.clip_norm = model, clip_norm

    def __call__(self, indices: torch.Tensor, step: int) -> ClippedSum:
        zeros = {name: torch.zeros_like(value).double() for name, value in self.model.named_parameters()}
        nothing = torch.zeros(0, dtype=torch.float64)
        return ClippedSum(gradients=zeros, norms=nothing, losses=nothing, sensitivity=self.clip_norm)


@pytest.mark.parametrize("mechanism", ["gaussian", "discrete-gaussian"])
@pytest.mark.parametrize("normalised", [True, False])
def test_on_pure_noise_what_is_subtracted_is_what_the_second_moment_holds(normalised, mechanism) -> None:
    model = nn.Linear(199, 100)
    plan = make_plan(clip_norm=0.25, mechanism=mechanism, accountant="rdp")
    recipe = small_recipe(training__optimizer="AdamBC", training__normalised_update=normalised)
    optimizer = Components().optimizer_of(recipe, model, plan)
    run_fit(model, NoData(model, 0.25), plan, optimizer, normalised_update=normalised)
    count = sum(value.numel() for value in model.parameters())
    squares = sum(optimizer.state[value]["square"].double().sum().item() for value in model.parameters())
    mean_square = squares / count / (1 - 0.999**STEPS)
    subtracted = optimizer.param_groups[0]["noise_stddev"] ** 2
    error = math.sqrt(2 / (count * STEPS))  # of a mean of squares, relative
    assert abs(mean_square / subtracted - 1) < 5 * error
    assert abs(mean_square / (subtracted * 1.1) - 1) > 5 * error  # a tenth more noise would be seen


def run_fit(model, sums, plan: Plan, optimizer, *, rate: float = 0.01, **options):
    return list(
        fit(
            model,
            sums,
            plan,
            optimizer=optimizer,
            learning_rate=lambda step: rate,
            average=WeightAverage.start(model, decay=0.0),
            source=SeededSource(5),
            spend=lambda step: None,
            **options,
        )
    )


def take_steps(optimizer: torch.optim.Optimizer, model: nn.Module, *, scale: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        for value in model.parameters():
            value.grad = scale * torch.randn(value.shape, generator=generator)
        optimizer.step()


def test_without_noise_to_speak_of_it_is_adam() -> None:
    model = SmallNet()
    adam, other = copy.deepcopy(model), copy.deepcopy(model)
    take_steps(AdamBC(model.parameters(), lr=0.01, noise_stddev=1e-12), model, scale=1.0)
    take_steps(torch.optim.Adam(adam.parameters(), lr=0.01, eps=0.0), adam, scale=1.0)
    take_steps(AdamBC(other.parameters(), lr=0.01, noise_stddev=0.5), other, scale=1.0)
    assert distance(model, adam) < 1e-6
    assert distance(other, adam) > 1e-3


def test_a_step_of_adam_bc_is_the_papers_formula_with_its_floor() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = AdamBC([weight], lr=0.1, noise_stddev=0.2, beta1=0.8, beta2=0.9, floor=0.25)
    mean = square = torch.zeros(3, dtype=torch.float64)
    expected = torch.zeros(3, dtype=torch.float64)
    for step, gradient in enumerate(([1.0, 0.1, 0.0], [0.5, -0.2, 0.0]), start=1):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        mean, square = 0.8 * mean + 0.2 * weight.grad, 0.9 * square + 0.1 * weight.grad**2
        corrected = (square / (1 - 0.9**step) - 0.2**2).clamp(min=0.25 * 0.2**2)
        expected = expected - 0.1 * mean / (1 - 0.8**step) / corrected.sqrt()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


# The Kalman filter of DiSK


def distance(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def disk_by_hand(model: nn.Module, data, plan: Plan, *, gain: float, rate: float, look_ahead: float) -> None:
    """DiSK over SGD, one unit at a time by plain autograd; the noise is the plan's for the same source."""
    source, units, plain = SeededSource(5), Units.images(data), Views(mean=(0.5,), std=(0.25,))
    move = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    filtered: dict[str, torch.Tensor] = {}
    for step, indices in enumerate(plan.sampler().batches(len(data), source)):
        ahead = copy.deepcopy(model)
        for name, value in ahead.named_parameters():
            value.data += look_ahead * move[name]
        total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        for index in indices.tolist():
            row = rows_of(units, [index], views=plain)[0]
            loss = cross_entropy(ahead(row.inputs), row.targets)
            gradient = torch.autograd.grad(loss, list(ahead.parameters()))
            norm = torch.cat([part.flatten() for part in gradient]).double().norm().item()
            for name, part in zip(total, gradient, strict=True):
                total[name] += part * min(1.0, plan.clip_norm / norm)
        nothing = torch.zeros(0)
        exact = ClippedSum(gradients=total, norms=nothing, losses=nothing, sensitivity=plan.clip_norm)
        for name, noisy in plan.noise(exact, source=source, step=step).items():
            gradient = noisy / (plan.batch_size * plan.clip_norm)
            earlier = filtered.get(name, gradient)
            filtered[name] = (1 - gain) * earlier + gain * gradient
        for name, value in model.named_parameters():
            move[name] = -rate * filtered[name]
            value.data += move[name]


def test_fit_with_the_filter_is_disk_with_one_clip_per_unit_and_noise_on_every_sum() -> None:
    data, plan, gain = small_set(40, seed=0), make_plan(clip_norm=0.5), 0.6
    model = SmallNet()
    oracle, where_it_stands, unfiltered = (copy.deepcopy(model) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sums = engine_sum(model, Units.images(data), clip_norm=0.5, views=Views(mean=(0.5,), std=(0.25,)))
    run_fit(model, sums, plan, optimizer, rate=0.5, kalman=KalmanFilter(optimizer, gain=gain))
    disk_by_hand(oracle, data, plan, gain=gain, rate=0.5, look_ahead=(1 - gain) / gain)
    disk_by_hand(where_it_stands, data, plan, gain=gain, rate=0.5, look_ahead=0.0)
    disk_by_hand(unfiltered, data, plan, gain=1.0, rate=0.5, look_ahead=0.0)
    assert distance(model, oracle) < 1e-4
    assert distance(where_it_stands, oracle) > 1e-3
    assert distance(unfiltered, oracle) > 1e-2


def test_one_point_says_what_two_say_where_the_loss_is_quadratic() -> None:
    generator = torch.Generator().manual_seed(0)
    root, centre, weights, move = (torch.randn(4, *rest, generator=generator) for rest in ((4,), (), (), ()))

    def gradient(at: torch.Tensor) -> torch.Tensor:
        return root @ root.T @ (at - centre)

    gain, gamma = 0.7, 0.5  # of the authors' code
    share = (1 - gain) / (gain * gamma)
    two = share * gradient(weights + gamma * move) + (1 - share) * gradient(weights)
    torch.testing.assert_close(gradient(weights + (1 - gain) / gain * move), two)
    assert not torch.allclose(gradient(weights), two, atol=1e-2)


def filled_filter(model: nn.Module, *, scale: float, name: str = "SGD", gain: float = 0.3) -> KalmanFilter:
    """A filter that has taken five steps on random gradients."""
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
    kalman = KalmanFilter(optimizer, gain=gain)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        for value in model.parameters():
            value.grad = scale * torch.randn(value.shape, generator=generator)
        kalman.step()
    return kalman


def test_ahead_of_its_weights_the_model_gives_a_sum_that_one_unit_moves_by_the_clip_norm_at_most() -> None:
    torch.manual_seed(0)
    data, model, clip_norm = small_set(40, seed=0), SmallNet(), 0.2
    kalman = filled_filter(model, scale=2.0)
    sums = engine_sum(model, Units.images(data), clip_norm=clip_norm)
    here = sums(torch.tensor([1, 2, 7]), 0)
    with kalman.ahead():
        whole, without = sums(torch.tensor([1, 2, 7]), 0), sums(torch.tensor([1, 7]), 0)
    moved = {name: whole.gradients[name] - without.gradients[name] for name in whole.gradients}
    assert whole.norms.min() > clip_norm
    assert 0.99 * clip_norm < oracles.norm_of(moved) <= clip_norm
    assert whole.sensitivity == clip_norm
    assert oracles.distance(whole.gradients, here.gradients) > 1e-3  # it was another point
    # Control: the same at two points that are clipped apart, and only then combined.
    without_here = sums(torch.tensor([1, 7]), 0)
    moved_here = {name: here.gradients[name] - without_here.gradients[name] for name in moved}
    share = (1 - kalman.gain) / (kalman.gain * 0.5)
    apart = {name: share * moved[name] + (1 - share) * moved_here[name] for name in moved}
    assert oracles.norm_of(apart) > 1.2 * clip_norm


def test_the_weights_are_back_to_the_last_bit_also_after_an_error() -> None:
    model = SmallNet()
    kalman = filled_filter(model, scale=1.0)
    before = [value.detach().clone() for value in model.parameters()]

    def fail_ahead() -> None:
        with kalman.ahead():
            assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_ahead()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "RMSprop", "Adagrad"])
def test_the_filter_gives_any_optimizer_the_filtered_gradients(name: str) -> None:
    model = SmallNet()
    oracle, unfiltered = copy.deepcopy(model), copy.deepcopy(model)
    kalman = filled_filter(model, scale=1.0, name=name)
    for net, gain in ((oracle, kalman.gain), (unfiltered, 1.0)):
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(3)
        earlier: dict[int, torch.Tensor] = {}
        for _ in range(5):
            for place, value in enumerate(net.parameters()):
                drawn = torch.randn(value.shape, generator=generator)
                earlier[place] = gain * drawn + (1 - gain) * earlier.get(place, drawn)
                value.grad = earlier[place].clone()
            optimizer.step()
    assert distance(model, oracle) < 1e-5
    assert distance(model, unfiltered) > 1e-3
    assert all({GRADIENT, MOVE} <= set(kalman.optimizer.state[value]) for value in model.parameters())
