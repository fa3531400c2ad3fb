import io
import stat
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.data.acquisition import archives
from sfumato.data.acquisition.archives import unpack
from sfumato.errors import DataError


def tar_of(path, members, mode="w:gz"):
    """A tar archive of (name, content) pairs, or of ready-made TarInfo members."""
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def zip_of(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in members:
            bundle.writestr(name, content)
    return path


def special(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def files_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def into(tmp_path):
    folder = tmp_path / "outer" / "into"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_plain_archives_are_unpacked_byte_for_byte(tmp_path, into, mode):
    members = [("a/b.txt", b"hello"), ("./c.bin", bytes(range(256)) * 9), ("empty", b"")]
    unpack(tar_of(tmp_path / "x.tar", members, mode), into)
    assert files_in(into) == {"a/b.txt": b"hello", "c.bin": bytes(range(256)) * 9, "empty": b""}


def test_zip_archives_are_unpacked_byte_for_byte(tmp_path, into):
    unpack(zip_of(tmp_path / "x.zip", [("a/b.txt", b"hello"), ("d/", b"")]), into)
    assert files_in(into) == {"a/b.txt": b"hello"}


EVIL_NAMES = ["../evil", "a/../../evil", "/tmp/evil", "..", "a\\..\\evil", "C:evil", "x" * 1200]


@pytest.mark.parametrize("name", EVIL_NAMES)
@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_no_name_leads_outside_the_folder(tmp_path, into, make, name):
    archive = make(tmp_path / "evil", [("fine.txt", b"x"), (name, b"gotcha")])
    with pytest.raises(DataError, match="unsafe-archive"):
        unpack(archive, into)
    assert [path.name for path in (tmp_path / "outer").iterdir()] == ["into"]
    unpack(make(tmp_path / "good", [("fine2.txt", b"x")]), into)  # the control


@given(st.text(min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_whatever_the_name_nothing_is_written_elsewhere(tmp_path_factory, name):
    outer = tmp_path_factory.mktemp("outer")
    (outer / "into").mkdir()
    try:
        archive = tar_of(outer / "x.tar", [(name, b"content")], "w")
    except (UnicodeError, ValueError):
        return  # not even a tar archive can hold such a name
    try:
        unpack(archive, outer / "into")
    except DataError:
        pass
    else:
        assert list(files_in(outer / "into").values()) == [b"content"]
    assert {path.name for path in outer.iterdir()} == {"x.tar", "into"}


@pytest.mark.parametrize(
    "member",
    [
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("link", tarfile.LNKTYPE, "fine.txt"),
        special("pipe", tarfile.FIFOTYPE),
        special("device", tarfile.CHRTYPE),
        special("disk", tarfile.BLKTYPE),
    ],
    ids=lambda member: member.name + member.type.decode(),
)
def test_links_and_devices_are_refused(tmp_path, into, member):
    with pytest.raises(DataError, match="unsafe-archive"):
        unpack(tar_of(tmp_path / "x.tar", [("fine.txt", b"x"), (member, b"")]), into)
    assert not any(path.is_symlink() for path in into.rglob("*"))


def test_a_link_in_a_zip_and_an_encrypted_file_are_refused(tmp_path, into):
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(DataError, match="unsafe-archive"):
        unpack(zip_of(tmp_path / "x.zip", [(link, b"/etc/passwd")]), into)
    path = zip_of(tmp_path / "y.zip", [("secret", b"x")])
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the "encrypted" flag in the directory
    path.write_bytes(data)
    with pytest.raises(DataError, match="unsafe-archive"):
        unpack(path, into)


@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_a_bomb_stops_at_the_limit(tmp_path, into, monkeypatch, make):
    monkeypatch.setattr(archives, "ALWAYS_ALLOWED_BYTES", 2_000_000)
    bomb = make(tmp_path / "bomb", [("zeros", bytes(30_000_000))])
    with pytest.raises(DataError, match=r"unsafe-archive(.|\n)*more than"):
        unpack(bomb, into)
    assert (into / "zeros").stat().st_size <= bomb.stat().st_size * archives.MAX_RATIO + 2_000_000
    unpack(make(tmp_path / "fine", [("few", bytes(1_900_000))]), into)


def test_a_file_that_comes_twice_is_refused(tmp_path, into):
    with pytest.raises(DataError, match=r"unsafe-archive(.|\n)*twice"):
        unpack(tar_of(tmp_path / "x.tar", [("a", b"1"), ("./a", b"2")]), into)
    assert files_in(into) == {"a": b"1"}


def test_damaged_missing_and_foreign_files_are_told_apart(tmp_path, into):
    good = tar_of(tmp_path / "x.tar.gz", [("a", bytes(range(256)) * 4000)])
    good.write_bytes(good.read_bytes()[:-2000])
    for path, content, code in (
        (good, None, "damaged-archive"),
        (tmp_path / "none.zip", None, "missing-file"),
        (tmp_path / "text.tar", b"hello", "not-an-archive"),
        (tmp_path / "empty.tar", b"", "not-an-archive"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            unpack(path, into)
        assert caught.value.code == code
