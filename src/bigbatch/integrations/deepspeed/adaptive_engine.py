"""DeepSpeed's engine with accumulation and micro-batch size from an AdaptiveBatch."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import print_dist
from torch import Tensor, nn

from bigbatch.data.collate import Batch, count_samples
from bigbatch.data.external_batches import ExternalBatches
from bigbatch.errors import BatchError, LoopError
from bigbatch.integrations.deepspeed.engine_steps import EngineSteps
from bigbatch.integrations.deepspeed.simigrad_config import (
    GRADIENT_STEP_SIZE,
    AdaptiveBatchParams,
    fork_params,
)
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.distributed_state import DistributedState
from bigbatch.training.loss_weights import weighted_loss

_STATE_KEY = "bigbatch"  # in the client state of a checkpoint


class AdaptiveEngine(DeepSpeedEngine):
    """DeepSpeed's engine whose `backward`, `step` and checkpoints follow an adaptive batch size.

    `adapt` makes it of an engine; everything else is DeepSpeed's. `engine.bigbatch` is the
    AdaptiveBatch, `engine.bigbatch.record` the record of the last step; `train_batch_size()`,
    `train_micro_batch_size_per_gpu()` and `gradient_accumulation_steps()` are those of the next.
    It has the attributes that the SimiGrad paper's scripts read, too: docs/deepspeed.md.
    """

    bigbatch: AdaptiveBatch
    gradient_step_size = GRADIENT_STEP_SIZE
    _loop: ExternalLoop
    _params: AdaptiveBatchParams
    _similarities: dict[int, float]  # by batch size, of its last measured step
    _backwards: int  # since the last call of `step`
    _micro_batches: int  # of the current optimizer step
    _assumes_samples: bool  # whether a micro-batch could not be counted
    _forward_samples: int | None  # of the forward before the next backward; 0 if not countable
    _pass: Iterator[Batch] | None  # the current pass over the loader

    @classmethod
    def adapt(
        cls, engine: DeepSpeedEngine, train: AdaptiveBatch, params: AdaptiveBatchParams
    ) -> None:
        """Specialises an engine in place."""
        engine.__class__ = cls
        engine.bigbatch = train
        engine._loop = ExternalLoop(train)
        engine._params, engine._similarities = params, {}
        engine._backwards, engine._micro_batches, engine._assumes_samples = 0, 0, False
        engine._forward_samples = engine._pass = None
        if isinstance(train.batches, ExternalBatches):
            engine.module.register_forward_pre_hook(engine._count_samples, with_kwargs=True)
        engine._apply_plan()

    @property
    def adaptive_batch_params(self) -> Mapping[str, Any]:
        """The parameters and the fork's state, such as the next `global_lr_modifier`; read-only."""
        train = self.bigbatch
        base = train.controller.base_batch
        return fork_params(self._params, base, train.lr_factor, self._similarities)

    @property
    def cos_placeholder(self) -> Tensor:
        """Similarity of the last measured step, 0-dim, on the CPU; nan before the first."""
        record = self.bigbatch.last_measured
        return torch.tensor(torch.nan if record is None else record.similarity)

    def batches(self) -> Iterator[Batch]:
        """Micro-batches of one pass over the loader; after a `break`, the rest of it."""
        try:
            self._pass = self._pass or iter(self._loop)
            for batch in self._pass:
                yield batch
                self._require_stepped()
        except Exception:
            self._pass = None
            raise
        self._pass = None

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | None = None,
    ) -> Tensor:
        """As DeepSpeed's, for the mean loss of a micro-batch; micro-batches may differ in size.

        Args:
            loss: the mean loss, a tensor of one number.
            retain_graph: as DeepSpeed's.
            scale_wrt_gas: as DeepSpeed's, for the returned loss.
            weight: number of items that the mean is taken over, if not samples (tokens, say).
        Raises:
            LoopError: a second backward for a micro-batch, or engine.step() was not called.
        """
        self._require_own_boundary()
        self._require_stepped()
        if self._announces:
            self._announce()
        with self._loop.step.weighted_backward(loss, weight) as factor:
            self._steps.backward(weighted_loss(loss, factor), retain_graph)
        self._backwards += 1
        self._micro_batches += 1
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As DeepSpeed's; at the end of the accumulation it also decides the next batch size.

        Raises:
            LoopError: engine.backward was not called before it.
        """
        if not self._backwards:
            raise LoopError(
                "engine.step() without engine.backward(loss) before it; loss.backward() bypasses "
                "the engine, and its gradient is not counted"
            )
        self._require_own_boundary()
        self._backwards = 0
        if not self._loop.step.complete:
            self._set_boundary()
            return
        with self._loop.step.optimizer_step() as finite:
            self._steps.step(self._loop.step.samples, finite=finite, lr_kwargs=lr_kwargs)
        record = self.bigbatch.record
        assert record is not None
        self._micro_batches = 0
        self._apply_plan()
        if record.statistics is not None:
            self._similarities[record.batch_size] = record.similarity
        if self._params.verbose:
            measured = f", similarity {record.similarity:.4f}" * (record.statistics is not None)
            print_dist(  # at any log level: DeepSpeed's is WARNING
                f"batch size {record.batch_size}{measured}: next "
                f"{self.train_batch_size()} ({record.decision.reason})",
                ranks=[0] if self._params.verbose == 1 else [-1],
            )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        **options: Any,
    ) -> bool:
        """As DeepSpeed's, with the state of the AdaptiveBatch; between two steps.

        Raises:
            LoopError: inside the accumulation.
        """
        self._require_between_steps("save_checkpoint")
        state = {**(client_state or {}), _STATE_KEY: DistributedState(self.bigbatch).state_dict()}
        return bool(super().save_checkpoint(save_dir, tag, state, save_latest, **options))

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **options: Any,
    ) -> Any:
        """As DeepSpeed's; restores batch size, micro-batch, accumulation and place in the data.

        With `load_module_only`, or without optimizer states, only weights are loaded.

        Raises:
            LoopError: inside the accumulation.
        """
        self._require_between_steps("load_checkpoint")
        flags = load_optimizer_states, load_lr_scheduler_states, load_module_only
        path, state = super().load_checkpoint(load_dir, tag, load_module_strict, *flags, **options)
        train_state = (state or {}).pop(_STATE_KEY, None)
        if path is None or load_module_only or not load_optimizer_states:
            return path, state
        if train_state is not None:
            DistributedState(self.bigbatch).load_state_dict(train_state)
            self._loop.forget()
            self._pass = None
            self._apply_plan()
        elif self.global_rank == 0:
            warnings.warn(
                f"{path} was saved without bigbatch: batch size, samples and place in the data "
                f"start again, at a batch of {self.train_batch_size()}",
                stacklevel=2,
            )
        return path, state

    @property
    def _announces(self) -> bool:
        """Whether micro-batches are the caller's."""
        return isinstance(self.bigbatch.batches, ExternalBatches)

    def _announce(self) -> None:
        if self._forward_samples is None:
            raise LoopError(
                "engine.backward(loss) without a forward of the engine before it, or a second time "
                "after one; sum the losses of a micro-batch and call it once"
            )
        samples, self._forward_samples = self._forward_samples, None
        self._loop.announce(samples or self._planned_samples())

    def _planned_samples(self) -> int:
        """Planned samples of a micro-batch, for one that cannot be counted; warns once."""
        samples: int = self.train_micro_batch_size_per_gpu()
        if not self._assumes_samples and self.global_rank == 0:
            warnings.warn(
                "the samples of a micro-batch cannot be counted from the arguments of the engine's "
                f"forward, and are assumed to be the planned {samples}; pass it tensors of one "
                "first size, and engine.backward(loss, weight=) the items that the mean is over",
                stacklevel=4,
            )
        self._assumes_samples = True
        return samples

    def _count_samples(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Counts the samples of a forward, if a backward may follow it."""
        evaluates = not module.training and self._forward_samples is not None
        if torch.is_grad_enabled() and not evaluates:
            self._forward_samples = _samples_in([*args, *kwargs.values()])

    def _require_own_boundary(self) -> None:
        if self.is_gradient_accumulation_boundary() != self._steps.boundary:
            raise LoopError(
                "somebody else set the gradient accumulation boundary; remove the call of "
                "set_gradient_accumulation_boundary, or a trainer's accumulation"
            )

    def _require_stepped(self) -> None:
        if self._micro_batches and self._loop.step.complete:
            raise LoopError(
                "the accumulation is complete and engine.step() was not called; call it after "
                "every engine.backward(loss)"
            )

    def _require_between_steps(self, call: str) -> None:
        if self._micro_batches:
            raise LoopError(
                f"engine.{call}() after {self._micro_batches} micro-batches of a step; call it "
                "right after the engine.step() that ends one"
            )

    @property
    def _steps(self) -> EngineSteps:
        steps = self.bigbatch.meter.source.engine
        assert isinstance(steps, EngineSteps)
        return steps

    def _apply_plan(self) -> None:
        plan = self.bigbatch.plan
        self.set_train_micro_batch_size(plan.micro)
        self.set_train_batch_size(plan.batch_size)
        self._set_boundary()

    def _set_boundary(self) -> None:
        """Sets the accumulation boundary: that of the caller's next micro-batch.

        A loader's step sets it for each of its own; here it stays as it is until the next is read.
        """
        last = not self._micro_batches
        if self._announces:
            last = self._micro_batches + 1 == self.bigbatch.plan.accumulation
        self._steps.set_last(last)


def _samples_in(arguments: list[Any]) -> int:
    """Samples in the arguments that are batches; 0 where they differ, or where none is a batch."""
    counts = set()
    for argument in arguments:
        with suppress(BatchError):
            counts.add(count_samples(argument))
    return counts.pop() if len(counts) == 1 else 0
