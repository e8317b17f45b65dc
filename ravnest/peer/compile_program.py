"""The program that compiles one stage: `python -m ravnest.peer.compile_program`, started by a peer.

It reads a request from stdin, compiles with torch's own compiler and answers on stdout. It opens no
connection. On a GPU it runs each part once, with zeros, so that kernels are tuned before training needs them.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.errors import RavnestError
from ravnest.model.blueprint.blueprint_json import read_blueprint
from ravnest.model.stage.compiled_stage import CompiledParts
from ravnest.model.stage.joint_graph import cut_stage, examples_of
from ravnest.model.stage.stage_program import build_stage_program
from ravnest.peer.compile_process import (
    FOLDER_VARIABLE,
    CompiledFiles,
    CompileRequest,
    TensorFacts,
    keep_code,
    load_parts,
)

logger = logging.getLogger(__name__)

_MOST_REQUEST_BYTES = 1 << 24
_NICE = 5  # training goes first
_ROOM = 2  # times what a trial takes must be free on the GPU: the training needs room, too


def compile_request(request: CompileRequest, blueprint: bytes, folder: Path) -> CompiledFiles:
    """Compile the parts of a stage into the folder."""
    torch.set_float32_matmul_precision(request.matmul_precision)
    autocast = None if request.autocast is None else getattr(torch, request.autocast)
    program = build_stage_program(read_blueprint(blueprint), request.device, autocast=autocast)
    mode = FakeTensorMode()
    with mode:
        examples = [_make(facts, request.device) for facts in request.tensors]
    cut = cut_stage(program.trace(examples), mode, examples)
    graphs, layout = (cut.forward, cut.inputs, cut.weights), cut.layout
    given = [[] if graph is None else examples_of(graph) for graph in graphs]
    kept = [node.meta["val"] for node in _ends(cut.forward)]
    files = tuple(None if graph is None else keep_code(compile_part(graph), folder) for graph in graphs)
    facts = (layout.num_shown, layout.tangents, layout.found, layout.names, layout.takes_loss)
    found = CompiledFiles(files, *facts)
    if torch.device(request.device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(torch.device(request.device))
        if free > _ROOM * (sum(map(_nbytes, given[0])) + 2 * sum(map(_nbytes, kept))):
            try:
                run_once(load_parts(found, folder), given)
                torch.cuda.synchronize()
            except Exception as error:  # zeros may be nothing that it can run with
                logger.warning("the compiled stage was not tried: %s", error)
    return found


def run_once(parts: CompiledParts, given: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Run the parts with zeros, each given tensors like these; return what the last one gives."""
    found: list[Tensor] = []
    shown = (parts.layout.num_shown, len(parts.layout.found), 0)  # by each part; the rest is for the next
    runs = zip((parts.forward, parts.inputs, parts.weights), given, shown, strict=True)
    num_shown = 0
    with torch.no_grad():
        for part, wanted, num_own in runs:
            if part is None:
                continue
            found = found[num_shown:]
            found += [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
                for like in wanted[len(found) :]
            ]
            found, num_shown = list(part(found)), num_own
    return found


def compile_part(graph: fx.GraphModule) -> str:
    """Compile a part; return its code."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Any] = []
    examples = examples_of(graph)
    num_given, num_found = len(examples), len(_ends(graph))

    def compile_inner(inner: fx.GraphModule, given: Any, **options: Any) -> Any:
        if (len(given), len(_ends(inner))) != (num_given, num_found):
            raise RavnestError("torch's compiler has changed what a part takes or gives")
        made.append(compile_fx_inner(inner, given, **options))
        return made[-1]

    with torch.no_grad():
        compile_fx(graph, examples, inner_compile=compile_inner)
    (found,) = made
    if found.constants or found.mutated_input_idxs:
        raise RavnestError("a part has constants of its own, or changes what it is given")
    source: str = found.source_code
    return source


def _make(facts: TensorFacts, device: str) -> Tensor:
    made = torch.empty_strided(
        facts.shape, facts.strides, dtype=getattr(torch, facts.dtype), device=torch.device(device)
    )
    return made.requires_grad_(facts.needs_gradient)


def _ends(graph: fx.GraphModule) -> list[Any]:
    (end,) = graph.graph.find_nodes(op="output")
    return list(end.args[0])


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _answer(given: BinaryIO) -> CompiledFiles:
    try:
        request = msgspec.json.decode(given.readline(_MOST_REQUEST_BYTES), type=CompileRequest)
        blueprint = given.read(request.blueprint_bytes)
        threading.Thread(target=_end_with_the_peer, args=(given,), daemon=True).start()
        return compile_request(request, blueprint, Path(os.environ[FOLDER_VARIABLE]))
    except Exception as error:  # a compiler may raise anything; the peer trains on without it
        told = (str(error).strip().splitlines() or [""])[0]
        return CompiledFiles(error=f"{type(error).__name__}: {told:.300}")


def _end_with_the_peer(given: BinaryIO) -> None:
    """Wait for the end of stdin: then nobody wants the answer."""
    given.read(1)
    os._exit(1)


def answer_request() -> None:
    """Answer one request; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if hasattr(os, "nice"):
        os.nice(_NICE)
    answers.write(msgspec.json.encode(_answer(sys.stdin.buffer)))
    answers.flush()
    os._exit(0)  # threads of the compiler's pool are not waited for


if __name__ == "__main__":
    answer_request()
