"""A run or release folder from a stranger: read, or refused with a code, in bounded time and memory."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from hostile import damaged, documents, examples, only_coded_errors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import sfumato
import sfumato.models
from sfumato.accounting import event_from_dict
from sfumato.errors import RunError
from sfumato.ledger.ledger import Ledger
from sfumato.recipes.recipe import recipe_from_toml, recipe_to_toml
from sfumato.release.card import headline
from sfumato.reporting.records import read_run
from sfumato.reporting.report import render
from sfumato.run.state import load_state
from sfumato.run.weights import read_checkpoint
from sfumato.training.averaging import WeightAverage
from sfumato.training.optimizers import build_optimizer

DOCUMENTS = (
    *("release/config.json", "release/privacy.json"),
    *("environment.json", "scores.json", "resolved.json", "audit.json"),
)


@pytest.fixture
def run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def spoilt(data: bytes) -> st.SearchStrategy[bytes]:
    """A JSON document changed in its structure or in its bytes."""
    return st.one_of(documents(json.loads(data)).map(str.encode), damaged(data))


def use(folder) -> None:
    """Everything that the project does with a folder that somebody sent."""
    page = render([read_run(folder)])
    page.encode()
    released = sfumato.load(folder)
    headline(released.privacy)
    size, channels = released.config["image_size"], released.config["channels"]
    if size * size * channels <= 10**6:
        found = released.predict(torch.zeros(1, channels, size, size).byte())
        json.dumps([found[0].probability, released.privacy, released.config], allow_nan=False)
    checkpoint = read_checkpoint(folder)
    for event in checkpoint.privacy.get("events", ()):
        event_from_dict(event)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(run, name):
    file = run / name
    data = file.read_bytes()

    @examples(60)
    @given(spoilt(data))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            use(run)

    check()


def test_metrics(run):
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)

    @examples(60)
    @given(spoilt(lines[0]), st.integers(0, len(lines)))
    def check(changed, place):
        file.write_bytes(b"".join([*lines[:place], changed, *lines[place:]]))
        with only_coded_errors():
            render([read_run(run)])

    check()


TOML_VALUES = (
    *("nan", "-inf", "1e400", "9" * 400, "9" * 5000, "-1", "0", "5e-324", "1e308", str(10**9), "true"),
    *("1979-05-27", '""', '"\\u0000"', '"²"', "[]", "{}", "[nan]", "{a = [1]}", "{pretrained = nan}", "0x_"),
    *("[" * 3000, "[" * 3000 + "]" * 3000, "{a=" * 3000, '"' + "x" * 10_000 + '"', f"[{'9' * 400}]"),
)


@st.composite
def recipes(draw, text: str) -> bytes:
    """A recipe with a value replaced, a line doubled or moved, or bytes changed."""
    lines = text.splitlines()
    index = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(("value", "value", "value", "double", "remove", "bytes", "add")))
    if kind == "bytes":
        return draw(damaged(text.encode()))
    if kind == "value" and "=" in lines[index]:
        lines[index] = f"{lines[index].partition('=')[0]}= {draw(st.sampled_from(TOML_VALUES))}"
    elif kind == "double":
        lines.insert(index, draw(st.sampled_from(lines)))
    elif kind == "remove":
        del lines[index]
    elif kind == "add":
        lines.insert(index, f"{draw(st.sampled_from(('a', '[a]', 'a.b', '[features]', '[[data]]')))} = 1")
    return "\n".join(lines).encode()


def test_recipe(run):
    file = run / "recipe.toml"

    @examples(150)
    @given(recipes(file.read_text()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            text = recipe_to_toml(read_run(run).recipe)
            assert recipe_to_toml(recipe_from_toml(text)) == text

    check()


def safetensors_files(data: bytes) -> st.SearchStrategy[bytes]:
    """Weights with a changed header (of the true length, or of any other), or changed bytes."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    headers = documents(header).map(str.encode)
    lengths = st.sampled_from((0, 1, 2**31, 2**63, 2**64 - 1))
    return st.one_of(
        headers.map(lambda text: len(text).to_bytes(8, "little") + text + body),
        lengths.map(lambda number: number.to_bytes(8, "little") + data[8:]),
        damaged(data),
    )


