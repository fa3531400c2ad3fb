"""Methods against the noise in whole runs: the plan stays, resuming is exact, nonsense is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from sfumato.errors import ConfigError
from sfumato.run.prepare import prepare
from sfumato.run.session import train
from sfumato.run.state import RunState, load_state, save_state
from sfumato.training.adam_bc import AdamBC
from sfumato.training.averaging import WeightAverage
from sfumato.training.kalman import KalmanFilter
from small_runs import SmallNet, Watcher, small_recipe, small_splits

METHODS = {
    "mixtures": {"augmentation__views": 2, "augmentation__mixed_views": 2},
    "adam-bc": {"training__optimizer": "AdamBC"},
    "kalman": {"training__kalman_gain": 0.6, "training__optimizer": "Adam"},
}


@pytest.fixture(autouse=True)
def own_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_broken_off_and_resumed_equals_the_whole_one_bit_for_bit(tmp_path, method):
    common = {"training__seed": 3, "training__learning_rate": 0.05, "training__num_steps": 4}
    recipe = small_recipe(**common, **METHODS[method])
    train(recipe, out=tmp_path / "whole", data=small_splits())
    with pytest.raises(RuntimeError, match="as if killed"):
        train(recipe, out=tmp_path / "parts", data=small_splits(), observer=Watcher(crash_after=3))
    train(recipe, out=tmp_path / "parts", data=small_splits(), resume=True)
    without = {"training__optimizer": "Adam"} if method == "kalman" else {}
    train(small_recipe(**common, **without), out=tmp_path / "without", data=small_splits())
    whole, parts, control = (
        load_file(tmp_path / name / "release/model.safetensors") for name in ("whole", "parts", "without")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert not all(torch.equal(whole[key], control[key]) for key in whole)  # the method does something


@pytest.mark.parametrize("method", METHODS)
def test_a_method_leaves_the_plan_and_its_epsilon_alone(method):
    with_it = prepare(small_recipe(**METHODS[method]), data=small_splits()).plan
    assert with_it == prepare(small_recipe(), data=small_splits()).plan


def memory_of(optimizer):
    return [memory[key] for memory in optimizer.state.values() for key in sorted(memory)]


@pytest.mark.parametrize("method", ["adam-bc", "kalman"])
def test_the_memory_of_a_method_is_saved_with_the_optimizer(tmp_path, method):
    def build(model):
        if method == "adam-bc":
            optimizer = AdamBC(model.parameters(), lr=0.01, noise_stddev=0.3)
            return optimizer, optimizer.step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return optimizer, KalmanFilter(optimizer, gain=0.4).step

    def advance(model, step, *seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for value in model.parameters():
                value.grad = torch.randn(value.shape, generator=generator)
            step()
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    model = SmallNet()
    optimizer, step = build(model)
    advance(model, step, 0, 1, 2)
    average = WeightAverage.start(model, decay=0.0)
    save_state(RunState.capture(model, average, optimizer, {"step": 3}), tmp_path)
    restored, forgetful = SmallNet(), SmallNet()
    fresh, fresh_step = build(restored)
    load_state(tmp_path).restore(restored, WeightAverage.start(restored, decay=0.0), fresh)
    forgetful.load_state_dict(restored.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(memory_of(optimizer), memory_of(fresh), strict=True))
    expected = advance(model, step, 9)
    assert torch.equal(advance(restored, fresh_step, 9), expected)
    assert not torch.equal(advance(forgetful, build(forgetful)[1], 9), expected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"training__kalman_gain": 0.6, "privacy__enabled": False}, "no-noise-to-remove"),
        ({"training__optimizer": "AdamBC", "privacy__enabled": False}, "no-noise-to-remove"),
        ({"training__optimizer": "AdamBC", "training__kalman_gain": 0.6}, "filtered-noise"),
        ({"training__kalman_gain": 1.0}, "bad-value"),
        ({"training__kalman_gain": 0.0}, "bad-value"),
        ({"augmentation__mixed_views": 2}, "bad-augmentation"),
        ({"augmentation__mixed_views": 2, "augmentation__views": 1}, "bad-augmentation"),
        ({"augmentation__mix_alpha": 0.0}, "bad-value"),
        ({"augmentation__mix_alpha": 1e-3}, "bad-augmentation"),
        (
            {"training__optimizer": "AdamBC", "training__optimizer_options": {"floor": 0.0}},
            "bad-optimizer-option",
        ),
        (
            {"training__optimizer": "AdamBC", "training__optimizer_options": {"noise_stddev": 1.0}},
            "bad-optimizer-option",
        ),
        ({"training__optimizer": "AdamBD"}, "unknown-optimizer"),
    ],
)
def test_a_method_that_cannot_be_meant_is_refused(changes, code):
    with pytest.raises(ConfigError) as caught:
        prepare(small_recipe(**changes), data=small_splits())
    assert caught.value.code == code


def test_the_card_and_the_report_name_the_methods(tmp_path):
    changes = {"training__kalman_gain": 0.6, "training__num_steps": 1}
    train(small_recipe(**METHODS["mixtures"], **changes), out=tmp_path / "run", data=small_splits())
    card = (tmp_path / "run/release/README.md").read_text()
    assert "2 views per image and 2 mixtures of them" in card
    assert "Kalman filter of gain 0.6" in card
    report = (tmp_path / "run/report.html").read_text()
    assert "2 + 2 mixed" in report
    assert "gain κ of the Kalman filter" in report
