"""Counting layers, and the models command."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sfumato
from sfumato.cli import cli, main
from sfumato.models import list_models, summarise


@pytest.mark.parametrize("name", ["resnet9", "wrn_16_4", "smoothnet", "lenet", "nfnet_f0"])
def test_multiply_adds_are_half_of_what_torch_counts(name: str) -> None:
    with torch.device("meta"):
        model = sfumato.create_model(name, num_classes=10)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(torch.empty(1, 3, 64, 64))
    assert summarise(model, (3, 64, 64)).multiply_adds == counter.get_total_flops() // 2


def test_a_layer_called_twice_has_its_parameters_once_and_its_products_twice() -> None:
    layer = nn.Linear(3, 3)
    once, twice = summarise(nn.Sequential(layer), (3,)), summarise(nn.Sequential(layer, layer), (3,))
    assert twice.num_parameters == once.num_parameters == 12
    assert (once.multiply_adds, twice.multiply_adds) == (9, 18)


def test_summarising_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    summary = summarise(model, (1, 8, 8))
    assert model.training
    assert not model[0]._forward_hooks
    assert torch.count_nonzero(model[1].running_mean) == 0
    assert [layer.output_shape for layer in summary.layers] == [(2, 6, 6), (2, 6, 6)]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["models", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_list_names_every_model_with_its_size_and_paper() -> None:
    rows = json.loads(run("list", "--json"))
    assert [row["name"] for row in rows if not row["fixed_features"]] == list_models()
    resnet9 = next(row for row in rows if row["name"] == "resnet9")
    assert resnet9["num_parameters"] == 2_447_946
    assert resnet9["papers"] == ["scalenorm2022"]
    lines = run("list", "scale_wrn_*").splitlines()
    assert len(lines) == 4
    assert "2,755,610" in lines[1]
    assert "de2022, scalenorm2022" in lines[1]


def test_show_gives_the_layout_the_options_and_every_layer() -> None:
    text = run("show", "scale_resnet9", "--num-classes", "7", "--channels", "1", "--image-size", "28")
    assert "Klause et al. 2022" in text
    assert "order='norm-act'" in text
    assert "scale_norm2" in text
    assert "256 x 3 x 3" in text
    shown = json.loads(run("show", "wrn_16_4", "--json"))
    assert sum(layer["num_parameters"] for layer in shown["layers"]) == shown["num_parameters"] == 2_753_818
    assert shown["options"]["skip"] == "full"


def test_an_unknown_model_ends_with_exit_code_2_and_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["models", "show", "resnet10"])
    assert stop.value.code == 2
    assert "Did you mean resnet1" in capsys.readouterr().err
