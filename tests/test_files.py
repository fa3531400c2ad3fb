"""One way to write, to lock and to find the user's folders: whole, alone, and where they always were."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfumato.errors import RunError
from sfumato.files import (
    cache_home,
    data_home,
    hold,
    ledger_home,
    put,
    remove_unfinished,
    replace_folder,
    replacing,
    workspace,
    write_text,
)

HOLDER = """
import sys
from pathlib import Path
from sfumato.files import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_held_by_one_process_and_freed_by_kill_9(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            hold(lock)
        holder.send_signal(signal.SIGKILL)
    with hold(lock):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_lock_excludes_the_same_process_too_and_ends_with_its_context(tmp_path: Path) -> None:
    with hold(tmp_path / "lock"), pytest.raises(BlockingIOError):
        hold(tmp_path / "lock")
    with hold(tmp_path / "lock"), hold(tmp_path / "other"):
        pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text(f"half{1 / temporary.stat().st_size}")
    assert path.read_text() == "old"
    with pytest.raises(RunError, match="cannot-save"), replacing(path) as temporary:
        temporary.unlink()
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["text"]


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_has_its_mode_before_anything_is_in_it(tmp_path: Path, mode: int) -> None:
    mask = os.umask(0o022)
    try:
        with replacing(tmp_path / "file", mode=mode) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == mode & ~0o022
            temporary.write_bytes(b"secret")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode & ~0o022


def test_what_is_put_into_place_is_synced_with_its_folder(tmp_path: Path, monkeypatch) -> None:
    synced, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "ready").write_text("text")
    put(tmp_path / "ready", tmp_path / "place")
    assert synced == ["ready", tmp_path.name]


def test_a_folder_is_exchanged_and_never_mixed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for content in ("one", "two"):
        with workspace(tmp_path) as work:
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            (work / "ready").mkdir()
            (work / "ready" / content).touch()
            if place.exists():
                with pytest.raises(OSError, match="not empty"):  # only in exchange
                    put(work / "ready", place)
            replace_folder(work / "ready", place)
        assert os.listdir(place) == [content]
    assert os.listdir(tmp_path) == ["place"]


WRITER = """
import sys
from pathlib import Path
from sfumato.files import replacing, workspace
with workspace(Path(sys.argv[1])), replacing(Path(sys.argv[1]) / "text"):
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_left_is_removed_at_once_and_a_live_one_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        with workspace(tmp_path):
            assert len(os.listdir(tmp_path)) == 3  # two workspaces and a file
        assert len(os.listdir(tmp_path)) == 2
        writer.send_signal(signal.SIGKILL)
    with workspace(tmp_path):
        assert len(os.listdir(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_locked_yet_is_given_a_minute(tmp_path: Path) -> None:
    (tmp_path / ".sfumato-unfinished-new").mkdir()
    with workspace(tmp_path):
        assert (tmp_path / ".sfumato-unfinished-new").exists()
    old = time.time() - 3600
    os.utime(tmp_path / ".sfumato-unfinished-new", (old, old))
    with workspace(tmp_path):
        assert not (tmp_path / ".sfumato-unfinished-new").exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    for name in ("SFUMATO_CACHE", "SFUMATO_DATA", "SFUMATO_LEDGER", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def homes() -> list[Path]:
    return [cache_home("decoded"), cache_home("features"), data_home(), ledger_home()]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other places")
def test_homes_lie_where_earlier_versions_put_them(home: Path, monkeypatch) -> None:
    cache, data = home / ".cache" / "sfumato", home / ".local" / "share" / "sfumato"
    expected = [cache / "decoded", cache / "features", cache, data / "ledger.sqlite"]
    assert homes() == expected
    # Ignored, as the specification asks: each working folder would have a ledger that knows of no other.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert homes() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert [str(path) for path in homes()] == [
        "/c/sfumato/decoded",
        "/c/sfumato/features",
        "/c/sfumato",
        "/d/sfumato/ledger.sqlite",
    ]


def test_variables_of_our_own_name_the_homes(home: Path, monkeypatch) -> None:
    monkeypatch.setenv("SFUMATO_CACHE", "~/c")
    monkeypatch.setenv("SFUMATO_DATA", "~/d")
    monkeypatch.setenv("SFUMATO_LEDGER", "~/l.sqlite")
    assert homes() == [home / "c", home / "c" / "features", home / "d", home / "l.sqlite"]


def test_the_package_is_imported_where_there_is_no_fcntl() -> None:
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import sfumato.files, sfumato.ledger.ledger, sfumato.run.session, sfumato.cli"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys; sys.modules['fcntl'] = None; import fcntl"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode  # the control
