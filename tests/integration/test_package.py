"""Wheel and sdist: they hold everything, and the wheel works in an empty environment without the checkout.

What Ravnest needs is lent to the environment by a path, so that nothing is downloaded.
"""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[2]
JOB = """
import torch, torch.nn.functional as F, ravnest as rv
x = torch.randn(128, 8)
job = rv.Job(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
    {"x": x, "y": (x.sum(1) > 0).long()}, batch_size=32, epochs=1,
    loss=lambda out, batch: F.cross_entropy(out, batch["y"]),
)
"""


def call(*command: str | Path, folder: Path, **options) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "-d", folder, folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own; return the folder of its programs."""
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", home, folder=built)
    python = home / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet")
    call(*pip, "--disable-pip-version-check", wheel, folder=built)
    places = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=built)
    lent = Path(numpy.__file__).parents[1]  # where torch and the others are
    (Path(places.stdout.strip()) / "lent.pth").write_text(f"{lent}\n")
    return home / "bin"


def find_files() -> set[str]:
    """Return the files of the package as they lie in the checkout."""
    found = (path for path in (ROOT / "ravnest").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_both_hold_every_file_of_the_package(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = find_files()
    assert "ravnest/web/static/uPlot.esm.js" in files
    assert "ravnest/py.typed" in files
    assert {name for name in inside if name.startswith("ravnest/")} == files
    assert {Path(name).name for name in inside if "licenses/" in name} == {"LICENSE", "uPlot.LICENSE.txt"}
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= files | {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"}
    beside = {name.partition("/")[0] for name in names}
    assert beside.isdisjoint({"tests", "docs", "benchmarks", ".venv", "runs"})


def test_a_wheel_made_from_the_sdist_is_the_same(built: Path, tmp_path: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", folder=folder)
    (again,) = (tmp_path / "again").glob("*.whl")

    def read(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    assert read(again) == read(wheel)


def test_the_program_works_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    ravnest, python = installed / "ravnest", installed / "python"
    where = call(python, "-c", "import ravnest; print(ravnest.__file__)", folder=tmp_path).stdout.strip()
    assert Path(where).is_relative_to(installed.parent)
    version = call(ravnest, "--version", folder=tmp_path).stdout
    assert version.startswith("ravnest 0.1.0 (protocol ")
    doctor = json.loads(call(ravnest, "doctor", "--json", folder=tmp_path).stdout)
    assert doctor["schema"].startswith("ravnest.doctor/")
    (tmp_path / "job.py").write_text(JOB)
    trained = call(ravnest, "train", "job.py:job", "--nodes", "1", "--out", "m.safetensors", folder=tmp_path)
    assert "num_samples 128" in trained.stdout
    assert (tmp_path / "m.safetensors").stat().st_size > 0
