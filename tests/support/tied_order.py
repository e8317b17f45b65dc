"""Delivers messages to the pure state machine of tied weights, as the dispatcher of a stage does."""

from typing import Any, TypeVar

from ravnest.averaging.tied import Addressed, TiedOrder
from ravnest.protocol.averaging import TiedCall, TiedGradient, TiedHolder, TiedMessage
from ravnest.protocol.messages import Refusal

V = TypeVar("V", bound=Any)


def deliver(order: TiedOrder[V], sender: str, message: TiedMessage[V]) -> Addressed[V] | Refusal:
    """Pass a message to its handler."""
    match message:
        case TiedHolder():
            return order.receive_holder(sender, message)
        case TiedCall():
            return order.receive_call(sender, message)
        case TiedGradient():
            return order.receive_gradient(sender, message)
        case _:
            return order.receive_step(sender, message)
