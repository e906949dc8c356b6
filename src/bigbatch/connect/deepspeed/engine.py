"""DeepSpeed's engine, whose accumulation and micro-batch follow an AdaptiveBatch."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import log_dist
from torch import Tensor, nn

from bigbatch.act.announced import Announced
from bigbatch.act.samples import Batch, count_samples
from bigbatch.checkpoint import RankStates
from bigbatch.connect.deepspeed.source import ZeroSource
from bigbatch.connect.driven import Driven
from bigbatch.errors import BatchError, GradientError, LoopError
from bigbatch.loop import AdaptiveBatch
from bigbatch.step import share_of

_STATE = "bigbatch"  # its key in a checkpoint's client state


class AdaptiveEngine(DeepSpeedEngine):
    """DeepSpeed's engine: `backward`, `step` and its checkpoints know of the batch that adapts.

    Made of an engine by `adapt`; everything else is DeepSpeed's. `engine.bigbatch` is the
    AdaptiveBatch, `engine.bigbatch.record` what the last step was; `train_batch_size()`,
    `train_micro_batch_size_per_gpu()` and `gradient_accumulation_steps()` are those of the next.
    """

    bigbatch: AdaptiveBatch
    _driven: Driven
    _verbose: int
    _backwards: int  # since the last call of step
    _forwarded: int | None  # samples, if they can be counted
    global_samples: int  # DeepSpeed's
    lr_scheduler: Any  # likewise

    @classmethod
    def adapt(cls, engine: DeepSpeedEngine, train: AdaptiveBatch, verbose: int) -> None:
        """Specialises an engine in place.

        Args:
            engine: DeepSpeed's.
            train: over this engine.
            verbose: 0; 1 says every decision on rank 0; 2 on every rank.
        """
        engine.__class__ = cls
        engine.bigbatch = train
        engine._driven = Driven(train)
        engine._verbose = verbose
        engine._backwards, engine._forwarded = 0, None
        if isinstance(train.batches, Announced):
            engine.module.register_forward_pre_hook(engine._count, with_kwargs=True)
        engine._carry_out_plan()

    def batches(self) -> Iterator[Batch]:
        """Micro-batches of one pass over the loader."""
        for batch in self._driven:
            self.tput_timer.start()
            yield batch

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | None = None,
    ) -> Tensor:
        """As DeepSpeed's, of the mean loss of a micro-batch; sizes may differ.

        Args:
            loss: one number.
            retain_graph: as DeepSpeed's.
            scale_wrt_gas: as DeepSpeed's, of what is returned.
            weight: what the mean is taken over, where that is not the samples: tokens, say.
        """
        if isinstance(self.bigbatch.batches, Announced):
            self._driven.announce(self._forwarded or self.train_micro_batch_size_per_gpu())
        step = self._driven.step
        self._require_own_boundary()
        with step.counted(loss, weight) as factor:
            super().backward(share_of(loss, factor), retain_graph, scale_wrt_gas=False)
        self._backwards += 1
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As DeepSpeed's; at the end of the accumulation it decides on the next batch too."""
        if not self._backwards:
            raise LoopError(
                "engine.step() without engine.backward(loss) before it; loss.backward() goes past "
                "the engine, and its gradient is not counted"
            )
        self._backwards = 0
        if not self._driven.step.complete:
            self.set_gradient_accumulation_boundary(False)
            super().step(lr_kwargs)
            return
        samples = self.global_samples
        with self._driven.step.updating() as finite:
            self._step_once(lr_kwargs, finite=finite)
        record = self.bigbatch.record
        assert record is not None
        self.global_samples = samples + record.batch_size
        self._carry_out_plan()
        if self._verbose:
            log_dist(
                f"batch size {record.batch_size}, similarity {record.similarity:.4f}: next "
                f"{self.train_batch_size()} ({record.decision.reason})",
                ranks=[0] if self._verbose == 1 else [-1],
            )

    def was_step_applied(self) -> bool:
        """As DeepSpeed's; False too where stage 0 was kept from a gradient that is not finite."""
        record = self.bigbatch.record
        return super().was_step_applied() and not (record is not None and record.skipped)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        **more: Any,
    ) -> bool:
        """As DeepSpeed's, and all of the AdaptiveBatch; between two steps.

        Raises:
            LoopError: inside the accumulation.
        """
        state = {**(client_state or {}), _STATE: RankStates(self.bigbatch).state_dict()}
        saved: bool = super().save_checkpoint(save_dir, tag, state, **more)
        return saved

    def load_checkpoint(self, load_dir: str, tag: str | None = None, **more: Any) -> Any:
        """As DeepSpeed's; batch, micro-batch, accumulation and data go on where they were.

        With `load_module_only`, or without optimizer states, weights alone are loaded.
        """
        path, state = super().load_checkpoint(load_dir, tag, **more)
        own = (state or {}).pop(_STATE, None)
        if (
            own is not None
            and not more.get("load_module_only")
            and more.get("load_optimizer_states", True)
        ):
            RankStates(self.bigbatch).load_state_dict(own)
            self._driven.forget()
            self._carry_out_plan()
        return path, state

    def _count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """How many samples a forward has that a backward may follow."""
        if torch.is_grad_enabled():
            try:
                self._forwarded = count_samples((*args, *kwargs.values()))
            except BatchError:
                self._forwarded = None

    def _step_once(self, lr_kwargs: dict[str, Any] | None, *, finite: bool) -> None:
        """DeepSpeed's step; the scheduler is advanced in base batches, not here."""
        if not (finite or self.zero_optimization() or self.bfloat16_enabled()):
            self.zero_grad()  # it would apply them
        scheduler, self.lr_scheduler = self.lr_scheduler, None
        try:
            self.set_gradient_accumulation_boundary(True)
            super().step(lr_kwargs)
        finally:
            self.lr_scheduler = scheduler
        if finite and not super().was_step_applied():
            raise GradientError(
                "DeepSpeed left the step out though every gradient is finite: their norm is not; "
                "look at the loss, and go on from a checkpoint"
            )

    def _require_own_boundary(self) -> None:
        source = self.bigbatch.meter.source
        assert isinstance(source, ZeroSource)
        if self.is_gradient_accumulation_boundary() != source.boundary:
            raise LoopError(
                "somebody else set the gradient accumulation boundary; leave "
                "set_gradient_accumulation_boundary, and a trainer's accumulation, out"
            )

    def _carry_out_plan(self) -> None:
        plan = self.bigbatch.plan
        self.set_train_micro_batch_size(plan.micro)
        self.set_train_batch_size(plan.batch_size)
        self.tput_timer.batch_size = plan.batch_size
