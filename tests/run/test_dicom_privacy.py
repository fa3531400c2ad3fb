"""A run on DICOM files, patient by patient, leaves no value of any header in anything that it writes."""

from __future__ import annotations

import base64
import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest

from dicom_files import SECRETS, SYNTAXES, write_dicom
from sfumato.cli import main
from sfumato.ledger.links import one_spelling

SMALL = ("--set", "model.options.width=4", "--set", "model.options.groups=2", "--set", "data.image_size=12")
SHORT = ("--set", "training.num_epochs=0.5", "--set", "data.holdout=0.2", "--delta", "0.01")
NUM_PATIENTS = 10


def secrets_of(patient: int) -> dict[str, str]:
    """A header of its own for each patient, in one of whose values nobody could mistake another text."""
    person = {
        name: f"{value}{'abcdefghij'[patient]}" for name, value in SECRETS.items() if "Date" not in name
    }
    return {**person, "PatientBirthDate": f"1953091{patient}", "StudyDate": f"2024022{patient}"}


def write_scans(folder: Path) -> list[str]:
    """Two images of each patient, over all transfer syntaxes; returns what names some of the patients."""
    random = np.random.default_rng(5)
    for number in range(2 * NUM_PATIENTS):
        place = folder / "train" / ("normal", "ill")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        header = secrets_of(number // 2)
        pixels = random.integers(0, 4096, (32, 32), dtype=np.uint16)
        syntax = SYNTAXES[number % len(SYNTAXES)]
        write_dicom(place / f"{number}.dcm", pixels, syntax=syntax, BitsStored=12, **header)
    return [secrets_of(patient)[key] for patient in (0, 3, 9) for key in ("PatientName", "PatientID")]


def forms_of(value: str, *, hashed: bool) -> set[bytes]:
    """How a header's value might be found: encoded otherwise, in pieces, or as a hash without a key."""
    forms = set()
    for text in {value, *value.split("^"), value.upper(), one_spelling(value)}:
        plain = text.encode()
        forms |= {plain, text.encode("utf-16-le"), plain.hex().encode(), base64.b64encode(plain)[:-4]}
        for name in ("md5", "sha1", "sha256") if hashed else ():
            digest = hashlib.new(name, plain)
            forms |= {digest.digest()[:8], digest.hexdigest()[:16].encode()}
    return {form for form in forms if len(form) > 6}


def found_in(places: list[Path], said: str, values: list[str]) -> list[str]:
    """Where a header's value occurs, in a file, in a file's name or in what was printed.

    Searched for is what all headers have in common, and ``values``, also as hashes.
    """
    forms = {form for value in SECRETS.values() for form in forms_of(value, hashed=False)}
    forms |= {form for value in values for form in forms_of(value, hashed=True)}
    files = [path for place in places for path in (place, *place.rglob("*"))]
    contents = {str(path): path.read_bytes() + str(path).encode() for path in files if path.is_file()}
    contents["printed"] = said.encode()
    assert len(contents) > 10
    return sorted({place for place, data in contents.items() if any(form in data for form in forms)})


@pytest.fixture
def call(capfd, caplog):
    caplog.set_level(logging.DEBUG)  # what a program of the user's own might log

    def run(*arguments: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["sfumato"])
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return captured.out + captured.err + caplog.text

    return run


def test_nothing_that_a_run_writes_or_says_holds_a_value_of_a_header(tmp_path, monkeypatch, call):
    places = {name: tmp_path / name for name in ("cache", "run", "ledger")}
    places["ledger"].mkdir()
    monkeypatch.setenv("SFUMATO_CACHE", str(places["cache"]))
    monkeypatch.setenv("SFUMATO_LEDGER", str(places["ledger"] / "ledger.sqlite"))
    monkeypatch.setattr("sfumato.data.pixels.MEMORY_LIMIT_BYTES", 0)  # so that decoded images are kept
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "scans"
    values = write_scans(data)

    said = call("doctor", "--data", data, "--unit", "patient", "--json")
    said += call("doctor", "--data", data, "--unit", "patient")
    assert "2 images each" in said  # per patient
    settings = ("--unit", "patient", "--epsilon", 8, "--window", "2048,4096", *SMALL, *SHORT)
    said += call("train", data, *settings, "--out", places["run"])
    assert "patients with" in said
    said += call("evaluate", places["run"], data, "--split", "train")
    said += call("predict", places["run"], data / "train" / "ill")
    said += call("report", places["run"])
    said += call("ledger", "show")

    assert places["cache"].is_dir()
    assert (places["run"] / "release" / "model.safetensors").is_file()
    assert found_in(list(places.values()), said, values) == []

    # the control: the search finds a name, also an encoded one, and a hash that has no key
    name = secrets_of(3)["PatientName"]
    (places["run"] / "notes.txt").write_text(f"seen: {name}")
    (places["cache"] / "key").write_bytes(hashlib.sha256(one_spelling(name).encode()).digest())
    found = found_in(list(places.values()), said + secrets_of(9)["PatientID"], values)
    assert found == sorted(["printed", str(places["cache"] / "key"), str(places["run"] / "notes.txt")])
    assert found_in([data], "", values) != []  # and the files themselves are full of them
