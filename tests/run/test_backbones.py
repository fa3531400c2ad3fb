"""Backbones of other libraries: real timm, torchvision and transformers, small nets with drawn weights."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import sfumato
import torchvision_operators
from sfumato.cli import main
from sfumato.errors import ConfigError, ModelError, PrivacyError
from sfumato.models import create_model
from sfumato.models.backbones import load_trunk
from sfumato.models.libraries import description_of, plain_config, split_name
from sfumato.recipes.recipe import Recipe, load_recipe, with_settings
from sfumato.run.backbones import describe_backbone, with_backbone
from sfumato.run.session import train
from small_runs import small_splits

torchvision_operators.declare()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LIBRARIES = ("timm", "torchvision", "hf")
NETWORKS = {"timm": "timm:test_resnet", "torchvision": "torchvision:shufflenet_v2_x0_5", "hf": "hf:own/vit"}


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))


def classifier(library: str) -> torch.nn.Module:
    """A small network of the library with its last layer, and statistics as if it had been trained."""
    pytest.importorskip({"hf": "transformers"}.get(library, library), reason=f"{library} is not installed")
    torch.manual_seed(5)
    if library == "timm":
        import timm

        net = timm.create_model("test_resnet", pretrained=False, num_classes=7)
    elif library == "torchvision":
        import torchvision

        net = torchvision.models.get_model("shufflenet_v2_x0_5", weights=None, num_classes=7)
    else:
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=7)
        net = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for _ in range(10):
            net.train()(torch.randn(8, 3, 32, 32))
    return net.eval()


def rows_of(net: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """What the last layer of a library's own classifier is given."""
    seen = []
    last = [module for module in net.modules() if isinstance(module, torch.nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(images)
    hook.remove()
    return seen[0]


def saved(net: torch.nn.Module, library: str, folder: Path) -> Path:
    """The weights as their publisher would give them, with the files beside them."""
    folder.mkdir(parents=True)
    if library == "hf":
        net.save_pretrained(folder)
        values = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "size": {"height": 32}}
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# A net\n")
        return folder / "model.safetensors"
    tensors = {name: value.clone().contiguous() for name, value in net.state_dict().items()}
    save_file(tensors, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def recipe_for(library: str, weights: Path, *, finetune: bool = False, **changes: object) -> Recipe:
    recipe = load_recipe("finetune/efficientnet-lite0" if finetune else "fast/pretrained")
    options = {"network": NETWORKS[library], "input_size": 32}
    settings = {
        "data.name": "shades",
        "model.name": "backbone" if finetune else "backbone_features",
        "model.options": options,
        "model.weights": str(weights),
        "model.weights_are_public": True,
        "privacy.epsilon": 8.0,
        "privacy.delta": 1e-3,
        "training.num_steps": 2,
        "training.num_epochs": None,
    }
    if finetune:
        settings |= {"training.batch_size": 8}
    return with_settings(recipe, settings | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_are_those_of_the_librarys_own_network(library, tmp_path):
    net = classifier(library)
    recipe = with_backbone(recipe_for(library, saved(net, library, tmp_path / "net")))
    from safetensors.torch import load_file

    weights, images = load_file(recipe.model.weights), torch.randn(3, 3, 32, 32)
    for name in ("backbone_features", "backbone"):
        model = create_model(name, num_classes=2, **recipe.model.options)
        trunk = model.network if name == "backbone" else model.extractor.networks[0]
        before = trunk.features(images)
        load_trunk(model, weights, network=NETWORKS[library], recorded=recipe.model.options["recorded"])
        model.train()  # a batch norm would now look at the other examples
        torch.testing.assert_close(trunk.features(images), rows_of(net, images), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(before, rows_of(net, images), atol=1e-3)  # the control: drawn weights


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_private_head_on_any_backbone_is_released_with_its_licence_and_checksum(library, tmp_path):
    secret = tmp_path / "at-dr-huber"
    weights = saved(classifier(library), library, secret)
    train(recipe_for(library, weights), out=tmp_path / "run", data=small_splits())
    privacy = json.loads((tmp_path / "run/release/privacy.json").read_text())
    record = privacy["weights_from"]["backbone"]
    assert record["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["network"] == NETWORKS[library]
    assert record["licence"] == {"hf": "mit"}.get(library, record["licence"])
    assert record["sha256"] in privacy["statement"]
    assert "declares that none of the private images" in privacy["statement"]
    assert privacy["releasable"]
    assert privacy["epsilon"] <= 8
    for file in (tmp_path / "run/release").iterdir():
        assert b"dr-huber" not in file.read_bytes()
    weights.unlink()  # the release stands alone
    released = sfumato.load(tmp_path / "run")
    logits = released.logits(small_splits().test.images)
    images = small_splits().test.images.float() / 255
    pixels = F.interpolate(images, size=(32, 32), mode="bicubic", align_corners=False, antialias=True)
    described = description_of(released.config["model"]["options"]["recorded"])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (described.mean, described.std))
    inputs = (pixels.clamp(0, 1).expand(-1, 3, -1, -1) - mean) / std
    net = classifier(library)
    rows = rows_of(net, inputs) + rows_of(net, inputs.flip(-1))
    rows = F.normalize(rows.sign() * rows.abs().sqrt(), dim=1) - released.model.centre
    expected = released.model.head(F.normalize(rows, dim=1))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_a_backbone_is_fine_tuned_privately_and_its_other_weights_stay(library, tmp_path):
    weights = saved(classifier(library), library, tmp_path / "net")
    train(recipe_for(library, weights, finetune=True), out=tmp_path / "run", data=small_splits())
    released = sfumato.load(tmp_path / "run").model
    recipe = with_backbone(recipe_for(library, weights, finetune=True))
    fresh = create_model("backbone", num_classes=3, in_channels=1, **recipe.model.options)
    from safetensors.torch import load_file

    options = {"network": NETWORKS[library], "recorded": recipe.model.options["recorded"]}
    load_trunk(fresh, load_file(weights), **options)
    before, after = fresh.state_dict(), released.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "head.weight" in changed
    assert any(name.startswith("network.") for name in changed)
    assert all(before[name].ndim < 2 or name == "head.weight" for name in changed)
    assert not any("running" in name for name in changed)


def test_without_its_package_a_backbone_says_what_to_install(tmp_path, monkeypatch):
    for package in ("timm", "torchvision", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    for network in ("timm:test_resnet", "torchvision:resnet18"):
        with pytest.raises(ModelError) as caught:
            create_model("backbone", num_classes=2, network=network)
        assert caught.value.code == "backbone-not-installed"
        assert "pip install 'sfumato[" in caught.value.fix


@pytest.mark.parametrize("network", ["resnet18", "tim:resnet18", "timm:", "timm:no_such_net", ""])
def test_what_names_no_network_is_refused(network):
    pytest.importorskip("timm")
    with pytest.raises(ConfigError) as caught:
        create_model("backbone", num_classes=2, network=network)
    assert caught.value.code == "bad-backbone"


@pytest.mark.parametrize("place", ["hf-hub:org/net", "hf_hub:org/net", "local-dir:/tmp/net", "org/net"])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_name_that_is_a_place_is_refused_before_its_library_is_asked(library, place, monkeypatch):
    asked = []
    monkeypatch.setattr("sfumato.models.libraries.import_library", lambda name: asked.append(name))
    with pytest.raises(ConfigError) as caught:
        create_model("backbone", num_classes=2, network=f"{library}:{place}")
    assert (caught.value.code, asked) == ("bad-backbone", [])
    assert split_name("hf:org/net") == ("hf", "org/net")  # a name only: its layers come from config.json


def test_weights_of_undeclared_origin_are_refused_and_so_are_known_ones(tmp_path):
    weights = saved(classifier("hf"), "hf", tmp_path / "net")
    for changes, data, code in (
        ({"model__weights_are_public": False}, small_splits(), "unprotected-weights"),
        ({"model__weights": None}, small_splits(), "bad-backbone"),
    ):
        with pytest.raises((PrivacyError, ConfigError)) as caught:
            train(recipe_for("hf", weights, **changes), out=tmp_path / "run", data=data)
        assert caught.value.code == code
    assert not (tmp_path / "run").exists()


def test_a_pickle_is_opened_only_with_its_checksum_and_never_runs(tmp_path):
    tensors = classifier("torchvision").state_dict()
    torch.save(tensors, tmp_path / "net.pth")
    digest = hashlib.sha256((tmp_path / "net.pth").read_bytes()).hexdigest()
    from sfumato.run.backbones import read_backbone

    settings = recipe_for("torchvision", tmp_path / "net.pth").model
    with pytest.raises(ModelError) as caught:
        read_backbone(settings)
    assert caught.value.code == "pickled-weights"

    from dataclasses import replace

    weights, record = read_backbone(replace(settings, weights_sha256=digest.upper()))
    assert record.sha256 == digest
    assert weights.keys() == tensors.keys()
    with pytest.raises(ModelError) as caught:
        read_backbone(replace(settings, weights_sha256="0" * 64))
    assert caught.value.code == "weights-changed"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"a": Bomb()}, tmp_path / "bomb.pth")
    digest = hashlib.sha256((tmp_path / "bomb.pth").read_bytes()).hexdigest()
    with pytest.raises(ModelError) as caught:
        read_backbone(replace(settings, weights=str(tmp_path / "bomb.pth"), weights_sha256=digest))
    assert caught.value.code == "bad-weights"
    assert not (tmp_path / "exploded").exists()


def test_weights_of_another_network_are_refused(tmp_path):
    weights = saved(classifier("timm"), "timm", tmp_path / "net")
    with pytest.raises(ModelError) as caught:
        train(recipe_for("torchvision", weights), out=tmp_path / "run", data=small_splits())
    assert caught.value.code == "weights-do-not-fit"


def test_of_a_strangers_configuration_only_sizes_are_taken(tmp_path):
    folder = tmp_path / "net"
    weights = saved(classifier("hf"), "hf", folder)
    values = json.loads((folder / "config.json").read_text())
    evil = {"auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "someone/kernel", "_x": 1}
    assert plain_config(values | evil).keys() <= values.keys()
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "timm_wrapper"}))
    with pytest.raises(ConfigError) as caught:
        create_model(
            "backbone", num_classes=2, network="hf:x", recorded=describe_backbone("hf:x", weights).recorded()
        )
    assert caught.value.code == "bad-backbone"
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        describe_backbone("hf:x", weights)
    assert caught.value.code == "bad-backbone"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--backbone", "timm:test_resnet"), "no-backbone-weights"),
        (("--backbone", "timm:test_resnet", "--backbone-weights", "w.safetensors"), "no-provenance"),
        (("--backbone-weights", "w.safetensors"), "bad-backbone"),
    ],
)
def test_the_command_asks_for_weights_and_provenance(flags, code, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path), "--epsilon", "3", *flags])
    assert ended.value.code == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_the_command_trains_on_a_folder_with_a_backbone(image_folder, capsys, tmp_path):
    weights = saved(classifier("hf"), "hf", tmp_path / "net")
    data = image_folder(train=6, test=2)
    words = [
        "--backbone",
        "hf:own/vit",
        "--backbone-weights",
        str(weights),
        "--epsilon",
        "8",
        "--delta",
        "0.01",
    ]
    main(
        [
            "train",
            str(data),
            *words,
            "--backbone-provenance",
            "public",
            "--out",
            str(tmp_path / "run"),
            "--json",
        ]
    )
    result = json.loads(capsys.readouterr().out)
    config = json.loads((tmp_path / "run/release/config.json").read_text())
    assert config["image_size"] == 32  # the backbone's own
    assert result["privacy"]["weights_from"]["backbone"]["licence"] == "mit"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(data), *words, "--backbone-provenance", "unknown", "--out", str(tmp_path / "no")])
    assert ended.value.code == 1
    assert "[unprotected-weights]" in capsys.readouterr().err
