"""A training on images that lie on the disk is the training on the same images in memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from sfumato.data import pixels
from sfumato.data.pixels import ChosenRows
from sfumato.run import prepare as preparing
from sfumato.run.session import train
from small_runs import Watcher, small_recipe


def test_a_mapped_run_broken_off_and_resumed_equals_the_one_in_memory_bit_for_bit(
    image_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("SFUMATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preparing, "check_model", lambda *_, **__: [])  # takes seconds; tested elsewhere
    recipe = small_recipe(
        data__name=str(image_folder(train=40)),
        data__image_size=8,
        data__holdout=0.3,
        training__num_steps=4,
        training__seed=3,
        augmentation__views=2,
        performance__microbatch_size=7,
        privacy__delta=1e-2,
    )
    train(recipe, out=tmp_path / "memory")
    monkeypatch.setattr(pixels, "MEMORY_LIMIT_BYTES", 0)

    class Looking(Watcher):
        def started(self, prepared, start_step):
            super().started(prepared, start_step)
            assert isinstance(prepared.units.data.images, ChosenRows)

    with pytest.raises(RuntimeError, match="as if killed"):
        train(recipe, out=tmp_path / "mapped", observer=Looking(crash_after=2))
    watcher = Looking()
    train(recipe, out=tmp_path / "mapped", observer=watcher, resume=True)
    assert watcher.start_step == 1  # the second step was not saved, and is taken again
    memory, mapped = (
        load_file(tmp_path / name / "release/model.safetensors") for name in ("memory", "mapped")
    )
    assert all(torch.equal(memory[key], mapped[key]) for key in memory)
