"""Free TCP ports for services whose addresses are written down before they start."""

import random
import socket

# Below the range that Linux hands out to outgoing connections, so that none of
# those takes a port between our choosing it and its service's binding it.
FIRST_PORT = 20_000
LAST_PORT = 32_000


def find_free_ports(count: int) -> list[int]:
    """Different ports on 127.0.0.1 that nothing listens on now."""
    ports: list[int] = []
    candidates = random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    for port in candidates:
        if len(ports) == count:
            return ports
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    raise OSError(f"fewer than {count} free ports between {FIRST_PORT} and {LAST_PORT}")
