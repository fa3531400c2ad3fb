"""Units: every row of a unit together, bounded, and memory that does not grow with the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfumato.data.distortion import Distortion
from sfumato.errors import DataError
from sfumato.randomness import SeededSource, UnitRandomness
from sfumato.training.inputs import Units, Views
from small_runs import small_set

VIEWS = Views(mean=(0.5,), std=(0.25,), count=3, padding=1, flip=True)
DISTORTED = replace(VIEWS, distortion=Distortion(zoom=0.2, rotation=9.0, contrast=0.3, grain=0.1))
CPU = torch.device("cpu")


def of_step(step, seed=0):
    return UnitRandomness(SeededSource(seed), purpose="augmentation", step=step)


def batches_of(units, indices, *, views=VIEWS, max_rows=24, seed=0):
    draws = of_step(0, seed)
    return list(views.microbatches(units, indices, max_rows=max_rows, randomness=draws, device=CPU))


def test_patients_own_exactly_their_images():
    data = small_set(50, seed=0, patients=7)
    units = Units.patients(data, max_images=100)
    assert len(units) == 7
    for patient in range(7):
        mine = units.choose(patient, of_step(0))
        assert set(mine.tolist()) == set((data.patients == patient).nonzero()[:, 0].tolist())


def test_a_patient_counts_with_at_most_so_many_images_chosen_anew_each_time():
    units = Units.patients(small_set(60, seed=0, patients=2), max_images=4)
    choices = {tuple(sorted(units.choose(0, of_step(step)).tolist())) for step in range(20)}
    assert {len(choice) for choice in choices} == {4}
    assert len(choices) > 10


def test_patients_need_a_patient_column():
    with pytest.raises(DataError) as caught:
        Units.patients(small_set(6, seed=0), max_images=1)
    assert caught.value.code == "no-patients"


@pytest.mark.parametrize("max_rows", [1, 7, 24, 1000])
def test_microbatches_hold_whole_units_and_no_more_rows_than_allowed(max_rows):
    units = Units.patients(small_set(50, seed=0, patients=9), max_images=3)
    parts = batches_of(units, torch.arange(9), max_rows=max_rows)
    assert sum(part.num_units for part in parts) == 9
    for part in parts:
        rows = torch.bincount(part.unit_index)
        assert part.unit_index.max() == part.num_units - 1
        assert len(part.inputs) <= max(max_rows, rows.max().item())  # one unit is never split
        assert set(rows.tolist()) == {9}  # 3 images of 3 views


def test_rows_carry_their_own_labels_and_pixels():
    data = small_set(12, seed=0)
    plain = Views(mean=(0.0,), std=(1.0,))
    parts = batches_of(Units.images(data), torch.tensor([5, 2, 7]), views=plain, max_rows=2)
    inputs, targets = torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])
    assert torch.equal(targets, data.labels[[5, 2, 7]])
    assert torch.allclose(inputs, data.images[[5, 2, 7]].float() / 255)


@pytest.mark.parametrize("views", [VIEWS, DISTORTED])
def test_views_of_one_unit_do_not_depend_on_other_units_images(views):
    first, second = small_set(12, seed=0), small_set(12, seed=9)
    second.images[3] = first.images[3]
    parts = [
        batches_of(Units.images(data), torch.tensor([2, 3, 4]), views=views)[0] for data in (first, second)
    ]
    mine = parts[0].unit_index == 1
    assert torch.equal(parts[0].inputs[mine], parts[1].inputs[mine])
    assert not torch.equal(parts[0].inputs[~mine], parts[1].inputs[~mine])


def test_an_empty_batch_gives_no_microbatch():
    assert batches_of(Units.images(small_set(4, seed=0)), torch.zeros(0, dtype=torch.int64)) == []


@pytest.mark.parametrize("views", [VIEWS, DISTORTED])
@pytest.mark.parametrize("max_rows", [3, 24, 1000])
def test_views_of_one_unit_do_not_depend_on_its_place_or_on_who_else_is_there(max_rows, views):
    units = Units.patients(small_set(60, seed=0, patients=9), max_images=3)

    def rows_of(unit, indices):
        for part in batches_of(units, indices, max_rows=max_rows, views=views):
            place = (part.unit_ids == unit).nonzero()
            if len(place):
                return part.inputs[part.unit_index == int(place)]
        return None

    alone, among = rows_of(5, torch.tensor([5])), rows_of(5, torch.tensor([8, 1, 5, 0]))
    assert torch.equal(alone, among)
    other = batches_of(units, torch.tensor([5]), seed=1, views=views)[0].inputs
    assert not torch.equal(alone, other)  # control: another step draws other views


def test_each_view_of_an_image_is_distorted_on_its_own():
    still = Views(mean=(0.5,), std=(0.25,), count=3, distortion=Distortion(brightness=0.3))
    rows = batches_of(Units.images(small_set(4, seed=0)), torch.tensor([1]), views=still)[0].inputs
    assert len({round(row.mean().item(), 4) for row in rows}) == 3
