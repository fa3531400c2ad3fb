"""Views of De et al. 2022, mirror-padded random crops and flips, and mixtures of an image's views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.special import betaincinv
from torch import Tensor

from sfumato.errors import ConfigError

# Published constants, never computed from the user's data: statistics of private images would leak.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)),
    "cifar100": ((0.50707, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
    "imagenette": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny-imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def normalisation_for(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Public mean and standard deviation for pixels in [0, 1]: the known set's, else 0.5 and 0.25."""
    mean, std = NORMALISATION.get(name, ((0.5,), (0.25,)))
    if len(mean) != channels:  # a known set loaded as grey or as colour
        mean = (sum(mean) / len(mean),) * channels
        std = (sum(std) / len(std),) * channels
    return mean, std


def check_normalisation(mean: Sequence[float] | None, std: Sequence[float] | None, *, channels: int) -> None:
    """Refuse constants that do not fit the images; None stands for those that do."""
    fit = all(values is None or len(values) in (1, channels) for values in (mean, std))
    if not fit or (std is not None and min(std) <= 0):
        shown = " and ".join(
            f"{name} {list(values)}" for name, values in (("mean", mean), ("std", std)) if values is not None
        )
        raise ConfigError(
            "bad-normalisation",
            f"{shown} cannot normalise images of {channels} channel{'s' if channels > 1 else ''}.",
            fix="Give one mean and one positive std per channel, or one for all.",
        )


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 images (B, C, H, W) as float32 ``(pixel / 255 - mean) / std``, channel by channel."""
    check_normalisation(mean, std, channels=images.shape[1])
    shift = torch.tensor(mean, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    scale = torch.tensor(std, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    # copy=True: what arrives as float32 already must not be changed in the caller's hands.
    pixels = images.to(torch.float32, copy=True)
    return pixels.mul_(1.0 / (255.0 * scale)).sub_(shift / scale)


def check_views(*, views: int, padding: int, size: tuple[int, int]) -> None:
    """Refuse views that images of this size (height, width) do not have."""
    if views < 0 or padding < 0 or (views and padding > min(size)):
        raise ConfigError(
            "bad-augmentation",
            f"views = {views}, padding = {padding} for images of {size[0]}x{size[1]}.",
            fix="Use views >= 0 and a padding between 0 and the image size.",
        )


def check_mixing(*, views: int, mixed: int, alpha: float) -> None:
    """Refuse mixtures of views where there are no two of them, and weights without a distribution."""
    if mixed < 0 or (mixed and views < 2) or not 0.01 <= alpha <= 100:
        raise ConfigError(
            "bad-augmentation",
            f"mixed_views = {mixed}, mix_alpha = {alpha:g} for {views} views.",
            why="Each mixture is made of two views of one image; other images' would void the guarantee.",
            fix="Use at least 2 views with mixed_views, and a mix_alpha from 0.01 to 100.",
        )


def augment(
    images: Tensor, *, views: int, padding: int = 4, flip: bool = True, generator: torch.Generator
) -> Tensor:
    """``crop_and_flip`` with draws from a generator, image after image: for code outside a private run, where
    a view may depend on its image's place."""
    shape = (len(images), max(0, views), 3)
    words = torch.randint(2**31, shape, generator=generator, device=generator.device)
    check_views(views=views, padding=padding, size=(images.shape[-2], images.shape[-1]))
    return crop_and_flip(images, words, padding=padding, flip=flip)


def crop_and_flip(images: Tensor, words: Tensor, *, padding: int, flip: bool) -> Tensor:
    """Crops of each mirror-padded image (B, C, H, W) -> (B * views, C, H, W).

    The views of image 0 come first, then those of image 1. Padding mirrors with the edge pixel
    included ("symmetric"). ``words``, (B, views, 3) random whole numbers, say where and whether flipped; no
    views return the images as they are.

    Guarantee: each view is computed from its own image and its own words: no example enters another's rows.
    """
    batch, channels, height, width = images.shape
    views = words.shape[1]
    check_views(views=views, padding=padding, size=(height, width))
    if views == 0:
        return images
    top, left, side = words.reshape(batch * views, 3).unbind(dim=1)
    rows, columns = _crop_index(height, top, padding), _crop_index(width, left, padding)
    if flip:
        columns = torch.where((side % 2 == 1)[:, None], columns.flip(1), columns)
    pixels = (rows[:, :, None] * width + columns[:, None, :]).view(batch, views, 1, height * width)
    pixels = pixels.to(images.device).expand(-1, -1, channels, -1)
    source = images.reshape(batch, 1, channels, height * width).expand(-1, views, -1, -1)
    return torch.gather(source, 3, pixels).view(batch * views, channels, height, width)


def mix_views(views: Tensor, words: Tensor, *, alpha: float) -> Tensor:
    """Views (B, K, C, H, W) with mixtures of them behind: (B, K + M, C, H, W), the K as they are.

    Bao et al. 2023, DP-Mix_self: a mixture is weight · a + (1 - weight) · b of two different views of ONE
    image, whose label it keeps; the weight follows Beta(alpha, alpha). ``words``, (B, M, 3) random uint32,
    say which two and how.

    Guarantee: each mixture is computed from the views of its own image and its own words: no example enters
    another's rows.
    """
    batch, count = views.shape[:2]
    first = words[..., 0] % count
    second = (first + 1 + words[..., 1] % (count - 1)) % count
    uniform = (words[..., 2].double() + 0.5) * 2.0**-32  # in (0, 1)
    weight = torch.from_numpy(betaincinv(alpha, alpha, uniform.cpu().numpy())).to(views)
    image = torch.arange(batch, device=views.device)[:, None]
    first, second = first.to(views.device), second.to(views.device)
    mixed = torch.lerp(views[image, second], views[image, first], weight[..., None, None, None])
    return torch.cat([views, mixed], dim=1)


def _crop_index(size: int, words: Tensor, padding: int) -> Tensor:
    """Source positions of random crops along one axis of the mirror-padded image."""
    offset = words % (2 * padding + 1)
    position = offset[:, None] + torch.arange(size, device=offset.device) - padding
    position = torch.where(position < 0, -1 - position, position)
    return torch.where(position >= size, 2 * size - 1 - position, position)
