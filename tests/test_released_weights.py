"""Whole runs with and without one unit: the released weights differ as ``privacy.json`` says, and no more.

From recipe to release nothing is left out: data, plan, doctor, sampling, clip, noise, update, average, files.
The model is linear without bias, and the unit, a canary, is the only one with light in the upper half of its
image. So its gradient has one known direction, longer than the clip norm, and all other weights of the upper
half are noise. Steps are so short that the weights hardly move, hence with k draws of the canary in T steps

    upper half of the weights = η/B · (k · direction + N(0, T·σ²)),    k = T, or Binomial(T, q) with Poisson.

Without the unit its place is taken by a black image, whose gradient is zero: N is public, and stays.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor, nn

from sfumato.data import DataSplits, ImageSet
from sfumato.ledger.ledger import Ledger
from sfumato.privacy.plan import Plan
from sfumato.recipes.recipe import Recipe, with_settings
from sfumato.run import publish, session
from sfumato.training import gradient_sums

UNITS, SIDE, RATE = 12, 4, 1e-3
LIGHT = SIDE * SIDE // 2  # pixels of the upper half
RUNS, RUNS_OF_A_CONTROL = 150, 30  # on each side
FALSE_ALARM = 1e-6  # of each check, two-sided

Stated = dict[str, float]


class Linear(nn.Module):
    """One linear layer without bias: a black image has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIDE * SIDE, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def splits(*, canary: bool) -> DataSplits:
    """Eleven images that are black above; the twelfth is white above, or all black."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (UNITS, 1, SIDE, SIDE), generator=generator)
    images[:, :, : SIDE // 2] = 0
    images[0] = 0
    images[0, :, : SIDE // 2] = 255 if canary else 0
    labels = torch.arange(UNITS) % 2
    return DataSplits(train=ImageSet(images.to(torch.uint8), labels, ("left", "right"), None, "halves"))


def recipe(sampling: str) -> Recipe:
    """Four steps; the canary's gradient has norm 2 at the weights 0, and is clipped to 1."""
    settings = {
        "data.name": "halves",
        "data.mean": (0.0,),
        "data.std": (1.0,),
        "privacy.noise_multiplier": 0.5,
        "privacy.clip_norm": 1.0,
        "privacy.delta": 1e-3,
        "privacy.sampling": sampling,
        "training.batch_size": UNITS if sampling == "full" else UNITS // 2,
        "training.num_steps": 4,
        "training.learning_rate": RATE,
        "training.ema_decay": 0.0,
        "performance.save_every_seconds": 1e9,
    }
    return with_settings(Recipe(), settings)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs, but for what only costs time: syncing, software versions, report, ε of one plan."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(publish, "describe_environment", dict)
    monkeypatch.setattr(publish, "write_report", lambda folders, target: None)
    monkeypatch.setattr(Plan, "_epsilon", functools.cache(Plan._epsilon))
    monkeypatch.setattr(Plan, "statement", functools.cache(Plan.statement))


def released(settings: Recipe, folder: Path, ledger: Ledger, *, canary: bool) -> tuple[Tensor, Stated]:
    """The upper half of a run's released weights, in units of η/B, and what the release states.

    The first value is the weights' component along the canary's direction, the others are across it.
    """
    session.train(settings, out=folder, data=splits(canary=canary), model=Linear(), ledger=ledger)
    stated = json.loads((folder / "release" / "privacy.json").read_text())
    del stated["filing"], stated["statement"]  # they name the run and what came before it
    weights = load_file(folder / "release" / "model.safetensors")["head.weight"].double()
    upper = weights.reshape(2, SIDE * SIDE)[:, :LIGHT].flatten()
    # Towards the canary's class and away from the other one, for each bright pixel alike.
    direction = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(LIGHT)
    basis = torch.linalg.qr(torch.cat([direction[:, None], torch.eye(2 * LIGHT).double()[:, 1:]], dim=1)).Q
    basis *= torch.sign(basis[:, 0] @ direction)
    return basis.T @ upper / (RATE / (stated["sampling_rate"] * stated["num_examples"])), stated


