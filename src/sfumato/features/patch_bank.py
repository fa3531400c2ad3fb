"""Wide dictionaries of patches: as patch layers, in the order that large products are fast in.

A patch layer convolves and then divides; here patches are whitened and scaled first, so that all responses
are one product with the dictionary, in bfloat16 where that is faster, and pooling is another. A thousand
patches then cost what a layer of three hundred does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfumato.data.generated import OnProgress, fitting_images, turns_of
from sfumato.errors import ModelError
from sfumato.features.patch_features import SoftPooling
from sfumato.features.patches import Dictionary, fit_dictionary, normalised
from sfumato.features.pieces import in_pieces
from sfumato.features.precision import working_dtype
from sfumato.features.whitening import Whitening, fit_whitening

_PATCHES_AT_ONCE = 1024  # their responses in one image stay in a core's cache
_ROWS_AT_ONCE = 8


class PatchBank(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → pooled responses (B, 2 · num_patches · grid²), both signs.

    Equal, up to rounding, to a ``PatchLayer`` of the same dictionary under ``SoftPooling``. The image is
    averaged down by ``shrink`` before: patches of the same size then see more of it. ``low_precision``: in
    bfloat16 on processors that multiply it faster, in float32 on others.
    """

    whitener: Tensor
    atoms: Tensor
    floor: Tensor
    threshold: Tensor

    def __init__(
        self,
        *,
        image_size: int,
        in_channels: int,
        num_patches: int,
        patch_size: int = 6,
        shrink: int = 1,
        grid: int = 3,
        spread: float = 0.5,
        mirror: bool = True,
        low_precision: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size, self.shrink, self.mirror = patch_size, shrink, mirror
        self.low_precision = low_precision
        self.stride = max(1, image_size // shrink // 32)
        seen = image_size // shrink - patch_size
        if seen < 0:
            raise ModelError(
                "image-too-small",
                f"these patches need images of {patch_size * shrink} pixels a side, not {image_size}.",
                fix="Enlarge the images: --set data.image_size=32",
            )
        size = in_channels * patch_size**2
        self.num_features = 2 * num_patches * grid**2
        self.register_buffer("whitener", torch.zeros(size, size))
        self.register_buffer("atoms", torch.zeros(size, num_patches))
        self.register_buffer("floor", torch.zeros(()))
        self.register_buffer("threshold", torch.zeros(()))
        self.pooling = SoftPooling(seen // self.stride + 1, grid=grid, spread=spread)

    @torch.no_grad()
    def fit(self, images: Tensor, *, generator: torch.Generator) -> PatchBank:
        """Whitening, dictionary and threshold from generated ``images`` (N, C, H, W), from 0 to 1."""
        found = fit_dictionary(
            self._shrunk(images),
            patch_size=self.patch_size,
            num_patches=self.atoms.shape[1],
            generator=generator,
        )
        for name in Dictionary.__annotations__:
            getattr(self, name).copy_(getattr(found, name))
        return self

    def forward(self, images: Tensor) -> Tensor:
        return in_pieces(self._piece, images, rows=_ROWS_AT_ONCE)

    def _piece(self, images: Tensor) -> Tensor:
        images = self._shrunk(images)
        pooled = self._pooled(images)
        return (pooled + self._pooled(images.flip(-1))).mul_(0.5) if self.mirror else pooled

    def _shrunk(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(images, self.shrink) if self.shrink > 1 else images

    def _pooled(self, images: Tensor) -> Tensor:
        dtype = working_dtype(images.device, low_precision=self.low_precision)
        atoms, window = self.atoms.to(dtype), self.pooling.window.T.to(dtype)
        patches = self._directions(images).to(dtype)
        if torch.compiler.is_exporting():  # a traced program has no loop over images, and knows no values
            return _responses(patches, atoms, window, self.threshold)
        threshold = float(self.threshold)
        # one image after the other: what is used next is near
        return torch.stack([_responses(each, atoms, window, threshold) for each in patches])

    def _directions(self, images: Tensor) -> Tensor:
        """All patches (B, places, size), whitened and of unit norm but for those of no contrast."""
        patches = F.unfold(images, self.patch_size, stride=self.stride).transpose(1, 2)
        whitened = normalised(patches) @ self.whitener
        return whitened / (whitened.norm(dim=2, keepdim=True) + self.floor)


def _responses(patches: Tensor, atoms: Tensor, window: Tensor, threshold: Tensor | float) -> Tensor:
    """Pooled responses of both signs to ``patches`` (..., places, size) of an image, or of several."""
    signs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for some in atoms.split(_PATCHES_AT_ONCE, dim=1):
        response = patches @ some
        signs[0].append(window @ (response - threshold).relu_())
        signs[1].append(window @ response.add_(threshold).neg_().relu_())
    return torch.cat([*signs[0], *signs[1]], dim=-1).float().mT.flatten(-2)


class WidePatchFeatures(nn.Module):
    """Images (B, C, H, W) from 0 to 1 → rows of unit norm: one bank of patches, whitened publicly.

    ``aligned``: by what other views of generated images change, too.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        in_channels: int = 3,
        num_patches: int = 1024,
        num_directions: int = 2500,
        patch_size: int = 6,
        shrink: int = 1,
        grid: int = 3,
        spread: float = 0.5,
        mirror: bool = True,
        low_precision: bool = True,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.image_size, self.in_channels = image_size, in_channels
        self.described = {"wide_patches": 1, "size": image_size, "grid": grid, "spread": spread}
        self.described |= {"shrink": shrink, "mirror": mirror, "low_precision": low_precision}
        self.described |= turns_of(image_size)
        self.aligned = aligned
        self.described |= {"aligned": True} if aligned else {}
        self.bank = PatchBank(
            image_size=image_size,
            in_channels=in_channels,
            num_patches=num_patches,
            patch_size=patch_size,
            shrink=shrink,
            grid=grid,
            spread=spread,
            mirror=mirror,
            low_precision=low_precision,
        )
        self.whitening = Whitening(self.bank.num_features, num_directions)

    @property
    def num_features(self) -> int:
        return self.whitening.num_directions

    @torch.no_grad()
    def fit(
        self, *, num_images: int = 12_000, seed: int = 0, on_progress: OnProgress | None = None
    ) -> WidePatchFeatures:
        """Fit bank and whitening on dead leaves; equal seeds give equal features."""
        images = fitting_images(
            num_images,
            image_size=self.image_size,
            channels=self.in_channels,
            seed=seed,
            on_progress=on_progress,
        )
        generator = torch.Generator().manual_seed(seed)
        self.bank.fit(images.float() / 255, generator=generator)
        fit_whitening(self.whitening, self.bank, images, seed=seed, aligned=self.aligned)
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.whitening(self.bank(images))
