"""What is read ahead is what was drawn: the same rows, in the same order, each once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sfumato.data import pixels
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.training import inputs as inputs_module
from sfumato.training.evaluation import predict_logits
from sfumato.training.gradient_sums import EngineSum
from sfumato.training.inputs import Units, Views
from sfumato.training.prefetch import AHEAD, made_ahead
from small_runs import SmallNet, small_set

DATA = small_set(40, seed=0, patients=11)
VIEWS = Views(mean=(0.5,), std=(0.25,), count=2, padding=1, flip=True)
DRAWN = torch.tensor([3, 8, 0, 10, 5, 1])


def parts_of_a_step():
    return list(
        VIEWS.microbatches(
            Units.patients(DATA, max_images=2),
            DRAWN,
            max_rows=9,
            randomness=UnitRandomness(SeededSource(0), purpose="augmentation", step=0),
            device=torch.device("cpu"),
        )
    )


def test_a_mapped_set_gives_the_microbatches_of_one_in_memory(monkeypatch):
    expected = parts_of_a_step()
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)
    used = []
    ahead = inputs_module.made_ahead
    monkeypatch.setattr(inputs_module, "made_ahead", lambda items: used.append(True) or ahead(items))
    found = parts_of_a_step()
    assert used
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        for name in ("inputs", "targets", "unit_index", "unit_ids"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(torch.cat([part.unit_ids for part in found]), DRAWN)  # each drawn unit, once


def test_the_sum_and_the_scores_are_those_of_a_set_in_memory(monkeypatch):
    model, data = SmallNet(), small_set(20, seed=1)

    def results():
        total = EngineSum(
            model=model,
            units=Units.images(data),
            inputs=VIEWS,
            clip_norm=0.1,
            source=SeededSource(1),
            max_rows=6,
        )(torch.arange(0, 20, 3), 0)
        return total.gradients, predict_logits(model, data.images, mean=(0.5,), std=(0.25,), batch_size=7)

    gradients, logits = results()
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)
    ahead, ahead_logits = results()
    assert torch.equal(logits, ahead_logits)
    for name, value in gradients.items():
        assert torch.allclose(value, ahead[name], rtol=1e-5, atol=1e-7)


def test_no_more_is_made_than_so_many_items_ahead():
    made = []
    items = made_ahead(made.append(number) or number for number in range(100))
    for expected in range(5):
        assert next(items) == expected
        time.sleep(0.02)
        assert len(made) <= expected + 1 + AHEAD
    items.close()
    assert len(made) <= 5 + AHEAD


def test_what_fails_in_the_thread_is_raised_at_its_place_and_the_thread_ends():
    def failing():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    items = made_ahead(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    left_early = made_ahead(iter(range(10)))
    next(left_early)
    left_early.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sfumato-ahead")]
    assert list(made_ahead(iter(()))) == []
