"""First weights of a model that was built under `empty_weights`, filled one module at a time.

A module is filled as its class does it: `reset_parameters`, then the model's own rule (`_init_weights`, as
Hugging Face models and others have it), else the values its constructor gave. Each module's numbers are
drawn by its name, so they are the same in any order. Shards on disk keep them, so that this is done once.
"""

import contextlib
import inspect
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.model.state.shards import ShardWriter, has_weights, index_of, open_weights
from ravnest.model.state.state_dict import to_bytes, type_of
from ravnest.model.state.state_source import FileSource, StateSource
from ravnest.protocol.tensors import Buffer, StoredType

FIRST_VALUES = "_ravnest_first_values"  # on a parameter without values: those of the constructor, and when
_RESETS = ("reset_parameters", "_reset_parameters")
_MOST_KEPT = 2**18  # items of a constructor's values
_OTHERWISE = "give the Job weights=, a safetensors file or folder"


def keep_first_values(module: nn.Module, parameter: Tensor, empty: nn.Parameter) -> None:
    """Remember what a constructor gave a parameter that becomes empty, where no rule could draw it again."""
    if parameter.numel() <= _MOST_KEPT and not any(hasattr(module, name) for name in _RESETS):
        setattr(empty, FIRST_VALUES, (parameter.detach().clone(), empty._version))


def empty_names(model: nn.Module) -> dict[str, StoredType]:
    """Return the parameters that have no values; those that modules share once, by their first name."""
    return {name: type_of(tensor) for name, tensor in model.named_parameters() if tensor.is_meta}


def fill_modules(model: nn.Module, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the first values of the empty parameters, one module after the other; or raise WeightsError."""
    seen: set[int] = set()
    paths = dict(model.named_modules())
    for path, module in paths.items():
        own = {}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in seen:
                seen.add(id(parameter))
                own[name] = parameter
        if own:
            ends = [end for end, letter in enumerate(path) if letter == "."][::-1]
            parents = [paths[path[:end]] for end in ends] + ([model] if path else [])
            yield _fill([module, *parents], own, path, seed)


def _fill(
    around: list[nn.Module], empty: Mapping[str, nn.Parameter], path: str, seed: int
) -> dict[str, Tensor]:
    """Return values for the parameters of a module; `around` is the module and those that hold it."""
    real = {name: _reserve(parameter) for name, parameter in empty.items()}
    before = {name: parameter._version for name, parameter in real.items()}
    with torch.random.fork_rng(devices=[]), _swapped(around, real), torch.no_grad():
        torch.manual_seed(int.from_bytes(blake3(f"{seed}/{path}".encode()).digest()[:8], "little") >> 1)
        try:
            _tell(around)
        except Exception as error:  # of the user's own rule
            told = (str(error).strip().splitlines() or [""])[0]
            kind = type(around[0]).__name__
            problem = f"the first values of {path or kind!r} cannot be drawn: {type(error).__name__}: {told}"
            raise WeightsError(f"{problem}; {_OTHERWISE}") from error
    prefix, found = f"{path}." if path else "", {}
    for name, parameter in empty.items():
        is_filled = real[name]._version != before[name] or not _is_marked(real[name])
        values = real[name].detach() if is_filled else _constructed(parameter)
        if values is None:
            raise WeightsError(_explain(f"{prefix}{name}", around[0]))
        found[prefix + name] = values
    return found


def _tell(around: list[nn.Module]) -> None:
    """Have modules fill what has memory, in the order in which models do it: the inner one first.

    Only the innermost has memory: what those that hold it do to others has no effect.
    """
    for module in around:
        for name in _RESETS:
            reset = getattr(module, name, None)
            if callable(reset) and _takes(reset, 0):
                reset()
    rules = [getattr(module, "_init_weights", None) for module in around]
    nearest = next((n for n, rule in enumerate(rules) if callable(rule) and _takes(rule, 1)), None)
    if nearest is not None:
        for module in around[: nearest + 1]:
            rules[nearest](module)  # type: ignore[misc]


def _reserve(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter like this one with memory, full of a mark that shows what nobody filled."""
    mark = torch.nan if parameter.is_floating_point() else 0
    full = torch.full(parameter.shape, mark, dtype=parameter.dtype)
    return nn.Parameter(full, requires_grad=False)


def _is_marked(parameter: nn.Parameter) -> bool:
    return not parameter.is_floating_point() or bool(parameter.isnan().all())


def _constructed(parameter: nn.Parameter) -> Tensor | None:
    """Return the values that a constructor gave, unless it changed them when they were not there any more."""
    kept = getattr(parameter, FIRST_VALUES, None)
    if kept is None:
        return None
    values, version = kept
    is_same = parameter._version == version and values.shape == parameter.shape
    return values.to(parameter.dtype) if is_same else None  # a model may have been cast since


@contextlib.contextmanager
def _swapped(around: list[nn.Module], real: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let a module have these parameters for a while, and all of them copies of their buffers."""
    parameters, buffers = dict(around[0]._parameters), [dict(module._buffers) for module in around]
    around[0]._parameters.update(real)
    for module in around:
        module._buffers.update({k: None if x is None else x.clone() for k, x in module._buffers.items()})
    try:
        yield
    finally:
        around[0]._parameters.update(parameters)
        for module, before in zip(around, buffers, strict=True):
            module._buffers.update(before)


def _takes(function: Callable[..., object], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False
    return True


def _explain(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    fix = f"give {kind} a method reset_parameters(self), as torch's modules have"
    return f"nothing says how {name!r} of {kind} is first filled; {fix}, or {_OTHERWISE}"


class InitialiserSource:
    """The first weights of a model, drawn when they are first asked for, and kept in shards on disk.

    `folder` gets them; without one they lie in files without a name. Files of an earlier run are used if they
    are of the same model and seed.
    """

    def __init__(self, model: nn.Module, seed: int, folder: Path | None = None) -> None:
        self._model, self._seed, self._folder = model, seed, folder
        self.types: Mapping[str, StoredType] = empty_names(model)
        shown = [seed, type(model).__qualname__, [(name, str(kind)) for name, kind in self.types.items()]]
        self._name = f"first-{blake3(repr(shown).encode()).hexdigest()[:16]}.safetensors"
        self._lock = threading.Lock()
        self._source: StateSource | None = None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes of a tensor, or a range of them."""
        return self.fill().read(name, start, stop)

    def fill(self) -> StateSource:
        """Draw what was not drawn yet."""
        with self._lock:
            if self._source is None:
                try:
                    self._source = self._make()
                except OSError as error:
                    place = self._folder or tempfile.gettempdir()
                    problem = f"the first weights cannot be written to {place}: {error.strerror or error}"
                    raise WeightsError(f"{problem}; make room, or give the hub another folder") from None
            return self._source

    def _make(self) -> StateSource:
        if self._folder is None:
            with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:
                return self._draw(Path(folder, self._name))
        file = self._folder / self._name
        if has_weights(file):
            with contextlib.suppress(WeightsError):
                found = FileSource(open_weights(file if file.exists() else index_of(file)))
                if found.types == self.types:
                    return found
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._draw(file)

    def _draw(self, file: Path) -> StateSource:
        with ShardWriter(file, self.types) as writer:
            for filled in fill_modules(self._model, self._seed):
                for name, tensor in filled.items():
                    writer.write(name, [to_bytes(tensor)])
            return FileSource(open_weights(writer.finish()))
