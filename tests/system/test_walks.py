"""The three walks of CONTRIBUTING get no longer: what follows one microbatch, one round, one death."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "walk.py"

pytestmark = pytest.mark.timeout(180)  # a busy PC must not fail them


@pytest.fixture(scope="module")
def walk() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walk", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["walk"] = module  # where dataclass looks for it
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["walk"]
    return module


@pytest.fixture(scope="module")
def walks() -> dict[str, dict[str, Any]]:
    run = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return found


def test_no_walk_has_more_files_than_before(walk: ModuleType, walks: dict[str, dict[str, Any]]) -> None:
    assert walks.keys() == walk.MOST_FILES.keys()
    for name, found in walks.items():
        assert found["count"] == len(set(found["files"])) <= walk.MOST_FILES[name]
        assert all((ROOT / file).is_file() for file in found["files"])


@pytest.mark.parametrize(("name", "most"), [("microbatch", 25), ("round", 20), ("death", 25)])
def test_the_walks_of_the_architecture_are_those_of_a_run(
    walks: dict[str, dict[str, Any]], name: str, most: int
) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = re.search(rf"^## Walk \d: one {name}$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    steps = section[1][section[1].index("\n1. ") :]
    named = {f"ravnest/{file}" for file in re.findall(r"`([a-z_/]+\.py)`", steps)}
    assert 5 < len(named) <= most
    assert named <= set(walks[name]["files"])


def test_a_file_more_and_a_lost_trace_are_found(walk: ModuleType) -> None:
    files = ["ravnest/hub/a.py", "ravnest/net/a.py", "ravnest/peer/a.py", "ravnest/engine/a.py"]
    assert walk.find_faults({"microbatch": files}, {"microbatch": 4}) == []
    (grown,) = walk.find_faults({"microbatch": files}, {"microbatch": 3})
    assert "one microbatch needs 4 files, more than 3" in grown
    (lost,) = walk.find_faults({"microbatch": files[:3]}, {"microbatch": 4})
    assert "not seen in engine" in lost
