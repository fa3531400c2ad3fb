"""What may never break, seen from the loop: one clip per unit, noise on every rank, noisy weights averaged.

Each test has a control: the same loop with the safeguard taken out must fail it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gaussianity import is_gaussian
from sfumato.gradients import ClippedSum, clipped_sum
from sfumato.privacy.plan import Plan
from sfumato.randomness import SecureSource, SeededSource, UnitRandomness
from sfumato.training import gradient_sums, loop
from sfumato.training.averaging import WeightAverage
from sfumato.training.inputs import Units, Views
from small_runs import SmallNet, small_set

VIEWS = Views(mean=(0.5,), std=(0.25,), count=5, padding=1, flip=True)
RATE = 0.5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plan(**changes: object) -> Plan:
    fixed = {"num_examples": 12, "batch_size": 12, "num_steps": 1, "sampling": "full", "delta": 1e-3}
    return Plan(**{**fixed, "noise_multiplier": 1e-6, "clip_norm": 0.01, **changes})


def fit(model: torch.nn.Module, units: Units, mine: Plan, *, decay: float = 0.0, **options) -> WeightAverage:
    average = WeightAverage.start(model, decay=decay)
    source = options.pop("source", SeededSource(3))
    sums = gradient_sums.EngineSum(
        model=model,
        units=units,
        inputs=options.pop("views", VIEWS),
        clip_norm=mine.clip_norm,
        source=source,
        max_rows=options.pop("max_rows", 25),
    )
    for _ in loop.fit(
        model,
        sums,
        mine,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        learning_rate=lambda step: RATE,
        average=average,
        **{"source": source, "spend": lambda step: None, **options},
    ):
        pass
    return average


def moved(before: torch.nn.Module, after: torch.nn.Module) -> float:
    return math.sqrt(
        sum(
            (new.detach().double() - old.detach().double()).square().sum().item()
            for old, new in zip(before.parameters(), after.parameters(), strict=True)
        )
    )


@pytest.mark.parametrize("patients", [None, 4])
def test_however_many_views_or_images_a_unit_moves_the_weights_by_one_clip(patients, monkeypatch):
    """All units but one are taken away: the step is then that unit's alone, η·C/(B·C) at most."""
    data = small_set(12, seed=1, patients=patients)
    units = Units.patients(data, max_images=3) if patients else Units.images(data)
    mine = plan(num_examples=len(units), batch_size=len(units), clip_norm=1e-3)
    only = torch.tensor([2])
    monkeypatch.setattr(
        "sfumato.sampling.FullBatch.batches", lambda self, num_units, source, start_step=0: iter([only])
    )
    limit = RATE / len(units)

    def step() -> float:
        torch.manual_seed(0)
        model = SmallNet()
        before = copy.deepcopy(model)
        fit(model, units, mine)
        return moved(before, model)

    assert 0.9 * limit < step() <= limit * (1 + 1e-4)

    def row_by_row(model, inputs, targets, *, clip_norm, unit_index=None, unit_ids, **options) -> ClippedSum:
        own = torch.arange(len(inputs))
        return clipped_sum(model, inputs, targets, clip_norm=clip_norm, unit_ids=own, **options)

    monkeypatch.setattr(gradient_sums, "clipped_sum", row_by_row)
    assert step() > 1.5 * limit  # the control: each view clipped on its own


def test_a_patient_has_at_most_so_many_images_in_a_step():
    units = Units.patients(small_set(40, seed=1, patients=4), max_images=3)
    source = SeededSource(0)
    steps = [UnitRandomness(source, purpose="augmentation", step=step) for step in range(50)]
    chosen = [units.choose(2, draws) for draws in steps]
    assert {len(images) for images in chosen} == {3}
    assert len({tuple(images.tolist()) for images in chosen}) > 10  # and not always the same ones


def nothing_but_noise(size: int = 200_000, sensitivity: float = 1.0) -> ClippedSum:
    empty = torch.zeros(0, dtype=torch.float64)
    return ClippedSum(gradients={"w": torch.zeros(size)}, norms=empty, losses=empty, sensitivity=sensitivity)


@pytest.mark.parametrize("rank", ["0", "1", "7"])
def test_noise_is_there_on_every_rank(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "8")
    mine = plan(noise_multiplier=3.0, clip_norm=1.0)
    noisy = mine.noise(nothing_but_noise(), source=SecureSource(), step=0)["w"].double().numpy()
    assert is_gaussian(noisy, stddev=3.0)
    assert not is_gaussian(noisy, stddev=3.0 / math.sqrt(8))


def test_the_average_sees_noisy_weights_and_nothing_else():
    """With decay 0 the average is the weights themselves, whatever the private gradients were."""
    data = small_set(12, seed=1)
    torch.manual_seed(0)
    model = SmallNet()
    average = fit(model, Units.images(data), plan(noise_multiplier=5.0, num_steps=3, clip_norm=1.0))
    for name, value in model.named_parameters():
        assert torch.equal(average.weights[name], value.detach())


def difference_of_two_runs(source_of: Callable[[], object]) -> Tensor:
    """What an onlooker gets by subtracting the step before a crash from the same step after it."""
    data = small_set(12, seed=1)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = SmallNet()
        fit(model, Units.images(data), plan(noise_multiplier=50.0, clip_norm=1.0), source=source_of())
        results.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    return results[0] - results[1]


def test_a_step_that_is_done_again_has_other_noise():
    fresh = difference_of_two_runs(SecureSource)
    again = difference_of_two_runs(lambda: SeededSource(11))
    noise = RATE * 50.0 / 12
    assert fresh.std() > noise  # √2 of it, had the other views not differed too
    assert again.abs().max() == 0  # the control: the same seed has the same noise, and it cancels


def test_the_noise_does_not_depend_on_the_number_of_microbatches():
    data = small_set(12, seed=1)

    def spread(max_rows: int) -> float:
        torch.manual_seed(0)
        model = SmallNet()
        before = torch.cat([value.detach().flatten() for value in model.parameters()])
        fit(
            model,
            Units.images(data),
            plan(noise_multiplier=200.0, clip_norm=1.0),
            source=SecureSource(),
            max_rows=max_rows,
            views=Views(mean=(0.5,), std=(0.25,)),
        )
        after = torch.cat([value.detach().flatten() for value in model.parameters()])
        return ((after - before).double().std() / (RATE * 200.0 / 12)).item()

    for max_rows in (1, 5, 100):
        assert spread(max_rows) == pytest.approx(1.0, rel=0.2)
    assert spread(1) != pytest.approx(math.sqrt(12), rel=0.2)  # what noise per microbatch would give
