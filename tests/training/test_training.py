"""The loop against Algorithm 1 written out one unit at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from sfumato.data import normalise
from sfumato.errors import ConfigError
from sfumato.gradients import ClippedSum
from sfumato.privacy.plan import Plan
from sfumato.randomness import SeededSource
from sfumato.training.averaging import WeightAverage
from sfumato.training.gradient_sums import EngineSum, PlainSum
from sfumato.training.inputs import Units, Views
from sfumato.training.loop import fit, fit_without_privacy
from sfumato.training.optimizers import build_optimizer
from small_runs import SmallNet, small_set

PLAIN = Views(mean=(0.5,), std=(0.25,))


def make_plan(**changes):
    values = {"num_examples": 40, "batch_size": 10, "num_steps": 3, "noise_multiplier": 0.8, "delta": 1e-3}
    return Plan(**{**values, **changes})


def run_fit(model, data, plan, *, units=None, seed=5, rate=0.5, spend=lambda step: None, **options):
    """Train in place; returns the records."""
    source = SeededSource(seed)
    sums = EngineSum(
        model=model,
        units=units or Units.images(data),
        inputs=options.pop("views", PLAIN),
        clip_norm=plan.clip_norm,
        source=source,
        max_rows=options.pop("max_rows", 16),
        **{key: options.pop(key) for key in ("loss", "clipping") if key in options},
    )
    return list(
        fit(
            model,
            sums,
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=rate),
            learning_rate=lambda step: rate,
            average=WeightAverage.start(model, decay=0.0),
            source=source,
            spend=spend,
            **options,
        )
    )


def algorithm_1(model, data, plan, *, seed=5, rate=0.5, divisor=None):
    """One unit at a time, by plain autograd; the noise is the plan's own for the same source."""
    source, parameters = SeededSource(seed), dict(model.named_parameters())
    for step, indices in enumerate(plan.sampler().batches(len(data), source)):
        total = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for index in indices.tolist():
            inputs = normalise(data.images[index : index + 1], PLAIN.mean, PLAIN.std)
            loss = cross_entropy(model(inputs), data.labels[index : index + 1])
            gradient = torch.autograd.grad(loss, list(parameters.values()))
            norm = torch.cat([part.flatten() for part in gradient]).double().norm().item()
            for name, part in zip(parameters, gradient, strict=True):
                total[name] += part * min(1.0, plan.clip_norm / norm)
        nothing = torch.zeros(0)
        exact = ClippedSum(gradients=total, norms=nothing, losses=nothing, sensitivity=plan.clip_norm)
        noisy = plan.noise(exact, source=source, step=step)
        size = divisor(indices) if divisor else plan.batch_size
        with torch.no_grad():
            for name, value in parameters.items():
                value -= rate * noisy[name] / (size * plan.clip_norm)


