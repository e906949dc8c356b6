"""Which operations reach a kernel, and which of them make the host wait."""

import contextlib
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# what makes the host wait: a number, a shape that depends on data, a comparison of whole tensors
WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "unique", "masked_select")


class Recorded(TorchDispatchMode):
    """Every operation that reaches a kernel, by name; backwards of a CPU run in this thread.

    `moved` has the copies to another device that the host waits for.
    """

    def __init__(self):
        super().__init__()
        self.seen = Counter()
        self.moved = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen[func.overloadpacket.__name__] += 1
        before = {x.device for x in args if isinstance(x, torch.Tensor)}
        after = {result.device} if isinstance(result, torch.Tensor) else set()
        if before and not after <= before and not (kwargs or {}).get("non_blocking"):
            self.moved.append(func.overloadpacket.__name__)
        return result

    @property
    def waits(self):
        return {name: self.seen[name] for name in WAITS if self.seen[name]}


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that operations make, as views of nothing that they were given."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for made in map(torch.Tensor.untyped_storage, tensors_in(result)):
            self.bytes += made.nbytes() * (made.data_ptr() not in given)
        return result


def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


@contextlib.contextmanager
def no_synchronization():
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
