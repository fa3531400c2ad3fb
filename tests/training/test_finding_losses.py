"""A sigmoid for each finding: sums of the engine and in closed form against autograd, the bound, scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from oracles import distance, reference
from sfumato.data import ImageSet
from sfumato.doctor import check_engine, check_model
from sfumato.errors import ModelError, PrivacyError
from sfumato.gradients import clipped_sum
from sfumato.randomness import SeededSource
from sfumato.training.finding_scores import finding_scores
from sfumato.training.gradient_sums import EngineSum, linear_head
from sfumato.training.head import LogisticRegression
from sfumato.training.inputs import Units, Views
from sfumato.training.losses import BinaryCrossEntropy
from small_runs import SmallNet

WEIGHTED = BinaryCrossEntropy((3.0, 1.0, 0.5, 7.0, 1.0))
LOSSES = [BinaryCrossEntropy(), BinaryCrossEntropy((4.0,)), WEIGHTED]


def library_loss(loss):
    """The same by PyTorch alone."""
    weights = torch.tensor(loss.positive_weights, dtype=torch.float64) if loss.positive_weights else None

    def of(outputs, targets):
        return binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), pos_weight=weights, reduction="sum"
        )

    return of


def slow_sum(rows, targets, weight, bias, clip_norm, loss):
    """One row after another by autograd: the obvious reference."""
    total, norms = [torch.zeros_like(weight).double(), torch.zeros_like(bias).double()], []
    for row, target in zip(rows, targets, strict=True):
        w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
        value = library_loss(loss)(w @ row.double() + b, target.double())
        gradients = torch.autograd.grad(value, (w, b))
        norms.append(math.sqrt(sum(g.square().sum().item() for g in gradients)))
        total = [a + g * min(1.0, clip_norm / norms[-1]) for a, g in zip(total, gradients, strict=True)]
    return total, torch.tensor(norms, dtype=torch.float64)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    rows = normalize(torch.randn(37, 11, generator=generator)) * torch.linspace(0.2, 3, 37)[:, None]
    targets = (torch.rand(37, 5, generator=generator) < 0.3).float()
    weight, bias = torch.randn(5, 11, generator=generator), torch.randn(5, generator=generator)
    return rows, targets, weight, bias


@pytest.mark.parametrize("loss", LOSSES)
def test_the_closed_form_is_autograd_row_by_row(problem, loss):
    rows, targets, weight, bias = problem
    chosen = torch.tensor([3, 30, 4, 11])
    sums = linear_head(rows, targets, loss=loss, num_classes=5)
    for indices in (None, chosen):
        total = sums(weight, bias, clip_norm=0.9, indices=indices)
        picked = slice(None) if indices is None else indices
        wanted, norms = slow_sum(rows[picked], targets[picked], weight, bias, 0.9, loss)
        assert torch.allclose(total.norms, norms, rtol=1e-5)
        assert torch.allclose(total.gradients["weight"].double(), wanted[0], atol=1e-4)
        assert torch.allclose(total.gradients["bias"].double(), wanted[1], atol=1e-4)
    other, _ = slow_sum(rows, targets, weight, bias, 0.9, BinaryCrossEntropy((2.0,)))
    unclipped, _ = slow_sum(rows, targets, weight, bias, 1e9, loss)
    found = sums(weight, bias, clip_norm=0.9).gradients["weight"].double()
    assert not torch.allclose(found, other[0], atol=1e-2)  # the comparison can tell
    assert not torch.allclose(found, unclipped[0], atol=1e-2)


def test_a_row_moves_the_closed_form_by_at_most_the_clip_norm(problem):
    rows, targets, weight, bias = problem
    rows = rows.clone()
    rows[0] *= 1e6
    rows[1] = float("nan")
    rows[2] = float("inf")
    targets[20] = 1.0  # all findings at once: the norm is over all of them together
    heavy = BinaryCrossEntropy((1000.0,))
    sums = LogisticRegression(rows, targets, loss=heavy)
    every = torch.arange(len(rows))
    whole = sums(weight, bias, clip_norm=0.5)
    for left_out in (0, 1, 2, 20):
        rest = sums(weight, bias, clip_norm=0.5, indices=every[every != left_out])
        moved = [whole.gradients[key] - rest.gradients[key] for key in ("weight", "bias")]
        length = math.sqrt(sum(value.double().square().sum().item() for value in moved))
        assert length <= 0.5 * (1 + 1e-5)
        if left_out in (1, 2):
            assert length < 1e-5  # rounding alone: what is not finite counts as nothing
        else:
            assert length > 0.49  # the bound is reached, so that it would be seen to be broken


def test_what_is_no_matrix_of_0_and_1_is_no_target(problem):
    rows, targets, _, _ = problem
    for wrong in (targets[:, 0], targets * 0.5):
        with pytest.raises(ValueError, match="0 and 1"):
            LogisticRegression(rows, wrong)


@pytest.mark.parametrize("loss", LOSSES[:2])
def test_the_engine_is_autograd_unit_by_unit(loss):
    torch.manual_seed(1)
    model, inputs = SmallNet(num_classes=4), torch.randn(7, 1, 8, 8)
    targets = (torch.rand(7, 4) < 0.4).float()
    units = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    for index in (None, units):
        wanted = reference(model, inputs, targets, loss=library_loss(loss), unit_index=index)
        clip_norm = 0.6 * float(wanted.norms.max())
        total = clipped_sum(model, inputs, targets, clip_norm=clip_norm, loss=loss, unit_index=index)
        assert torch.allclose(total.norms.double(), wanted.norms, rtol=1e-4)
        assert distance(total.gradients, wanted.clipped_sum(clip_norm)) < 1e-4
        other = reference(model, inputs, 1 - targets, loss=library_loss(loss), unit_index=index)
        assert distance(total.gradients, other.clipped_sum(clip_norm)) > 1e-2


def findings_set(count, *, patients=None):
    generator = torch.Generator().manual_seed(5)
    labels = (torch.rand(count, 4, generator=generator) < 0.4).float()
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator).byte()
    owners = None if patients is None else torch.arange(count) % patients
    return ImageSet(images, labels, ("a", "b", "c", "d"), owners)


@pytest.mark.parametrize("views", [0, 2])
def test_a_patient_with_several_images_is_one_unit(views):
    torch.manual_seed(2)
    data, model, loss = findings_set(12, patients=5), SmallNet(num_classes=4), BinaryCrossEntropy()
    units = Units.patients(data, max_images=4)
    inputs = Views(mean=(0.5,), std=(0.25,), count=views, flip=False)
    total = EngineSum(
        model=model, units=units, inputs=inputs, clip_norm=0.8, source=SeededSource(0), max_rows=6, loss=loss
    )(torch.tensor([1, 3, 4]), 0)
    rows = [units.rows[units.offsets[u] : units.offsets[u + 1]] for u in (1, 3, 4)]
    index = torch.arange(3).repeat_interleave(torch.tensor([len(each) for each in rows]))
    images = (data.images[torch.cat(rows)] / 255 - 0.5) / 0.25
    wanted = reference(model, images, data.labels[torch.cat(rows)], loss=library_loss(loss), unit_index=index)
    assert torch.allclose(total.norms.double(), wanted.norms, rtol=1e-4)
    assert distance(total.gradients, wanted.clipped_sum(0.8)) < 1e-4


class Mixing(nn.Module):
    """Each row sees the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x - 0.5 * x.mean(0, keepdim=True))


