"""What a process really sends: the kernel's own counts of its TCP sockets."""

import os
import socket
import struct
import sys
from typing import Any

import torch.distributed as dist

_SENT, _AGAIN = 200, 208  # tcpi_bytes_sent and _retrans in Linux's struct tcp_info, since 4.19

Ends = tuple[Any, Any]  # address and port, here and there


def by_socket() -> dict[Ends, int] | None:
    """Bytes that each connected TCP socket has sent, once, since it was opened; None: unknown."""
    if sys.platform != "linux":
        return None
    seen: dict[Ends, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                ends = each.getsockname()[:2], each.getpeername()[:2]
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed since, listening, or of another family
            continue
        if len(info) < _AGAIN + 8:
            return None
        seen[ends] = _number(info, _SENT) - _number(info, _AGAIN)
    return seen


def _number(info: bytes, offset: int) -> int:
    number: int = struct.unpack_from("=Q", info, offset)[0]
    return number


class Wire:
    """Bytes that this rank sends to each other one between `start()` and `sent()`. Collective.

    A barrier at either end makes sure that all has arrived; its own bytes are taken off.
    """

    def __init__(self) -> None:
        self._barrier = [0] * dist.get_world_size()
        self.start()
        self._barrier = self.sent() or self._barrier

    def start(self) -> None:
        """Counts from here on."""
        dist.barrier()
        self._before = by_socket()

    def sent(self) -> list[int] | None:
        """To each rank; None where this is not known."""
        dist.barrier()
        now = by_socket()
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, [here for here, _ in now or ()])
        if now is None or self._before is None:
            return None
        ranks = {address: rank for rank, each in enumerate(addresses) for address in each}
        totals = [-own for own in self._barrier]
        for ends, count in now.items():
            if ends[1] in ranks:
                totals[ranks[ends[1]]] += count - self._before.get(ends, 0)
        return totals
