"""Where a hub listens, made sure of before a model is captured. Driven by job.swarm."""

import os
import socket

from ravnest.errors import ConfigError
from ravnest.net.addresses import is_everywhere, split_address, write_address


def claim_door(door: str) -> str:
    """Return the address with a free port if it left that open; raise ConfigError if it cannot be had."""
    host, port = split_address(door)
    place = None if is_everywhere(host) else host
    try:
        found = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(found[0], socket.SOCK_STREAM) as tried:
            if os.name == "posix":  # elsewhere this would let two share a port
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(found[4])
            return write_address(host, tried.getsockname()[1])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        fix = "choose another port or stop who has it, and an address of this PC"
        raise ConfigError(f"cannot listen at {host}:{port}: {reason}; {fix}") from None
