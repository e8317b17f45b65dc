"""The program that computes: an agent starts it, as a process of its own.

It closes its first fences while it has one thread, and only then loads torch: `compute` goes on. It ends
when the agent does.
"""

import json
import os
import socket
import sys

from ravnest.peer.fences import FenceWishes, close_early


def run_compute(descriptor: int, wishes: str) -> None:
    """Compute at this end of a pair of sockets until the other one is closed."""
    end_of_pair = socket.socket(fileno=descriptor)
    end_of_pair.set_inheritable(False)  # no program that it starts holds the border open
    given = json.loads(wishes)
    given |= {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    known = FenceWishes(**given)
    fences = close_early(known)
    from ravnest.peer.compute import serve_agent  # it loads torch

    code = serve_agent(end_of_pair, known, fences)
    sys.stderr.flush()
    os._exit(code)  # threads of libraries are not waited for
