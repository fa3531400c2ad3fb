"""sfumato adapt as a user calls it: a new folder that the other commands use, and an original left alone."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import sfumato
from sfumato.cli import main
from sfumato.data import load_data
from sfumato.ledger.ledger import Ledger
from sfumato.models import create_model
from sfumato.privacy.plan import Plan
from sfumato.release.card import model_card
from sfumato.release.release import FORMAT, read_description, write_release

CENTRE = 0.3  # the logit changes its sign at this brightness


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))


@pytest.fixture
def call(capsys):
    def run(*arguments):
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def release_by_brightness(folder, classes=("well", "ill"), privacy=None, **config):
    """A release that needs no training: the brighter an image, the higher the last class's logit.

    ``privacy`` is what its statement has beside, or instead of, the plan's.
    """
    model = create_model("lenet", num_classes=len(classes), in_channels=1, activation="relu")
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["trunk.0.weight"][0, 0, 2, 2] = 1  # each layer passes the first channel on
    state["trunk.3.weight"][0, 0, 2, 2] = 1
    state["hidden.0.weight"][0, :25] = 1 / 25
    state["hidden.2.weight"][0, 0] = 1
    state["head.weight"][-1, 0] = 20
    state["head.bias"][-1] = -20 * CENTRE
    model.load_state_dict(state)
    plan = Plan.calibrate(epsilon=3, delta=1e-3, num_examples=500, batch_size=50, num_steps=10)
    privacy = {**plan.statement().as_dict(), **(privacy or {})}
    described = {
        "format": FORMAT,
        "model": {"name": "lenet", "options": {"activation": "relu"}},
        "classes": list(classes),
        "image_size": 12,
        "channels": 1,
        "mean": [0.0],
        "std": [1.0],
        "fit": "crop",
        "data": "scans",
        **config,
    }
    card = model_card(config=described, privacy=privacy, scores=None, recipe=None)
    write_release(folder, model=model, config=described, privacy=privacy, card=card)
    return folder


@pytest.fixture
def release(tmp_path):
    return release_by_brightness(tmp_path / "release")


@pytest.fixture
def scans(tmp_path):
    """A place whose images are all brighter: two of each patient, three of ten patients ill."""
    random = np.random.default_rng(5)
    for number in range(120):
        ill = number // 2 % 10 < 3
        level = int(np.clip(random.normal(200 if ill else 140, 12), 0, 255))
        place = tmp_path / "scans" / ("ill" if ill else "well")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 12), level, dtype=np.uint8)).save(
            place / f"P{number // 2:03d}_{number}.png"
        )
    return tmp_path / "scans"


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_place_of_shifted_scores_is_told_apart_again_by_evaluate_and_predict(
    call, release, scans, tmp_path
):
    before = contents(release)
    code, out, err = call("adapt", release, scans, "--prevalence", 0.3, "--out", tmp_path / "there", "--json")
    found = json.loads(out)
    assert (code, found["num_images"], found["num_units"], found["unit"]) == (0, 120, 120, "image")
    assert found["classes"]["ill"]["called_before"] == 1
    assert found["classes"]["ill"]["called"] == pytest.approx(0.3, abs=0.02)
    assert "not protected" in err
    assert contents(release) == before
    scores = {
        folder: json.loads(call("evaluate", folder, scans, "--json")[1])
        for folder in (release, tmp_path / "there")
    }
    assert scores[release]["balanced_accuracy"] == 0.5  # the control: everybody is called ill
    assert scores[tmp_path / "there"]["balanced_accuracy"] > 0.95
    assert scores[tmp_path / "there"]["auc"] == scores[release]["auc"]
    assert scores[tmp_path / "there"]["epsilon"] == scores[release]["epsilon"]
    rows = json.loads(call("predict", tmp_path / "there", scans, "--json")[1])
    assert np.mean([row["label"] == "ill" for row in rows]) == found["classes"]["ill"]["called"]


def test_every_file_of_the_new_release_says_whom_it_does_not_protect(call, release, scans, tmp_path):
    there = tmp_path / "release-adapted"  # the default
    code, out, _ = call("adapt", release, scans, "--prevalence", "0.7,0.3", "--patient-from", r"(P\d+)_")
    assert code == 0
    assert "120 images of 60 patients" in out
    old, new = read_description(release), read_description(there)
    assert (there / "model.safetensors").read_bytes() == (release / "model.safetensors").read_bytes()
    assert new[0]["adapted"] == {
        "prevalence": [0.7, 0.3],
        "num_images": 120,
        "num_units": 60,
        "unit": "patient",
    }
    assert {**new[0], "adapted": 0, "decision": 0} == {**old[0], "adapted": 0, "decision": 0}
    changed = {key for key in new[1] if new[1][key] != old[1][key]}
    assert changed == {"statement"}
    added = new[1]["statement"].removeprefix(old[1]["statement"] + "\n")
    for words in ("120 images of 60 patients", "well 0.7, ill 0.3", "post-processing", "does not protect"):
        assert words in added
    card = (there / "README.md").read_text(encoding="utf-8")
    assert "post-processing" in card
    assert card.index("does not protect") < card.index("## Another place") < card.index("## Accuracy")
    assert "measured before" in card
    assert sfumato.load(there).privacy["statement"] == new[1]["statement"]
    assert "post-processing" not in (release / "README.md").read_text(encoding="utf-8")


def test_findings_are_moved_each_by_itself(call, scans, tmp_path):
    release = release_by_brightness(
        tmp_path / "findings",
        classes=("dull", "bright"),
        task="multi-label",
        decision={
            "shift": None,
            "temperature": 1.0,
            "threshold": 0.5,
            "positive": 0,
            "thresholds": [0.4, 0.2],
        },
    )
    code, _, _ = call("adapt", release, scans, "--prevalence", "0.5,0.3")
    assert code == 1  # the first finding's score is the same for all
    one = release_by_brightness(tmp_path / "one", classes=("bright",), task="multi-label")
    code, out, err = call("adapt", one, scans, "--prevalence", 0.05, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["classes"]["bright"]["called"] == pytest.approx(0.3, abs=0.03)  # 0.05 was wrong
    assert len(found["notes"]) == 2  # and that nobody knows the training images
    assert "only about 6 images with bright are expected" in err


def test_several_classes_get_the_declared_shares_on_average(call, scans, tmp_path):
    release = release_by_brightness(tmp_path / "three", classes=("a", "b", "c"))
    code, _, _ = call("adapt", release, scans, "--prevalence", "0.5,0.2,0.3", "--out", tmp_path / "new")
    assert code == 0
    rows = json.loads(call("predict", tmp_path / "new", scans, "--json")[1])
    means = [np.mean([row["probabilities"][name] for row in rows]) for name in "abc"]
    assert means == pytest.approx([0.5, 0.2, 0.3], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("--prevalence", 1.2), 2, "bad-prevalence"),
        (("--prevalence", "nan"), 2, "bad-prevalence"),
        (("--prevalence", "nan,0.5"), 2, "bad-prevalence"),
        (("--prevalence", "0.2,0.3,0.5"), 2, "bad-prevalence"),
        (("--prevalence", 0.3, "--at-least", 121), 1, "few-images-of-place"),
        (("--prevalence", 0.3, "--patient-from", r"(P\d+)_", "--at-least", 61), 1, "few-images-of-place"),
        (("--prevalence", 0.3, "--patient-from", r"(Q\d+)_"), 1, "missing-patient"),
        (("--prevalence", 0.3, "--patient-from", "dicom"), 1, "missing-patient"),
        (("--prevalence", 0.3, "--out", "{release}"), 1, "run-exists"),
        (("--prevalence", 0.3, "--out", "{release}/config.json/new"), 1, "cannot-save"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(call, release, scans, arguments, code, error):
    given = [str(word).format(release=release) for word in arguments]
    before, beside = contents(release), set(release.parent.iterdir())
    got, out, _ = call("adapt", release, scans, *given, "--json")
    assert (got, json.loads(out)["code"]) == (code, error)
    assert (contents(release), set(release.parent.iterdir())) == (before, beside)


def test_a_release_for_another_place_is_not_adapted_again_and_a_broken_image_is_named(call, release, scans):
    broken = scans / "broken.png"
    broken.write_bytes(b"no image")
    code, _, err = call("adapt", release, scans, "--prevalence", 0.3)
    assert code == 1
    assert "broken.png" in err
    broken.unlink()
    assert call("adapt", release, scans, "--prevalence", 0.3)[0] == 0
    code, _, err = call("adapt", f"{release}-adapted", scans, "--prevalence", 0.3)
    assert code == 2
    assert "already-adapted" in err
    assert call("adapt", release, scans, "--prevalence", "much")[0] == 2


def trained(ledger, state, images, *, data="scans"):
    """A run on record, with the hashes of its images in ``state``; its number."""
    plan = Plan.calibrate(epsilon=3, delta=1e-3, num_examples=500, batch_size=50, num_steps=10)
    state.mkdir(parents=True)
    account = ledger.begin(
        fingerprint=images.fingerprint, name=data, plan=plan, folder=state, image_ids=images.known_ids
    )
    return account.record.run_id


def test_images_that_the_model_was_trained_on_are_refused_by_their_content(call, scans, tmp_path):
    images = load_data(scans, image_size=12, channels=1).train
    with Ledger.open() as ledger:
        mine = trained(ledger, tmp_path / "run" / "state", images)
    filing = {"date": "", "units_from": "", "earlier_runs": 0, "total_epsilon": None}
    release = release_by_brightness(
        tmp_path / "run" / "release", privacy={"filing": {**filing, "run_id": mine}}
    )
    elsewhere = release_by_brightness(tmp_path / "copy", privacy={"filing": {**filing, "run_id": mine}})
    unknown = release_by_brightness(tmp_path / "unknown")
    one = scans / "ill" / "one.png"
    next((scans / "well").iterdir()).rename(one)  # another name, the same content
    others = tmp_path / "others"
    others.mkdir()
    for number in range(60):
        Image.fromarray(np.full((13, 13), number * 3, dtype=np.uint8)).save(others / f"{number}.png")
    for place in (release.parent, release, elsewhere):  # by the run's state, and by the ledger
        code, out, _ = call("adapt", place, others, one, "--prevalence", 0.3, "--json")
        assert (code, json.loads(out)["code"]) == (1, "place-was-trained-on")
        code, out, err = call("adapt", place, others, "--prevalence", 0.5, "--json")
        assert (code, json.loads(out)["notes"]) == (0, [])
        assert "nobody checked" not in err
    code, _, err = call("adapt", unknown, others, one, "--prevalence", 0.3)
    assert code == 0
    assert "nobody checked" in err


def test_a_release_without_a_guarantee_is_not_said_to_have_one(call, scans, tmp_path):
    release = release_by_brightness(
        tmp_path / "plain", privacy={"epsilon": None, "releasable": False, "statement": "NO PRIVACY."}
    )
    code, out, err = call("adapt", release, scans, "--prevalence", 0.3)
    assert code == 0
    assert "NO PRIVACY" in out
    statement = read_description(tmp_path / "plain-adapted")[1]["statement"]
    for text in (err, statement):
        assert "guarantee" not in text
        assert "protected" in text


def test_an_image_named_twice_counts_once_and_a_hidden_file_not_at_all(call, release, scans, tmp_path):
    (scans / "well" / "._P001_2.png").write_bytes(b"what another system leaves")
    (scans / ".thumbnails").mkdir()
    (scans / ".thumbnails" / "small.png").write_bytes(b"no image")
    link = tmp_path / "again"
    link.symlink_to(scans)
    code, out, err = call("adapt", release, scans, scans / "ill", link, "--prevalence", 0.3, "--json")
    assert (code, json.loads(out)["num_images"]) == (0, 120)
    assert "Skipped 4 files, hidden" in err


def test_what_came_to_be_at_the_new_place_meanwhile_is_left(call, release, scans, tmp_path, monkeypatch):
    there = tmp_path / "there"

    def looked_just_before(place):
        if not place.exists():
            place.mkdir()
        (place / "mine.txt").write_text("of another process", encoding="utf-8")

    monkeypatch.setattr("sfumato.release.another_place.check_new", looked_just_before)
    code, _, err = call("adapt", release, scans, "--prevalence", 0.3, "--out", there)
    assert code == 1
    assert "cannot-save" in err
    assert [file.name for file in there.iterdir()] == ["mine.txt"]


def test_a_link_that_leads_nowhere_is_not_written_over_and_the_new_folder_may_be_read(
    call, release, scans, tmp_path
):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    code, _, err = call("adapt", release, scans, "--prevalence", 0.3, "--out", link)
    assert code == 1
    assert "run-exists" in err
    old = os.umask(0o022)
    try:
        code, _, _ = call("adapt", release, scans, "--prevalence", 0.3, "--out", tmp_path / "new" / "lock")
    finally:
        os.umask(old)
    assert code == 0
    folder = tmp_path / "new" / "lock"
    modes = [place.stat().st_mode & 0o777 for place in (folder.parent, folder, *folder.iterdir())]
    assert modes == [0o755, 0o755, *[0o644] * 4]


def test_a_card_that_is_no_text_is_refused(call, release, scans):
    (release / "README.md").write_bytes(b"\xff\xfe")
    code, _, err = call("adapt", release, scans, "--prevalence", 0.3)
    assert code == 1
    assert "bad-release" in err
