"""An EventStore in memory, as the storage interface of the hub asks for; a test may let it fail."""

from collections.abc import Callable, Iterator

from ravnest.hub.coordinator.events import Event
from ravnest.hub.service.event_log import WritesAtOnce


class MemoryStore(WritesAtOnce):
    """Keeps events in a list; `check` sees each before it is kept, and may raise."""

    def __init__(self, check: Callable[[Event], None] = lambda _: None) -> None:
        self.kept: list[Event] = []
        self._check = check

    def append(self, event: Event) -> None:
        self._check(event)
        self.kept.append(event)

    def events(self, after: int = 0) -> Iterator[Event]:
        return iter(self.kept[after:])

    def close(self) -> None:
        pass
