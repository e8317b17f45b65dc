"""Each message for a stage has one handler, found once; and only plain data crosses to compute and back."""

import dataclasses
import enum
import types
from collections.abc import Sequence
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import pytest

from ravnest.ids import HUB, LeaseId, MicrobatchId, NodeId, RoundId, SegmentId
from ravnest.peer.compute_protocol import ComputeFailed, ComputeSetup, FromCompute, ToCompute
from ravnest.peer.stage_host import RunningStage
from ravnest.protocol.averaging import (
    AnchorPart,
    AnchorQuery,
    RingPart,
    RoundAbort,
    RoundCommit,
    RoundOpen,
    TiedCall,
    TiedGradient,
    TiedHolder,
    TiedStep,
)
from ravnest.protocol.membership import Stop
from ravnest.protocol.messages import Message, Refusal
from ravnest.protocol.tensors import TensorSpec
from ravnest.protocol.training import (
    Activation,
    DroppedMicrobatch,
    FieldParts,
    Gradient,
    LearningRate,
    LeaseDone,
    LeaseGrant,
    Pace,
    StepReport,
)

MICROBATCH, ROUND, SEGMENT = MicrobatchId(0), RoundId(1), SegmentId(0)
SPEC = TensorSpec("float32", (1,), "fp32")
HANDLERS = {
    "worker.start_lease": LeaseGrant(1, LeaseId(0), False, MICROBATCH, (4,)),
    "worker.receive_fields": FieldParts(1, MICROBATCH, ()),
    "worker.receive_activation": Activation(1, MICROBATCH, False, 4, ()),
    "worker.receive_gradient": Gradient(1, MICROBATCH, ()),
    "worker.drop_microbatch": DroppedMicrobatch(1, MICROBATCH, "not finite"),
    "worker.set_rate": LearningRate(1, 0, 0.1),
    "worker.timekeeper.follow_pace": Pace(1, 0, 1, 1, True),
    "worker.timekeeper.record_report": StepReport(1, MICROBATCH, 0, 0, 4, 0.0, 0.0, 0.0, 0.0, None, ()),
    "averager.open": RoundOpen(1, ROUND, 1.0, False, False, ()),
    "averager.receive_outcome": RoundCommit(ROUND),
    "averager.receive_part": RingPart(ROUND, SEGMENT, 0, 0, 1, 1.0, SPEC),
    "averager.receive_query": AnchorQuery(1, SEGMENT, ROUND),
    "averager.receive_anchor": AnchorPart(1, SEGMENT, ROUND, 0, SPEC),
    "worker.tied.receive_holder": TiedHolder(1, 0, 4, False),
    "worker.answer_tied_call": TiedCall(1, 1, (), False),
    "worker.tied.receive_gradient": TiedGradient(1, 1, ()),
    "worker.tied.receive_step": TiedStep(1, 1, None, ()),
}


class Recorder:
    """Stands for a part of a stage, and records which of its methods are called."""

    is_empty = False

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, name: str) -> "Recorder":
        return Recorder(f"{self._name}.{name}", self._calls)

    def __call__(self, *_: object) -> None:
        self._calls.append(self._name)


def make_stage(calls: list[str]) -> RunningStage:
    return RunningStage(Recorder("worker", calls), Recorder("averager", calls), lambda: 0.0)


@pytest.mark.parametrize(("handler", "message"), HANDLERS.items(), ids=HANDLERS)
def test_a_message_reaches_its_handler_and_no_other(handler: str, message: Message) -> None:
    calls: list[str] = []
    make_stage(calls).receive(message, (b"0000",), NodeId("other"))
    assert calls == [handler]


def test_an_abort_goes_where_a_commit_does_and_what_is_for_others_is_refused() -> None:
    calls: list[str] = []
    stage = make_stage(calls)
    stage.receive(RoundAbort(ROUND, "somebody died"), (), HUB)
    assert calls == ["averager.receive_outcome"]
    for message in (LeaseDone(1, LeaseId(0), 4), Stop("over")):
        assert isinstance(stage.receive(message, (), HUB), Refusal)
    assert len(calls) == 1


def test_a_stage_without_tied_weights_refuses_what_is_about_them() -> None:
    calls: list[str] = []
    stage = make_stage(calls)
    stage.worker.tied = Recorder("tied", calls)
    stage.worker.tied.is_empty = True
    for kind in ("worker.tied.receive_holder", "worker.answer_tied_call", "worker.tied.receive_step"):
        assert isinstance(stage.receive(HANDLERS[kind], (), NodeId("other")), Refusal)
    assert not calls


PLAIN = (int, float, str, bool, bytes, bytearray, memoryview, type(None))


def find_foreign(hint: Any) -> list[str]:
    """Return what in a type is no plain data: numbers, text, bytes, tuples and frozen records of them."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in PLAIN or hint is ... or isinstance(hint, TypeVar):
        return []
    if isinstance(hint, NewType):
        return find_foreign(hint.__supertype__)
    if origin is Annotated:
        return find_foreign(inner[0])
    if origin in (Union, types.UnionType, tuple, Sequence):
        return [each for part in inner for each in find_foreign(part)]
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return []
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:
        return [
            f"{kind.__name__}.{name}: {each}"
            for name, part in get_type_hints(kind).items()
            for each in find_foreign(part)
        ]
    return [str(hint)]


def test_only_plain_data_crosses_between_agent_and_compute() -> None:
    assert find_foreign(Union[ToCompute, FromCompute, ComputeSetup]) == []  # noqa: UP007

    @dataclasses.dataclass(frozen=True)
    class Leak:
        work: types.FunctionType
        numbers: list

    assert find_foreign(Leak) == [f"Leak.work: {types.FunctionType}", f"Leak.numbers: {list}"]


def test_an_error_of_an_unknown_class_crosses_as_a_plain_one() -> None:
    for kind in ("Union", "NoSuchError", "annotations", "__name__"):
        error = ComputeFailed(kind, "it broke").error
        assert (type(error).__name__, str(error)) == ("RavnestError", "it broke")
