"""The border between agent and compute: every record that crosses it, in both directions.

The agent has keys and sockets; compute has torch and one stage. Only these records pass between the two. They
are frozen and made of numbers, text, bytes and messages; none holds a callable or a shared object. So compute
is a process of its own (compute_process), or a thread (compute). A large snapshot crosses as a file in the
folder that `ComputeSetup` names.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from msgspec import Meta

from ravnest import errors
from ravnest.config import CompileMode
from ravnest.errors import RavnestError
from ravnest.ids import NodeId, RoundId
from ravnest.protocol.membership import ProbeReport
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import BlobRef, PlanOrder, RingOrder, SnapshotOrder, StageParts
from ravnest.protocol.tensors import Buffer
from ravnest.transfer.outbox import Outgoing


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """What the provider lends: memory for tensors, work for one batch, and the device for both.

    With `emulated_flops_per_second` the device behaves like one that is so slow, and waits the rest.
    """

    memory_bytes: float
    flops_per_batch: float = 1e15
    device: str = "cpu"
    emulated_flops_per_second: float | None = None
    compile_mode: CompileMode = CompileMode.AUTO


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    """What compute starts with; without a folder, snapshots cross in memory."""

    limits: ProviderLimits
    folder: Annotated[str, Meta(max_length=4096)] | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """Build this stage."""

    order: PlanOrder
    parts: StageParts
    blueprint: bytes
    contents: tuple[Buffer, ...]  # of the sources


@dataclass(frozen=True, slots=True)
class Probe:
    """Run this little stage, and complete the report with the speed of this PC."""

    report: ProbeReport
    blueprint: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message for the stage; the agent has admitted it."""

    message: Message
    buffers: Sequence[Buffer]
    sender: NodeId


@dataclass(frozen=True, slots=True)
class HubLink:
    """Whether the hub is there: without it a stage trains what it has."""

    is_up: bool


ToCompute = PlanOrder | RingOrder | SnapshotOrder | Build | Probe | Delivered | HubLink


@dataclass(frozen=True, slots=True)
class StageBuilt:
    """The stage of this build can train."""

    build_id: int


@dataclass(frozen=True, slots=True)
class WrittenBlob:
    """Content that compute has written: a file in its folder, named by its hash, or bytes."""

    ref: BlobRef
    hashes: bytes  # of its pieces
    content: bytes | None = None  # where the disk takes no file
    fault: str = ""  # why it takes none


def name_file(folder: str | None, blob: str) -> Path:
    """Return the file in which content with this hash crosses, or raise OSError if there is no folder."""
    if folder is None:
        raise FileNotFoundError(f"no folder could be made in {tempfile.gettempdir()}")
    return Path(folder, blob)


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The snapshot that this order asks for."""

    order: SnapshotOrder
    version: int
    blob: WrittenBlob
    anchor_round: RoundId | None = None  # the round whose average it has; None: the live weights


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """Compute ends with an error of this class in ravnest.errors."""

    kind: str
    reason: str

    @classmethod
    def of(cls, error: RavnestError) -> "ComputeFailed":
        """Return what crosses the border of an error."""
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> RavnestError:
        """The error, made anew."""
        kind = getattr(errors, self.kind, RavnestError)
        is_error = isinstance(kind, type) and issubclass(kind, RavnestError)
        return kind(self.reason) if is_error else RavnestError(self.reason)


FromCompute = Outgoing | StageBuilt | SnapshotWritten | ComputeFailed


class Compute(Protocol):
    """The agent's end of the border."""

    def put(self, item: ToCompute) -> None:
        """Pass an item to compute; never waits."""

    async def run(self, setup: ComputeSetup, deliver: Callable[[FromCompute], None]) -> None:
        """Run compute until it is closed; `deliver` is called here, on the event loop, for each item."""

    def close(self) -> None:
        """End `run`, and with it compute; a thread ends after the piece of work under way."""
