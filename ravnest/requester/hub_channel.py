"""Requests to a hub that runs, from other programs of its user on this PC, over loopback.

A hub with a folder listens while it trains, and notes the port in hub.json. A request must prove the hub's
own key, which lies in that file: whoever may read it is the requester. Lines of JSON go both ways, each of
bounded size: a request, then pieces of the answer. No torch in here.
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
_PURPOSE = b"ravnest hub channel"

_Name = Annotated[str, Meta(min_length=1, max_length=300)]


class TextRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """A prompt, and how to go on with it."""

    prompt: Annotated[str, Meta(max_length=1 << 19)]
    is_chat: bool = False
    max_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class RevokeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="revoke"):
    """Withdraw the invitation of a guest."""

    name: _Name


class KickRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="kick"):
    """Send a node away."""

    node: _Name


class CheckpointRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checkpoint"):
    """Write what was trained down now."""


HubRequest = TextRequest | RevokeRequest | KickRequest | CheckpointRequest


class ProvenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request, and the proof that one may ask."""

    proof: Annotated[str, Meta(max_length=128)]
    request: HubRequest


class AnswerPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text, perhaps the whole of a token; or the end, with the reason if it comes too early."""

    text: str = ""
    is_token: bool = False
    is_end: bool = False
    fault: str = ""
    is_mistake: bool = False  # of whoever asked


Answer = Callable[[HubRequest], AsyncGenerator[tuple[int, str], None]]  # tokens (or -1) with their text


def prove_requester(hub_secret: bytes) -> str:
    """Return what shows that one knows the hub's own secret key."""
    return hmac.new(hub_secret, _PURPOSE, hashlib.sha256).hexdigest()


class ChannelServer:
    """Listens on loopback while a hub trains; `answer` carries out requests."""

    def __init__(
        self, hub_secret: bytes, answer: Answer, timeouts: ProgramTimeouts = TIMEOUTS.program
    ) -> None:
        self._proof, self._carry_out, self._timeouts = prove_requester(hub_secret), answer, timeouts
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
                await self._write(
                    writer, AnswerPiece(is_end=True, fault="others are asking; ask again later")
                )
                return
            await self._answer(reader, writer)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a line that is too long
            logger.debug("whoever asked is gone: %s", error)
        finally:
            self._num_readers -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._timeouts.channel_request_seconds):
            line = await reader.readline()
        try:
            asked = msgspec.json.decode(line, type=ProvenRequest)
        except msgspec.MsgspecError:
            await self._write(writer, AnswerPiece(is_end=True, fault="that is no request to a hub"))
            return
        if not hmac.compare_digest(asked.proof.encode(), self._proof.encode()):
            await self._write(
                writer, AnswerPiece(is_end=True, fault="the request does not prove the hub's key")
            )
            return
        fault, is_mistake = "", False
        try:
            async with contextlib.aclosing(self._carry_out(asked.request)) as pieces:
                async for token, text in pieces:
                    await self._write(writer, AnswerPiece(text, is_token=token >= 0))
        except RavnestError as error:
            fault, is_mistake = str(error), isinstance(error, ConfigError)
        await self._write(writer, AnswerPiece(is_end=True, fault=fault, is_mistake=is_mistake))

    async def _write(self, writer: asyncio.StreamWriter, piece: AnswerPiece) -> None:
        writer.write(msgspec.json.encode(piece) + b"\n")
        async with asyncio.timeout(self._timeouts.channel_request_seconds):
            await writer.drain()


def ask_hub(
    folder: Path, request: HubRequest, timeouts: ProgramTimeouts = TIMEOUTS.program
) -> Iterator[AnswerPiece]:
    """Yield the pieces of the answer of the hub that runs in a folder, or raise what is wrong."""
    file = read_hub_file(folder)
    if file.process is None or not file.channel_port:
        told = "no hub is at work" if file.process is None else "the hub trains no model yet"
        raise RavnestError(f"{told} in {folder}")
    asked = ProvenRequest(prove_requester(file.keys.secret), request)
    try:
        with socket.create_connection(
            (_HERE, file.channel_port), timeouts.channel_request_seconds
        ) as connection:
            connection.settimeout(timeouts.channel_answer_seconds)
            connection.sendall(msgspec.json.encode(asked) + b"\n")
            with connection.makefile("rb") as lines:
                yield from _read(lines.readline)
    except OSError as error:
        raise RavnestError(f"the hub in {folder} does not answer: {error}") from None


def _read(read_line: Callable[[int], bytes]) -> Iterator[AnswerPiece]:
    while True:
        line = read_line(_MOST_LINE_BYTES)
        try:
            piece = msgspec.json.decode(line, type=AnswerPiece)
        except msgspec.MsgspecError:
            raise RavnestError("the hub ended before its answer did") from None
        if piece.fault:
            raise ConfigError(piece.fault) if piece.is_mistake else RavnestError(piece.fault)
        if piece.is_end:
            return
        yield piece
