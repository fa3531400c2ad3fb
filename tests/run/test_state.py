"""State on disk: whole or not at all, for every optimizer, on a full disk too."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import torch

from sfumato.errors import RunError
from sfumato.files import write_json, write_text
from sfumato.run.state import STATE_FILE, LineLog, RunState, load_state, save_state
from sfumato.training.averaging import WeightAverage
from sfumato.training.inputs import Units
from small_runs import SmallNet, small_set

OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "RMSprop",
    "ASGD",
    "Rprop",
]


def step_with(optimizer, model, seed):
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.grad = torch.randn(value.shape, generator=generator)
    optimizer.step()


def weights(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path, name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    model = SmallNet()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    average = WeightAverage.start(model, decay=0.9)
    for seed in range(3):
        step_with(optimizer, model, seed)
        average.update(model)
    save_state(RunState.capture(model, average, optimizer, {"step": 3}), tmp_path)
    step_with(optimizer, model, 9)

    restored = SmallNet()
    fresh = getattr(torch.optim, name)(restored.parameters(), lr=0.01, **options)
    mean = WeightAverage.start(restored, decay=0.9)
    forgetful = SmallNet()
    state = load_state(tmp_path)
    state.restore(restored, mean, fresh)
    forgetful.load_state_dict(restored.state_dict())
    step_with(fresh, restored, 9)
    assert state.values["step"] == 3
    assert torch.equal(weights(restored), weights(model))
    assert mean.num_updates == 3
    assert all(torch.equal(mean.weights[key], value) for key, value in average.weights.items())
    step_with(getattr(torch.optim, name)(forgetful.parameters(), lr=0.01, **options), forgetful, 9)
    assert not torch.equal(weights(forgetful), weights(model))  # without the optimizer's memory it differs


def small_state(step):
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RunState.capture(model, WeightAverage.start(model, decay=0.0), optimizer, {"step": step})


@pytest.mark.parametrize("broken", ["save_file", "fsync", "replace"])
def test_a_full_disk_is_a_coded_error_and_the_old_state_stays(tmp_path, monkeypatch, broken):
    save_state(small_state(1), tmp_path)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = "sfumato.run.state.save_file" if broken == "save_file" else f"sfumato.files.os.{broken}"
    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(RunError, match="No space left") as caught:
            save_state(small_state(2), tmp_path)
    assert caught.value.code == "cannot-save"
    assert load_state(tmp_path).values["step"] == 1
    assert os.listdir(tmp_path) == [STATE_FILE]
    save_state(small_state(2), tmp_path)
    assert load_state(tmp_path).values["step"] == 2


def test_a_damaged_state_is_refused(tmp_path):
    save_state(small_state(1), tmp_path)
    whole = (tmp_path / STATE_FILE).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\x80\x04pickle"):
        (tmp_path / STATE_FILE).write_bytes(damaged)
        with pytest.raises(RunError) as caught:
            load_state(tmp_path)
        assert caught.value.code == "no-state"


@pytest.mark.parametrize("written", ["nothing", "half a line", "all"])
def test_a_log_is_brought_to_what_the_state_holds_wherever_writing_was_broken_off(tmp_path, written):
    log = LineLog(tmp_path / "log.jsonl")
    log.add({"step": 1})
    log.write()
    log.add({"step": 2})
    saved = log.pending()
    before = log.path.read_text()
    log.write()
    whole = log.path.read_text()
    log.path.write_text({"nothing": before, "half a line": before + '{"st', "all": whole}[written])
    resumed = LineLog(log.path)
    resumed.recover(saved)
    assert log.path.read_text() == whole == '{"step": 1}\n{"step": 2}\n'
    resumed.add({"step": 3})
    resumed.write()
    assert log.path.read_text() == whole + '{"step": 3}\n'


def test_lines_of_steps_that_are_done_again_are_forgotten(tmp_path):
    log = LineLog(tmp_path / "log.jsonl")
    saved = log.pending()
    log.add({"step": 1})
    log.write()
    resumed = LineLog(log.path)
    resumed.recover(saved)
    assert log.path.read_text() == ""


def test_a_log_shorter_than_its_state_is_refused(tmp_path):
    log = LineLog(tmp_path / "log.jsonl")
    log.add({"step": 1})
    log.write()
    saved = log.pending()
    log.path.write_text("")
    with pytest.raises(RunError) as caught:
        LineLog(log.path).recover(saved)
    assert caught.value.code == "damaged-log"


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"value": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"value": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n  "value": 1\n}\n'


def test_a_missing_folder_is_told_apart_from_a_full_disk(tmp_path):
    with pytest.raises(RunError, match="there is no folder") as caught:
        write_text(tmp_path / "nowhere" / "page.html", "text")
    assert "resume" not in caught.value.fix
    write_text(tmp_path / "page.html", "text")
    assert (tmp_path / "page.html").read_text() == "text"


def test_the_checksum_of_units_knows_labels_and_groups_but_no_order_and_no_numbers():
    data = small_set(24, seed=1, patients=8)
    patients = Units.patients(data, max_images=2).checksum()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    renumbered = replace(data, patients=torch.tensor([9, 2, 7, 1, 5, 3, 30, 4])[data.patients])
    for same in (data.select(order), renumbered, renumbered.select(order)):
        assert Units.patients(same, max_images=2).checksum() == patients
    shifted = replace(data, patients=data.patients.roll(1).where(data.patients > 4, data.patients))
    relabelled = replace(data, labels=(data.labels + 1) % 3)
    for other in (shifted, relabelled):
        assert other.fingerprint == data.fingerprint
        assert Units.patients(other, max_images=2).checksum() != patients
    assert Units.images(shifted).checksum() == Units.images(data).checksum()  # there patients change nothing
    assert Units.images(relabelled).checksum() != Units.images(data).checksum() != patients
