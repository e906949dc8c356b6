"""Optimizers that read the gradient of each micro-batch, as loops and engines see them."""

from typing import Protocol, runtime_checkable

from torch.optim import Optimizer

from bigbatch.gradients import GradientSource
from bigbatch.optim.ddp_comm_hook import DDPCommHook
from bigbatch.optim.gsnr_state import GradientScaling, GsnrState
from bigbatch.optim.layer_gsnr import LayerGsnr


@runtime_checkable
class MicroBatchOptimizer(Protocol):
    """An optimizer that needs at least two micro-batches in a step, and better eight."""

    base: Optimizer
    """The optimizer that steps along the scaled gradient."""
    gsnr_state: GsnrState
    """Moments of the micro-batch gradients, momentum of r, and options."""
    gsnr: LayerGsnr | None
    """What the last step did to each layer, where that is watched."""
    attached: DDPCommHook | None
    """The DDP communication hook after which `.grad` is not the mean gradient."""

    def reduced_source(self) -> GradientSource | None:
        """Its own source, where a micro-batch is that of all ranks together (fully_shard)."""

    def bind_to_loop(self, source: GradientSource) -> None:
        """Reads its gradients from the source of a training loop, on one rank or many."""

    def bind(self, source: GradientSource, scaling: GradientScaling | None = None) -> None:
        """Reads its gradients from the source of an engine, which `scaling` knows."""

    def scale_gradients(self) -> None:
        """Multiplies the gradients by r; an engine that steps `base` itself calls it before."""

    def describe(self) -> str:
        """What must be equal on all ranks, in words."""


def micro_batch_optimizer(optimizer: object) -> MicroBatchOptimizer | None:
    """The optimizer, if it reads the gradient of each micro-batch."""
    return optimizer if isinstance(optimizer, MicroBatchOptimizer) else None
