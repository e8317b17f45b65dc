"""Which messages a peer admits: of this build, from a sender that may say so; else a sentence why."""

from typing import get_args, get_origin

import pytest

from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.peer.agent import refuse_message
from ravnest.protocol.averaging import (
    AnchorQuery,
    RingPart,
    RoundAbort,
    RoundOpen,
    TiedCall,
    TiedGradient,
    TiedHolder,
    TiedStep,
)
from ravnest.protocol.membership import Refused, Stop, Welcome
from ravnest.protocol.messages import Message
from ravnest.protocol.placement import BackupOrder, BlobRequest, PlanOrder, SnapshotOrder
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import Activation, DroppedMicrobatch, Gradient, LearningRate, LeaseGrant, Pace

ME, NEXT, FAR = NodeId("me"), NodeId("next"), NodeId("far")  # far is in a ring with us, not in the cluster
BUILD = 7
CLUSTER = (ME, NEXT)
OF_HUB = [
    LeaseGrant(BUILD, LeaseId(1), False, MicrobatchId(0), (4,)),
    LearningRate(BUILD, 0, 0.1),
    RoundOpen(BUILD, RoundId(1), 1.0, False, False, ()),
    SnapshotOrder(BUILD, 1),
]
OF_CLUSTER = [
    Activation(BUILD, MicrobatchId(0), False, 4, ()),
    Gradient(BUILD, MicrobatchId(0), ()),
    DroppedMicrobatch(BUILD, MicrobatchId(0), "not finite"),
    Pace(BUILD, 0, 1, 1, True),
    TiedHolder(BUILD, 0, 4, False),
    TiedCall(BUILD, 1, (), False),
    TiedGradient(BUILD, 1, ()),
    TiedStep(BUILD, 1, None, ()),
]
PART = RingPart(RoundId(3), SegmentId(0), 0, 0, 1, 1.0, TensorSpec("float32", (1,), "fp32"))


def late(message: Message) -> Message:
    names = [name for name in message.__dataclass_fields__ if name != "build_id"]
    return type(message)(build_id=BUILD - 1, **{name: getattr(message, name) for name in names})


@pytest.mark.parametrize("message", OF_HUB, ids=lambda message: type(message).__name__)
def test_an_order_is_admitted_from_the_hub_alone_and_of_this_build(message: Message) -> None:
    assert refuse_message(message, HUB, BUILD, CLUSTER) is None
    assert "only the hub sends it" in refuse_message(message, NEXT, BUILD, CLUSTER).reason
    assert "is of build 6; build 7 is here" in refuse_message(late(message), HUB, BUILD, CLUSTER).reason
    assert refuse_message(message, HUB, 0, ()) is not None  # nothing is planned here


@pytest.mark.parametrize("message", OF_CLUSTER, ids=lambda message: type(message).__name__)
def test_what_stages_say_to_each_other_is_admitted_from_this_cluster_and_build(message: Message) -> None:
    assert refuse_message(message, NEXT, BUILD, CLUSTER) is None
    for sender in (FAR, HUB):
        assert "is not in this cluster" in refuse_message(message, sender, BUILD, CLUSTER).reason
    assert "is of build 6; build 7 is here" in refuse_message(late(message), NEXT, BUILD, CLUSTER).reason


@pytest.mark.parametrize(
    "message", [PART, AnchorQuery(1, SegmentId(0), RoundId(0)), BlobRequest("0" * 64, 0, 1)]
)
def test_rings_and_content_are_for_everybody_in_the_plan(message: Message) -> None:
    assert refuse_message(message, FAR, BUILD, CLUSTER) is None
    assert "not in the plan" in refuse_message(message, None, BUILD, CLUSTER).reason


def test_orders_without_a_build_and_a_new_plan_are_admitted_from_the_hub() -> None:
    new = PlanOrder(BUILD + 1, 10, 0, None, (), (), ())
    for message in (Welcome(ME, 1.0), Stop("over"), RoundAbort(RoundId(1), "x"), new):
        assert refuse_message(message, HUB, BUILD, CLUSTER) is None
        assert refuse_message(message, FAR, BUILD, CLUSTER) is not None
    assert refuse_message(new, HUB, 0, ()) is None
    assert refuse_message(Refused("not here", "0" * 64), FAR, BUILD, CLUSTER) is None


def test_every_order_of_the_protocol_is_for_the_hub_alone() -> None:
    kinds = {get_origin(kind) or kind for kind in get_args(Message)}
    orders = [kind for kind in kinds if kind.__name__.endswith("Order")]
    assert BackupOrder in orders
    for kind in orders:
        message = object.__new__(kind)
        assert "only the hub" in refuse_message(message, FAR, BUILD, CLUSTER).reason
