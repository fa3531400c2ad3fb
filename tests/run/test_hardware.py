"""A plan past this machine: what is counted, what the papers took, and what many devices wait for."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfumato.bench.scaling import bench_scaling, limit_of
from sfumato.cli import main
from sfumato.errors import ConfigError
from sfumato.models import create_model
from sfumato.recipes.recipe import load_recipe
from sfumato.run.hardware import NOISE_SECONDS, Trouble, devices, parse_hardware, project, simulate
from sfumato.run.workload import count_network, workload_of

ROOT = Path(__file__).resolve().parents[2]
RESNET9, WRN = "scalenorm2022/cifar10-resnet9-eps7.42", "scalenorm2022/cifar10-wrn16-4-eps8"
NO_TROUBLE = Trouble(jitter=0.0, stall_chance=0.0, sharding=False)


def called(arguments: list[str]) -> int:
    """The exit code."""
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def minutes(recipe: str, hardware: str) -> float:
    return project(workload_of(load_recipe(recipe)), parse_hardware(hardware)).seconds / 60


def test_the_minutes_of_klause_et_al_are_found_and_one_device_less_would_be_noticed():
    assert minutes(RESNET9, "1xRTX8000") == pytest.approx(22, rel=0.05)  # the efficiency comes from this one
    assert minutes(WRN, "2xRTX8000") == pytest.approx(963, rel=0.05)  # and is checked by this one
    assert minutes(WRN, "1xRTX8000") > 1.5 * 963


@pytest.mark.parametrize(
    ("model", "milliseconds"), [("wrn_16_4", 14.7), ("resnet9", 11.2), ("smoothnet", 37.5)]
)
def test_measured_milliseconds_of_two_cores_are_found(model, milliseconds):
    """benchmarks/2026-11-16-gradients.jsonl, per image; the efficiency comes from the first."""
    counted = count_network(model, (), 10, (3, 32, 32), "all")
    found = 1000 * 6 * counted.multiply_adds / parse_hardware("cpu:1").flops_per_second / 2
    assert found == pytest.approx(milliseconds, rel=0.1)


def test_multiply_adds_are_those_that_autograd_sees():
    from torch.utils.flop_counter import FlopCounterMode

    model = create_model("resnet9", num_classes=10)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32)).sum().backward()
    counted = count_network("resnet9", (), 10, (3, 32, 32), "all").multiply_adds
    # the first layer's inputs need no gradient
    assert 5.5 * counted < counter.get_total_flops() <= 6.001 * counted


def test_frozen_layers_cost_less_and_a_last_layer_on_fixed_rows_hardly_anything():
    flops = {
        trained: workload_of(
            replace(
                recipe := load_recipe(RESNET9),
                model=replace(recipe.model, trained=trained),
            )
        ).flops
        for trained in ("all", "norms-and-biases", "last")
    }
    assert flops["all"] > 1.4 * flops["norms-and-biases"] > 10 * flops["last"]


@pytest.mark.parametrize("text", ["8xB300", "x", "0xA100", "8xA100:2", "A100 A100", "-1xA100", ""])
def test_unknown_hardware_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_hardware(text)
    assert caught.value.code == "unknown-hardware"


def test_hardware_is_a_number_and_a_name():
    assert [parse_hardware(text).count for text in ("8xA100", "A100", "cpu:2", "2xcpu")] == [8, 1, 2, 2]
    assert parse_hardware("8xa100").name == "A100"
    assert all(0 < device.efficiency <= 1 and device.basis for device in devices().values())


def test_without_trouble_a_simulated_step_is_the_planned_one():
    workload = replace(workload_of(load_recipe(WRN)), rows_per_step=65_536.0)
    for count in (1, 8, 64):
        hardware = parse_hardware(f"{count}xA100")
        found = simulate(workload, hardware, trouble=NO_TROUBLE, num_steps=3)
        assert found["seconds_per_step"] == pytest.approx(project(workload, hardware).seconds_per_step)


def test_the_wait_for_the_largest_poisson_shard_is_the_textbooks():
    """With 4,096 units over 64 devices a shard holds 64 on average, and the largest of 64 about 84."""
    workload = replace(workload_of(load_recipe(WRN)), num_noisy=0)
    hardware = parse_hardware("64xA100")
    shards = simulate(workload, hardware, trouble=replace(NO_TROUBLE, sharding=True), num_steps=400)
    drawn = torch.poisson(torch.full((4000, 64), 64.0), generator=torch.Generator().manual_seed(5))
    assert shards["imbalance"] / shards["compute"] == pytest.approx(
        drawn.amax(1).mean().item() / 64 - 1, rel=0.05
    )
    shares = simulate(workload, hardware, trouble=NO_TROUBLE, num_steps=400)
    assert shares["imbalance"] == pytest.approx(0, abs=1e-9)


def test_a_ring_sends_every_value_twice_and_noise_is_drawn_once():
    eight = parse_hardware("8xA100")
    seconds = eight.seconds_to_reduce(10**9)
    assert seconds == pytest.approx(2 * 7 / 8 * 8e9 / 300e9, rel=0.01)
    assert parse_hardware("1xA100").seconds_to_reduce(10**9) == 0
    assert parse_hardware("16xA100").seconds_to_reduce(10**9) > 5 * seconds  # over the network
    one, many = (
        simulate(workload_of(load_recipe(WRN)), parse_hardware(name), trouble=NO_TROUBLE, num_steps=2)
        for name in ("1xA100", "512xA100")
    )
    assert one["noise"] == many["noise"] == pytest.approx(2_752_506 * NOISE_SECONDS, rel=0.01)


def test_the_limit_is_where_efficiency_falls_below_nine_tenths():
    result = bench_scaling(
        workload_of(load_recipe(WRN)), parse_hardware("A100"), trouble=Trouble(), num_steps=50
    )
    for way, sharding in (("shards", True), ("shares", False)):
        rows = {row["devices"]: row["efficiency"] for row in result["rows"] if row["sharding"] == sharding}
        limit = result["limit"][way]
        assert rows[limit] >= 0.9 > rows[2 * limit]
    assert result["limit"]["shards"] < result["limit"]["shares"]
    assert limit_of([{"sharding": True, "devices": 1, "efficiency": 0.5}], sharding=True) is None


def test_recipes_list_projects_without_data_and_says_what_it_cannot_know(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))
    assert called(["recipes", "list", RESNET9, "--hardware", "RTX8000", "--price", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["projection"]["dollars"] == pytest.approx(3 * row["projection"]["device_hours"])
    assert called(["recipes", "list", "fast/patches", "--hardware", "RTX8000"]) == 0
    assert "-: needs your images" in capsys.readouterr().out


def test_a_dry_run_says_what_the_run_takes_elsewhere(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "train",
        "digits",
        "--recipe",
        "default/folder",
        "--epsilon",
        "8",
        "--set",
        "data.image_size=8",
    ]
    arguments += ["--set", "model.options={width=4,groups=2}", "--dry-run"]
    assert called([*arguments, "--hardware", "2xA100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["hardware"] == "2xA100"
    assert found["hardware"]["seconds"] > 0
    assert (
        called([one for one in arguments if one != "--dry-run"] + ["--hardware", "2xA100"]) == 2
    )  # it would train here
    assert "hardware-without-dry-run" in capsys.readouterr().err


def test_the_table_of_the_document_is_what_the_code_says():
    document = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    specification = importlib.util.spec_from_file_location("scale_table", ROOT / "docs" / "scale_table.py")
    table = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(table)
    assert table.page_with(document, table.rows()) == document
    assert table.page_with(document, table.rows(table.RECIPES[:2])) != document
