"""Wide banks of patches: equal to patch layers, and rows that know their own image alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool2d, cross_entropy

from sfumato.data.generated import dead_leaves
from sfumato.errors import ConfigError, ModelError
from sfumato.features.cache import checksum
from sfumato.features.patch_bank import PatchBank, WidePatchFeatures
from sfumato.features.patch_features import SoftPooling
from sfumato.features.patches import PatchLayer
from sfumato.features.whitening import Whitening, leading_directions, leading_of_rows
from sfumato.models import create_model


@pytest.fixture(scope="module")
def pixels():
    return dead_leaves(150, seed=5).float() / 255


def bank_of(pixels, *, seed=0, **changes) -> PatchBank:
    settings = {"image_size": 32, "in_channels": 3, "num_patches": 20, "low_precision": False, **changes}
    return PatchBank(**settings).fit(pixels, generator=torch.Generator().manual_seed(seed))


def small(**changes) -> WidePatchFeatures:
    return WidePatchFeatures(**{"num_patches": 16, "num_directions": 30, "grid": 2, **changes})


def test_a_bank_is_a_patch_layer_under_soft_pooling(pixels, processor):
    layer = PatchLayer(3, patch_size=6, num_patches=20)
    layer.fit(pixels, generator=torch.Generator().manual_seed(0))
    pool = SoftPooling(27, grid=3, spread=0.5)
    wanted = pool(layer(pixels[:11]))
    assert torch.allclose(bank_of(pixels, mirror=False)(pixels[:11]), wanted, atol=1e-5)
    assert not torch.allclose(bank_of(pixels, mirror=False, seed=1)(pixels[:11]), wanted, atol=1e-3)
    mirrored = (wanted + pool(layer(pixels[:11].flip(-1)))) / 2
    assert torch.allclose(bank_of(pixels)(pixels[:11]), mirrored, atol=1e-5)
    bank = bank_of(pixels, low_precision=True)
    processor(bfloat16=True)
    rounded = bank(pixels[:11])
    assert 1e-4 * mirrored.norm() < (rounded - mirrored).norm() < 0.01 * mirrored.norm()
    processor(bfloat16=False)  # as when a release is loaded on another machine
    assert torch.equal(bank(pixels[:11]), bank_of(pixels)(pixels[:11]))


def test_more_patches_than_are_taken_at_once_keep_their_places(pixels, monkeypatch):
    whole = bank_of(pixels)(pixels[:3])
    monkeypatch.setattr("sfumato.features.patch_bank._PATCHES_AT_ONCE", 7)
    assert torch.allclose(bank_of(pixels)(pixels[:3]), whole, atol=1e-6)


def test_a_shrunk_bank_sees_the_averaged_image(pixels):
    coarse = bank_of(pixels, shrink=2)
    plain = bank_of(avg_pool2d(pixels, 2), image_size=16)
    assert torch.allclose(coarse(pixels[:4]), plain(avg_pool2d(pixels[:4], 2)), atol=1e-5)
    with pytest.raises(ModelError, match="12 pixels"):
        bank_of(pixels[:, :, :8, :8], image_size=8, shrink=2)


def test_rows_have_unit_norm_ignore_mirroring_and_come_from_their_own_image():
    features, images = small().fit(num_images=80), dead_leaves(6, seed=4).float() / 255
    rows = features(images)
    assert rows.shape == (6, features.num_features) == (6, 30)
    assert torch.allclose(rows.norm(dim=1), torch.ones(6), atol=1e-5)
    assert torch.allclose(rows, features(images.flip(-1)), atol=1e-3)
    changed = images.clone()
    changed[1:] = changed[1:].flip(0) * 0.3
    assert torch.equal(rows[0], features(changed)[0])
    assert not torch.allclose(rows[1], features(changed)[1], atol=1e-2)
    copy = small()
    copy.load_state_dict(features.state_dict())
    assert torch.equal(copy(images), rows)


def test_directions_of_rows_are_those_of_their_covariance():
    generator = torch.Generator().manual_seed(0)
    spread = 0.9 ** torch.arange(300)
    rows = torch.randn(120, 300, generator=generator) * spread
    rows = rows - rows.mean(0)
    values, vectors = leading_of_rows(rows, 10)
    wanted, wanted_vectors = leading_directions(rows.T @ rows / len(rows), 10)
    assert torch.allclose(values, wanted, rtol=1e-3)
    assert torch.allclose((vectors.T @ wanted_vectors).abs(), torch.eye(10), atol=1e-2)
    whitened = Whitening(300, 10).fit(rows * 7, ridge=0.0).project(rows * 7)  # fewer rows than features
    assert torch.allclose(whitened.T @ whitened / len(rows), torch.eye(10), atol=0.05)


def test_longer_rows_leave_the_bias_a_smaller_share_of_each_gradient():
    def bias_share(row_norm):
        model = create_model("patches", num_classes=2, num_layers=1, num_patches=4, row_norm=row_norm)
        row = torch.randn(1, model.extractor.num_features)
        cross_entropy(model(row), torch.tensor([1])).backward()
        bias, weight = (value.grad.square().sum() for value in (model.head.bias, model.head.weight))
        return float(bias / (bias + weight))

    assert bias_share(1.0) == pytest.approx(0.5)
    assert bias_share(3.0) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="row_norm"):
        bias_share(0.0)


def test_aligned_rows_bring_to_the_fore_what_stays_from_view_to_view():
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(3.0, 0.5, 12)
    images = torch.randn(4000, 12, generator=generator) * spread
    change = torch.zeros(12)
    change[2:4] = 2.0  # two of twelve numbers differ between views of one image
    views = images + change * torch.randn(4000, 12, generator=generator)
    plain = Whitening(12, 12).fit(images, ridge=0.0)
    aligned = Whitening(12, 12).fit(images, views=views, ridge=0.0)

    def shares(whitening):
        """How much of each number's variance over images a row holds, as a share of all."""
        spread_of = whitening.project(torch.eye(12) * spread) - whitening.project(torch.zeros(1, 12))
        return spread_of.square().sum(1) / spread_of.square().sum()

    assert torch.allclose(shares(plain), torch.full((12,), 1 / 12), atol=0.01)
    steady = [number for number in range(12) if number not in (2, 3)]
    assert shares(aligned)[[2, 3]].max() < 0.3 * shares(aligned)[steady].min()
    differences = aligned.project(images) - aligned.project(views)
    values = torch.linalg.eigvalsh(differences.T @ differences / len(images))
    assert values.max() < 1 + 1e-3  # what the ridge adds keeps it below
    assert values.max() > 0.5


def test_aligned_features_are_an_extractor_of_their_own():
    images = dead_leaves(5, seed=4)
    plain, aligned = (small(aligned=which).fit(num_images=80) for which in (False, True))
    rows = aligned(images.float() / 255)
    assert torch.allclose(rows.norm(dim=1), torch.ones(5), atol=1e-5)
    assert not torch.allclose(rows, plain(images.float() / 255), atol=1e-2)
    assert torch.equal(rows, small(aligned=True).fit(num_images=80)(images.float() / 255))
    assert checksum(small(aligned=True), images) != checksum(small(), images)
    assert torch.equal(aligned.bank.atoms, plain.bank.atoms)  # the whitening alone is another
