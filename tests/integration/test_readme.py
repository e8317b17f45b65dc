"""The first program that the README shows, run as it stands there: it learns, and its file is written."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def test_the_program_of_the_readme_learns_and_writes_its_file(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^## Train your own model\n.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    (tmp_path / "mine.py").write_text(shown[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert metrics["val_accuracy"] >= 0.95
    assert {"0.weight", "2.weight", "4.weight"} <= load_file(tmp_path / "mine.safetensors").keys()
