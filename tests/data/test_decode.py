import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from sfumato.data.readers.decode import decode_files, decode_image, read_headers
from sfumato.data.readers.listing import image_files
from sfumato.errors import DataError


def decode(path, size=None, channels=3, fit="crop"):
    header = read_headers([path])[0]
    return decode_image(path, image_size=size or header.width, channels=channels, fit=fit)


def png_header(width, height):
    """A PNG that claims a size and holds nearly nothing: 57 bytes on disk."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [body, b"IDAT" + zlib.compress(b""), b"IEND"]
    parts = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(50_000, 50_000), (9_500, 9_500), (100_000_000, 1)])
def test_a_decompression_bomb_is_refused_before_a_pixel_is_decoded(tmp_path, size):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(*size))
    with pytest.raises(DataError, match="image-too-large") as caught:
        read_headers([path])
    assert f"{path}: claims {size[0] * size[1]:,} pixels" in str(caught.value)
    path.write_bytes(
        png_header(9_000, 9_000)
    )  # below the limit: its header is fine, only its pixels are missing
    assert read_headers([path])[0].width == 9_000


def test_no_warning_escapes_for_a_bomb_when_warnings_are_not_errors(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(10_000, 10_000))  # where Pillow itself would only warn
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match="image-too-large"):
            read_headers([path])
    assert not seen


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".tif", ".gif"])
def test_a_truncated_image_is_named_and_never_skipped(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    good, bad = tmp_path / f"good{suffix}", tmp_path / f"bad{suffix}"
    Image.fromarray(pixels).save(good)
    bad.write_bytes(good.read_bytes()[: good.stat().st_size * 2 // 3])
    assert decode(good).shape == (3, 64, 64)
    with pytest.raises(DataError, match="corrupt-image") as caught:
        list(decode_files([good, bad, good], image_size=64, channels=3, fit="crop"))
    assert "bad" in caught.value.what


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "odd.png"
    path.write_bytes(content)  # the last would start Ghostscript if Pillow were free to choose
    with pytest.raises(DataError, match="corrupt-image"):
        read_headers([path])
    with pytest.raises(DataError, match="missing-image"):
        read_headers([tmp_path / "none.png"])


def test_an_animation_is_refused(tmp_path):
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 128, 255)]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match="several-frames"):
        read_headers([tmp_path / "film.gif"])


def test_photographs_are_turned_upright(tmp_path):
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 255  # bright above
    exif = Image.Exif()
    exif[0x0112] = 3  # "rotate by 180 degrees"
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert decode(tmp_path / "turned.png")[:, 4:].min() == 255
    Image.fromarray(pixels).save(tmp_path / "plain.png")
    assert decode(tmp_path / "plain.png")[:, :4].min() == 255


def test_sixteen_bit_greyscale_keeps_its_scale(tmp_path):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for suffix in ("png", "tif"):
        path = tmp_path / f"deep.{suffix}"
        Image.fromarray(values).save(path)
        assert read_headers([path])[0].grey
        assert np.array_equal(decode(path, channels=1)[0], (values // 257).astype(np.uint8))


def test_palette_transparency_cmyk_and_bilevel_become_what_a_viewer_shows(tmp_path):
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    red.quantize(4).save(tmp_path / "palette.png")
    assert decode(tmp_path / "palette.png")[:, 0, 0].tolist() == [255, 0, 0]
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert decode(tmp_path / "clear.png")[:, 0, 0].tolist() == [255, 255, 255]  # not the hidden red
    Image.new("LA", (8, 8), (10, 255)).save(tmp_path / "solid.png")
    assert decode(tmp_path / "solid.png", channels=1)[0, 0, 0] == 10
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    assert np.abs(decode(tmp_path / "print.jpg")[:, 0, 0].astype(int) - [255, 0, 0]).max() < 6
    Image.new("1", (8, 8), 1).save(tmp_path / "fax.png")
    assert decode(tmp_path / "fax.png", channels=1).min() == 255


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(np.ones((8, 8), dtype=np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(DataError, match="unsupported-pixels"):
        decode(tmp_path / "float.tif")


def test_the_three_ways_to_make_an_image_square(tmp_path):
    pixels = np.zeros((8, 24), dtype=np.uint8)
    pixels[:, 8:16] = 255  # only the middle third is bright
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    crop = decode(tmp_path / "wide.png", size=8, channels=1, fit="crop")
    pad = decode(tmp_path / "wide.png", size=24, channels=1, fit="pad")
    stretch = decode(tmp_path / "wide.png", size=24, channels=1, fit="stretch")
    assert crop.min() == 255
    assert pad[0, :8].max() == 0
    assert pad[0, 8:16, 8:16].min() == 255
    assert stretch[0, :, 10:14].min() == 255
    assert stretch[0, :, :4].max() == 0


def test_the_order_of_the_files_is_kept_over_many_threads_and_chunks(tmp_path):
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number}.png")
        Image.new("L", (1 + 7 * (number % 5) + 4, 8), number).save(paths[-1])
    seen = []
    chunks = list(
        decode_files(
            paths * 30, image_size=4, channels=1, fit="stretch", on_progress=lambda *step: seen.append(step)
        )
    )
    images = np.concatenate([images for images, _ in chunks])
    assert images[:, 0, 0, 0].tolist() == list(range(40)) * 30
    assert seen == sorted(seen)
    assert {(1024, 1200), (1200, 1200)} <= set(seen)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_that_is_called_an_image_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(DataError, match="not a plain file") as caught:
        decode_image(tmp_path / "x.png", image_size=8, channels=1)
    assert caught.value.code == "corrupt-image"


@pytest.mark.parametrize("name", ["brain.nii", "BRAIN.NII.GZ"])
def test_a_volume_is_refused_with_what_to_do_instead(tmp_path, name):
    (tmp_path / "train/ill").mkdir(parents=True)
    path = tmp_path / "train/ill" / name
    path.write_bytes(b"\x5c\x01\x00\x00" + bytes(400))
    for read in (lambda: read_headers([path]), lambda: list(image_files(tmp_path / "train"))):
        with pytest.raises(DataError, match="nifti-volume"):
            read()
    path.rename(path.with_name("brain.txt"))
    with pytest.raises(DataError, match="not-an-image"):  # the control: other files are not called volumes
        list(image_files(tmp_path / "train"))
