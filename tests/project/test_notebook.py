"""The notebook of docs is committed without outputs, and runs."""

import json
import os
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "measure.ipynb"
SECONDS = 300  # far more than a cell needs: a hang ends as a failure


def test_the_notebook_has_ids_and_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (4, 5) == (notebook["nbformat"], notebook["nbformat_minor"])
    assert all(cell["id"] for cell in notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [([], None)] * len(code) == [(cell["outputs"], cell["execution_count"]) for cell in code]


@pytest.mark.thorough
def test_the_notebook_runs_in_an_empty_folder(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    kernel = tmp_path / "share" / "kernels" / "this_python"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    specification = {"argv": command, "display_name": "Python", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(specification))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    folder = tmp_path / "empty"
    folder.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="this_python",
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=os.environ | {"OMP_NUM_THREADS": "1"})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {}) if "image" in kind]
    assert ["image/png", "image/png", "image/png", "image/svg+xml"] == shown
    assert [] == list(folder.iterdir())  # its run is in a temporary folder
