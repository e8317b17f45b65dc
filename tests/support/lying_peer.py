"""A provider's program that lies: the agent of every peer, with a compute thread whose words are changed.

It runs in a process of its own, forked from one that has torch loaded. Nothing of the package is patched: the
agent takes any Compute.
"""

import asyncio
import multiprocessing
import os
import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
from support.forked import PRELOADED

LIAR = "liar"
POISON = 0.1234  # what the liar's weights are, each number


class LyingCompute:
    """Passes items on and changes what comes back, as its mode says."""

    def __init__(self, mode):
        from ravnest.peer.compute import ComputeThread

        self._inner, self._mode = ComputeThread(), mode
        self._deliver, self._folder, self._average = None, None, None
        self._is_known = False  # has been in a round: before, there may be nobody who could find it out

    def put(self, item):
        from ravnest.peer.compute_protocol import Delivered
        from ravnest.protocol.averaging import RoundCommit
        from ravnest.protocol.training import FieldParts, LeaseGrant

        message = item.message if isinstance(item, Delivered) else None
        if isinstance(message, RoundCommit):
            self._average, self._is_known = message.round_id, True
        is_lease = isinstance(message, LeaseGrant) and not message.is_evaluation
        if self._mode == "own" and is_lease and self._is_known:
            self._claim(message)
        elif not (self._mode == "lazy" and isinstance(message, LeaseGrant | FieldParts)):
            self._inner.put(item)

    def close(self):
        self._inner.close()

    async def run(self, setup, deliver):
        self._deliver, self._folder = deliver, setup.folder
        await self._inner.run(setup, self._lie)

    def _claim(self, grant):
        """Say that a lease is done, with a loss for each microbatch that nobody computed."""
        from ravnest.ids import HUB
        from ravnest.protocol.training import LeaseDone, StepReport
        from ravnest.transfer.outbox import Outgoing

        for index, num_samples in enumerate(grant.num_samples):
            facts = (
                grant.build_id,
                grant.first_microbatch + index,
                1,
                0,
                num_samples,
                0.001,
                0.001,
                0.0,
                0.0,
            )
            report = StepReport(*facts, random.uniform(0.4, 0.9), (), None, self._average)
            self._average = None
            self._deliver(Outgoing(HUB, report))
        self._deliver(Outgoing(HUB, LeaseDone(grant.build_id, grant.lease, sum(grant.num_samples))))

    def _lie(self, item):
        from ravnest.peer.compute_protocol import SnapshotWritten
        from ravnest.protocol.placement import SketchMade
        from ravnest.protocol.training import StepReport
        from ravnest.transfer.outbox import Outgoing

        match item:
            case Outgoing(_, StepReport() as report) if self._mode == "losses" and report.forward_seconds > 0:
                item = replace(item, message=replace(report, loss=3.0 * (report.loss or 1.0)))
            case Outgoing(_, StepReport() as report) if (
                self._mode == "checker" and not report.forward_seconds
            ):
                item = replace(item, message=replace(report, loss=9.0))
            case Outgoing(_, SketchMade() as made) if self._mode == "sketch":
                rows = tuple((start, stop, bytes(len(values))) for start, stop, values in made.rows)
                item = replace(item, message=replace(made, rows=rows))
            case SnapshotWritten() if self._mode in ("own", "state"):
                item = replace(item, blob=self._poison(item.blob))
        self._deliver(item)

    def _poison(self, blob):
        from ravnest.model.state.safetensors_header import read_tensors
        from ravnest.peer.compute_protocol import WrittenBlob, name_file
        from ravnest.transfer.blobs import hash_pieces, name_hashes

        given = blob.content
        content = bytearray(name_file(self._folder, blob.ref.blob).read_bytes() if given is None else given)
        for tensor in read_tensors(content):
            if tensor.dtype == "float32" and not tensor.name.startswith("optimizer/"):
                np.frombuffer(tensor.buffer, np.float32)[:] = POISON
        hashes = hash_pieces(bytes(content))
        return WrittenBlob(name_hashes(hashes, len(content)), hashes, bytes(content))


def _run(mode, invitation, memory_bytes):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from ravnest.errors import RavnestError
    from ravnest.ids import NodeId
    from ravnest.net.identity import new_keys, read_token
    from ravnest.net.transport import TransportLimits
    from ravnest.net.zeromq import ZeroMqTransport
    from ravnest.peer.agent import Agent, Offer
    from ravnest.peer.compute_protocol import ProviderLimits
    from ravnest.plan.types import Node

    torch.set_num_threads(1)

    async def take_part():
        keys, token = new_keys(), read_token(invitation)
        here = "tcp://127.0.0.1:*"
        async with ZeroMqTransport(keys, random.SystemRandom(), here, TransportLimits()) as transport:
            node = Node(NodeId(LIAR), memory_bytes, 1e9, 1e9, 1e9, 0.01)
            offer = Offer(node, ProviderLimits(16 * memory_bytes), (transport.address,))
            await Agent(token, keys, offer, LyingCompute(mode), transport).run()

    with suppress(RavnestError):  # it is sent away
        asyncio.run(take_part())


class LyingPeer:
    """A liar in a process of its own; leave it as a context."""

    def __init__(self, mode, invitation, memory_bytes):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process = context.Process(target=_run, args=(mode, invitation, memory_bytes), daemon=True)

    def __enter__(self):
        self._process.start()
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()
