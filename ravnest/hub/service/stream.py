"""The stream of a hub: everything that happens in it, for any number of readers.

A reader sees each event and each report of a stage (telemetry, which is in no log) with the actions that
followed. Status and the live view subscribe a callback. A web page follows an async iterator: one that reads
too slowly loses the oldest happenings, and never delays the hub.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ravnest.hub.coordinator.events import Action, Event

Reader = Callable[[Event, tuple[Action, ...]], None]
_MOST_WAITING = 1_000  # happenings that a slow reader may still get


@dataclass(frozen=True, slots=True)
class Happening:
    """An event or a report, and what the coordinator wants done because of it."""

    event: Event
    actions: tuple[Action, ...]


class HubStream:
    """One writer, the service; readers come and go."""

    def __init__(self) -> None:
        self._readers: dict[int, Reader] = {}
        self._next_reader = 0

    def publish(self, event: Event, actions: tuple[Action, ...]) -> None:
        """Show a happening to all readers."""
        for reader in tuple(self._readers.values()):
            reader(event, actions)

    def subscribe(self, reader: Reader) -> Callable[[], None]:
        """Call a reader at every happening from now on; return what ends that."""
        number, self._next_reader = self._next_reader, self._next_reader + 1
        self._readers[number] = reader

        def unsubscribe() -> None:
            self._readers.pop(number, None)

        return unsubscribe

    async def follow(self, most_waiting: int = _MOST_WAITING) -> AsyncIterator[Happening]:
        """Yield every happening from the first step of the iterator on, as fast as it is read."""
        waiting: asyncio.Queue[Happening] = asyncio.Queue(most_waiting)

        def put(event: Event, actions: tuple[Action, ...]) -> None:
            if waiting.full():
                waiting.get_nowait()
            waiting.put_nowait(Happening(event, actions))

        unsubscribe = self.subscribe(put)
        try:
            while True:
                yield await waiting.get()
        finally:
            unsubscribe()
