"""What the requester brings: a model, data, a loss. And how a command finds it in the requester's file.

A job holds the requester's own objects and checks them early, so that a mistake is told before anything is
captured or sent. Nothing of it leaves this PC as code: `capture` makes a blueprint of it. Driven by the
requester's script and by the cli.
"""

import contextlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ravnest.errors import CaptureError, ConfigError
from ravnest.model.capture import Captured, capture
from ravnest.model.whole import Metric
from ravnest.units import show_value

Batch = dict[str, Tensor] | tuple[Tensor, ...]

_GIVE = "give a dict of fields or a tuple (inputs..., target)"
_OTHER = "has other parts than sample 0; give every sample the same"
_NOT_THE_USERS = (str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], "<")
_NAME = re.compile(r"(?=\S)[\w.:/+()@,' -]{1,64}(?<=\S)")


@dataclass(frozen=True, eq=False)
class Job:
    """A model to train, with its data and its loss.

    Data is a dict (or tuple) of tensors, a dataset with length and index, an iterable of samples, or a
    DataLoader, which brings its own batch size. A sample is a dict of fields or a tuple (inputs..., target).
    `loss` and `metrics` take what the model returned and the batch, or its target when batches are tuples;
    without a loss the model returns it. `inputs` names the fields the model takes. `is_padded=False` promises
    that no sample is padded.
    """

    model: nn.Module = field(repr=False)
    train_data: Any = field(repr=False)
    val_data: Any = field(default=None, repr=False, kw_only=True)
    batch_size: int = field(default=32, kw_only=True)
    loss: Metric | None = field(default=None, repr=False, kw_only=True)
    metrics: Mapping[str, Metric] = field(default_factory=dict, repr=False, kw_only=True)
    inputs: Sequence[str] | None = field(default=None, kw_only=True)
    is_padded: bool | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_functions(self.loss, self.metrics)
        if isinstance(self.train_data, DataLoader) and self.train_data.batch_size is not None:
            object.__setattr__(self, "batch_size", self.train_data.batch_size)
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"batch_size is {show_value(self.batch_size)}; give a whole number, 1 or more")
        if isinstance(self.inputs, str):
            raise ConfigError(f"inputs is the text {self.inputs!r}; give a list of fields: [{self.inputs!r}]")
        if self.is_padded not in (None, True, False):
            raise ConfigError(f"is_padded is {show_value(self.is_padded)}; give True, False or nothing")
        if self.name is None:
            object.__setattr__(self, "name", type(self.model).__name__[:64])
        elif not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            signs = "letters, digits, spaces inside and . : / + ( ) @ , ' -"
            raise ConfigError(f"name is {show_value(self.name)}; give 1 to 64 of {signs}")

    def first_batch(self) -> Batch:
        """Return the first batch of the train data; it is read once and kept."""
        return self._first[0]

    def capture(self) -> Captured:
        """Turn the model into a blueprint, with the first batch as the example."""
        batch, notes = self._first
        captured = capture(
            self.model,
            batch,
            self.loss,
            self.metrics,
            name=self.name,
            inputs=self.inputs,
            is_padded=self.is_padded,
        )
        return replace(captured, notes=(*notes, *captured.notes))

    @cached_property
    def _first(self) -> tuple[Batch, tuple[str, ...]]:
        if isinstance(self.train_data, DataLoader):
            return _check_ready(next(iter(self.train_data), None)), ()
        batch = _read_batch(self.train_data, self.batch_size)
        num_samples = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
        if num_samples >= self.batch_size:
            return batch, ()
        count = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        note = f"the train data has {count}, fewer than batch_size {self.batch_size}; a batch is all of it"
        return batch, (note,)


def _check_model(model: object) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ConfigError(f"model is {_show(model)}; make one: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {_show(model)}; give a torch.nn.Module")


def _check_functions(loss: object, metrics: object) -> None:
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {_show(loss)}; give a function of (what the model returns, batch)")
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is {_show(metrics)}; give a dict of names and functions")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric):
            shown = f"{show_value(name)}: {show_value(metric)}"
            raise ConfigError(f"metrics has {shown}; give names and functions")


