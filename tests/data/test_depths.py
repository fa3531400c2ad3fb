"""More than 8 bits become 8 by public constants, the same for every image, not by what an image holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.data import load_data
from sfumato.data.readers.decode import decode_image, read_headers
from sfumato.data.readers.rendering import Rendering
from sfumato.errors import ConfigError, DataError

TWELVE = (np.arange(256, dtype=np.uint16) * 16).reshape(16, 16)  # 0 to 4080


def saved(path, values):
    Image.fromarray(values).save(path)
    return path


def pixels(path, **rendering):
    return decode_image(path, image_size=16, channels=1, rendering=Rendering(**rendering))[0].astype(int)


@pytest.mark.parametrize("ending", [".png", ".tif", ".pgm"])
def test_twelve_bits_in_a_file_of_sixteen_are_shown_in_full(tmp_path, ending):
    path = saved(tmp_path / f"a{ending}", TWELVE)
    assert pixels(path).max() == 15  # the full 16-bit range: nearly black
    expected = TWELVE.astype(int) * 255 // 4095
    assert np.array_equal(pixels(path, bits=12), expected)
    assert np.array_equal(pixels(path, range=(0, 4095)), expected)
    assert np.array_equal(pixels(path, window=(2048, 4096)), expected)  # the same, in DICOM's terms
    assert not np.array_equal(pixels(path, bits=13), expected)
    assert read_headers([path])[0].bits == 16


def test_sixteen_bits_are_divided_by_257_as_ever_and_eight_are_not_touched(tmp_path):
    full = saved(tmp_path / "a.png", (TWELVE.astype(int) * 257 // 16).astype(np.uint16))
    assert np.array_equal(pixels(full), TWELVE // 16)
    eight = saved(tmp_path / "b.png", (TWELVE // 16).astype(np.uint8))
    assert np.array_equal(pixels(eight, bits=12), pixels(eight))


def test_what_does_not_fit_into_the_bits_is_refused_and_what_leaves_the_range_is_cut(tmp_path):
    path = saved(tmp_path / "a.png", TWELVE)
    with pytest.raises(DataError, match=r"value-above-bits(.|\n)*a\.png"):
        pixels(path, bits=11)
    assert pixels(path, range=(1000, 2000)).min() == 0
    assert pixels(path, range=(1000, 2000)).max() == 255


@pytest.mark.parametrize(
    "rendering",
    [
        {"bits": 12, "range": (0, 1)},
        {"window": (1, 2), "range": (0, 1)},
        {"window": (40, 0)},
        {"window": (1, 2, 3)},
        {"range": (5, 5)},
        {"range": (0, float("inf"))},
        {"bits": 8},
        {"frame": -1},
    ],
)
def test_constants_that_cannot_be_meant_are_refused(rendering):
    with pytest.raises(ConfigError, match="bad-rendering"):
        Rendering(**rendering)


def test_sets_that_are_no_image_files_take_no_window():
    with pytest.raises(ConfigError, match="bad-rendering"):
        load_data("digits", rendering=Rendering(bits=12))


def test_a_frame_of_an_animation_is_chosen_by_its_number(tmp_path):
    frames = [Image.new("L", (16, 16), value) for value in (10, 20, 30)]
    frames[0].save(tmp_path / "film.tif", save_all=True, append_images=frames[1:])
    assert pixels(tmp_path / "film.tif", frame=1).max() == 20
    for frame, code in ((None, "several-frames"), (3, "no-such-frame")):
        with pytest.raises(DataError, match=code):
            pixels(tmp_path / "film.tif", frame=frame)


def write_scans(folder):
    random = np.random.default_rng(2)
    for number in range(24):
        place = folder / "train" / ("ill", "well")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        saved(place / f"{number}.png", random.integers(0, 4096, (16, 16), dtype=np.uint16))


def doctor(capsys, *arguments):
    main(["doctor", *map(str, arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    return {finding["code"] for finding in report["findings"]}, report["summary"]


def test_the_doctor_notices_scans_that_come_out_black(tmp_path, capsys):
    write_scans(tmp_path)
    codes, summary = doctor(capsys, "--data", tmp_path)
    assert "dark-images" in codes
    assert summary["bits"] == {"16": 24}
    assert "dark-images" not in doctor(capsys, "--data", tmp_path, "--set", "data.bits=12")[0]


def test_the_release_keeps_the_constants_and_predict_decodes_by_them(tmp_path, monkeypatch, capsys):
    from sfumato.release.release import load

    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    write_scans(tmp_path / "scans")
    run, small = tmp_path / "run", ("model.options.width=4", "model.options.groups=2", "data.image_size=12")
    settings = [
        part for text in (*small, "data.bits=12", "training.num_epochs=0.2") for part in ("--set", text)
    ]
    main(["train", str(tmp_path / "scans"), "--epsilon", "8", *settings, "--out", str(run)])
    config = json.loads((run / "release" / "config.json").read_text())
    assert config["rendering"] == {"bits": 12}
    scan = tmp_path / "scans" / "train" / "ill" / "0.png"
    assert int(load(run / "release").decode([scan]).max()) > 200
    config["rendering"] = {"bits": 12, "range": [0, 1]}  # a stranger's file
    (run / "release" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="bad-release"):
        load(run)
    capsys.readouterr()
