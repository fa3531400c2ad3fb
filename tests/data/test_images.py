import numpy as np
import pytest
import torch

from sfumato.data import (
    DataSplits,
    ImageSet,
    carve_validation,
    duplicate_images,
    shared_images,
    shared_patients,
)
from sfumato.data.fingerprint import image_ids, raw_ids
from sfumato.errors import ConfigError, DataError


def image_set(count=60, seed=0, patients=None, channels=3):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, channels, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 3
    return ImageSet(pixels, labels, ("a", "b", "c"), patients, "made")


def test_the_fingerprint_does_not_depend_on_order_or_labels_but_on_every_pixel():
    images = image_set()
    shuffled = images.select(torch.randperm(60, generator=torch.Generator().manual_seed(1)))
    assert shuffled.fingerprint == images.fingerprint
    relabelled = ImageSet(images.images, (images.labels + 1) % 3, images.classes)
    assert relabelled.fingerprint == images.fingerprint
    touched = images.images.clone()
    touched[17, 1, 2, 3] += 1
    assert ImageSet(touched, images.labels, images.classes).fingerprint != images.fingerprint
    assert images.select(torch.arange(59)).fingerprint != images.fingerprint


def test_grey_images_stored_as_colour_keep_their_content_id():
    grey = image_set(channels=1)
    colour = ImageSet(grey.images.expand(-1, 3, -1, -1), grey.labels, grey.classes)
    assert torch.equal(grey.content_ids, colour.content_ids)
    assert not torch.equal(image_set().content_ids, colour.content_ids)


def test_duplicates_and_shared_images_are_found_exactly():
    images = image_set()
    doubled = images.select(torch.tensor([0, 1, 2, 1, 3, 1]))
    assert duplicate_images(doubled).tolist() == [3, 5]
    assert duplicate_images(images).tolist() == []
    assert shared_images(images, image_set(seed=9)).tolist() == []
    assert shared_images(images, images.select(torch.tensor([7, 40]))).tolist() == [7, 40]


def test_patients_in_both_train_and_test_are_named():
    patients = torch.arange(60) // 6
    images = image_set(patients=patients)
    train, test = images.select(torch.arange(0, 33)), images.select(torch.arange(33, 60))
    names = tuple(f"person{number}" for number in range(10))
    assert shared_patients(DataSplits(train, test=test, patient_names=names)) == ["person5"]
    apart = DataSplits(images.select(torch.arange(0, 30)), test=images.select(torch.arange(30, 60)))
    assert shared_patients(apart) == []


def test_units_are_images_or_whole_patients():
    images = image_set(count=5, patients=torch.tensor([9, 4, 9, 4, 100]))
    assert images.unit_index("image").tolist() == [0, 1, 2, 3, 4]
    assert images.unit_index("patient").tolist() == [1, 0, 1, 0, 2]
    assert (images.num_units("image"), images.num_units("patient")) == (5, 3)
    with pytest.raises(DataError, match="no-patients"):
        image_set().unit_index("patient")
    with pytest.raises(ConfigError, match="unknown-unit"):
        images.unit_index("person")


def test_carving_a_validation_set_keeps_patients_whole_and_moves_nobody_else_when_one_leaves():
    images = image_set(count=600, patients=torch.arange(600) // 3)
    whole = carve_validation(DataSplits(images), fraction=0.25)
    assert 90 < len(whole.val) < 210
    assert len(whole.train) + len(whole.val) == 600
    assert not whole.val_is_public
    assert set(whole.train.patients.tolist()).isdisjoint(whole.val.patients.tolist())
    for leaving in (0, 77, 199):
        rest = carve_validation(DataSplits(images.select(images.patients != leaving)), fraction=0.25)
        moved = set(whole.val.patients.tolist()) ^ set(rest.val.patients.tolist())
        assert moved <= {leaving}


def test_a_rule_by_position_would_move_others():
    """The control: "the last quarter" changes side for neighbours of whoever leaves."""
    units = list(range(200))
    last_quarter = set(units[-50:])
    assert last_quarter ^ set([unit for unit in units if unit != 0][-49:]) != set()


def test_carving_without_patients_goes_by_content_and_says_when_it_is_declared_public():
    images = image_set(count=400)
    once = carve_validation(DataSplits(images), fraction=0.5, public=True)
    shuffled = images.select(torch.randperm(400, generator=torch.Generator().manual_seed(4)))
    again = carve_validation(DataSplits(shuffled), fraction=0.5)
    assert once.val_is_public
    assert once.val.fingerprint == again.val.fingerprint
    with pytest.raises(ConfigError, match="val-exists"):
        carve_validation(once, fraction=0.5)
    with pytest.raises(ConfigError, match="bad-fraction"):
        carve_validation(DataSplits(images), fraction=1.5)
    with pytest.raises(DataError, match="empty-split"):
        carve_validation(DataSplits(image_set(count=2)), fraction=1e-6)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"images": torch.zeros(3, 1, 2, 2)}, "bad-array"),
        ({"images": torch.zeros(3, 2, 2, dtype=torch.uint8)}, "bad-array"),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, "bad-array"),
        ({"labels": torch.zeros(3)}, "bad-array"),
        ({"patients": torch.zeros(4, dtype=torch.int64)}, "bad-array"),
        ({"labels": torch.tensor([0, 1, 2])}, "label-out-of-range"),
        ({"labels": torch.tensor([0, -1, 1])}, "label-out-of-range"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, code):
    good = {
        "images": torch.zeros(3, 1, 2, 2, dtype=torch.uint8),
        "labels": torch.tensor([0, 1, 1]),
        "classes": ("a", "b"),
    }
    assert len(ImageSet(**good)) == 3
    with pytest.raises(DataError, match=code):
        ImageSet(**(good | change))


def test_raw_pixels_have_the_ids_of_ordinary_images_in_every_type_and_tell_others_apart():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 5, 3), dtype=np.uint8)
    pixels[0] = pixels[0, :, :, :1]  # grey
    known = image_ids(torch.from_numpy(np.moveaxis(pixels, 3, 1).copy()))
    for same in (pixels, pixels.astype(np.int64), pixels.astype(np.float32), pixels / 255):
        assert torch.equal(raw_ids(same), known)
    deep = np.random.default_rng(1).normal(0, 500, (6, 5, 5, 1))
    changed = deep.copy()
    changed[2, 0, 0, 0] += 1
    assert (raw_ids(deep) == raw_ids(changed)).tolist() == [True, True, False, True, True, True]
    assert torch.equal(raw_ids(deep), raw_ids(deep.astype(np.float32)))
    assert len(raw_ids(deep).unique()) == 6
