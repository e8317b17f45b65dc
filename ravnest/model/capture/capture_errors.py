"""Why a model cannot be captured, in the user's terms: the file and line, the reason, the usual fix."""

import re
import traceback
from types import TracebackType

import torch
from torch import fx

from ravnest.errors import CaptureError

_NOT_THE_USERS = (*torch.__path__, __file__.rpartition("model")[0], "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SYMBOL = re.compile(r"\bs\d+\b")  # what export calls the batch size

# Part of torch's message, the reason in one clause, the usual fix.
_FIXED_SIZE = (
    r"specialized|Constraints violated|not a constant|marked .* dynamic|shape .* is invalid",
    "the model works for one batch size only",
    "write x.shape[0] or -1 where the batch size stands as a number, or as len(x)",
)
BY_SIZE = (
    "it behaves differently by batch size",
    "compute the same for every batch size; providers may run other sizes than the first batch has",
)
NO_BATCH_SIZE = (
    "it needs the batch size, but its stage gets nothing of the batch to know that from",
    "make it of the values it meets, as torch.randn_like(x) does, or use the numbers of the batch before it",
)
_KNOWN = (
    (
        r"CondAutogradOp|torch\.cond|torch\.while_loop",
        "it chooses between branches while it runs",
        "compute both and choose with torch.where",
    ),
    (
        r"data.dependent|Could not guard on|Could not extract specialized integer|_local_scalar_dense",
        "the code looks at the values in a tensor to decide what to do",
        "use torch.where or a mask instead of `if tensor:`, and keep values in tensors instead of .item()",
    ),
    (r"generated guard", *BY_SIZE),
    _FIXED_SIZE,
    (
        r"numpy|can't convert|Cannot convert",
        "the code leaves torch (a numpy array or a Python number made from a tensor)",
        "do it with torch operations, or before training in the data",
    ),
    (
        r"must match the size|size mismatch|mat1 and mat2",
        "the shapes do not fit together",
        "check that the model runs on this batch and on a smaller one",
    ),
)


def refuse_node(node: fx.Node, reason: str, fix: str) -> CaptureError:
    """Return the error for one operation of a graph, with the line of the user's code it came from."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    return _refuse(_users(frames), reason, fix)


def refuse_error(error: Exception, at_other_size: Exception | None = None) -> CaptureError:
    """Return the error for an exception out of torch.export.

    `at_other_size` is what the module says to a batch of another size.
    """
    text = str(error).strip()
    if at_other_size is not None and re.search(_FIXED_SIZE[0], text):
        return _refuse(_where(at_other_size), *_FIXED_SIZE[1:])
    for pattern, reason, fix in _KNOWN:
        if re.search(pattern, text):
            return _refuse(_where(error), reason, fix)
    return _refuse(_where(error), _first_line(error), "check that model and loss run on this batch")


def refuse_failure(error: Exception) -> CaptureError:
    """Return the error for a module that fails by itself."""
    place = _where(error)
    where = f"{place[0]}:{place[1]}: " if place else ""
    return CaptureError(
        f"{where}the model itself fails on the first batch: {_first_line(error)}; "
        "correct the data or the loss"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.'):.200}"


def refuse_here(reason: str, fix: str) -> CaptureError:
    """Return the error for something the model's code is doing right now."""
    return _refuse(_users(_frames(traceback.extract_stack())), reason, fix)


def _refuse(place: tuple[str, int] | None, reason: str, fix: str) -> CaptureError:
    where = f"{place[0]}:{place[1]}" if place else "the model"
    return CaptureError(f"{where} cannot be captured: {_SYMBOL.sub('batch', reason)}; {fix}")


def _where(error: BaseException) -> tuple[str, int] | None:
    """Find the user's line in the traceback of an error or of what caused it."""
    found = None
    seen: BaseException | None = error
    while seen is not None:
        trace: TracebackType | None = seen.__traceback__
        found = _users(_frames(traceback.extract_tb(trace))) or found
        seen = seen.__cause__ or seen.__context__
    return found or _users([(file, int(line)) for file, line in _FRAME.findall(str(error))])


def _frames(stack: traceback.StackSummary) -> list[tuple[str, int]]:
    return [(frame.filename, frame.lineno or 0) for frame in stack]


def _users(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the innermost frame that is neither torch's nor ours; code of no package is preferred."""
    theirs = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    own = [frame for frame in theirs if "site-packages" not in frame[0]]
    return own[-1] if own else theirs[-1] if theirs else None