def distance(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("clip_norm", [0.1, 1.0])
def test_fit_is_algorithm_1(clip_norm):
    data, plan, model = small_set(40, seed=0), make_plan(clip_norm=clip_norm), SmallNet()
    oracle, wrong = copy.deepcopy(model), copy.deepcopy(model)
    run_fit(model, data, plan)
    algorithm_1(oracle, data, plan)
    algorithm_1(wrong, data, plan, divisor=len)  # the true batch size, which is private
    assert distance(model, oracle) < 1e-4
    assert distance(model, wrong) > 1e-3


@pytest.mark.parametrize("max_rows", [1, 7, 100])
def test_microbatches_change_neither_the_sum_nor_the_noise(max_rows):
    data, model = small_set(40, seed=0), SmallNet()
    other, elsewhere = copy.deepcopy(model), copy.deepcopy(model)
    run_fit(model, data, make_plan(), max_rows=16)
    run_fit(other, data, make_plan(), max_rows=max_rows)
    run_fit(elsewhere, data, make_plan(), max_rows=16, seed=6)
    assert distance(model, other) < 1e-5
    assert distance(model, elsewhere) > 1e-3


def test_spending_returns_before_the_update_is_used():
    model, seen = SmallNet(), []
    before = [value.clone() for value in model.parameters()]

    def spend(step):
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        seen.append((step, changed))
        before[:] = [value.clone() for value in model.parameters()]

    run_fit(model, small_set(40, seed=0), make_plan(), spend=spend)
    assert seen == [(1, False), (2, True), (3, True)]


def test_a_refused_expense_leaves_the_weights_alone():
    model = SmallNet()
    before = copy.deepcopy(model)

    def refuse(step):
        raise RuntimeError("no budget")

    with pytest.raises(RuntimeError, match="no budget"):
        run_fit(model, small_set(40, seed=0), make_plan(), spend=refuse)
    assert distance(model, before) == 0


def test_an_empty_batch_is_an_ordinary_step_of_pure_noise():
    model, data = SmallNet(), small_set(40, seed=0)
    before = copy.deepcopy(model)
    plan = make_plan(batch_size=1e-9, num_steps=1, noise_multiplier=2.0)
    records = run_fit(model, data, plan, rate=1e-9)
    assert records[0].loss is None
    moves = torch.cat(
        [(a - b).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    )
    assert 1.7 < moves.std() < 2.3  # rate / batch size = 1: the move is the noise itself
    assert run_fit(SmallNet(), data, make_plan())[0].loss is not None


def test_a_patient_moves_the_model_as_one_unit():
    data = small_set(40, seed=0, patients=4)
    plan = make_plan(num_examples=4, batch_size=4, sampling="full", num_steps=1, delta=0.1)
    quiet = make_plan(
        num_examples=4, batch_size=4, sampling="full", num_steps=1, delta=0.1, noise_multiplier=1e-9
    )
    model = SmallNet()
    before = copy.deepcopy(model)
    records = run_fit(model, data, quiet, units=Units.patients(data, max_images=100), rate=1.0)
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    )
    assert moved.norm() <= 1.0 + 1e-5  # four patients of norm at most 1, divided by 4
    assert len(records) == plan.num_steps


def test_the_normalised_update_does_not_depend_on_the_clip_norm_when_all_are_clipped():
    data, results = small_set(40, seed=0), []
    torch.manual_seed(0)
    start = SmallNet()
    for clip_norm, normalised in ((1e-4, True), (1e-3, True), (1e-3, False)):
        model = copy.deepcopy(start)
        run_fit(model, data, make_plan(clip_norm=clip_norm), normalised_update=normalised)
        results.append(model)
    assert distance(results[0], results[1]) < 1e-3
    assert distance(results[0], results[2]) > 1e-2


def test_frozen_parameters_stay_and_the_rest_learns():
    model = SmallNet()
    model.convolution.requires_grad_(False)
    before = copy.deepcopy(model)
    trained = [value for value in model.parameters() if value.requires_grad]
    list(
        fit(
            model,
            EngineSum(
                model=model,
                units=Units.images(small_set(40, seed=0)),
                inputs=PLAIN,
                clip_norm=1.0,
                source=SeededSource(1),
                max_rows=8,
            ),
            make_plan(),
            optimizer=torch.optim.SGD(trained, lr=1.0),
            learning_rate=lambda step: 1.0,
            average=WeightAverage.start(model, decay=0.0),
            source=SeededSource(1),
            spend=lambda step: None,
        )
    )
    assert torch.equal(model.convolution.weight, before.convolution.weight)
    assert not torch.equal(model.head.weight, before.head.weight)


def test_training_without_privacy_is_the_mean_gradient():
    data, model = small_set(40, seed=0), SmallNet()
    oracle = copy.deepcopy(model)
    sampler = make_plan(num_steps=2).sampler()
    list(
        fit_without_privacy(
            model,
            PlainSum(model=model, units=Units.images(data), inputs=PLAIN, source=SeededSource(5), max_rows=3),
            sampler,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            learning_rate=lambda step: 0.5,
            average=WeightAverage.start(model, decay=0.0),
            source=SeededSource(5),
        )
    )
    for indices in sampler.batches(len(data), SeededSource(5)):
        loss = cross_entropy(oracle(normalise(data.images[indices], (0.5,), (0.25,))), data.labels[indices])
        gradients = torch.autograd.grad(loss, list(oracle.parameters()))
        with torch.no_grad():
            for value, gradient in zip(oracle.parameters(), gradients, strict=True):
                value -= 0.5 * gradient
    assert distance(model, oracle) < 1e-5


@pytest.mark.parametrize("name", ["SGD", "NAdam", "AdamW", "RMSprop", "Adagrad", "RAdam"])
def test_any_optimizer_is_found_by_name(name):
    optimizer = build_optimizer(name, SmallNet(), learning_rate=0.1, options={})
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("Sdg", {}, "unknown-optimizer"),
        ("LBFGS", {}, "unknown-optimizer"),
        ("Optimizer", {}, "unknown-optimizer"),
        ("SGD", {"momentun": 0.9}, "bad-optimizer-option"),
        ("SGD", {"momentum": -1.0}, "bad-optimizer-option"),
    ],
)
def test_an_optimizer_that_cannot_be_meant_is_refused(name, options, code):
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, SmallNet(), learning_rate=0.1, options=options)
    assert caught.value.code == code


def test_an_optimizer_that_cannot_be_used_is_not_its_own_cure():
    for name in ("LBFGS", "SparseAdam"):
        with pytest.raises(ConfigError) as caught:
            build_optimizer(name, SmallNet(), learning_rate=0.1, options={})
        assert "Did you mean" not in str(caught.value)
        assert caught.value.why
    with pytest.raises(ConfigError, match=r"Did you mean NAdam\?"):
        build_optimizer("NAdams", SmallNet(), learning_rate=0.1, options={})
