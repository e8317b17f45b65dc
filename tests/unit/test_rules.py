"""The rules of the house are enforced: each violation planted here must be caught by its tool."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BANNED = [
    "import pickle",
    "import marshal",
    "import shelve",
    "from torch import load",
    "import torch\ntorch.load('x')",
    "import torch\ntorch.save({}, 'x')",
    "import torch\ntorch.jit.load('x')",
    "import torch\ntorch.package.PackageImporter('x')",
    "import torch\ntorch.export.load('x')",
    "import numpy as np\nnp.load('x')",
    "import numpy as np\nnp.random.rand()",
    "import time\ntime.sleep(1)",
    "import time\ntime.monotonic()",
    "import time\ntime.time()",
    "import datetime\ndatetime.datetime.now()",
    "import asyncio\nasyncio.sleep(1)",
    "import random\nrandom.random()",
    "import random\nrandom.shuffle([])",
    "eval('1')",
    "exec('1')",
    "print('x')",
    "from . import cost",
    "import subprocess\nsubprocess.run('x', shell=True)",
]


def ruff(code: str) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    command += ["--stdin-filename", "ravnest/plan/planted.py", "-"]
    module = f'"""A planted module."""\n\n{code}\n'
    return subprocess.run(command, input=module, capture_output=True, text=True, cwd=ROOT, check=False).stdout


@pytest.mark.parametrize("code", BANNED)
def test_the_linter_catches_a_banned_call(code: str) -> None:
    caught = {line.split()[1] for line in ruff(code).splitlines() if line.startswith("ravnest")}
    assert caught & {"TID251", "TID252", "S102", "S307", "S602", "T201", "NPY002", "DTZ005"}, caught


def test_the_linter_accepts_what_is_allowed() -> None:
    assert "All checks passed" in ruff("import numpy as np\n\ngenerator = np.random.default_rng(1)")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("ravnest", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


WRONG_IMPORTS = [
    ("plan/cost.py", "ravnest.engine.schedule", "Imports only go down"),
    ("engine/schedule.py", "ravnest.averaging.ring", "Imports only go down"),
    ("engine/staleness.py", "torch", "No torch where decisions are made"),
    ("averaging/round.py", "asyncio", "Pure folders do no I/O"),
    ("plan/formation.py", "time", "Pure folders do no I/O"),
    ("hub/coordinator/rounds.py", "zmq", "Pure folders do no I/O"),
    ("hub/coordinator/leases.py", "ravnest.net.identity", "Pure folders do no I/O"),
]


def test_the_contracts_catch_every_wrong_import(copy: Path) -> None:
    """All are planted at once: each must be told below its contract, by the line it stands in."""
    places = {}
    for where, name, _ in WRONG_IMPORTS:
        path = copy / "ravnest" / where
        text = path.read_text().rstrip() + f"\n\nimport {name}\n"
        path.write_text(text)
        places[where] = len(text.splitlines())
    result = lint_imports(copy)
    assert result.returncode != 0
    _, *parts = re.split(r"^(.+)\n-+\n", result.stdout.partition("Broken contracts")[2], flags=re.MULTILINE)
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    for where, name, contract in WRONG_IMPORTS:
        module = "ravnest." + where.removesuffix(".py").replace("/", ".")
        (found,) = (text for title, text in told.items() if title.startswith(contract))
        assert f"{module} -> {name} (l.{places[where]})" in found, (where, name)


def test_the_contracts_catch_a_module_without_a_layer(copy: Path) -> None:
    (copy / "ravnest" / "newcomer.py").write_text('"""A module without a layer."""\n')
    result = lint_imports(copy)
    assert result.returncode != 0
    assert "ravnest.newcomer" in result.stdout


def size(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "size.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_and_a_class_that_are_too_long_are_told(copy: Path) -> None:
    assert size(copy).returncode == 0
    (copy / "ravnest" / "long.py").write_text("x = 1\n" * 601)
    (copy / "ravnest" / "wide.py").write_text("class Wide:\n" + "    x = 1\n" * 400)
    assert size(copy).returncode == 1
    assert "long.py has 601 lines" in size(copy).stdout
    assert "class Wide has 401 lines" in size(copy).stdout


def rules(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "rules.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(120)  # it reads every file
def test_the_rules_hold_as_they_are() -> None:
    done = rules(ROOT)
    assert (done.returncode, done.stdout) == (0, "")


PATCHES = [
    ("from ravnest.peer import agent\nmonkeypatch.setattr(agent, 'Fetcher', None)", "agent"),
    ("import ravnest as rv\nmonkeypatch.setattr(rv.Hub, 'fit', None)", "rv.Hub"),
    ("import ravnest.plan.cost\nravnest.plan.cost.LIMIT = 1", "ravnest.plan.cost.LIMIT"),
    ("from ravnest.requester.session import Hub\nHub.see = print", "Hub.see"),
    ("from ravnest.requester.session import Hub\ndel Hub.fit", "Hub.fit"),
    ("from ravnest.views.live import LiveView\nview = LiveView()\npatch.setattr(view, '_draw', 1)", "view"),
    ("from ravnest.views.live import LiveView\nwith LiveView() as v:\n    setattr(v, '_draw', 1)", "v"),
    ("import importlib\nm = importlib.import_module('ravnest.codec')\nm.x = 1", "m.x"),
    ("monkeypatch.setattr('ravnest.codec.x', 1)", "'ravnest.codec.x'"),
    ("with mock.patch('ravnest.codec.x', 1): pass", "'ravnest.codec.x'"),
    ("with patch.multiple('ravnest.codec', x=1): pass", "'ravnest.codec'"),
    ("from ravnest.net.link import Link\nmock.patch.object(Link, 'tick', 1)", "Link"),
    ("from ravnest.net import link\nmock.patch.dict(link.TABLE, x=1)", "link.TABLE"),
]


@pytest.mark.parametrize("folder", ["tests/unit", "benchmarks/scenarios", "studies"])
@pytest.mark.parametrize(("code", "target"), PATCHES)
def test_a_patch_of_the_package_is_told(tmp_path: Path, folder: str, code: str, target: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "planted.py").write_text(code + "\n")
    last = code.count("\n") + 1
    done = rules(tmp_path)
    assert (done.returncode, done.stdout) == (1, f"{folder}/planted.py:{last}: patches {target}\n")


def test_a_patch_of_the_world_around_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    code = "import os\nfrom ravnest.net.link import Link\n"
    code += "monkeypatch.setattr(os, 'fsync', None)\nmonkeypatch.setenv('x', 'y')\nlink = dict(Link.x)\n"
    (tmp_path / "tests" / "planted.py").write_text(code)
    assert rules(tmp_path).stdout == ""


PRIVATE = [
    ("from ravnest.net.link import Link\nlink = Link()\nassert link._peer", "link._peer"),
    ("def test_it(world):\n    world.hub._placement.outlook = 1", "world.hub._placement"),
    ("from ravnest.config import _BOUNDS", "_BOUNDS"),
]


@pytest.mark.parametrize(("code", "name"), PRIVATE)
def test_a_private_name_of_others_is_told(tmp_path: Path, code: str, name: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "planted.py").write_text(code + "\n")
    done = rules(tmp_path)
    assert done.returncode == 1
    assert f"tests/planted.py:{code.count(chr(10)) + 1}: {name}\n" in done.stdout


def test_private_names_of_oneself_and_of_python_are_not_others(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    code = "class A:\n    def f(self):\n        self._x = super()._x\n        os._exit(self.__dict__)\n"
    (tmp_path / "tests" / "planted.py").write_text(code)
    assert rules(tmp_path).stdout == ""


def test_the_number_of_private_names_can_only_fall(copy: Path) -> None:
    """With a test less that uses one, the number in the script has to be lowered."""
    shutil.copytree(ROOT / "tests" / "stages", copy / "tests" / "stages")
    command = [sys.executable, str(copy / "scripts" / "rules.py")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "uses of private names are left: lower MOST_PRIVATE" in told.stdout


def test_a_public_name_that_is_defined_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "ravnest").mkdir()
    (tmp_path / "ravnest" / "one.py").write_text("class Twice:\n    pass\n\n_Twice, logger = 1, 2\n")
    (tmp_path / "ravnest" / "two.py").write_text("from one import _Twice\n\nTwice: int = 3\nlogger = 4\n")
    done = rules(tmp_path)
    assert done.returncode == 1
    assert done.stdout == "Twice is defined in ravnest/one.py and ravnest/two.py\n"


@pytest.mark.parametrize(
    "name", ["GRACE_SECONDS", "_QUIET_SECONDS", "FLUSH_MILLISECONDS", "_BF16_SECONDS_MAX"]
)
def test_a_timeout_outside_of_the_configuration_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "ravnest" / "peer").mkdir(parents=True)
    (tmp_path / "ravnest" / "peer" / "planted.py").write_text(f"class Patient:\n    {name} = 1.0\n")
    done = rules(tmp_path)
    assert done.returncode == 1
    assert done.stdout == f"ravnest/peer/planted.py: {name} is for config.Timeouts\n"
