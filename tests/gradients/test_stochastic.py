"""What a model draws at random belongs to its units, not to their places in a batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oracles import distance, norm_of, reference
from sfumato.errors import PrivacyError
from sfumato.gradients import Choices, clipped_sum
from sfumato.gradients.random_operations import REPLACEMENTS, RandomOperations
from sfumato.gradients.stochastic import Generators
from sfumato.randomness import SeededSource, UnitRandomness

CLIP = 1.0


def of_step(step: int = 0) -> UnitRandomness:
    return UnitRandomness(SeededSource(7), purpose="model", step=step)


def mlp(p: float = 0.5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 3))


def batch(rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return 3 * torch.randn(rows, 20), torch.randint(3, (rows,))


def summed(model, inputs, targets, ids, *, size=None, step=0, **options):
    total = clipped_sum(
        model,
        inputs,
        targets,
        clip_norm=CLIP,
        microbatch_size=size,
        randomness=of_step(step),
        unit_ids=ids,
        **options,
    )
    return total.gradients


def moved(first: dict, second: dict) -> float:
    return norm_of({name: value - second[name] for name, value in first.items()})


def by_global_generator(model, inputs, targets, seed):
    """What clipped_sum did when masks came from PyTorch's generator: the control."""
    torch.manual_seed(seed)
    masks = (torch.rand(len(inputs), 64) < 0.5).float() * 2
    total: dict[str, torch.Tensor] = {}
    for x, y, mask in zip(inputs, targets, masks, strict=True):
        hidden = F.relu(model[0](x[None])) * mask
        gradients = torch.autograd.grad(F.cross_entropy(model[3](hidden), y[None]), list(model.parameters()))
        norm = sum(g.double().square().sum() for g in gradients).sqrt()
        for number, g in enumerate(gradients):
            total[str(number)] = total.get(str(number), 0) + g.double() * min(1.0, CLIP / float(norm))
    return total


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("gone", [0, 100, 255])
def test_removing_a_unit_moves_the_sum_by_at_most_the_bound_under_dropout(gone, seeded):
    model, (inputs, targets) = mlp(), batch()
    ids = torch.randperm(1000)[:256]
    keep = torch.arange(256) != gone
    if seeded:
        torch.manual_seed(5)
    whole = summed(model, inputs, targets, ids, size=64)
    if seeded:
        torch.manual_seed(5)
    rest = summed(model, inputs[keep], targets[keep], ids[keep], size=64)
    assert 0 < moved(whole, rest) <= CLIP


def test_masks_of_the_global_generator_would_break_the_bound():
    model, (inputs, targets) = mlp(), batch()
    whole = by_global_generator(model, inputs, targets, 5)
    rest = by_global_generator(model, inputs[1:], targets[1:], 5)
    assert moved(whole, rest) > 4 * CLIP


@pytest.mark.parametrize("size", [7, 64, 256])
def test_neither_microbatches_nor_places_change_the_sum(size):
    model, (inputs, targets) = mlp(), batch()
    ids = torch.arange(256) + 9
    whole = summed(model, inputs, targets, ids, size=256)
    order = torch.randperm(256)
    other = summed(model, inputs[order], targets[order], ids[order], size=size)
    assert distance(other, whole) < 1e-5
    assert distance(summed(model, inputs, targets, ids + 1, size=size), whole) > 0.05  # control: other units
    assert distance(summed(model, inputs, targets, ids, size=size, step=1), whole) > 0.05  # another step


def test_rows_of_one_unit_draw_apart_from_each_other():
    model, (inputs, targets) = mlp(), batch(1)
    twice = inputs.repeat(2, 1), targets.repeat(2)
    one = summed(model, inputs, targets, torch.tensor([4]))
    both = summed(model, *twice, torch.tensor([4]), unit_index=torch.tensor([0, 0]))
    assert distance(one, both) > 0.05
    plain = mlp(0.0)
    same = summed(plain, *twice, torch.tensor([4]), unit_index=torch.tensor([0, 0]))
    assert distance(summed(plain, inputs, targets, torch.tensor([4])), same) < 1e-5  # control: no dropout


