"""Text from a hub that runs, for other programs of its user on this PC, over loopback.

A hub with a folder listens while it trains, and notes the port in hub.json. Whoever may read that file knows
the secret that a request must prove. Lines of JSON go both ways, each of bounded size. No torch in here.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ravnest.config import TIMEOUTS, ProgramTimeouts
from ravnest.errors import ConfigError, RavnestError
from ravnest.requester.run_folder import read_hub_file

logger = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_MOST_LINE_BYTES = 1 << 20
_MOST_READERS = 8
_PURPOSE = b"ravnest text"


class TextRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, how to go on with it, and the proof that one may ask."""

    proof: Annotated[str, Meta(max_length=128)]
    prompt: Annotated[str, Meta(max_length=1 << 19)]
    is_chat: bool = False
    max_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class TextPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token and the text that it completes; or the end, with the reason if it comes too early."""

    text: str = ""
    is_token: bool = False
    is_end: bool = False
    fault: str = ""
    is_mistake: bool = False  # of whoever asked


WriteText = Callable[[TextRequest], AsyncGenerator[tuple[int, str], None]]


def prove_reader(secret: bytes) -> str:
    """Return what shows that one knows the secret of a hub."""
    return hmac.new(secret, _PURPOSE, hashlib.sha256).hexdigest()


class TextServer:
    """Listens on loopback while a hub trains; `stream` goes on with the prompt of a request."""

    def __init__(
        self, secret: bytes, stream: WriteText, timeouts: ProgramTimeouts = TIMEOUTS.program
    ) -> None:
        self._proof, self._stream = prove_reader(secret), stream
        self._seconds = timeouts.text_request_seconds
        self._num_readers = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Listen on a free port, which is given."""
        server = await asyncio.start_server(self._serve, _HERE, 0, limit=_MOST_LINE_BYTES)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_readers += 1
        try:
            if self._num_readers > _MOST_READERS:
                await self._write(writer, TextPiece(is_end=True, fault="others are asking; ask again later"))
                return
            await self._answer(reader, writer)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a line that is too long
            logger.debug("a reader of texts is gone: %s", error)
        finally:
            self._num_readers -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._seconds):
            line = await reader.readline()
        try:
            request = msgspec.json.decode(line, type=TextRequest)
        except msgspec.MsgspecError:
            await self._write(writer, TextPiece(is_end=True, fault="that is no request for a text"))
            return
        if not hmac.compare_digest(request.proof, self._proof):
            await self._write(
                writer, TextPiece(is_end=True, fault="the request does not prove the hub's secret")
            )
            return
        fault, is_mistake = "", False
        try:
            async with contextlib.aclosing(self._stream(request)) as pieces:
                async for token, text in pieces:
                    await self._write(writer, TextPiece(text, is_token=token >= 0))
        except RavnestError as error:
            fault, is_mistake = str(error), isinstance(error, ConfigError)
        await self._write(writer, TextPiece(is_end=True, fault=fault, is_mistake=is_mistake))

    async def _write(self, writer: asyncio.StreamWriter, piece: TextPiece) -> None:
        writer.write(msgspec.json.encode(piece) + b"\n")
        async with asyncio.timeout(self._seconds):
            await writer.drain()


def request_text(
    folder: Path, timeouts: ProgramTimeouts = TIMEOUTS.program, **wishes: str | float | bool
) -> Iterator[TextPiece]:
    """Yield the pieces of a text from the hub that runs in a folder, or raise what is wrong."""
    file = read_hub_file(folder)
    if file.process is None or not file.text_port:
        told = "no hub is at work" if file.process is None else "the hub trains no model yet"
        raise RavnestError(f"{told} in {folder}; start it, or write on this PC: ravnest generate MODEL")
    try:
        request = msgspec.convert({"proof": prove_reader(file.secret), **wishes}, TextRequest)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this cannot be asked for: {error}") from None
    try:
        with socket.create_connection((_HERE, file.text_port), timeouts.text_request_seconds) as connection:
            connection.settimeout(timeouts.text_answer_seconds)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as lines:
                yield from _read(lines.readline)
    except OSError as error:
        raise RavnestError(f"the hub in {folder} does not answer: {error}") from None


def _read(read_line: Callable[[int], bytes]) -> Iterator[TextPiece]:
    while True:
        line = read_line(_MOST_LINE_BYTES)
        try:
            piece = msgspec.json.decode(line, type=TextPiece)
        except msgspec.MsgspecError:
            raise RavnestError("the hub ended before the text did") from None
        if piece.fault:
            raise ConfigError(piece.fault) if piece.is_mistake else RavnestError(piece.fault)
        if piece.is_end:
            return
        yield piece
