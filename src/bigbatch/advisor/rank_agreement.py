"""Makes sure that every rank runs under advice before one waits for the others."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = "bigbatch/advise"
_PATIENCE = timedelta(seconds=60)


def sign_in(refusal: str) -> str:
    """Tells all ranks what this one has found, and returns the first refusal of any of them.

    It uses the store of the default process group, no collective: a rank without advice would leave
    the others waiting in one, or answer it by one of its own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return refusal
    store: Any = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = store.add(f"{_KEY}/count/{rank}", 1)  # a process may be observed several times
    store.set(f"{_KEY}/{number}/{rank}", refusal or "-")
    if refusal:
        return refusal
    for other in range(ranks):
        try:
            store.wait([f"{_KEY}/{number}/{other}"], _PATIENCE)
        except Exception:
            return (
                f"rank {other} of {ranks} does not run under advise: start all of them by it, "
                "`torchrun ... -m bigbatch advise train.py`, and not by a launcher inside the "
                "script"
            )
        found = store.get(f"{_KEY}/{number}/{other}").decode()
        if found != "-":
            return f"rank {other}: {found}"
    return ""
