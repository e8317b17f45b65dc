"""Parts of a stage as the code that torch's compiler writes: made by one program, loaded by another.

The code is a module with a function `call`. It is kept by its hash in a folder of the provider alone, and is
refused if it is not what its name says. Kernels lie in torch's own caches, in the same folder.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ravnest.errors import RavnestError
from ravnest.model.stage.compiled_stage import CompiledPart

_HASH = re.compile("[0-9a-f]{64}")
_ALIGNMENT = 16  # bytes: what kernels rely on


def keep_code(source: str, folder: Path) -> str:
    """Write the code of a part down; return its name in the folder."""
    content = source.encode()
    name = hashlib.sha256(content).hexdigest()
    file, fresh = folder / f"{name}.py", folder / f"{name}.{os.getpid()}"
    fresh.write_bytes(content)
    fresh.replace(file)  # whole, or not at all: another program may be writing the same
    return name


def load_part(name: str, folder: Path) -> CompiledPart:
    """Return the part whose code has this name."""
    file = folder / f"{name}.py"
    if not _HASH.fullmatch(name) or hashlib.sha256(file.read_bytes()).hexdigest() != name:
        raise RavnestError(f"the code of a part, {name:.64}, is not what its name says")
    spec = importlib.util.spec_from_file_location(f"ravnest_part_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call: CompiledPart = module.call
    return _align(call)


def load_compiler() -> None:
    """Import what the code of parts needs: seconds of Python, better spent before there is work."""
    with contextlib.suppress(Exception):  # a torch without it runs stages uncompiled, and says why then
        import torch._inductor.async_compile
        import torch._inductor.select_algorithm  # noqa: F401 - its import is the point


def _align(call: CompiledPart) -> CompiledPart:
    """Return the part for tensors that begin anywhere in memory; its kernels read whole words."""

    def run(given: list[Tensor]) -> Any:
        for place, tensor in enumerate(given):
            if isinstance(tensor, Tensor) and tensor.data_ptr() % _ALIGNMENT:
                given[place] = tensor.clone(memory_format=torch.preserve_format)
        return call(given)

    return run
