"""The environment that accelerate reads from torchrun, for tests on `ranks`."""

import os
from contextlib import contextmanager

from accelerate.state import AcceleratorState


@contextmanager
def launched(rank, ranks):
    """Inside, accelerate has `ranks` processes, and no state of an earlier test."""
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # unused: the process group exists
    }
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)
