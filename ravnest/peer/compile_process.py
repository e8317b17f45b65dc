"""A stage is compiled in a process of its own, which has Python's lock to itself; training goes on meanwhile.

The process gets the blueprint and the types of tensors, and no token; it writes code into the provider's own
folder and answers with names, which are hashes. This program only loads that code, between two microbatches.
What was compiled once is found there the next time. Kernels lie in torch's own caches, in the same folder.
"""

import contextlib
import hashlib
import importlib.abc
import importlib.util
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ravnest.config import TIMEOUTS, PeerTimeouts
from ravnest.errors import RavnestError
from ravnest.model.blueprint.blueprint_json import write_blueprint
from ravnest.model.stage.compiled_stage import (
    CompiledPart,
    CompiledParts,
    PartsLayout,
    PendingParts,
    StageToCompile,
)

FOLDER_VARIABLE, THREADS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
_PROGRAM = "ravnest.peer.compile_program"
_SECRETS = "RAVNEST_"  # variables that begin so are not the compiler's business
_MOST_ANSWER_BYTES = 1 << 24
_HASH = re.compile("[0-9a-f]{64}")
_ALIGNMENT = 16  # bytes: what kernels rely on


class TensorFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a compiler must know of an argument; nothing of its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    needs_gradient: bool


class CompileRequest(msgspec.Struct, frozen=True):
    """What is to be compiled, and for what; the bytes of a blueprint follow."""

    torch: str
    device: str
    device_name: str
    autocast: str | None
    matmul_precision: str
    blueprint_bytes: int
    tensors: tuple[TensorFacts, ...]


class CompiledFiles(msgspec.Struct, frozen=True):
    """The names of the code of the three parts, and their layout; or why there is none."""

    files: tuple[str | None, ...] = ()
    num_shown: int = 0
    tangents: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    takes_loss: bool = False
    error: str = ""


def compile_apart(
    stage: StageToCompile, arguments: Sequence[Tensor], timeouts: PeerTimeouts = TIMEOUTS.peer
) -> PendingParts:
    """Begin to compile a stage in a process of its own; what is returned loads the parts at its end."""
    if FOLDER_VARIABLE not in os.environ:
        raise RavnestError(f"no folder for compiled code is set in {FOLDER_VARIABLE}")
    folder = Path(os.environ[FOLDER_VARIABLE])
    blueprint = write_blueprint(stage.blueprint)
    request = msgspec.json.encode(_describe(stage, arguments, len(blueprint)))
    index = folder / f"{hashlib.sha256(request + blueprint).hexdigest()}.json"
    if (known := _read_known(index, folder)) is not None:
        return lambda: load_parts(known, folder)
    return CompileProcess(request + b"\n" + blueprint, index, timeouts)


def load_parts(found: CompiledFiles, folder: Path) -> CompiledParts:
    """Return the parts, ready to run."""
    layout = PartsLayout(found.num_shown, found.tangents, found.found, found.names, found.takes_loss)
    forward, inputs, weights = (None if name is None else load_part(name, folder) for name in found.files)
    assert forward is not None
    return CompiledParts(forward, inputs, weights, layout)


def _describe(stage: StageToCompile, arguments: Sequence[Tensor], num_bytes: int) -> CompileRequest:
    facts = tuple(
        TensorFacts(tuple(each.shape), each.stride(), _name(each.dtype), each.requires_grad)
        for each in arguments
    )
    is_cuda = stage.device.type == "cuda"
    return CompileRequest(
        str(torch.__version__),
        str(stage.device),
        torch.cuda.get_device_name(stage.device) if is_cuda else stage.device.type,
        None if stage.autocast is None else _name(stage.autocast),
        torch.get_float32_matmul_precision(),
        num_bytes,
        facts,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_known(index: Path, folder: Path) -> CompiledFiles | None:
    """Return what was compiled before, if all of it is still there."""
    try:
        found = msgspec.json.decode(index.read_bytes(), type=CompiledFiles)
    except (OSError, msgspec.MsgspecError):
        return None
    is_whole = all(name is None or (folder / f"{name}.py").is_file() for name in found.files)
    return found if is_whole and found.files else None


class CompileProcess:
    """The process of one stage; it ends with this program, or when nobody waits for it any more."""

    def __init__(self, request: bytes, index: Path, timeouts: PeerTimeouts) -> None:
        self._index, self._folder = index, index.parent
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_SECRETS)}
        environment[THREADS_VARIABLE] = str(torch.get_num_threads())
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._answer: Future[bytes] = Future()
        weakref.finalize(self, _end, process)
        limit = threading.Timer(timeouts.compile_seconds, process.kill)
        limit.daemon = True
        facts = (process, request, self._answer, limit)
        threading.Thread(target=_talk, args=facts, name="compile", daemon=True).start()

    def wait(self) -> None:
        """Wait until the process has answered."""
        self._answer.result()

    def __call__(self) -> CompiledParts | None:
        """Return the parts if the process has ended; raise what went wrong there."""
        if not self._answer.done():
            return None
        answer = self._answer.result()
        try:
            found = msgspec.json.decode(answer, type=CompiledFiles)
        except msgspec.MsgspecError:
            raise RavnestError("the compiler ended without an answer") from None
        if found.error:
            raise RavnestError(found.error)
        parts = load_parts(found, self._folder)
        self._index.write_bytes(answer)
        return parts


def _talk(
    process: "subprocess.Popen[bytes]", request: bytes, answer: "Future[bytes]", limit: threading.Timer
) -> None:
    """Send the request and wait for the answer; stdin stays open: its end would be that of the process."""
    assert process.stdin is not None
    assert process.stdout is not None
    limit.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        found = process.stdout.read(_MOST_ANSWER_BYTES)
    except (OSError, ValueError):  # it has ended, or nobody waits any more
        found = b""
    limit.cancel()
    answer.set_result(found)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def keep_code(source: str, folder: Path) -> str:
    """Write the code of a part down; return its name in the folder."""
    content = source.encode()
    name = hashlib.sha256(content).hexdigest()
    file, fresh = folder / f"{name}.py", folder / f"{name}.{os.getpid()}"
    fresh.write_bytes(content)
    fresh.replace(file)  # whole, or not at all: another program may be writing the same
    return name


class _CheckedCode(importlib.abc.SourceLoader):
    """Loads the bytes that were hashed: a second read, or bytecode beside them, may give others."""

    def __init__(self, file: Path, content: bytes) -> None:
        self._file, self._content = str(file), content

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str) -> bytes:
        return self._content


def load_part(name: str, folder: Path) -> CompiledPart:
    """Return the part whose code has this name."""
    file = folder / f"{name}.py"
    content = file.read_bytes() if _HASH.fullmatch(name) else b""
    if hashlib.sha256(content).hexdigest() != name:
        raise RavnestError(f"the code of a part, {name:.64}, is not what its name says")
    loader = _CheckedCode(file, content)
    spec = importlib.util.spec_from_loader(f"ravnest_part_{name}", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
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