def test_the_doctor_checks_with_the_loss_and_the_targets_of_findings():
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    inputs, loss = torch.randn(4, 6), BinaryCrossEntropy()
    check_model(nn.Linear(6, 3), inputs, loss=loss, targets=targets)
    with pytest.raises(PrivacyError, match="mixes-examples"):
        check_model(Mixing(), inputs, loss=loss, targets=targets)
    seen = []

    def unclipped(model, *given, **options):
        seen.append((given[1], options["loss"]))
        return clipped_sum(model, *given, **{**options, "clip_norm": 1e6})

    check_engine(nn.Linear(6, 3), inputs, loss=loss, targets=targets)
    with pytest.raises(ModelError, match="engine-disagrees"):
        check_engine(nn.Linear(6, 3), inputs, loss=loss, targets=targets, sum_function=unclipped)
    assert seen[0][0].shape == (4, 3)
    assert seen[0][1] is loss


def slow_area(truth, scores):
    """All pairs, one by one."""
    pairs = [(p, n) for p in scores[truth] for n in scores[~truth]]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


def test_scores_of_findings_are_those_counted_by_hand():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(60, 3, generator=generator) < 0.4).float()
    logits = (labels + 0.8 * torch.randn(60, 3, generator=generator)).round(decimals=1) - 0.5
    labels[:, 2] = 0.0  # nobody has it
    found = finding_scores(logits, labels, ("a", "b", "c"))
    truth = labels.numpy() > 0
    areas = [slow_area(truth[:, i], logits.numpy()[:, i]) for i in range(2)]
    assert [found.auc["a"], found.auc["b"]] == pytest.approx(areas)
    assert found.auc["c"] is None
    assert found.mean_auc == pytest.approx(np.mean(areas))
    right = (logits.numpy() >= 0) == truth
    assert found.accuracy == pytest.approx(right.mean())
    assert found.exact_match == pytest.approx(right.all(1).mean())
    assert found.accuracy != pytest.approx(found.exact_match)
    for name, area in zip("ab", areas, strict=True):
        low, high = found.per_finding[name].auc_interval
        assert low < area < high
    assert found.per_finding["c"].auc_interval is None
    assert found.per_finding["c"].sensitivity is None
    together = finding_scores(logits, labels, ("a", "b", "c"), groups=torch.arange(60) // 20)
    wide, narrow = together.per_finding["a"].auc_interval, found.per_finding["a"].auc_interval
    assert wide != narrow  # people are drawn, not images
    assert finding_scores(logits, labels, ("a", "b", "c"), intervals=False).mean_auc_interval is None
