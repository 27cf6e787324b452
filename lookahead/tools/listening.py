"""Take a port, which needs neither torch nor transformers: importing these takes seconds, and loading a model more."""

import errno
import socket

from lookahead.tools.files import explained


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, one for each address of a host, all at one port. port: 0 is any free one.

    Connections wait until they are served. Raises ClickException if the port cannot be had. An address that the machine
    does not have, such as that of IPv6 in many containers, is left out if there is another.
    """
    sockets: list[socket.socket] = []
    with explained(f"cannot listen at {host}, port {port}; choose another --port or --host", OSError, UnicodeError):
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
