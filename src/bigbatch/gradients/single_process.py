"""Gradients of plain tensors in one process: a hook on each leaf parameter."""

from collections.abc import Iterable

from torch import Tensor

from bigbatch.gradients.grad_guard import GradGuard
from bigbatch.gradients.leaf_tap import LeafTap
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.gradients.source import GradientSource

_UNSHARED = (
    "{ranks} ranks found, and a model that none of them shares; wrap it in "
    "DistributedDataParallel or fully_shard, and hand over the wrapped model"
)


class SingleProcessSource(GradientSource):
    """Leaf hooks in one process; on several it refuses the first step."""

    def __init__(
        self, parameters: Iterable[Tensor], *, explicit: bool = False, unshared: str = _UNSHARED
    ) -> None:
        reducer = RankReducer(unshared)
        super().__init__(parameters, LeafTap(), GradGuard(), reducer, explicit=explicit)
