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
        files = [*found["files"], *found["near"], *found["inside"]]
        assert (found["count"], found["total"]) == (len(found["files"]), len(set(files)))
        most_passed, most_in_all = walk.MOST_FILES[name]
        assert found["count"] <= most_passed
        assert found["total"] <= most_in_all
        assert all((ROOT / file).is_file() for file in files)
        behind = [file for file in found["files"] if Path(file).parts[1] in walk.DOORS]
        assert set(behind) <= set(walk.DOORS.values())
        assert walk.DOORS["net"] in behind


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
    found = walks[name]
    assert named <= {*found["files"], *found["near"], *found["inside"]}


def opened(walk: ModuleType, *passed: str, near: tuple[str, ...] = ()) -> Any:
    files = {f"ravnest/{file}": walk.Opened(is_passed=True) for file in passed}
    return walk.Walk.through(files | {f"ravnest/{file}": walk.Opened() for file in near})


def test_one_file_stands_for_a_folder_with_a_door_and_what_is_near_is_apart(walk: ModuleType) -> None:
    near = ("codec.py", "net/identity.py")
    found = opened(walk, "hub/a.py", "net/link.py", "plan/cost.py", "plan/repair.py", near=near)
    assert found.describe() == {
        "files": ["ravnest/hub/a.py", walk.DOORS["net"], walk.DOORS["plan"]],
        "count": 3,
        "near": ["ravnest/codec.py"],
        "inside": ["ravnest/net/link.py", "ravnest/plan/cost.py", "ravnest/net/identity.py"],
        "total": 7,
    }
    assert opened(walk, "hub/a.py", near=("net/link.py",)).describe()["files"] == ["ravnest/hub/a.py"]


def test_a_file_more_and_a_lost_trace_are_found(walk: ModuleType) -> None:
    files = ("hub/a.py", "net/transport.py", "peer/a.py", "engine/a.py")
    near = ("codec.py",)
    assert walk.find_faults({"microbatch": opened(walk, *files, near=near)}, {"microbatch": (4, 5)}) == []
    (grown,) = walk.find_faults({"microbatch": opened(walk, *files, near=near)}, {"microbatch": (3, 5)})
    assert "one microbatch passes 4 files, more than 3" in grown
    (wider,) = walk.find_faults({"microbatch": opened(walk, *files, near=near)}, {"microbatch": (4, 4)})
    assert "one microbatch has in all 5 files, more than 4" in wider
    (lost,) = walk.find_faults({"microbatch": opened(walk, *files[:3])}, {"microbatch": (4, 5)})
    assert "not seen in engine" in lost
