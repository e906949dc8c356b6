"""Gradients under DistributedDataParallel: leaf hooks see each rank's own, `.grad` is the mean."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import SettingError
from bigbatch.measure.source.engine import EngineSource


class DDPSource(EngineSource):
    """Leaf hooks, as in one process: DDP reduces after them, so they see the local gradient.

    With and without `no_sync`; the last backward of a step has to reduce.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Iterable[Tensor]) -> None:
        group = ddp.process_group
        self.rank = dist.get_rank(group)
        self.ranks = self.replicas = dist.get_world_size(group)
        self._ddp = ddp
        shared = set(ddp.parameters())
        parameters = list(parameters)
        if any(p.requires_grad and p not in shared for p in parameters):
            raise SettingError("a parameter stands outside the DDP wrapper, so no rank shares it")
        super().__init__(parameters, [group])

    def synchronize(self, now: bool) -> None:
        """As `no_sync` does: DDP reads it in the forward, so it is set before that."""
        self._ddp.require_backward_grad_sync = now
