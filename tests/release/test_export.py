"""Exported models compute what the release computes, and carry its statement."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sfumato
from sfumato.cli import main
from sfumato.errors import ModelError
from sfumato.release import export as export_module
from sfumato.release.decompositions import adaptive_max_pool, resized
from sfumato.release.export import export
from small_releases import CLASSES, small_release

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
IMAGES = torch.randint(256, (5, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return small_release(tmp_path_factory.mktemp("export") / "release")


def machine_paths(content: bytes) -> list[bytes]:
    """Folders of this machine that a file names."""
    places = [str(Path(sfumato.__file__).parent.parent), str(Path(torch.__file__).parent), str(Path.home())]
    return [place.encode() for place in places if len(place) > 5 and place.encode() in content]


def test_onnx_gives_equal_outputs_for_any_number_of_images_and_states_its_guarantee(
    release, tmp_path, capsys
):
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    main(["export", str(release), "--out", str(tmp_path / "model.onnx"), "--json"])
    assert json.loads(capsys.readouterr().out)["largest_difference"] <= 1e-4
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    released = sfumato.load(release)
    for rows in (5, 2):
        logits, chances = session.run(["logits", "probabilities"], {"images": IMAGES[:rows].numpy()})
        expected = released.logits(IMAGES[:rows]).numpy()
        assert np.abs(logits - expected).max() < 1e-4
        assert np.abs(chances.sum(1) - 1).max() < 1e-5
    assert np.abs(expected[:1] - expected[1:]).max() > 1e-2  # the control: images do make a difference
    said = session.get_modelmeta().custom_metadata_map
    assert said["sfumato.statement"] == released.privacy["statement"]
    assert json.loads(said["sfumato.privacy"])["epsilon"] <= 3
    assert json.loads(said["sfumato.classes"]) == list(CLASSES)
    assert json.loads(said["sfumato.config"])["fit"] == "crop"
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    assert machine_paths((tmp_path / "model.onnx").read_bytes()) == []
    assert machine_paths(str(Path(torch.__file__).parent).encode()) != []


def test_a_program_of_torch_gives_equal_outputs_and_states_its_guarantee(release, tmp_path):
    path = tmp_path / "model.pt2"
    assert export(sfumato.load(release), path, to="torch-export") <= 1e-4
    said = {"sfumato.statement.txt": "", "sfumato.privacy.txt": ""}
    program = torch.export.load(path, extra_files=said)
    logits, _ = program.module()(IMAGES)
    torch.testing.assert_close(logits, sfumato.load(release).logits(IMAGES), atol=1e-4, rtol=0)
    assert said["sfumato.statement.txt"] == sfumato.load(release).privacy["statement"]
    assert machine_paths(path.read_bytes()) == []


def test_fixed_features_of_a_public_network_are_exported_whole(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    folder = small_release(
        tmp_path / "release",
        name="efficientnet_lite0_features",
        image_size=12,
        input_size=32,
        pretrained=False,
    )
    config = json.loads((folder / "config.json").read_text())
    config["decision"] = {"shift": [0.5, -0.5, 0.2], "temperature": 2.0, "threshold": 0.5, "positive": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert export(sfumato.load(folder), tmp_path / "model.onnx", to="onnx") <= 1e-4
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    logits = session.run(["logits"], {"images": IMAGES.numpy()})[0]
    assert np.abs(logits - sfumato.load(folder).logits(IMAGES).numpy()).max() < 1e-4


FEW = {"num_directions": 6}
PATCHES = {"num_patches": 5, **FEW}


@pytest.mark.parametrize(
    ("name", "options", "to"),
    [
        ("patches", {"num_layers": 2, "second_patches": 4, **PATCHES}, "onnx"),
        ("wide_patches_scatter", {"coarse_patches": 3, **PATCHES}, "onnx"),
        ("scatter_cnn", {"width": 8, "num_maps": 12}, "onnx"),
        ("patches_scatter", PATCHES, "torch-export"),
    ],
)
def test_features_that_need_no_weights_are_exported_whole(name, options, to, tmp_path):
    """Each extractor goes through a batch in pieces, which a traced program cannot."""
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    folder = small_release(tmp_path / "release", name=name, image_size=16, **options)
    assert export(sfumato.load(folder), tmp_path / "model", to=to) <= 1e-4


@pytest.mark.parametrize(("size_in", "size_out"), [(12, 32), (64, 24), (7, 7), (33, 32)])
def test_resizing_as_matrix_products_is_torchs(size_in, size_out):
    images = torch.rand(2, 3, size_in, size_in, generator=torch.Generator().manual_seed(0))
    size = (size_out, size_out)
    expected = F.interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=True)
    torch.testing.assert_close(resized(images, size, False), expected, atol=1e-5, rtol=0)
    without = F.interpolate(images, size=size, mode="bicubic", align_corners=False)
    assert size_in == size_out or not torch.allclose(without, expected, atol=1e-3)  # the control


@pytest.mark.parametrize("size", [2, 3, 5])
def test_adaptive_pooling_in_parts_is_torchs(size):
    maps = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(adaptive_max_pool(maps, (size, 2))[0], F.adaptive_max_pool2d(maps, (size, 2)))


def test_a_file_that_computes_something_else_is_not_left_behind(release, tmp_path, monkeypatch):
    original = export_module._run_program
    monkeypatch.setattr(
        export_module, "_run_program", lambda path, images: tuple(x + 1e-3 for x in original(path, images))
    )
    with pytest.raises(ModelError) as caught:
        export(sfumato.load(release), tmp_path / "model.pt2", to="torch-export")
    assert caught.value.code == "export-differs"
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_it_says_what_to_install(release, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModelError) as caught:
        export(sfumato.load(release), tmp_path / "model.onnx", to="onnx")
    assert caught.value.code == "export-not-installed"
    assert list(tmp_path.iterdir()) == []
