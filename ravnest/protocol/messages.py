"""All messages between programs, as data; the other modules of this folder hold them by subject.

A message names the facts it belongs to by number (plan, build, round, lease, microbatch), so a late one is
dropped by number. Tensors travel beside it: one buffer for each TensorSpec in it, in order. State machines
take and return messages; wire packs them and checks every bound. Times are spans: no two programs share a
clock. docs/protocol.md lists every message.
"""

from dataclasses import dataclass

from ravnest.protocol.averaging import AnchorPart, RingPart, RoundMessage
from ravnest.protocol.blobs import BlobPart, BlobRequest
from ravnest.protocol.membership import MembershipMessage, ProbeOrder, ProbeReport
from ravnest.protocol.placement import PlacementMessage
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.tied import TiedMessage
from ravnest.protocol.training import LearningRate, Pace, TrainingMessage


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a state machine did not take a message; logged and shown, never sent."""

    reason: str


SetupMessage = PlacementMessage | BlobRequest | BlobPart | ProbeOrder | ProbeReport
TensorMessage = RingPart[TensorSpec] | AnchorPart[TensorSpec] | TiedMessage[TensorSpec]
Message = (
    MembershipMessage | SetupMessage | TrainingMessage | Pace | LearningRate | RoundMessage | TensorMessage
)
