"""The port of a server, taken before a model loads. Importing this module does not import torch."""

from __future__ import annotations

import errno
import socket

OTHERS = (errno.EADDRINUSE, errno.EACCES)  # the port is no matter of one address


class PortError(ValueError):
    """A host or port that cannot be listened to."""


def listening(host: str, port: int) -> list[socket.socket]:
    """Sockets at all addresses of `host`, which clients may connect to before anybody answers.

    Args:
        port: 0: a free one, the same at each address.

    Raises:
        PortError: the port is taken, or the host is none of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PortError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
    sockets: list[socket.socket] = []
    reason: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        taken = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listening((family, kind, protocol), (address[0], taken, *address[2:])))
        except OSError as error:  # a machine without IPv6 may still name such an address
            reason = error
            if error.errno in OTHERS:
                break
    if not sockets or (reason is not None and reason.errno in OTHERS):
        for one in sockets:
            one.close()
        why = reason.strerror if reason is not None else "no address"
        raise PortError(f"port {port} at {host}: {why}; choose another with --port")
    return sockets


def _listening(kind: tuple[int, int, int], address: tuple) -> socket.socket:
    found = socket.socket(*kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if found.family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        found.listen(1024)  # at once: two sockets that are only bound may share a port
    except OSError:
        found.close()
        raise
    return found
