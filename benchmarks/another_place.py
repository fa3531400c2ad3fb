"""Ways to find an operating point for another place, compared on held-out patients; no test image is read.

    python benchmarks/another_place.py runs/imitation-0 runs/imitation-1

Each run has held patients out (``data.holdout``). Their images are changed as another scanner might; half of
the patients are the place's unlabelled images, the other half is scored. Protocol and findings are in
2026-11-18-another-place.md.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import norm
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from sfumato.release.release import load
from sfumato.release.scored_images import data_of, images_of, settings_of

Floats = NDArray[np.float64]


def exposed(*, gamma: float = 1, contrast: float = 1, brightness: float = 0) -> Callable[[Tensor], Tensor]:
    return lambda images: 0.5 + contrast * (images.clamp(0, 1) ** gamma - 0.5) + brightness


def moved(*, zoom: float = 1, degrees: float = 0) -> Callable[[Tensor], Tensor]:
    turn = np.radians(degrees)
    matrix = torch.tensor([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0]]).float() / zoom

    def change(images: Tensor) -> Tensor:
        grid = affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        return grid_sample(images, grid, padding_mode="border", align_corners=False)

    return change


def blurred(images: Tensor) -> Tensor:
    """By a normal distribution of a deviation of one pixel."""
    line = torch.exp(-(torch.arange(-3, 4).float() ** 2) / 2)
    kernel = (line[:, None] * line / line.sum() ** 2).expand(images.shape[1], 1, 7, 7)
    return conv2d(pad(images, (3, 3, 3, 3), mode="replicate"), kernel, groups=images.shape[1])


def sharpened(images: Tensor) -> Tensor:
    return 2 * images - blurred(images)


def noisy(images: Tensor) -> Tensor:
    grain = torch.randn(len(images), 1, *images.shape[2:], generator=torch.Generator().manual_seed(0))
    return images + 0.04 * grain


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "none": (),
    "gamma 0.7": (exposed(gamma=0.7),),
    "gamma 1.4": (exposed(gamma=1.4),),
    "contrast 0.7": (exposed(contrast=0.7),),
    "contrast 1.3": (exposed(contrast=1.3),),
    "brightness - 0.1": (exposed(brightness=-0.1),),
    "brightness + 0.1": (exposed(brightness=0.1),),
    "blur": (blurred,),
    "sharpening": (sharpened,),
    "noise": (noisy,),
    "zoom 0.85": (moved(zoom=0.85),),
    "zoom 1.1": (moved(zoom=1.1),),
    "rotation": (moved(degrees=8),),
    "gamma 0.7, blur": (exposed(gamma=0.7), blurred),
    "gamma 1.4, noise": (exposed(gamma=1.4), noisy),
    "contrast 0.7, zoom 0.85": (exposed(contrast=0.7), moved(zoom=0.85)),
    "brightness + 0.1, sharpening": (exposed(brightness=0.1), sharpened),
}


def share(scores: Floats, prevalence: float) -> float:
    return float(np.quantile(scores, 1 - prevalence))


def matched(scores: Floats, prevalence: float) -> float:
    """What to subtract so that the mean probability is the prevalence."""
    return float(
        brentq(lambda b: expit(scores - b).mean() - prevalence, *(scores.min() - 50, scores.max() + 50))
    )


def mixture(scores: Floats, prevalence: float, *, free: bool = False) -> float:
    """The middle between two normal distributions of one spread, fitted by EM from the share's cut on."""
    cut, weight = share(scores, prevalence), prevalence
    high = (scores >= cut).astype(float)
    for _ in range(500):
        above, below = np.average(scores, weights=high), np.average(scores, weights=1 - high)
        spread = np.sqrt(np.mean(high * (scores - above) ** 2 + (1 - high) * (scores - below) ** 2)) + 1e-9
        weight = float(high.mean()) if free else prevalence
        odds = logit(weight) + norm.logpdf(scores, above, spread) - norm.logpdf(scores, below, spread)
        before, high = high, np.clip(expit(odds), 1e-12, 1 - 1e-12)
        if np.abs(high - before).max() < 1e-8:
            break
    return float((above + below) / 2)