def _show(thing: object) -> str:
    """Return a thing as an error names it: a class, a small value, or something of a type."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    is_small = thing is None or isinstance(thing, bool | int | float | str | bytes)
    return show_value(thing) if is_small else f"of type {type(thing).__name__}"


def _read_batch(data: Any, batch_size: int) -> Batch:
    if isinstance(data, Mapping):
        return _first_rows(data, batch_size)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        return tuple(_first_rows({f"part {k}": part for k, part in enumerate(data)}, batch_size).values())
    samples = _first_samples(data, batch_size)
    if not samples:
        raise ConfigError("the train data is empty; give at least one sample")
    return _collate(samples)


def _first_rows(data: Mapping[str, Any], batch_size: int) -> dict[str, Tensor]:
    if not data:
        raise ConfigError("the train data is an empty dict; give at least one tensor")
    rows: dict[str, Tensor] = {}
    for name, whole in data.items():
        if not isinstance(whole, Tensor | np.ndarray) or whole.ndim == 0:
            what = "a single number" if isinstance(whole, Tensor) else _show(whole)
            fix = "give tensors whose first size is the samples, or one dataset instead of the dict"
            raise ConfigError(f"the train data has {name!r}, {what}; {fix}")
        rows[name] = torch.as_tensor(whole[:batch_size])
    sizes = {name: len(whole) for name, whole in data.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"the train data has fields of unequal length ({shown}); give one row per sample")
    if not next(iter(sizes.values())):
        raise ConfigError("the train data is empty; give at least one sample")
    return rows


def _first_samples(data: Any, batch_size: int) -> list[Any]:
    if isinstance(data, str | bytes | Tensor | type) or not (
        isinstance(data, Iterable) or hasattr(data, "__getitem__")
    ):
        raise ConfigError(
            f"the train data is {_show(data)}; give a dict of tensors, a dataset, an iterable of samples "
            "or a DataLoader"
        )
    is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_indexed and not isinstance(data, IterableDataset):
        return [data[index] for index in range(min(batch_size, len(data)))]
    return list(islice(iter(data), batch_size))


def _collate(samples: Sequence[Any]) -> Batch:
    """Put samples together field by field; numbers and lists become tensors."""
    first = samples[0]
    if isinstance(first, Mapping):
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                raise ConfigError(f"sample {number} of the train data {_OTHER}")
        return {name: _collate_field([sample[name] for sample in samples], repr(name)) for name in first}
    if isinstance(first, tuple | list) and len(first) > 1:
        for number, sample in enumerate(samples):
            if not isinstance(sample, tuple | list) or len(sample) != len(first):
                raise ConfigError(f"sample {number} of the train data {_OTHER}")
        return tuple(
            _collate_field(list(part), f"part {k}") for k, part in enumerate(zip(*samples, strict=True))
        )
    raise ConfigError(f"a sample of the train data is {_show(first)}; {_GIVE}")


def _collate_field(values: Sequence[Any], what: str) -> Tensor:
    tensors = [_to_tensor(value, what) for value in values]
    shapes = {tuple(tensor.shape): number for number, tensor in reversed(list(enumerate(tensors)))}
    if len(shapes) > 1:
        shown = " and ".join(f"{shape} in sample {number}" for shape, number in sorted(shapes.items())[:2])
        raise ConfigError(f"{what} of the train data differs in shape ({shown}); pad or cut to one length")
    batch: Tensor = default_collate(tensors)
    return batch


def _to_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # A list that is no array of numbers becomes one of texts or objects, or none at all.
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.as_tensor(value)
    except (ValueError, TypeError):
        pass
    raise ConfigError(
        f"{what} of the train data is {show_value(value)}, not numbers; leave it out of the samples "
        f"(of a Hugging Face dataset: .remove_columns([{what}])) or turn it into numbers first"
    )


def _check_ready(batch: Any) -> Batch:
    if batch is None:
        raise ConfigError("the train data is an empty DataLoader; give at least one sample")
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch)
    raise ConfigError(f"a batch of the DataLoader is {_show(batch)}; {_GIVE}")


def load_job(place: str) -> Job:
    """Return the job at FILE.py:NAME, a Job or a function that makes one; FILE.py will do for one Job."""
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
        problem = f"{file} has {len(jobs)} jobs, so say which: {', '.join(f'{file}:{key}' for key in jobs)}"
        raise ConfigError(problem if jobs else f"{file} has no Job; add job = ravnest.Job(...) to it")
    if name not in found:
        raise ConfigError(f"{file} has no {name!r}; {listed}")
    job = found[name]
    if inspect.isfunction(job):
        job = _make_job(job, f"{file}:{name}")
    if not isinstance(job, Job):
        raise ConfigError(f"{file}:{name} is {_show(job)}, not a Job or a function of one; {listed}")
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
        raise ConfigError(f"{place} returned {_show(job)}, not a Job; return ravnest.Job(...)")
    return job


@contextlib.contextmanager
def users_code(file: str) -> Iterator[None]:
    """Turn what the requester's code raises into a ConfigError with their lines, and none of ours."""
    try:
        yield
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code of someone else may raise
        raise _tell(error, file) from None


def _tell(error: BaseException, file: str) -> ConfigError:
    if isinstance(error, SyntaxError):
        place = f"{_shorten(error.filename)}:{error.lineno}" if error.filename else file
        line = f": {error.text.strip()}" if error.text else ""
        return ConfigError(f"{place} is not Python: {error.msg}{line}")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS) and "site-packages" not in frame.filename
    ]
    place = f"{_shorten(frames[-1].filename)}:{frames[-1].lineno}" if frames else file
    if isinstance(error, ConfigError):
        return ConfigError(f"{place}: {error}")
    shown = "".join(f"\n  {_shorten(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in frames)
    if isinstance(error, SystemExit):
        fix = 'keep what runs a program under `if __name__ == "__main__":`'
        return ConfigError(f"{place} ended the program ({error.code}); {fix}{shown}")
    fix = "; install it where ravnest is installed" if isinstance(error, ModuleNotFoundError) else ""
    return ConfigError(f"{place} failed: {type(error).__name__}: {error}{fix}{shown}")


def _shorten(file: str) -> str:
    """Return a path as the requester would write it here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