def test_dropout_has_its_rate_and_is_exact():
    """A model that shows its mask: entries are 0 or 1 / (1 - p), as often as p says."""
    inputs = torch.ones(200, 100)
    seen = []
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(100, 3))
    model[0].register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
    summed(model, inputs, torch.zeros(200, dtype=torch.int64), torch.arange(200), size=200)
    mask = seen[-1]
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (mask == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize("layer", ["dropout", "own generator", "functional"])
def test_a_model_that_draws_is_refused_by_name_without_randomness(layer):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.Generator().manual_seed(0) if layer == "own generator" else None

        def forward(self, x):
            return x + torch.randn(x.shape, generator=self.own)

    model = nn.Sequential(nn.Linear(20, 3), nn.Dropout(0.1) if layer == "dropout" else Noisy())
    inputs, targets = batch(6)
    with pytest.raises(PrivacyError, match="random-model") as caught:
        clipped_sum(model, inputs, targets, clip_norm=CLIP, choices=Choices())
    assert caught.value.what.startswith("1 (")
    clipped_sum(model, inputs, targets, clip_norm=CLIP, randomness=of_step(), unit_ids=torch.arange(6))
    if layer == "dropout":
        clipped_sum(model.eval(), inputs, targets, clip_norm=CLIP)  # control: it draws nothing
        clipped_sum(mlp(0.0), inputs, targets, clip_norm=CLIP)


def test_dropout_switched_on_later_is_noticed():
    model, (inputs, targets) = mlp(0.0), batch(6)
    clipped_sum(model, inputs, targets, clip_norm=CLIP)
    model[2].p = 0.5
    with pytest.raises(PrivacyError, match="random-model"):
        clipped_sum(model, inputs, targets, clip_norm=CLIP)


def test_the_global_generators_are_left_as_they_were():
    model, (inputs, targets) = mlp(), batch(20)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    summed(model, inputs, targets, torch.arange(20), choices=Choices())
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(3)
    with pytest.raises(PrivacyError):
        clipped_sum(model, inputs, targets, clip_norm=CLIP, choices=Choices())
    assert torch.equal(torch.rand(4), expected)


class LayerDrop(nn.Module):
    """Skips a layer for the whole batch, and noise for each row."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.first, self.head = draw, nn.Linear(20, 20), nn.Linear(20, 3)

    def forward(self, x):
        y = self.first(x)
        return self.head(x + y if self.draw() < 0.5 else x - y)


def test_what_all_rows_share_is_the_same_in_every_microbatch():
    model, (inputs, targets) = LayerDrop(lambda: torch.rand(())), batch(50)
    ids = torch.arange(50)
    for step in range(4):
        whole = summed(model, inputs, targets, ids, size=50, step=step)
        assert distance(summed(model, inputs, targets, ids, size=7, step=step), whole) < 1e-5
    different = {norm_of(summed(model, inputs, targets, ids, step=step)) for step in range(6)}
    assert len(different) == 2  # both ways occur


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_randomness_from_outside_torch_is_refused(draw):
    model, (inputs, targets) = LayerDrop(draw), batch(5)
    with pytest.raises(PrivacyError, match="random-operation"):
        summed(model, inputs, targets, torch.arange(5), choices=Choices())


class Positions(nn.Module):
    """Draws for (positions, rows), as transformers that have positions first."""

    def __init__(self, folded: bool):
        super().__init__()
        self.folded, self.head = folded, nn.Linear(5, 3)

    def forward(self, x):
        x = x.view(len(x), 4, 5)
        if self.folded:
            return self.head(F.dropout(x.flatten(0, 1), 0.5).view(x.shape).mean(dim=1))
        return self.head(F.dropout(x.transpose(0, 1), 0.5).mean(dim=0))


@pytest.mark.parametrize("rows", [1, 3, 4, 8])
@pytest.mark.parametrize("folded", [False, True])
def test_draws_without_rows_first_are_refused_whatever_lengths_are_equal(folded, rows):
    inputs, targets = batch(rows)
    with pytest.raises(PrivacyError, match="random-layout"):
        summed(Positions(folded), inputs, targets, torch.arange(rows), choices=Choices())


class Custom(nn.Module):
    """A layer without a rule, with dropout and a path that is dropped for whole rows."""

    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.randn(20, 20) / 4), nn.Dropout(0.4)

    def forward(self, x):
        y = self.dropout(torch.tanh(x @ self.weight))
        kept = x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7  # as timm's DropPath
        also = (torch.rand((len(x), 1), dtype=x.dtype) + 0.7).floor()  # as transformers' drop_path
        return x + y * kept + y.sin() * also


class Looks(Custom):
    """The same, but vmap cannot follow it."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("unit_index", [None, [0, 0, 1, 2, 2, 2, 3, 3]], ids=["rows", "units"])
@pytest.mark.parametrize("kind", ["custom", "looks", "encoder"])
def test_modules_whose_forward_pass_is_repeated_see_the_same_numbers(kind, unit_index):
    """The engine's gradient is autograd's of the very pass: its numbers are answered by hand here."""
    torch.manual_seed(4)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(20, 2, 32, batch_first=True)
        body = nn.Sequential(nn.Unflatten(1, (1, 20)), layer, nn.Flatten())
    else:
        body = {"custom": Custom, "looks": Looks}[kind]()
    model = nn.Sequential(nn.Linear(20, 20), body, nn.Linear(20, 3)).double()
    inputs, targets = batch(8)
    inputs, draws = inputs.double(), of_step()
    index = torch.arange(8) if unit_index is None else torch.tensor(unit_index)
    ids = torch.arange(int(index.max()) + 1) * 3 + 1
    rows = np.array([int((index[:i] == index[i]).sum()) for i in range(8)])
    total = clipped_sum(
        model, inputs, targets, clip_norm=1e9, randomness=draws, unit_ids=ids, choices=Choices(),
        unit_index=None if unit_index is None else index,
    )  # fmt: skip
    expected = reference(_Answered(model, draws, ids[index].numpy(), rows), inputs, targets, unit_index=index)
    clean = {name.removeprefix("model."): value for name, value in expected.clipped_sum(1e9).items()}
    assert distance(total.gradients, clean) < 1e-10
    torch.testing.assert_close(total.norms, expected.norms, rtol=1e-10, atol=0)


class _Answered(nn.Module):
    """Draws by hand: which rows are passing is found by comparing them with the batch's."""

    def __init__(self, model, draws, units, rows):
        super().__init__()
        self.model, self.draws, self.units, self.rows = model, draws, units, rows
        self.seen = None

    def forward(self, x):
        inputs, _ = batch(8)
        which = [int((inputs.double() == row).all(dim=1).nonzero()[0, 0]) for row in x]
        stream = 0

        def uniform(shape, wide, device):
            nonlocal stream
            count = int(np.prod(shape[1:])) * (2 if wide else 1)
            words = self.draws.words(self.units[which], self.rows[which], count, stream=stream)
            stream += 1
            if wide:
                values = (words.copy().view(np.uint64) >> np.uint64(11)) * 2.0**-53
            else:
                values = ((words >> np.uint32(8)) * 2.0**-24).astype(np.float32)
            return torch.from_numpy(values).reshape(shape)

        with RandomOperations(uniform):
            return self.model(x)


DISTRIBUTIONS = {
    "rand": (lambda n: torch.rand(n), 0.5, 1 / 12),
    "randn": (lambda n: torch.randn(n), 0.0, 1.0),
    "uniform": (lambda n: torch.empty(n).uniform_(2, 4), 3.0, 4 / 12),
    "normal": (lambda n: torch.empty(n).normal_(1, 2), 1.0, 4.0),
    "exponential": (lambda n: torch.empty(n).exponential_(2.0), 0.5, 0.25),
    "geometric": (lambda n: torch.empty(n).geometric_(0.25), 4.0, 12.0),
    "bernoulli": (lambda n: torch.bernoulli(torch.full((n,), 0.2)), 0.2, 0.16),
    "randint": (lambda n: torch.randint(2, 6, (n,)), 3.5, 15 / 12),
    "randint_like": (lambda n: torch.randint_like(torch.empty(n), 4), 1.5, 15 / 12),
    "random_": (lambda n: torch.empty(n).random_(0, 4), 1.5, 15 / 12),
    "multinomial": (
        lambda n: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), n, replacement=True), 1.5, 0.75,
    ),
    "rrelu": (lambda n: -F.rrelu(-torch.ones(n), 0.2, 0.4, training=True), 0.3, 0.04 / 12),
    "double": (lambda n: torch.rand(n, dtype=torch.float64), 0.5, 1 / 12),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_answered_operations_have_their_distributions(name):
    draw, mean, variance = DISTRIBUTIONS[name]
    generator, before = torch.Generator().manual_seed(0), torch.get_rng_state()

    def uniform(shape, wide, device):
        return torch.rand(shape, generator=generator, dtype=torch.float64 if wide else torch.float32)

    with RandomOperations(uniform):
        values = draw(100_000).double()
    assert values.mean().item() == pytest.approx(mean, abs=5 * (variance / 1e5) ** 0.5)
    assert values.var().item() == pytest.approx(variance, rel=0.05)
    assert torch.equal(torch.get_rng_state(), before)


