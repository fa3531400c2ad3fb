"""``sfumato errors``: every message leads to an explanation that is inside the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.cli import errors as command
from sfumato.cli import main
from sfumato.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def test_a_message_names_the_command_that_explains_it_and_the_command_does(capsys):
    message = str(DataError("empty-class", "x", fix="Do this."))
    assert message.splitlines()[-1].strip() == "More: sfumato errors show empty-class"
    main(["errors", "show", "empty-class"])
    assert command.sections()["empty-class"] in capsys.readouterr().out
    main(["errors", "show", "empty-class", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"code": "empty-class", "text": command.sections()["empty-class"]}
    main(["errors", "list"])
    assert capsys.readouterr().out.split() == sorted(command.sections())


def test_a_code_that_does_not_exist_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["errors", "show", "emty-class"])
    assert stopped.value.code == 2
    assert "Did you mean empty-class?" in capsys.readouterr().err


def test_a_wheel_has_the_document_and_uses_it(tmp_path, monkeypatch):
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PYTHONWARNINGS": ""})
    packed = tmp_path / "sfumato" / "errors.md"
    assert packed.read_bytes() == (ROOT / "docs" / "errors.md").read_bytes()
    monkeypatch.setattr(command, "PLACES", (packed, tmp_path / "none"))
    assert "empty-class" in command.sections()
    monkeypatch.setattr(command, "PLACES", (tmp_path / "none",))
    with pytest.raises(Exception, match="no-explanations"):
        command.sections()
