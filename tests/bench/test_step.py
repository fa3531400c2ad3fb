"""The time of a step is told part by part, each where it is spent; and nothing is spent of any ε."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sfumato.bench import step as bench
from sfumato.bench.gradients import bench_gradients
from sfumato.bench.peak import SIZE, Product, operations
from sfumato.bench.step import Plain, Work, bench_step
from sfumato.bench.stopwatch import PARTS, Seconds, Stopwatch
from sfumato.cli import main
from sfumato.data import ImageSet
from sfumato.ledger.account import Account
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.sampling import PoissonSampling
from sfumato.training import gradient_sums, inputs
from sfumato.training.averaging import WeightAverage
from sfumato.training.inputs import Views

SMALL = {"image_size": 12, "batch_size": 8, "microbatch_size": 4, "rounds": 1}


@pytest.fixture(autouse=True)
def few_images(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "GENERATED_BYTES", 0)
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setattr(bench, "_choose_strategies", lambda sums: None)


class SlowImages:
    """Pixels whose reading takes its time."""

    def __init__(self, images, read):
        self.images, self.read = images, read
        self.shape, self.dtype, self.ndim = images.shape, images.dtype, images.ndim

    def __len__(self):
        return len(self.images)

    def __getitem__(self, rows):
        return self.read(self.images, rows)


PLACES = {
    "sampling": (PoissonSampling, "batch", 1.0),
    "augmentation": (inputs, "crop_and_flip", 3.0),
    "gradient": (gradient_sums, "clipped_sum", 5.0),
    "noise": (Plan, "noise", 7.0),
    "ledger": (Account, "spend", 11.0),
    "optimizer": (torch.optim.SGD, "step", 13.0),
    "average": (WeightAverage, "update", 17.0),
}


def test_each_part_is_told_the_time_that_it_takes_and_no_other(monkeypatch):
    """On a clock that goes on only inside the parts, by as many seconds as the table says."""
    moment, during = [0.0], dict.fromkeys(PARTS, 0.0)

    def slowly(part, seconds, function):
        def slow(*args, **kwargs):
            moment[0] += seconds
            during[part] += seconds
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(Seconds, "now", classmethod(lambda cls: cls(moment[0], moment[0])))
    for part, (place, name, seconds) in PLACES.items():
        monkeypatch.setattr(place, name, slowly(part, seconds, getattr(place, name)))
    images = bench._generated(12)
    slow_images = SlowImages(images.images, slowly("reading", 2.0, torch.Tensor.__getitem__))
    work = Work(
        train=replace(images, images=slow_images),
        views=Views(mean=(0.5,) * 3, std=(0.25,) * 3, count=1, padding=4, flip=True),
        batch_size=20,
        max_rows=8,
        bfloat16=False,
    )
    watch = Stopwatch()
    with bench._private_steps(create_model("lenet", num_classes=10), work, 2, watch) as steps:
        for _ in range(2):
            during.update(dict.fromkeys(PARTS, 0.0))
            watch.take()
            next(steps)
            spent = {part: taken.clock for part, taken in watch.take().items()}
            assert spent == during
            assert spent["noise"] == 7.0
            assert spent["gradient"] / 5 == spent["reading"] / 2 == spent["augmentation"] / 3


def test_the_parts_make_up_the_whole_step():
    result = bench_step("lenet", **SMALL)
    for parts, whole in (
        ("parts", "milliseconds_per_image"),
        ("parts_by_the_clock", "milliseconds_by_the_clock"),
    ):
        assert sum(result[parts].values()) == pytest.approx(result[whole]["private"])
    assert tuple(result["parts"]) == PARTS
    assert result["least_ratio"] <= result["ratio"] <= result["most_ratio"]
    ways = result["milliseconds_per_image"]
    assert result["ratio"] == pytest.approx(ways["private"] / ways["plain"])


def test_a_stopwatch_gives_each_part_its_own_time_and_others_threads_none():
    watch = Stopwatch()
    watch.turn("outer")
    time.sleep(0.03)
    with watch.during("inner"):
        time.sleep(0.06)
    spent = watch.take()
    assert 0.03 <= spent["outer"].clock < spent["inner"].clock
    assert spent["inner"].clock >= 0.06
    watch.thread = -1  # as if this were another thread
    with watch.during("inner"):
        pass
    assert "inner" not in watch.take()


def test_a_bench_leaves_the_ledger_alone(tmp_path, monkeypatch):
    spent = []
    spend = Account.spend
    monkeypatch.setattr(Account, "spend", lambda account, step: (spent.append(step), spend(account, step)))
    bench_step("lenet", **SMALL)
    assert spent == [1, 2]  # it is paid for in a ledger, but not in the user's
    assert not (tmp_path / "ledger.sqlite").exists()


def test_the_plain_step_is_that_of_one_batch(monkeypatch):
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    train = ImageSet(pixels, torch.arange(40) % 10, tuple("abcdefghij"), None, "generated")
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    views = Views(mean=(0.5,) * 3, std=(0.25,) * 3, count=2, padding=1, flip=True)
    work = Work(train=train, views=views, batch_size=6, max_rows=8, bfloat16=False)
    plain = Plain(network, work, torch.contiguous_format)
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    made = plain.rows
    monkeypatch.setattr(plain, "rows", lambda images: rows.append(made(images)) or rows[-1])
    monkeypatch.setattr(plain.optimizer, "step", lambda: None)
    plain()
    assert [len(x) for x, _ in rows] == [8, 4]
    x, y = (torch.cat(values) for values in zip(*rows, strict=True))
    expected = torch.autograd.grad(cross_entropy(network(x), y), list(network.parameters()))
    for parameter, gradient in zip(plain.network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_operations_are_those_of_products_and_convolutions():
    linear, rows = nn.Linear(8, 4), torch.randn(5, 8)
    assert operations(lambda: linear(rows).sum().backward()) == 2 * (2 * 5 * 8 * 4)  # no input gradient
    assert operations(lambda: rows.relu()) == 0
    assert Product.speed(2.0) == SIZE**3


def test_shares_of_the_peak_are_of_the_same_precision():
    result = bench_gradients("lenet", batch_size=2, image_size=12, against=("plain", "bfloat16"), rounds=1)
    for name in ("sfumato", "plain", "bfloat16", "plain_bfloat16"):
        peak = result["matmul_gflops_in_bfloat16" if "bfloat16" in name else "matmul_gflops"]
        done = result["share_of_peak"][name] * peak * result["milliseconds_per_image"][name]
        reference = result["matmul_gflops"] * result["milliseconds_per_image"]["plain"]
        assert done == pytest.approx(result["share_of_peak"]["plain"] * reference)


def test_the_command_shows_parts_ratio_and_share(capsys, tmp_path):
    small = ["--model", "lenet", "--image-size", "12", "--batch-size", "8", "--rounds", "1"]
    main(["bench", "step", *small, "--append", str(tmp_path / "steps.jsonl")])
    shown = capsys.readouterr().out
    assert all(part in shown for part in (*PARTS, "private / plain", "of the machine's matrix products"))
    main(["bench", "step", *small, "--views", "2", "--precision", "bfloat16", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["precision"] == "bfloat16"
    assert result.keys() == json.loads((tmp_path / "steps.jsonl").read_text()).keys()
