"""Optimizers that read the gradient of each micro-batch, as a training loop sees them."""

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.gradients import GradientSource
from bigbatch.optim.layer_gsnr import LayerGsnr


class MeanGradientNorm(Protocol):
    """Knows the norm of the mean gradient where `.grad` holds something else."""

    def clip_grad_norm_(self, max_norm: float, scaler: GradScaler | None = None) -> Tensor:
        """Clips as torch would clip the mean gradient; returns its norm before that."""


@runtime_checkable
class MicroBatchOptimizer(Protocol):
    """An optimizer that needs at least two micro-batches in a step, and better eight."""

    gsnr: LayerGsnr | None
    """What the last step did to each layer, where that is watched."""
    attached: MeanGradientNorm | None
    """Where `.grad` is not the mean gradient after the last backward."""

    def reduced_source(self) -> GradientSource | None:
        """Its own gradients, where a micro-batch is that of all ranks together (fully_shard)."""

    def bind_to_loop(self, source: GradientSource) -> None:
        """Reads its gradients from the source of a training loop, on one rank or many."""

    def describe(self) -> str:
        """What must be equal on all ranks, in words."""


def micro_batch_optimizer(optimizer: Optimizer) -> MicroBatchOptimizer | None:
    """The optimizer, if it reads the gradient of each micro-batch."""
    return optimizer if isinstance(optimizer, MicroBatchOptimizer) else None
