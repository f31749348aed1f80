"""Which address this node announces to other ranks, and over which network interface it talks to them."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def find_own_address(peer: str) -> str:
    """Return the address from which this node reaches `peer`, as the routing table says; nothing is sent.

    For an address of this node that is the address itself. No host name is resolved: /etc/hosts often maps a node's
    own name to 127.0.1.1, where no other node finds it.

    Raises:
        OSError: there is no route to `peer`.
    """
    family, kind, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]  # the port does not matter
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None if none has it (in 127.0.0.0/8 all but one)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
