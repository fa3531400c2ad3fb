"""The notebooks run from top to bottom as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(path: Path, folder: Path) -> str:
    """Everything that its cells print."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="no kernel to run notebooks with")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_learns_and_states_its_guarantee(path, tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    printed = run(path, tmp_path)
    assert float(re.search(r"accuracy (\S+)%", printed)[1]) > 60  # ten classes: guessing gives 10
    assert "differentially private SGD" in printed
    assert (tmp_path / "ledger.sqlite").is_file()


def test_there_are_two_notebooks_without_outputs_of_somebodys_machine():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        text = path.read_text()
        assert '"outputs": []' in text
        assert '"output_type"' not in text
