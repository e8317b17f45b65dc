"""What commands work with: timeouts, limits, the hub's parts, this PC. A caller may give others.

`program.main(args, obj=CommandParts(...))` runs a command with other parts than the usual ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ravnest.config import TIMEOUTS, Timeouts

if TYPE_CHECKING:  # each of them loads more than most commands need
    from ravnest.hub.service.server import HubParts
    from ravnest.peer.capabilities import Machine
    from ravnest.plan.types import Plan


@dataclass(frozen=True, slots=True)
class CommandParts:
    """The parts that commands are built of; None is the usual one, loaded when it is needed."""

    timeouts: Timeouts = TIMEOUTS
    max_file_bytes: int = 1 << 29  # of a file to read; a million nodes take half of it
    hub: "HubParts | None" = None
    machine: "Machine | None" = None
    make_transport: Callable[..., Any] | None = None
    form_plan: "Callable[..., Plan] | None" = None

    @property
    def hub_parts(self) -> "HubParts":
        """The parts of a hub."""
        from ravnest.hub.service.server import HubParts

        return HubParts(timeouts=self.timeouts) if self.hub is None else self.hub


def find_parts() -> CommandParts:
    """Return the parts that the running command was given."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.find_object(CommandParts)
    return CommandParts() if found is None else found
