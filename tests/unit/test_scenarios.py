"""Every benchmark can be started, also those that CI does not run."""

import importlib
import inspect
import pkgutil

import pytest

from benchmarks import scenarios


@pytest.mark.parametrize("name", sorted(each.name for each in pkgutil.iter_modules(scenarios.__path__)))
def test_a_scenario_is_loaded_and_takes_what_the_runner_gives(name: str) -> None:
    scenario = importlib.import_module(f"benchmarks.scenarios.{name}")
    given = [True, *([object()] if hasattr(scenario, "add_options") else [])]
    inspect.signature(scenario.run).bind(*given)
