"""Finds the job in the requester's Python file, and explains what is wrong with that file.

The file runs as Python would run it, on the requester's PC.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ravnest.errors import ConfigError
from ravnest.requester.dataset import show_thing
from ravnest.requester.job import Job
from ravnest.requester.users_code import users_code


def load_job(place: str) -> Job:
    """Return the job at FILE.py:NAME, a Job or a function that makes one.

    FILE.py will do if it has one Job, or none and a function called `job`.
    """
    name, file = "", place
    if not place.endswith(".py"):
        file, _, name = place.rpartition(":")
    if not file.endswith(".py") or (name and not name.isidentifier()) or file + ":" == place:
        raise ConfigError(f"{place!r} names no job; write FILE.py:NAME, like model.py:job")
    path = Path(file)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {problem}; give a Python file that makes a ravnest.Job")
    with users_code(file):
        found = _run_file(path)
    return _find_job(found, file, name)


def _run_file(path: Path) -> dict[str, object]:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Its own name, so that other processes can import it, unless a module has that name already.
    name = path.stem if path.stem not in sys.modules else f"job_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return vars(module)


def _find_job(found: Mapping[str, object], file: str, name: str) -> Job:
    jobs = {key: value for key, value in found.items() if isinstance(value, Job)}
    listed = f"it has the jobs {', '.join(jobs)}" if jobs else "it has no Job; add job = ravnest.Job(...)"
    if not name:
        if len({id(job) for job in jobs.values()}) == 1:
            return next(iter(jobs.values()))
        if not jobs and inspect.isfunction(found.get("job")):
            return _find_job(found, file, "job")
        problem = f"{file} has {len(jobs)} jobs, so say which: {', '.join(f'{file}:{key}' for key in jobs)}"
        raise ConfigError(problem if jobs else f"{file} has no Job; add job = ravnest.Job(...) to it")
    if name not in found:
        raise ConfigError(f"{file} has no {name!r}; {listed}")
    job = found[name]
    if inspect.isfunction(job):
        job = _make_job(job, f"{file}:{name}")
    if not isinstance(job, Job):
        raise ConfigError(f"{file}:{name} is {show_thing(job)}, not a Job or a function of one; {listed}")
    return job


def _make_job(function: Callable[..., object], place: str) -> object:
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(f"{place} needs {', '.join(needed)}; give every argument a default")
    with users_code(place):
        job = function()
    if not isinstance(job, Job):
        raise ConfigError(f"{place} returned {show_thing(job)}, not a Job; return ravnest.Job(...)")
    return job