METHODS: dict[str, Callable[[Floats, float], float]] = {
    "as it is": lambda scores, prevalence: 0.0,
    "share": share,
    "mean": lambda scores, prevalence: matched(scores, prevalence) + float(logit(prevalence)),
    "mean, half": matched,
    "mixture": mixture,
    "mixture, free": lambda scores, prevalence: mixture(scores, prevalence, free=True),
}


def held_out(run: Path) -> tuple[dict[str, Floats], NDArray[np.bool_], NDArray[np.int64]]:
    """Log-odds of the held-out images under every change, kept beside the run; who is ill; whose they are."""
    released, settings = load(run), settings_of(run)
    _, images = images_of(released, data_of(run, released, None), "val", settings=settings)
    assert images.patients is not None
    positive, kept = released.decision.positive, run / "places.npz"
    if not kept.exists():
        found = {}
        for name, steps in CHANGES.items():
            pixels = images.images[0 : len(images)].float() / 255
            for step in steps:
                pixels = step(pixels).clamp(0, 1)
            logits = released.logits((255 * pixels).round().byte()).double().numpy()
            found[name] = logits[:, positive] - logits[:, 1 - positive]
            print(run.name, name, flush=True)
        np.savez(kept, **found)
    return dict(np.load(kept)), (images.labels == positive).numpy(), images.patients.numpy()


def balanced_accuracy(scores: Floats, ill: NDArray[np.bool_], cut: float) -> float:
    return float(((scores[ill] >= cut).mean() + (scores[~ill] < cut).mean()) / 2)


def chosen(ill: NDArray[np.bool_], prevalence: float, random: np.random.Generator) -> NDArray[np.int64]:
    """All rows of one class and as many of the other as the prevalence leaves, at random."""
    rows = [np.flatnonzero(ill), np.flatnonzero(~ill)]
    total = min(len(rows[0]) / prevalence, len(rows[1]) / (1 - prevalence))
    wanted = (round(total * prevalence), round(total * (1 - prevalence)))
    return np.concatenate([random.permutation(r)[:n] for r, n in zip(rows, wanted, strict=True)])


def trials(run: Path, few: int | None) -> Iterator[tuple[str, float, float, str, float]]:
    """Change, prevalence, error of the declaration, method and balanced accuracy of every combination."""
    places, ill, patients = held_out(run)
    half = np.array([zlib.crc32(str(number).encode()) % 2 for number in patients])
    random = np.random.default_rng(0)
    for change, scores in places.items():
        for prevalence in (0.3, 0.5, 0.7):
            for mine in (0, 1):
                rows, others = np.flatnonzero(half == mine), np.flatnonzero(half != mine)
                place = rows[chosen(ill[rows], prevalence, random)]
                scored = others[chosen(ill[others], prevalence, random)]
                for _ in range(1 if few is None else 5):
                    seen = scores[place if few is None else random.permutation(place)[:few]]
                    for error in (-0.1, 0.0, 0.1):
                        for name, method in METHODS.items():
                            cut = method(seen, prevalence + error)
                            accuracy = balanced_accuracy(scores[scored], ill[scored], cut)
                            yield change, prevalence, error, name, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    for few in (None, 60):
        rows = [row for run in parser.parse_args().runs for row in trials(run, few)]
        print(f"\n{'all images of the half' if few is None else f'{few} images'}")
        columns: dict[str, Callable[[tuple[str, float, float, str, float]], bool]] = {
            "all": lambda row: True,
            **{f"declared {error:+.1f}": lambda row, e=error: row[2] == e for error in (-0.1, 0.0, 0.1)},  # type: ignore[misc]
            **{f"prevalence {p}": lambda row, p=p: row[1] == p for p in (0.3, 0.5, 0.7)},  # type: ignore[misc]
            **{change: lambda row, c=change: row[0] == c for change in CHANGES},  # type: ignore[misc]
        }
        for column, fits in columns.items():
            means = [np.mean([r[4] for r in rows if r[3] == name and fits(r)]) for name in METHODS]
            print(
                f"{column:<30}"
                + "".join(f"{name} {mean:.4f}   " for name, mean in zip(METHODS, means, strict=True))
            )


if __name__ == "__main__":
    main()
