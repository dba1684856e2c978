"""The notebooks of examples/ run from top to bottom; their last cells check what they found."""

from pathlib import Path

import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
LARGEST = 120_000  # bytes, with the figures that are kept in it


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_small_and_ends_with_a_check(name: str) -> None:
    path = EXAMPLES / name
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[-1].source.count("assert") == 2
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert not [out for out in outputs if out.output_type == "error"]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of Jupyter
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_native_cache: None
) -> None:
    from nbclient import NotebookClient

    monkeypatch.delenv("MECHANIC_NATIVE", raising=False)  # a reader's steps are compiled
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    before = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    assert [cell.source for cell in notebook.cells] == before
    printed = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in printed)
