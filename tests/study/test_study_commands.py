"""sfumato study, end to end on small runs: files, JSON, refusals, and what is said about private images."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from sfumato.cli import main
from sfumato.run.session import train
from small_runs import small_recipe

TINY = ("--option", "width=4", "--option", "groups=2", "--num-images", "8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two private runs and an ordinary one, on the digits inside the package."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_LEDGER", str(folder / "ledger.sqlite"))
        for seed in (0, 1):
            train(
                small_recipe(data__name="digits", privacy__delta=1e-4, training__seed=seed),
                out=folder / f"private-{seed}",
            )
        plain = {"privacy__enabled": False, "training__learning_rate": 0.1}
        train(small_recipe(data__name="digits", **plain), out=folder / "ordinary")
    return folder


@pytest.fixture
def study(capsys, tmp_path):
    """Runs a study in a folder of its own; returns its JSON document."""

    def call(name: str, *words: object, fails: int | None = None) -> dict:
        arguments = ["study", name, *map(str, words), "--out", str(tmp_path), "--json"]
        if fails is None:
            main(arguments)
        else:
            with pytest.raises(SystemExit) as stop:
                main(arguments)
            assert stop.value.code == fails
        call.errors = capsys.readouterr()
        return json.loads(call.errors.out)

    return call


def assert_written(folder: Path, name: str) -> list[dict[str, str]]:
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert json.loads((folder / f"{name}.json").read_text())["study"] == name
    return list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("activations", ()),
        ("hessian", ("--num-iterations", 3, "--num-vectors", 1)),
        ("landscape", ("--points", 3)),
    ],
)
def test_fresh_nets_on_generated_images(study, tmp_path, name, words) -> None:
    document = study(name, *TINY, *words)
    assert [net["name"] for net in document["nets"]] == ["resnet9", "scale_resnet9"]
    assert {net["data"] for net in document["nets"]} == {"generated"}
    assert document["sensitive"] is False
    assert {row["sensitive"] for row in assert_written(tmp_path, name)} == {"False"}


@pytest.mark.parametrize("name", ["activations", "hessian", "landscape"])
def test_training_images_are_used_only_when_told_and_then_it_says_so(study, tmp_path, runs, name) -> None:
    words = {"hessian": ("--num-iterations", 2, "--num-vectors", 1), "landscape": ("--points", 3)}.get(
        name, ()
    )
    quiet = study(name, runs / "private-0", "--num-images", 8, *words)
    assert (quiet["nets"][0]["split"], quiet["sensitive"], quiet["notice"]) == ("test", False, None)
    assert "NOT PRIVATE" not in study.errors.err
    without = (tmp_path / f"{name}.png").stat().st_size
    loud = study(name, runs / "private-0", "--num-images", 8, "--on", "train", *words)
    assert loud["sensitive"] is True
    assert loud["notice"].startswith("NOT PRIVATE")
    assert "NOT PRIVATE" in study.errors.err
    assert {row["sensitive"] for row in assert_written(tmp_path, name)} == {"True"}
    assert (tmp_path / f"{name}.png").stat().st_size != without


def test_runs_on_generated_images_have_activations_but_no_loss(study, runs) -> None:
    document = study("activations", runs / "private-0", "--on", "generated", "--num-images", 4)
    assert document["nets"][0]["data"] == "generated"
    assert study("hessian", runs / "private-0", "--on", "generated", fails=1)["code"] == "no-labels"


def test_what_cannot_be_studied_is_refused_with_its_code(study, runs) -> None:
    assert study("activations", "resnet8", fails=2)["code"] == "no-subject"
    assert study("activations", "resnet9", "--on", "test", fails=2)["code"] == "no-data"
    assert study("landscape", "resnet9", "--data", "digits", "--on", "val", fails=1)["code"] == "no-split"
    assert study("landscape", "resnet9", "--points", 4, *TINY, fails=2)["code"] == "bad-grid"
    assert study("activations", "lenet", "--num-images", 2, fails=1)["code"] == "no-residual-blocks"


def test_seeds_of_one_recipe_become_one_curve(study, tmp_path, runs) -> None:
    document = study("convergence", runs / "private-0", runs / "private-1", runs / "ordinary")
    assert [curve["runs"] for curve in document["curves"]] == [["private-0", "private-1"], ["ordinary"]]
    rows = assert_written(tmp_path, "convergence")
    assert {row["split"] for row in rows} == {"test"}
    assert all(row["epsilon"] == "" for row in rows if row["run"] == "ordinary")


def test_runs_and_published_results_side_by_side(study, tmp_path, runs) -> None:
    document = study("pareto", runs / "private-0", runs / "private-1", runs / "ordinary")
    (point,) = document["points"]  # the ordinary run has no place on this axis
    assert (document["data"], point["num_runs"]) == ("digits", 2)
    assert len(study("pareto")["points"]) == 24
    assert len(assert_written(tmp_path, "pareto")) == 24
    assert study("pareto", "--data", "mnist", fails=2)["code"] == "no-results"


def test_private_and_ordinary_runs_are_compared_class_by_class(study, tmp_path, runs) -> None:
    private = ("--private", runs / "private-0", "--private", runs / "private-1")
    ordinary = ("--ordinary", runs / "ordinary")
    document = study("fairness", *private, *ordinary, "--group", "all=digits")
    rows = {row["name"]: row for row in assert_written(tmp_path, "fairness")}
    assert len(rows) == 12  # ten classes, a group, and all images
    expected = json.loads((runs / "ordinary" / "scores.json").read_text())
    assert float(rows["all images"]["ordinary"]) == pytest.approx(expected["accuracy"])
    assert rows["all"]["gap"] == rows["all images"]["gap"]
    assert float(rows["3"]["ordinary"]) == pytest.approx(expected["per_class"]["3"])
    assert document["sensitive"] is False
    assert study("fairness", *private, *ordinary, "--on", "train")["notice"].startswith("NOT PRIVATE")
    swapped = ("--private", runs / "ordinary", "--ordinary", runs / "private-0")
    assert study("fairness", *swapped, fails=1)["code"] == "wrong-side"