def test_permutations_and_draws_without_replacement_are_such():
    with RandomOperations(lambda shape, wide, device: torch.rand(shape, dtype=torch.float64)):
        assert sorted(torch.randperm(50).tolist()) == list(range(50))
        drawn = torch.multinomial(torch.tensor([[1.0, 2.0, 0.0, 4.0]] * 30), 3)
    assert all(sorted(row) == [0, 1, 3] for row in drawn.tolist())


def test_an_unknown_random_operation_is_refused():
    class Poisson(nn.Module):
        def forward(self, x):
            return x + torch.poisson(x.abs())

    inputs, targets = batch(4)
    with pytest.raises(PrivacyError, match="random-operation"):
        summed(nn.Sequential(Poisson(), nn.Linear(20, 3)), inputs, targets, torch.arange(4))
    assert all(hasattr(torch.ops.aten, name.partition(".")[0]) for name in REPLACEMENTS)


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 0, 1, 2]), torch.arange(3), [0, 1, 2, 3]])
def test_units_that_cannot_be_told_apart_are_refused(ids):
    inputs, targets = batch(4)
    with pytest.raises(Exception, match="bad-unit-ids"):
        summed(mlp(), inputs, targets, ids)


def test_another_threads_random_numbers_do_not_make_a_model_refused(monkeypatch):
    """Python's generator moves during the pass: the model is asked once more, and did not do it."""
    model = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    inputs, targets = batch(6)
    moved = iter([True])
    monkeypatch.setattr(Generators, "others_moved", lambda self: next(moved, False))
    found = clipped_sum(
        model, inputs, targets, clip_norm=CLIP, randomness=of_step(), unit_ids=torch.arange(6)
    )
    assert next(moved, None) is None  # control: it was asked
    assert found.norms.isfinite().all()
