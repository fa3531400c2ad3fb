import numpy as np
import pytest
import torch

from sfumato.data import augment, normalisation_for, normalise
from sfumato.errors import ConfigError


def images(batch=3, channels=2, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, channels, size, size, generator=generator)


def all_views(image, padding, mode):
    """Every crop and flip, the slow and obvious way, as bytes."""
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode=mode)
    size = image.shape[-1]
    found = set()
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + size, left : left + size]
            found |= {crop.tobytes(), crop[:, :, ::-1].tobytes()}
    return found


def test_every_view_is_a_crop_of_its_own_image_mirrored_with_the_edge_pixel():
    batch = images()
    views = augment(batch, views=40, padding=2, flip=True, generator=torch.Generator().manual_seed(1))
    assert views.shape == (120, 2, 8, 8)
    for row, view in enumerate(views):
        image = batch[row // 40].numpy()  # the views of image 0 come first
        assert view.numpy().tobytes() in all_views(image, 2, "symmetric")
    control = [all_views(batch[row // 40].numpy(), 2, "reflect") for row in range(120)]
    assert not all(view.numpy().tobytes() in known for view, known in zip(views, control, strict=True))


def test_all_crops_and_both_flips_occur_about_equally_often():
    batch = images(batch=1)
    views = augment(batch, views=5000, padding=2, flip=True, generator=torch.Generator().manual_seed(2))
    counts = np.unique([hash(view.numpy().tobytes()) for view in views], return_counts=True)[1]
    assert len(counts) == 5 * 5 * 2
    assert counts.min() > 60  # 100 expected each; 60 is four standard deviations below
    unflipped = augment(batch, views=500, padding=2, flip=False, generator=torch.Generator().manual_seed(2))
    assert len({view.numpy().tobytes() for view in unflipped}) == 25  # without flips, half as many


def test_no_image_enters_the_rows_of_another():
    first = images(batch=4)
    second = first.clone()
    second[2] += 1.0

    def views(batch):
        return augment(batch, views=5, padding=3, flip=True, generator=torch.Generator().manual_seed(3))

    changed = (views(first) != views(second)).flatten(1).any(1)
    assert changed.tolist() == [False] * 10 + [True] * 5 + [False] * 5


def test_views_repeat_with_the_seed_and_only_with_it():
    def views(seed):
        return augment(images(), views=4, padding=2, flip=True, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(views(1), views(1))
    assert not torch.equal(views(1), views(2))


def test_bytes_and_floats_and_shapes_that_are_not_square_are_cropped_alike():
    pixels = torch.randint(0, 256, (2, 3, 6, 9), dtype=torch.uint8)

    def views(batch):
        return augment(batch, views=3, padding=4, flip=True, generator=torch.Generator().manual_seed(5))

    assert views(pixels).dtype == torch.uint8
    assert torch.equal(views(pixels).float(), views(pixels.float()))


def test_no_views_and_no_padding_leave_the_images_alone():
    batch = images()
    generator = torch.Generator().manual_seed(0)
    assert augment(batch, views=0, padding=4, flip=True, generator=generator) is batch
    assert torch.equal(augment(batch, views=1, padding=0, flip=False, generator=generator), batch)


@pytest.mark.parametrize("options", [{"views": -1, "padding": 0}, {"views": 1, "padding": 9}])
def test_impossible_views_are_refused(options):
    with pytest.raises(ConfigError, match="bad-augmentation"):
        augment(images(), flip=True, generator=torch.Generator(), **options)


def test_normalising_is_the_textbook_formula_and_leaves_its_input_alone():
    pixels = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = normalisation_for("cifar10", 3)
    expected = (pixels.double() / 255 - torch.tensor(mean, dtype=torch.float64).view(3, 1, 1)) / torch.tensor(
        std, dtype=torch.float64
    ).view(3, 1, 1)
    assert torch.allclose(normalise(pixels, mean, std).double(), expected, atol=2e-6)
    floats = pixels.float()
    normalise(floats, mean, std)
    assert torch.equal(floats, pixels.float())


def test_constants_are_public_and_fit_the_channels():
    assert normalisation_for("cifar10", 3)[0] == (0.49140, 0.48216, 0.44653)
    assert normalisation_for("my-hospital", 1) == ((0.5,), (0.25,))
    assert len(normalisation_for("mnist", 3)[0]) == 3
    assert len(normalisation_for("cifar10", 1)[0]) == 1
    with pytest.raises(ConfigError, match="bad-normalisation"):
        normalise(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), (0.5, 0.5), (0.25,))
