"""bfloat16 is used where the processor multiplies it faster, which is measured once, and nowhere else."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sfumato.features import precision
from sfumato.features.backbone import BackboneFeatures
from sfumato.features.cache import complete_parts, features_of
from sfumato.features.precision import bfloat16_is_faster, wants_low_precision, working_dtype
from sfumato.models import create_model
from sfumato.recipes.recipe import load_recipe
from sfumato.run.features import _entry as entry_of_extractor

CPU = torch.device("cpu")


@pytest.fixture
def unmeasured():
    """No device has been asked about yet, and none will have been."""
    precision._measured.cache_clear()
    yield
    precision._measured.cache_clear()


class Network(nn.Module):
    """Remembers in which precision it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.seen: list[torch.dtype] = []

    def features(self, images):
        maps = self.convolution(images)
        self.seen.append(maps.dtype)
        return maps.mean((2, 3))


def backbone(*, low_precision: bool) -> BackboneFeatures:
    torch.manual_seed(0)
    constants = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    return BackboneFeatures(
        Network(), num_features=4, input_size=8, mirror=False, low_precision=low_precision, **constants
    )


@pytest.mark.parametrize(
    ("glance", "products", "faster"),
    [
        ((1.0, 0.5), (1.0, 0.5), True),
        ((1.0, 1.2), (1.0, 0.5), True),  # small products tell little of a device that starts them slowly
        ((1.0, 0.5), (1.0, 1.0), False),  # chance would decide, each time anew
        ((1.0, 0.5), (1.0, 1.5), False),
        ((1.0, 60.0), None, False),  # nobody waits for the larger ones
    ],
)
def test_the_times_of_products_decide(glance, products, faster, monkeypatch):
    sizes = []

    def timed(device, size, *, rounds):
        sizes.append(size)
        return glance if len(sizes) == 1 else products

    monkeypatch.setattr(precision, "_best_seconds", timed)
    assert precision._compared(CPU) is faster
    assert len(sizes) == (1 if products is None else 2)


def test_a_device_without_bfloat16_is_not_faster_in_it(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("not implemented for BFloat16")

    monkeypatch.setattr(precision, "_best_seconds", refused)
    assert precision._compared(CPU) is False


def test_threads_that_ask_at_once_wait_for_one_measurement(unmeasured, monkeypatch):
    measured = []

    def slowly(device):
        measured.append(device)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(precision, "_compared", slowly)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: bfloat16_is_faster(CPU), range(8)))
    assert measured == [CPU]
    bfloat16_is_faster(torch.device("cuda", 1))  # the control: another device is another question
    assert measured == [CPU, torch.device("cuda", 1)]


def test_nothing_is_measured_before_it_matters(unmeasured, monkeypatch):
    monkeypatch.setattr(precision, "_compared", lambda _: pytest.fail("measured"))
    backbone(low_precision=True)
    assert working_dtype(CPU, low_precision=False) == torch.float32
    backbone(low_precision=False)(torch.rand(2, 3, 8, 8))
    with pytest.raises(pytest.fail.Exception, match="measured"):  # the control
        backbone(low_precision=True)(torch.rand(2, 3, 8, 8))


def test_what_surrounds_the_question_does_not_change_the_answer(unmeasured, monkeypatch):
    seen = []

    def looking(*_, **__):
        seen.append((torch.is_autocast_enabled("cpu"), torch.ones(1).device.type))
        return 1.0, 60.0

    monkeypatch.setattr(precision, "_best_seconds", looking)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        bfloat16_is_faster(CPU)
        precision._compared(CPU)  # the control: here all products would be in bfloat16
    assert seen == [(False, "cpu"), (True, "meta")]


def test_a_real_measurement_agrees_with_longer_products_and_draws_nothing(unmeasured):
    state = torch.get_rng_state()
    answer = bfloat16_is_faster(CPU)
    assert torch.equal(torch.get_rng_state(), state)  # else seeded runs would depend on the processor
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.rand(384, 384).to(dtype)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            square @ square
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    ratio = best[torch.bfloat16] / best[torch.float32]
    if not 0.6 < ratio < 3:  # else a busy machine may have disturbed either
        assert answer is (ratio < 1)


@pytest.mark.parametrize("low_precision", [True, False])
def test_a_backbone_decides_when_it_computes(low_precision, processor):
    features, images = backbone(low_precision=low_precision), torch.rand(2, 3, 8, 8)
    (network,) = features.networks
    rows = {}
    for bfloat16 in (True, False):
        processor(bfloat16=bfloat16)
        rows[bfloat16] = features(images)
    assert network.seen == [torch.bfloat16 if low_precision else torch.float32, torch.float32]
    assert torch.equal(rows[False], backbone(low_precision=False)(images))
    assert torch.equal(rows[True], rows[False]) is not low_precision
    assert torch.allclose(rows[True], rows[False], atol=0.01)


@pytest.mark.parametrize("low_precision", [True, False])
def test_rows_of_one_precision_are_not_taken_for_those_of_the_other(low_precision, processor, tmp_path):
    features = backbone(low_precision=low_precision)
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    rows = {}
    for bfloat16 in (True, False, True):
        processor(bfloat16=bfloat16)
        rows[bfloat16] = features_of(features, images, folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == (2 if low_precision else 1)
    assert torch.equal(rows[True], rows[False]) is not low_precision


def test_parts_of_one_precision_outlive_the_completion_of_the_other(processor, tmp_path):
    features = backbone(low_precision=True)
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    for bfloat16 in (True, False):
        processor(bfloat16=bfloat16)
        complete_parts(features, images, worker=(0, 1), folder=tmp_path)
    features_of(features, images, folder=tmp_path)  # removes its own
    (left,) = tmp_path.glob("*.part")
    assert ".float32" not in left.name
    processor(bfloat16=True)
    features_of(features, images, folder=tmp_path)
    assert not list(tmp_path.glob("*.part"))  # the control


def test_fitted_features_serve_in_either_precision(processor):
    small = {"num_patches": 8, "num_directions": 10}
    extractor = create_model("wide_patches_scatter", num_classes=2, **small).extractor
    plain = create_model("wide_patches_scatter", num_classes=2, low_precision=False, **small).extractor
    assert wants_low_precision(extractor)
    assert not wants_low_precision(plain)
    settings = load_recipe("fast/wide").features
    entries = set()
    for bfloat16 in (True, False):
        processor(bfloat16=bfloat16)
        entries.add(entry_of_extractor(extractor, settings, None))
    assert len(entries) == 1
    assert entry_of_extractor(plain, settings, None) not in entries  # the control
