"""The notebooks of examples/ run from top to bottom, show how far a training is, and can be interrupted."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
ENDLESS = """
import torch, torch.nn.functional as F, ravnest as rv
x = torch.randn(256, 8)
job = rv.Job(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
    {"x": x, "y": (x.sum(1) > 0).long()}, batch_size=32, epochs=100_000,
    loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
)
with rv.local(nodes=1) as hub:
    result = hub.fit(job)
print("kept", len(result.metrics) > 0)
"""


@pytest.fixture(autouse=True)
def _kernels_use_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def find_outputs(notebook: nbformat.NotebookNode, kind: str) -> Iterator[str]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if kind in output.get("data", {}):
                yield output["data"][kind]
            elif output.output_type == "stream" and kind == output.name:
                yield output.text


def run(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    return client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    done = run(nbformat.read(path, as_version=4), tmp_path)
    pages = list(find_outputs(done, "text/html"))
    if path.stem == "plan_a_swarm":
        assert any("<svg" in each for each in find_outputs(done, "image/svg+xml"))
        assert "needs" in "".join(find_outputs(done, "stdout"))
        return
    (page,) = (each for each in pages if "<progress" in each)  # drawn again and again in one place
    assert 'value="1.0000"' in page
    assert "100%" in page
    assert re.search(r"node\d", page)
    assert "joined" not in "".join(find_outputs(done, "stderr")), "what the page shows is not told twice"


def test_an_interrupt_keeps_what_was_trained_and_the_notebook_goes_on(tmp_path: Path) -> None:
    """The first interrupt comes when a loss was shown: not before there is something to keep."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(ENDLESS)])

    class Impatient(NotebookClient):
        sent: asyncio.Task[None] | None = None

        def process_message(self, msg, cell, cell_index):
            shown = msg["content"].get("data", {}).get("text/html", "")
            if "loss" in shown and self.sent is None:
                self.sent = asyncio.get_running_loop().create_task(self.km.interrupt_kernel())
            return super().process_message(msg, cell, cell_index)

    client = Impatient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    done = client.execute()
    assert client.sent is not None
    assert "kept True" in "".join(find_outputs(done, "stdout"))
