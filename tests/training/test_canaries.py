"""Canaries in the sums: fair coins, orthogonal directions, and real units for whom nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sfumato.data.canaries import canary_images
from sfumato.errors import ConfigError
from sfumato.gradients import ClippedSum
from sfumato.randomness import SecureSource, SeededSource
from sfumato.run.canaries import new_key
from sfumato.sampling import PoissonSampling
from sfumato.training.canaries import Directions, WithGradientCanaries, WithInputCanaries, toss_coins
from sfumato.training.gradient_sums import EngineSum, head_gradients
from sfumato.training.inputs import Units, Views
from sfumato.training.last_layer import LastLayerViews
from small_runs import SmallNet, small_set

KEY = 20260101


class Head(nn.Module):
    """A linear layer on flat images, as a head in closed form has them."""

    def __init__(self, num_inputs: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(num_inputs, 3)

    def forward(self, x):
        return self.head(x.flatten(1))


def engine_sum(model, units, *, clip_norm=1.0, views=0):
    inputs = Views(mean=(0.0,), std=(1.0,), count=views, padding=1 if views else 0)
    return EngineSum(
        model=model, units=units, inputs=inputs, clip_norm=clip_norm, source=SeededSource(5), max_rows=16
    )


def dense(directions: Directions) -> torch.Tensor:
    size = sum(shape.numel() for shape in directions.shapes.values())
    vectors = torch.zeros(len(directions.places), size, dtype=torch.float64)
    vectors.scatter_(1, directions.places, directions.signs / directions.places.shape[1] ** 0.5)
    return vectors


def flat(gradients, shapes) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in shapes]).double()


def test_coins_are_fair_and_independent_of_everything_else_that_follows_from_the_key():
    key = new_key(SecureSource())
    coins = toss_coins(key, 4000)
    assert torch.equal(coins, toss_coins(key, 4000))
    other = toss_coins(new_key(SecureSource()), 4000)
    directions = Directions.draw(key, 4000, nn.Linear(100, 100, bias=False))
    labels = canary_images(key, 4000, kind="noise", shape=(1, 2, 2), classes=("a", "b")).labels
    for one in (torch.ones(4000), other, directions.signs[:, 0] > 0, directions.places[:, 0] % 2, labels):
        agreeing = int((coins == one.bool()).sum())
        assert abs(agreeing - 2000) < 160  # 5 standard deviations
    assert abs(int((coins[1:] == coins[:-1]).sum()) - 2000) < 160


@pytest.mark.parametrize("model", [SmallNet(), Head(), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))])
def test_directions_are_unit_vectors_that_share_no_coordinate(model):
    vectors = dense(Directions.draw(KEY, 40, model))
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(40, dtype=torch.float64))
    assert int((vectors != 0).sum(0).max()) == 1
    assert not torch.equal(vectors, dense(Directions.draw(KEY + 1, 40, model)))


def test_more_canaries_than_trained_parameters_are_refused():
    with pytest.raises(ConfigError, match="too-many-canaries"):
        Directions.draw(KEY, 200, Head(num_inputs=40))


def test_in_a_wide_last_layer_no_image_has_a_gradient_where_canaries_are_and_no_prediction_changes():
    model, units = Head(), Units.images(small_set(60, seed=1))
    nn.init.normal_(model.head.weight, std=0.1)
    directions = Directions.draw(KEY, 40, model)
    total = engine_sum(model, units)(torch.arange(60), 0)
    assert directions.projections(total.gradients).abs().max() < 1e-5
    generic = Directions.draw(KEY, 65, model)  # more than inputs: any coordinates
    assert generic.projections(total.gradients).abs().max() > 0.1
    pixels = torch.rand(20, 1, 8, 8)
    before = model(pixels).softmax(1)
    moved = directions.added(
        {name: torch.zeros_like(value) for name, value in model.named_parameters()},
        torch.arange(40),
        length=3.0,
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += moved[name]
    torch.testing.assert_close(model(pixels).softmax(1), before)


@pytest.mark.parametrize("closed", [False, True])
def test_a_sum_is_that_of_the_real_units_and_the_vectors_of_the_canaries_that_are_in(closed):
    units = Units.images(small_set(30, seed=1))
    model = Head() if closed else SmallNet()
    if closed:
        rows = LastLayerViews(images=Views(mean=(0.0,), std=(1.0,)), features=torch.rand(30, 64))
        others = head_gradients(model, rows, units, clip_norm=0.5)
    else:
        others = engine_sum(model, units, clip_norm=0.5)
    directions, members = Directions.draw(KEY, 50, model), toss_coins(KEY, 50)
    joined = WithGradientCanaries(others=others, directions=directions, members=members)
    assert joined.num_units == 80
    indices = torch.tensor([0, 3, 29, *range(30, 60)])
    total, alone = joined(indices, 0), others(indices[:3], 0)
    vectors = dense(directions)
    wanted = flat(alone.gradients, directions.shapes) + 0.5 * vectors[:30][members[:30]].sum(0)
    torch.testing.assert_close(flat(total.gradients, directions.shapes), wanted)
    assert members[:30].any()
    assert not members[:30].all()
    assert total.sensitivity == alone.sensitivity
    assert torch.equal(total.norms, alone.norms)
    for name, value in total.gradients.items():
        assert value.shape == alone.gradients[name].shape
    first = int(members.nonzero()[0]) + 30  # one canary more moves the sum by at most the sensitivity
    one = flat(joined(torch.tensor([0, first]), 0).gradients, directions.shapes)
    none = flat(joined(torch.tensor([0]), 0).gradients, directions.shapes)
    assert 0.499 < float((one - none).norm()) <= 0.5


def test_canaries_with_images_are_clipped_and_added_as_units_of_their_own():
    real, drawn = small_set(30, seed=1), small_set(20, seed=9)
    model = SmallNet()
    others, canaries = engine_sum(model, Units.images(real)), engine_sum(model, Units.images(drawn))
    members = toss_coins(KEY, 20)
    joined = WithInputCanaries(others=others, canaries=canaries, members=members)
    total = joined(torch.arange(5, 50), 0)
    alone, added = others(torch.arange(5, 30), 0), canaries(members.nonzero()[:, 0], 0)
    for name, value in total.gradients.items():
        torch.testing.assert_close(value, alone.gradients[name] + added.gradients[name])
    assert torch.equal(total.norms, alone.norms)  # what is logged is about the real units
    assert torch.equal(total.losses, alone.losses)
    assert total.sensitivity == 1.0


def test_a_batch_draws_the_same_real_units_whether_there_are_canaries_or_not():
    sampling, counts = PoissonSampling(sampling_rate=0.3, num_steps=400), torch.zeros(50)
    for step in range(400):
        alone = sampling.batch(30, SeededSource(1), step)
        joined = sampling.batch(80, SeededSource(1), step)
        assert torch.equal(joined[joined < 30], alone)
        counts[joined[joined >= 30] - 30] += 1
    assert 90 < counts.min() <= counts.max() < 150  # each at the rate of the plan: 120 of 400 expected


def test_an_empty_step_without_canaries_is_left_as_it_is():
    empty = ClippedSum(
        gradients={"weight": torch.zeros(2, 3)}, norms=torch.zeros(0), losses=torch.zeros(0), sensitivity=1.0
    )

    class Nothing:
        num_units = 4

        def __call__(self, indices, step):
            assert len(indices) == 0
            return empty

    directions = Directions.draw(KEY, 3, nn.Linear(3, 2, bias=False))
    joined = WithGradientCanaries(others=Nothing(), directions=directions, members=torch.zeros(3).bool())
    assert joined(torch.tensor([5, 6]), 0) is empty


def test_images_of_canaries_follow_from_the_key_and_have_any_label():
    for kind in ("mislabelled", "noise"):
        one, again, other = (
            canary_images(key, 90, kind=kind, shape=(3, 8, 8), classes=("a", "b", "c")) for key in (1, 1, 2)
        )
        assert torch.equal(one.images, again.images)
        assert not torch.equal(one.images, other.images)
        assert set(one.labels.tolist()) == {0, 1, 2}
        assert one.images.shape == (90, 3, 8, 8)
        assert len(torch.unique(one.known_ids)) == 90


def test_directions_of_a_run_on_findings_are_not_in_the_last_layer_where_sigmoids_do_not_cancel():
    net, end = SmallNet(), 0
    for name, value in net.named_parameters():
        first, end = end, end + value.numel()
        if name == "head.weight":
            break

    def in_head(directions):
        return (directions.places >= first) & (directions.places < end)

    assert in_head(Directions.draw(KEY, 5, net)).all()
    assert not in_head(Directions.draw(KEY, 5, net, softmax=False)).any()


def test_canaries_of_findings_have_a_coin_for_each():
    images = canary_images(
        KEY, 400, kind="noise", shape=(1, 2, 2), classes=("a", "b", "c"), task="multi-label"
    )
    assert images.multi_label
    assert (images.labels.mean(0) - 0.5).abs().max() < 0.13  # five standard deviations
    assert abs(torch.corrcoef(images.labels.T)[0, 1]) < 0.25