def many(sampling: str, folder: Path, *, runs: int) -> tuple[Tensor, Tensor, Stated]:
    """(runs, 16) with the canary, the same without it, and what every one of the releases states."""
    settings, sides, statements = recipe(sampling), [], []
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger._connection.execute("PRAGMA synchronous=OFF")
        for canary in (True, False):
            places = [folder / f"{canary}{run}" for run in range(runs)]
            found = [released(settings, place, ledger, canary=canary) for place in places]
            sides.append(torch.stack([weights for weights, _ in found]))
            statements += [stated for _, stated in found]
    assert all(stated == statements[0] for stated in statements)
    return *sides, statements[0]


def disagreements(present: Tensor, absent: Tensor, stated: Stated) -> list[str]:
    """Where the weights are not distributed as stated; each check has a false alarm in a million."""
    runs, steps, rate = len(present), stated["num_steps"], stated["sampling_rate"]
    noise = steps * stated["noise_multiplier"] ** 2  # variances
    draws = steps * rate * (1 - rate)
    across = torch.cat([present[:, 1:], absent[:, 1:]])
    shift = (present[:, 0].mean() - absent[:, 0].mean()).item()
    sideways = present[:, 1:].mean(0) - absent[:, 1:].mean(0)
    failed = {
        "noise": _unlike_chi_square((across.square() / noise).sum(), across.numel()),
        "noise along the canary": _unlike_chi_square((absent[:, 0].square() / noise).sum(), runs),
        "shift": abs(shift - steps * rate) > _z() * math.sqrt((2 * noise + draws) / runs),
        "spread with the canary": _unlike_chi_square(
            ((present[:, 0] - steps * rate).square() / (noise + draws)).sum(), runs
        ),
        "shift across": _unlike_chi_square((sideways.square() * runs / (2 * noise)).sum(), len(sideways)),
    }
    return [name for name, wrong in failed.items() if wrong]


def _unlike_chi_square(value: Tensor, freedom: int) -> bool:
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], freedom)
    return not low < value.item() < high


def _z() -> float:
    return float(stats.norm.isf(FALSE_ALARM / 2))


@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_released_weights_with_and_without_a_unit_differ_as_stated(sampling, tmp_path):
    present, absent, stated = many(sampling, tmp_path, runs=RUNS)
    assert disagreements(present, absent, stated) == []
    if sampling == "full":  # then μ is the shift in standard deviations, and the plan's is exact
        noise = torch.cat([present[:, 1:], absent[:, 1:]])
        mu = ((present[:, 0].mean() - absent[:, 0].mean()) / noise.square().mean().sqrt()).item()
        error = math.sqrt(2 / RUNS + mu**2 / (2 * noise.numel()))
        assert abs(mu - stated["mu_gdp"]) < _z() * error
        assert _z() * error < 0.2 * stated["mu_gdp"]  # close enough to mean something


def test_half_the_noise_is_seen_in_released_weights(tmp_path, monkeypatch):
    original = Plan.noise

    def halved(self, total, **options):
        noisy = original(self, total, **options)
        return {name: (value + total.gradients[name]) / 2 for name, value in noisy.items()}

    monkeypatch.setattr(Plan, "noise", halved)
    assert "noise" in disagreements(*many("full", tmp_path, runs=RUNS_OF_A_CONTROL))


def test_twice_the_sensitivity_is_seen_in_released_weights(tmp_path, monkeypatch):
    original = gradient_sums.clipped_sum

    def doubled(*inputs, clip_norm, **options):
        total = original(*inputs, clip_norm=2 * clip_norm, **options)
        return type(total)(
            gradients=total.gradients, norms=total.norms, losses=total.losses, sensitivity=clip_norm
        )

    monkeypatch.setattr(gradient_sums, "clipped_sum", doubled)
    assert "shift" in disagreements(*many("full", tmp_path, runs=RUNS_OF_A_CONTROL))
