"""Many models at once: each is trained as the engine and the loop would train it alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.audit import lenet_kernel, lenet_passes
from sfumato.audit.lenet_windows import WindowConvolutions
from sfumato.audit.many_models import ManySums, losses_of, paired_units, stack, train_many
from sfumato.data import ImageSet
from sfumato.gradients import clipped_sum
from sfumato.gradients.kernels import library
from sfumato.models import create_model
from sfumato.privacy import Plan
from sfumato.randomness import SeededSource
from sfumato.training.inputs import Views

CLIP = 0.7


def digits(count: int, *, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 28, 28), generator=generator).to(torch.uint8)
    return ImageSet(images, torch.arange(count) % 10, tuple("0123456789"), name="digits")


def lenets(count: int) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return [create_model("lenet", num_classes=10, in_channels=1) for _ in range(count)]


def stacked_of(models: list[nn.Module]) -> nn.Module:
    stacked = stack(models[0], len(models))
    for name, value in stacked.named_parameters():
        value.data = torch.stack([dict(model.named_parameters())[name].detach() for model in models])
    return stacked


PATHS = lenet_kernel.available()  # every instruction set that this build has and this processor can run


@pytest.fixture(params=[*PATHS, "windows"])
def way(request, monkeypatch):
    monkeypatch.setattr(lenet_kernel, "compiled", lambda: PATHS.get(request.param))
    return request.param


def sums_of(models: list[nn.Module], data: ImageSet, views: Views) -> ManySums:
    return ManySums(
        stacked=stacked_of(models),
        data=data,
        inputs=views,
        num_models=len(models),
        clip_norm=CLIP,
        source=SeededSource(1),
    )


def far_apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], model: int) -> float:
    return max(
        float((found[name][model] - value).norm() / value.norm().clamp(min=1e-9))
        for name, value in wanted.items()
    )


def test_each_model_gets_the_engines_sum_over_its_own_batch(way) -> None:
    models, data = lenets(3), digits(9)
    sums = sums_of(models, data, Views(mean=(0.1,), std=(0.3,)))
    chosen = {0: [0, 2, 3, 8], 1: [5], 2: [0, 1, 2, 3, 4, 7]}
    pairs = sorted(example * 3 + model for model, examples in chosen.items() for example in examples)
    found = sums(torch.tensor(pairs), 0)
    images = (data.images.float() / 255 - 0.1) / 0.3
    for number, examples in chosen.items():
        alone = clipped_sum(models[number], images[examples], data.labels[examples], clip_norm=CLIP)
        assert far_apart(found.gradients, alone.gradients, number) < 1e-5
        other = clipped_sum(
            models[number], images[examples[1:] or [6]], data.labels[examples[1:] or [6]], clip_norm=CLIP
        )
        assert far_apart(found.gradients, other.gradients, number) > 1e-2  # one unit less is seen
    assert found.sensitivity == CLIP
    assert len(found.norms) == len(found.losses) == 11


def test_a_unit_of_several_views_is_clipped_once(way) -> None:
    models, data = lenets(2), digits(4)
    views = Views(mean=(0.1,), std=(0.3,), count=3, padding=2)
    sums = sums_of(models, data, views)
    pairs = torch.tensor([0, 2, 4, 5, 7])
    found = sums(pairs, 5)
    from sfumato.randomness import UnitRandomness

    for number in range(2):
        of_model = pairs[pairs % 2 == number]
        randomness = UnitRandomness(SeededSource(1), purpose="augmentation", step=5)
        part = next(
            views.microbatches(
                paired_units(data, 2),
                of_model,
                max_rows=100,
                randomness=randomness,
                device=torch.device("cpu"),
            )
        )
        arguments = models[number], part.inputs, part.targets
        alone = clipped_sum(*arguments, clip_norm=CLIP, unit_index=part.unit_index)
        by_row = clipped_sum(*arguments, clip_norm=CLIP / 3)
        assert far_apart(found.gradients, alone.gradients, number) < 1e-5
        assert far_apart(found.gradients, by_row.gradients, number) > 1e-4


def test_a_step_without_any_unit_gives_zeros() -> None:
    found = sums_of(lenets(2), digits(4), Views(mean=(0.0,), std=(1.0,)))(
        torch.zeros(0, dtype=torch.int64), 0
    )
    assert all(not value.any() for value in found.gradients.values())
    assert found.sensitivity == CLIP


def convolved() -> tuple:
    """Weights of two models, five images, and six rows of them."""
    stacked = stacked_of(lenets(2))
    weights = {name: 4 * value.detach() for name, value in stacked.named_parameters()}
    return (
        tuple(weights[name] for name in lenet_passes.CONVOLUTIONS),
        torch.randn(5, 28, 28),
        torch.tensor([4, 0, 1, 1, 2, 3]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
    )


@pytest.mark.parametrize("path", list(PATHS))
def test_compiled_convolutions_equal_products_over_windows(path, monkeypatch) -> None:
    monkeypatch.setattr(lenet_kernel, "compiled", lambda: PATHS[path])
    arguments = convolved()
    ours, plain = lenet_kernel.Convolutions(*arguments), WindowConvolutions(*arguments)
    assert torch.allclose(ours.features, plain.features, atol=2e-6)
    gradient = torch.randn(6, 400)
    for first, second in zip(ours.backward(gradient, 3), plain.backward(gradient, 3), strict=True):
        assert first.shape == second.shape
        assert float((first - second).norm() / second.norm()) < 1e-5


@pytest.mark.parametrize("path", list(PATHS))
def test_c_refuses_what_it_would_read_or_write_past_an_array(path, monkeypatch) -> None:
    monkeypatch.setattr(lenet_kernel, "compiled", lambda: PATHS[path])
    weights, images, image_of, model_of = convolved()
    made = lenet_kernel.Convolutions(weights, images, image_of, model_of)
    for wrong in (5, -2):
        with pytest.raises(ValueError, match="out of range"):
            lenet_kernel.Convolutions(weights, images, torch.full((6,), wrong), model_of)
    with pytest.raises(ValueError, match="out of range"):
        lenet_kernel.Convolutions(weights, images, image_of, model_of + 1)
    for rows in (0, 4):
        with pytest.raises(ValueError, match="does not fit the arrays"):
            made.backward(torch.randn(6, 400), rows)
    passed = [made.images, image_of, model_of, *weights, made.kept, made.features]
    PATHS[path].call("lenet_forward", *passed)
    for place in range(len(passed)):  # one value less
        shorter = [value.flatten()[:-1] if at == place else value for at, value in enumerate(passed)]
        with pytest.raises(ValueError, match="does not fit the arrays"):
            PATHS[path].call("lenet_forward", *shorter)


def test_the_convolutions_take_the_path_of_the_engine(monkeypatch) -> None:
    for path, kernels in library.available().items():
        monkeypatch.setattr(library, "compiled", lambda kernels=kernels: kernels)
        assert lenet_kernel.compiled() is PATHS.get(path)
    monkeypatch.setattr(library, "compiled", lambda: None)  # SFUMATO_KERNELS=none
    assert lenet_kernel.compiled() is None


def test_models_of_a_stack_draw_their_own_batches_and_noise() -> None:
    data, model = digits(20), lenets(1)[0]
    plan = Plan(num_examples=20, batch_size=10, num_steps=2, noise_multiplier=1.0, delta=0.01)
    trained = train_many(
        model,
        plan,
        data,
        Views(mean=(0.0,), std=(1.0,)),
        num_models=3,
        learning_rate=0.5,
        source=SeededSource(0),
    )
    bias = dict(trained.named_parameters())["hidden.0.bias"].detach()
    assert bias.shape == (3, 120)
    moved = bias - dict(model.named_parameters())["hidden.0.bias"].detach()
    correlation = np.corrcoef(moved.numpy())
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 0.4
    # two steps of noise, rate · σ / batch size each (the update is normalised by the clip norm)
    assert 0.8 < float(moved.std()) / (0.5 / 10 * 2**0.5) < 1.2
    losses = losses_of(trained, model, torch.zeros(4, 1, 28, 28), torch.arange(4))
    assert losses.shape == (3, 4)


def test_one_example_more_leaves_the_draws_of_all_others() -> None:
    few, more = paired_units(digits(3), 4), paired_units(digits(4), 4)
    assert torch.equal(more.rows[: len(few.rows)], few.rows)
    assert more.rows[len(few.rows) :].tolist() == [3] * 4
