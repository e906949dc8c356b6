"""A process as torchrun starts it, as far as accelerate looks: for tests on `ranks`."""

import os
from contextlib import contextmanager

from accelerate.state import AcceleratorState


@contextmanager
def launched(rank, ranks):
    """Inside, accelerate finds so many processes; it keeps nothing of an earlier test."""
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # unused: the group is there
    }
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)
