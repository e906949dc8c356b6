"""Bytes that a process really sends: the kernel's counts of its TCP sockets."""

import os
import socket
import struct
import sys
from typing import Any

import torch.distributed as dist

# offsets of tcpi_bytes_sent and tcpi_bytes_retrans in Linux's struct tcp_info, since 4.19
_SENT, _RETRANSMITTED = 200, 208

Connection = tuple[Any, Any]  # address and port of the local and of the remote end


def bytes_by_connection() -> dict[Connection, int] | None:
    """Bytes that each connected TCP socket has sent since it was opened, without retransmissions.

    None where the system does not count them.
    """
    if sys.platform != "linux":
        return None
    totals: dict[Connection, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(int(name))) as connected:
                connection = connected.getsockname()[:2], connected.getpeername()[:2]
                info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, listening, or of another family
            continue
        if len(info) < _RETRANSMITTED + 8:
            return None
        sent, retransmitted = struct.unpack_from("=QQ", info, _SENT)
        totals[connection] = sent - retransmitted
    return totals


class SocketBytes:
    """Bytes that this rank sends to each other rank between `start()` and `sent()`. Collective.

    A barrier at either end waits until all bytes have arrived; its own bytes are subtracted.
    """

    def __init__(self) -> None:
        self._barrier = [0] * dist.get_world_size()
        self.start()
        self._barrier = self.sent() or self._barrier

    def start(self) -> None:
        """Starts counting."""
        dist.barrier()
        self._before = bytes_by_connection()

    def sent(self) -> list[int] | None:
        """Bytes that were sent to each rank; None where unknown."""
        dist.barrier()
        after = bytes_by_connection()
        rank_addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rank_addresses, [local for local, _ in after or ()])
        if after is None or self._before is None:
            return None
        rank_of = {address: rank for rank, local in enumerate(rank_addresses) for address in local}
        totals = [-size for size in self._barrier]
        for connection, size in after.items():
            _, remote = connection
            if remote in rank_of:
                totals[rank_of[remote]] += size - self._before.get(connection, 0)
        return totals
