"""Listen on a port. This module imports neither torch nor transformers, so a busy port is reported at once."""

import errno
import socket

from lookahead.tools.files import explained


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, one for each address of a host, all on one port. port: 0 means any free port.

    Connections wait until they are served. An address that the machine does not have, such as IPv6 in many containers,
    is left out if there is another. Raises ClickException if the port is not available.
    """
    sockets: list[socket.socket] = []
    with explained(f"cannot listen on {host}, port {port}; choose another --port or --host", OSError, UnicodeError):
        missing: OSError | None = None
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            try:
                one = socket.create_server((address[0], port), family=family, backlog=2048)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            port = one.getsockname()[1]
            sockets.append(one)
        if missing is not None and not sockets:
            raise missing
    return sockets