def test_weights(run):
    file = run / "release/model.safetensors"

    @examples(60)
    @given(safetensors_files(file.read_bytes()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            use(run)

    check()


def restore(run) -> None:
    """Resume as far as the state is concerned."""
    model = sfumato.create_model("scale_resnet9", num_classes=3, in_channels=1, width=4, groups=2)
    optimizer = build_optimizer("SGD", model, learning_rate=1.0, options={})
    state = load_state(run / "state")
    state.restore(model, WeightAverage.start(model, decay=0.9), optimizer)


def test_state_tensors(run):
    file = run / "state/state.safetensors"

    @examples(60)
    @given(safetensors_files(file.read_bytes()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            restore(run)

    check()


def test_state_values(run):
    file = run / "state/state.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    @examples(60)
    @given(spoilt(metadata["values"].encode()))
    def check(values):
        save_file(tensors, file, metadata={**metadata, "values": values.decode(errors="replace")})
        with only_coded_errors():
            restore(run)

    check()


def test_an_average_of_other_shapes_is_refused(run):
    file = run / "state/state.safetensors"
    restore(run)  # the control
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = next(name for name in tensors if name.startswith("average."))
    save_file({**tensors, name: tensors[name].flatten()[:1]}, file, metadata=metadata)
    with pytest.raises(RunError, match="averaged weights have other names or shapes"):
        restore(run)


def test_spending(run, tmp_path):
    file = run / "state/spending.json"
    ledger = Ledger.open(tmp_path / "ledger.sqlite")

    @examples(80)
    @given(spoilt(file.read_bytes()))
    def check(changed):
        file.write_bytes(changed)
        with only_coded_errors():
            ledger.import_folder(run / "state")

    check()


def refused(run, model) -> None:
    file = run / "release/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model": model}))
    with only_coded_errors(seconds=5):
        use(run)
        pytest.fail("it was built")


@pytest.mark.parametrize(
    "model",
    [
        {"name": "efficientnet_lite0", "options": {"depth": 1e308}},
        {"name": "efficientnet_lite0", "options": {"width": 1e308}},
        {"name": "efficientnet_lite0", "options": {"width": -1}},
        {"name": "nfnet_f0", "options": {"group_size": 10**12}},
        {"name": "patches", "options": {"num_layers": 10**9}},
        {"name": "patches", "options": {"image_size": 10**9}},
        {"name": "patches", "options": {"image_size": 1}},
        {"name": "patches", "options": {"grid": 10**6}},
        {"name": "scatter", "options": {"image_size": 10**5}},
        {"name": "scatter", "options": {"num_directions": 10**12}},
        {"name": "scatter_cnn", "options": {"image_size": 3}},
        {"name": "efficientnet_lite0_features", "options": {"networks": "x" * 10**6}},
        {"name": "efficientnet_lite0_features", "options": {"networks": "+".join(["lite0"] * 2000)}},
    ],
    ids=lambda model: f"{model['name']}-{'-'.join(map(str, model['options']))}",
)
def test_a_model_that_cannot_be_is_refused(run, model):
    refused(run, model)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "wrn_6000004_1", "options": {}},
        {"name": "wrn_16_4", "options": {"depth": 6_000_004}},
        {"name": "smoothnet", "options": {"depth": 10**9}},
        {"name": "resnet18", "options": {"depths": [10**7] * 4}},
        {"name": "densenet121", "options": {"depths": [10**5] * 4}},
        {"name": "efficientnet_lite0", "options": {"depth": 1e5}},
    ],
    ids=lambda model: f"{model['name']}-{'-'.join(map(str, model['options']))}",
)
def test_a_model_that_never_ends_is_refused(run, model):
    refused(run, model)


PIPES = ("release/model.safetensors", "release/config.json", "state/spending.json", "state/links.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run / name)
    with only_coded_errors():
        use(run)
