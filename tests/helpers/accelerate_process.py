"""The environment that accelerate reads from torchrun, for tests on `ranks`."""

import os
from contextlib import contextmanager
from unittest.mock import patch

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


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


@contextmanager
def sharding():
    """Inside, accelerate shards by fully_shard on CPUs too, where it takes DDP without a word.

    Its state chooses FSDP on accelerators only; here a plugin is enough.
    """
    construct = AcceleratorState.__init__

    def choose(self, *arguments, **options):
        construct(self, *arguments, **options)
        plugin = options.get("fsdp_plugin") or self._shared_state.get("fsdp_plugin")
        if plugin is not None:
            kind = DistributedType.FSDP
            self._shared_state.update(fsdp_plugin=plugin, distributed_type=kind)

    with patch.object(AcceleratorState, "__init__", choose):
        yield
