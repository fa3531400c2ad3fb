"""DICOM files become the picture that a radiologist would see, or are refused; headers stay closed."""

from __future__ import annotations

import logging
import sys
import warnings
import zlib
from types import SimpleNamespace

import numpy as np
import pydicom
import pytest
from PIL import Image

from dicom_files import SECRETS, SYNTAXES, write_dicom
from sfumato.data import load_data
from sfumato.data.readers import decode, dicom
from sfumato.data.readers.rendering import AS_THE_FILES_SAY, Rendering
from sfumato.errors import ConfigError, DataError

RANDOM = np.random.default_rng(3)
TWELVE = RANDOM.integers(0, 4096, (32, 40), dtype=np.uint16)


def shown(path, rendering=AS_THE_FILES_SAY):
    """The picture before it is resized."""
    with decode._strict_readers():
        return np.asarray(decode._decode(path, rendering)[0])


def content_id(path, rendering=AS_THE_FILES_SAY):
    chunks = decode.decode_files([path], image_size=8, channels=1, fit="crop", rendering=rendering)
    return int(next(chunks)[1][0])


def refusal(path, rendering=AS_THE_FILES_SAY):
    with pytest.raises(DataError) as caught:
        decode.decode_image(path, image_size=8, channels=1, rendering=rendering)
    assert str(path) in caught.value.what
    return caught.value


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_every_transfer_syntax_gives_the_pixels_that_were_stored(tmp_path, syntax):
    path = write_dicom(tmp_path / "a.dcm", TWELVE, syntax=syntax, BitsStored=12)
    assert pydicom.dcmread(path).file_meta.TransferSyntaxUID.keyword == syntax
    assert np.array_equal(shown(path), TWELVE.astype(np.int64) * 255 // 4095)
    (header,) = decode.read_headers([path])
    assert (header.width, header.height, header.grey, header.bits) == (40, 32, True, 12)


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_rescaling_and_the_headers_window_are_those_of_pydicom(tmp_path, function):
    from pydicom.pixels import apply_modality_lut, apply_windowing

    stored = RANDOM.integers(-1000, 2000, (20, 24), dtype=np.int16)
    window = {"WindowCenter": [40, 600], "WindowWidth": [400, 1500], "VOILUTFunction": function}
    path = write_dicom(tmp_path / "ct.dcm", stored, RescaleSlope=2, RescaleIntercept=-1024, **window)
    dataset = pydicom.dcmread(path)
    expected = apply_windowing(apply_modality_lut(stored, dataset), dataset)
    low, high = -(2.0**15) * 2 - 1024, (2.0**15 - 1) * 2 - 1024
    expected = (expected - low) / (high - low) * 255
    assert np.abs(shown(path) - expected).max() <= 1.001  # rounded down
    inverted = write_dicom(tmp_path / "inverted.dcm", stored, PhotometricInterpretation="MONOCHROME1",
                           RescaleSlope=2, RescaleIntercept=-1024, **window)  # fmt: skip
    assert np.array_equal(shown(inverted), 255 - shown(path))
    unscaled = write_dicom(tmp_path / "unscaled.dcm", stored, **window)
    assert np.abs(shown(unscaled) - expected).max() > 100  # the control: the comparison can tell


def test_a_window_or_range_that_is_set_holds_in_place_of_the_headers_own(tmp_path):
    values = np.arange(0, 4000, dtype=np.uint16).reshape(40, 100)
    path = write_dicom(tmp_path / "a.dcm", values, BitsStored=12, WindowCenter=100, WindowWidth=50)
    picture = shown(path, Rendering(window=(2000.5, 1001)))  # from 1500 to 2500
    assert np.array_equal(picture, np.clip((values.astype(int) - 1500) * 255 // 1000, 0, 255))
    assert np.array_equal(picture, shown(path, Rendering(range=(1500, 2500))))
    assert not np.array_equal(picture, shown(path))


def test_without_any_window_the_full_range_of_the_stored_bits_is_shown_whatever_the_pixels_are(tmp_path):
    dark = write_dicom(tmp_path / "dark.dcm", TWELVE // 16, BitsStored=12)
    assert shown(dark).max() == 15  # not stretched to what this image happens to hold
    signed = np.array([[-2048, 0, 2047]] * 4, dtype=np.int16)
    path = write_dicom(tmp_path / "ct.dcm", signed, BitsStored=12, RescaleSlope=1, RescaleIntercept=-1024)
    assert shown(path)[0].tolist() == [0, 127, 255]


def test_lookup_tables_and_colours_are_understood(tmp_path):
    from pydicom.dataset import Dataset

    table = Dataset()
    table.LUTDescriptor, table.LUTData = [256, 0, 16], [65535 - 257 * step for step in range(256)]
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "US"
    grey = RANDOM.integers(0, 256, (12, 10), dtype=np.uint8)
    path = write_dicom(tmp_path / "lut.dcm", grey, VOILUTSequence=[table])
    assert np.array_equal(shown(path), 255 - grey)
    colours = RANDOM.integers(0, 256, (12, 10, 3), dtype=np.uint8)
    assert np.array_equal(shown(write_dicom(tmp_path / "colour.dcm", colours)), colours)
    names = ("Red", "Green", "Blue")
    palette = {f"{name}PaletteColorLookupTableDescriptor": [256, 0, 16] for name in names}
    palette |= {
        f"{name}PaletteColorLookupTableData": (257 * np.roll(np.arange(256), shift)).astype("<u2").tobytes()
        for shift, name in enumerate(names)
    }
    path = write_dicom(tmp_path / "p.dcm", grey, PhotometricInterpretation="PALETTE COLOR", **palette)
    assert np.array_equal(shown(path), np.stack([grey, grey - 1, grey - 2], axis=-1))


def test_the_same_image_remains_the_same_under_every_window_syntax_and_depth(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", TWELVE, BitsStored=12)
    known = content_id(path)
    for rendering in (Rendering(window=(40, 400)), Rendering(range=(0, 1000))):
        assert not np.array_equal(shown(path, rendering), shown(path))
        assert content_id(path, rendering) == known
    assert content_id(write_dicom(tmp_path / "b.dcm", TWELVE, syntax="RLELossless", BitsStored=12)) == known
    Image.fromarray(TWELVE).save(tmp_path / "copy.png")
    assert content_id(tmp_path / "copy.png", Rendering(bits=12)) == known
    other = TWELVE.copy()
    other[0, 0] ^= 1  # the lowest bit of one pixel
    assert content_id(write_dicom(tmp_path / "c.dcm", other, BitsStored=12)) != known


def test_several_frames_are_refused_unless_one_is_chosen(tmp_path):
    film = RANDOM.integers(0, 256, (3, 10, 12), dtype=np.uint8)
    path = write_dicom(tmp_path / "film.dcm", film)
    assert refusal(path).code == "several-frames"
    assert np.array_equal(shown(path, Rendering(frame=2)), film[2])
    assert refusal(path, Rendering(frame=3)).code == "no-such-frame"


def test_files_are_known_by_their_first_bytes_whatever_they_are_called(image_folder):
    folder = image_folder(train=2)
    for name in ("1.2.840.113619.2.55", "IM000001", "a.dcm", "b.DCM"):
        write_dicom(folder / "train" / "cat" / name, TWELVE)
    (folder / "train" / "cat" / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")  # the list of a compact disc
    assert len(load_data(folder).train) == 8
    (folder / "train" / "cat" / "1.2.3").write_text("no image")
    with pytest.raises(DataError, match="not-an-image"):
        load_data(folder)


def test_a_compression_without_a_decoder_is_refused_by_its_name(tmp_path, monkeypatch):
    path = write_dicom(tmp_path / "a.dcm", TWELVE, syntax="JPEG2000Lossless")
    monkeypatch.setattr("pydicom.pixels.get_decoder", lambda syntax: SimpleNamespace(is_available=False))
    error = refusal(path)
    assert error.code == "dicom-compression"
    assert "JPEG 2000" in error.what
    assert "sfumato[medical]" in error.fix


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    path = write_dicom(tmp_path / "a.dcm", TWELVE)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ConfigError, match=r"medical-not-installed(.|\n)*sfumato\[medical\]"):
        decode.decode_image(path, image_size=8, channels=1)


def spoilt(path, how):
    """The file with one thing wrong, whose explanation by pydicom would quote the header."""
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-700])
    elif how == "no preamble":
        path.write_bytes(path.read_bytes()[132:])
    elif how == "no pixels":
        dataset = pydicom.dcmread(path)
        del dataset.PixelData
        dataset.save_as(path)
    else:
        name, value = how
        dataset = pydicom.dcmread(path)
        with pydicom.config.disable_value_validation():
            setattr(dataset, name, value)
            dataset.save_as(path)


SPOILT = (
    "cut",
    "no preamble",
    "no pixels",
    ("PhotometricInterpretation", SECRETS["PatientName"]),
    ("VOILUTFunction", SECRETS["PatientName"]),
    ("Rows", 60000),
    ("BitsAllocated", 64),
    ("NumberOfFrames", "-3"),
)


@pytest.mark.parametrize("how", SPOILT, ids=str)
def test_whatever_is_wrong_with_a_file_is_told_by_its_name_alone(tmp_path, how, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    path = write_dicom(tmp_path / "a.dcm", TWELVE, WindowCenter=9, WindowWidth=99, **SECRETS)
    shown(path)  # the control: whole, it is read
    spoilt(path, how)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        error = refusal(path)
    told = repr(error.as_dict()) + repr(error.__context__) + repr(error.__cause__)
    said = told + capfd.readouterr().err + caplog.text + "".join(str(each.message) for each in heard)
    assert not [value for value in SECRETS.values() if value in said]


def test_a_file_without_a_picture_and_a_useless_window_have_codes_of_their_own(tmp_path):
    path = write_dicom(tmp_path / "a.dcm", TWELVE, WindowCenter=9, WindowWidth=0)
    assert refusal(path).code == "bad-window"
    dataset = pydicom.dcmread(path)
    for name in ("PixelData", "Rows", "PhotometricInterpretation"):
        delattr(dataset, name)
    dataset.save_as(path)
    assert refusal(path).code == "dicom-without-picture"
    assert refusal(write_dicom(tmp_path / "deep.dcm", TWELVE.astype(np.uint32))).code == "unsupported-pixels"
    assert refusal(tmp_path / "none.dcm").code == "missing-image"


def test_a_deflated_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    path = write_dicom(tmp_path / "a.dcm", TWELVE, syntax="DeflatedExplicitVRLittleEndian")
    shown(path)  # the control
    begin = 144 + pydicom.filereader.read_file_meta_info(path).FileMetaInformationGroupLength
    squeeze = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bomb = squeeze.compress(b"\0" * 20_000_000) + squeeze.flush()
    path.write_bytes(path.read_bytes()[:begin] + bomb)
    monkeypatch.setattr(dicom, "_INFLATED_BYTES", 10_000_000)
    assert refusal(path).code == "image-too-large"
    with pytest.raises(DataError, match="image-too-large"):
        decode.read_patients([path])


def test_what_a_decoder_logs_of_a_broken_picture_is_not_heard(tmp_path, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    path = write_dicom(tmp_path / "a.dcm", TWELVE, syntax="JPEG2000Lossless", BitsStored=12)
    broken = path.read_bytes()
    path.write_bytes(broken[:-400] + b"\xff" * 400)
    caplog.clear()  # of what the encoder said
    refusal(path)
    for name in ("pydicom", "pydicom.pixels.decoders.base", "pylibjpeg.utils", "openjpeg.utils"):
        logging.getLogger(name).warning("of %s", SECRETS["PatientName"])
    assert (caplog.text, capfd.readouterr().err) == ("", "")


def test_while_one_thread_reads_another_that_has_done_so_opens_nothing():
    first, second = decode._strict_readers(), decode._strict_readers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    warnings.warn(SECRETS["PatientName"], UserWarning, stacklevel=1)  # ignored: ``second`` still reads
    second.__exit__(None, None, None)
    with pytest.raises(UserWarning):  # the control: outside, warnings are errors here
        warnings.warn("heard", UserWarning, stacklevel=1)


def test_patients_are_those_of_the_headers_without_any_expression(tmp_path):
    for number in range(8):
        place = tmp_path / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = RANDOM.integers(0, 256, (10, 10), dtype=np.uint8)
        write_dicom(place / f"{number}.dcm", pixels, PatientID=("K 1", "k 1 ", "K-2")[number // 3])
    for options in ({}, {"patient_from": "dicom"}):
        data = load_data(tmp_path, **options)
        assert data.patient_names == ("k 1", "k-2")  # spellings of one name are one patient
        assert data.train.num_units("patient") == 2
    assert load_data(tmp_path, patient_from=r"(\d)\.dcm").train.num_units("patient") == 8
    write_dicom(tmp_path / "train" / "a" / "unnamed.dcm", pixels, **{**SECRETS, "PatientID": ""})
    assert load_data(tmp_path).train.patients is None
    with pytest.raises(DataError, match=r"no-patients"):
        load_data(tmp_path).train.num_units("patient")
    with pytest.raises(DataError, match=r"missing-patient(.|\n)*unnamed\.dcm") as caught:
        load_data(tmp_path, patient_from="dicom")
    assert SECRETS["PatientName"] not in str(caught.value)
    assert not [example for example in load_data(tmp_path).survey.examples if "k" in (example[1] or "")]


def test_a_doctors_example_shows_a_number_in_place_of_a_name_from_a_header(tmp_path):
    for number in range(4):
        place = tmp_path / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        write_dicom(place / f"{number}.dcm", TWELVE + number, **SECRETS)
    examples = load_data(tmp_path).survey.examples
    assert [patient for _, patient in examples] == ["patient 1"] * 4
    by_name = load_data(tmp_path, patient_from=r"(\d)\.dcm").survey.examples
    assert sorted(patient for _, patient in by_name) == ["0", "1", "2", "3"]


def test_a_file_in_memory_is_read_as_one_on_the_disk(tmp_path):
    for syntax in ("ExplicitVRLittleEndian", "DeflatedExplicitVRLittleEndian"):
        path = write_dicom(tmp_path / "a.dcm", TWELVE, syntax=syntax, BitsStored=12)
        upload = decode.Upload(path.read_bytes())
        for _ in range(2):
            assert np.array_equal(shown(upload), shown(path))
    with pytest.raises(DataError, match="dicom-without-picture"):
        decode.decode_image(decode.Upload(path.read_bytes()[:300]), image_size=8, channels=1)
