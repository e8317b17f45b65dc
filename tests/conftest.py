"""One hypothesis profile for all laws: the same examples on every machine, and no clock.

Tests that need root or PostgreSQL are skipped where that cannot be had, unless RAVNEST_NEEDS_FAULTS says that
it must.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Generator

import psutil
import pytest
from hypothesis import settings

from tests.support.store_servers import find_postgres

settings.register_profile("ravnest", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("ravnest")

LONG = {
    "properties",
    "stages",
    "system",
    "integration",
    "browser",
    "attacks",
}  # many examples, captures, processes
LONG_SECONDS = 600.0  # against what hangs, not against what is slow: a PC may have a load of 15
WITH_PROGRAMS = {"integration", "browser", "attacks"}
NUM_SHOWN = 10
COSTS = pytest.StashKey[dict[str, float]]()  # seconds of a core, by test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_root: makes networks and mounts disks")
    config.addinivalue_line("markers", "needs_postgres: starts PostgreSQL")
    config.stash[COSTS] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count what a test costs in seconds of a core, which a busy PC does not change as it does durations."""
    has_programs = item.path.parent.name in WITH_PROGRAMS
    before = find_used(has_programs)
    result = yield
    item.config.stash[COSTS][item.nodeid] = find_used(has_programs) - before
    return result


def find_used(has_programs: bool) -> float:
    """Return the seconds of a core that this program has used, with all that it started."""
    used = sum(os.times()[:4])
    if has_programs:
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used += sum(each.cpu_times()[:4])
    return used


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the tests that cost most."""
    dearest = sorted(config.stash[COSTS].items(), key=lambda item: -item[1])[:NUM_SHOWN]
    if dearest and dearest[0][1] >= 1.0:
        terminalreporter.section(f"dearest {len(dearest)}, in seconds of a core")
        for name, seconds in dearest:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = find_missing() if item.get_closest_marker("needs_root") else ""
    if item.get_closest_marker("needs_postgres") and find_postgres() is None:
        missing = "PostgreSQL is not installed here (Debian: postgresql)"
    if missing and os.environ.get("RAVNEST_NEEDS_FAULTS"):
        pytest.fail(f"{missing}; RAVNEST_NEEDS_FAULTS is set, so this is not skipped", pytrace=False)
    if missing:
        pytest.skip(missing)


@functools.cache
def find_missing() -> str:
    """Return what networks and disks cannot be made without, as a sentence; nothing if all of it is here."""
    programs = [each for each in ("ip", "tc", "mount", "unshare") if shutil.which(each) is None]
    if programs:
        return f"networks and disks are made with {' and '.join(programs)}, which this PC lacks"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    if tried.returncode:
        return "networks and disks are made by root, with the right to make namespaces; run this as root"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give some tests more time than the others: a busy PC must not fail them."""
    for item in items:
        if item.path.parent.name in LONG and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
