"""DeepSpeed's engine, whose accumulation and micro-batch follow an AdaptiveBatch."""

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
from bigbatch.errors import BatchError, GradientError, LoopError
from bigbatch.integrations.deepspeed.gradient_source import ZeroSource
from bigbatch.integrations.deepspeed.paper_names import GRADIENT_STEP_SIZE, cosine, readable
from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams
from bigbatch.integrations.external_loop import ExternalLoop
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch.training.distributed_state import DistributedState
from bigbatch.training.step import weighted_loss

_STATE = "bigbatch"  # its key in a checkpoint's client state

_NO_STEP = (
    "the accumulation is complete and engine.step() was not called; call it after every "
    "engine.backward(loss)"
)


class AdaptiveEngine(DeepSpeedEngine):
    """DeepSpeed's engine: `backward`, `step` and its checkpoints know of the batch that adapts.

    Made of an engine by `adapt`; everything else is DeepSpeed's. `engine.bigbatch` is the
    AdaptiveBatch, `engine.bigbatch.record` what the last step was; `train_batch_size()`,
    `train_micro_batch_size_per_gpu()` and `gradient_accumulation_steps()` are those of the next.
    What the SimiGrad paper's scripts read is there too: docs/deepspeed.md.
    """

    bigbatch: AdaptiveBatch
    _driven: ExternalLoop
    _params: AdaptiveBatchParams
    _similarities: dict[int, float]  # the last one of each batch size
    _backwards: int  # since the last call of step
    _done: int  # micro-batches of the present optimizer step
    _assumes: bool  # whether micro-batches were taken to have as many samples as are planned
    _forwarded: int | None  # samples that a backward may follow for; 0 where they have no number
    _pass: Iterator[Batch] | None  # over the loader, as far as it has come
    global_samples: int  # DeepSpeed's
    global_steps: int  # likewise
    skipped_steps: int  # likewise
    lr_scheduler: Any  # likewise

    @classmethod
    def adapt(
        cls, engine: DeepSpeedEngine, train: AdaptiveBatch, params: AdaptiveBatchParams
    ) -> None:
        """Specialises an engine in place.

        Args:
            engine: DeepSpeed's.
            train: over this engine.
            params: that it was made by.
        """
        engine.__class__ = cls
        engine.bigbatch = train
        engine._driven = ExternalLoop(train)
        engine._params, engine._similarities = params, {}
        engine._backwards, engine._done, engine._assumes = 0, 0, False
        engine._forwarded = engine._pass = None
        if isinstance(train.batches, ExternalBatches):
            engine.module.register_forward_pre_hook(engine._count, with_kwargs=True)
        engine._carry_out_plan()

    @property
    def adaptive_batch_params(self) -> Mapping[str, Any]:
        """As given, and the fork's state: the next step's `global_lr_modifier` ...; read-only."""
        train = self.bigbatch
        base = train.controller.base_batch
        return readable(self._params, base, train.lr_factor, self._similarities)

    @property
    def cos_placeholder(self) -> Tensor:
        """The last step's similarity; nan before the first."""
        record = self.bigbatch.record
        return cosine(float("nan") if record is None else record.similarity)

    @property
    def gradient_step_size(self) -> int:
        """Nothing uses it, in the fork either."""
        return GRADIENT_STEP_SIZE

    def batches(self) -> Iterator[Batch]:
        """Micro-batches of one pass over the loader; after a `break`, the rest of it."""
        try:
            self._pass = self._pass or iter(self._driven)
            for batch in self._pass:
                self.tput_timer.start()
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
        """As DeepSpeed's, of the mean loss of a micro-batch; sizes may differ.

        Args:
            loss: one number.
            retain_graph: as DeepSpeed's.
            scale_wrt_gas: as DeepSpeed's, of what is returned.
            weight: what the mean is taken over, where that is not the samples: tokens, say.
        Raises:
            LoopError: a second one for a micro-batch, or engine.step() was forgotten.
        """
        self._require_own_boundary()
        self._require_stepped()
        if self._announces:
            self._announce()
        with self._driven.step.weighted_backward(loss, weight) as factor:
            super().backward(weighted_loss(loss, factor), retain_graph, scale_wrt_gas=False)
            self._source.complete()
        self._backwards += 1
        self._done += 1
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As DeepSpeed's; at the end of the accumulation it decides on the next batch too.

        Raises:
            LoopError: there was no engine.backward before it.
        """
        if not self._backwards:
            raise LoopError(
                "engine.step() without engine.backward(loss) before it; loss.backward() goes past "
                "the engine, and its gradient is not counted"
            )
        self._require_own_boundary()
        self._backwards = 0
        if not self._driven.step.complete:
            self.set_gradient_accumulation_boundary(False)
            super().step(lr_kwargs)
            self._look_ahead()
            return
        samples = self.global_samples
        with self._driven.step.optimizer_step() as finite:
            self._step_once(lr_kwargs, finite=finite)
        record = self.bigbatch.record
        assert record is not None
        self.global_samples = samples + record.batch_size
        self._done = 0
        self._carry_out_plan()
        self._similarities[record.batch_size] = record.similarity
        if self._params.verbose:
            print_dist(  # at any log level: DeepSpeed's is WARNING
                f"batch size {record.batch_size}, similarity {record.similarity:.4f}: next "
                f"{self.train_batch_size()} ({record.decision.reason})",
                ranks=[0] if self._params.verbose == 1 else [-1],
            )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        **more: Any,
    ) -> bool:
        """As DeepSpeed's, and all of the AdaptiveBatch; between two steps.

        Raises:
            LoopError: inside the accumulation.
        """
        self._require_none_begun("save_checkpoint")
        state = {**(client_state or {}), _STATE: DistributedState(self.bigbatch).state_dict()}
        saved: bool = super().save_checkpoint(save_dir, tag, state, save_latest, **more)
        return saved

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **more: Any,
    ) -> Any:
        """As DeepSpeed's; batch, micro-batch, accumulation and data continue where they were.

        With `load_module_only`, or without optimizer states, weights alone are loaded.

        Raises:
            LoopError: inside the accumulation.
        """
        self._require_none_begun("load_checkpoint")
        wanted = load_optimizer_states, load_lr_scheduler_states, load_module_only
        path, state = super().load_checkpoint(load_dir, tag, load_module_strict, *wanted, **more)
        own = (state or {}).pop(_STATE, None)
        if path is None or load_module_only or not load_optimizer_states:
            return path, state
        if own is not None:
            DistributedState(self.bigbatch).load_state_dict(own)
            self._driven.forget()
            self._pass = None
            self._carry_out_plan()
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
        if self._forwarded is None:
            raise LoopError(
                "engine.backward(loss) without a forward of the engine before it, or a second time "
                "after one; sum the losses of a micro-batch and call it once"
            )
        samples, self._forwarded = self._forwarded, None
        self._driven.announce(samples or self._assumed())

    def _assumed(self) -> int:
        """Samples of a micro-batch that cannot be counted; said once."""
        samples: int = self.train_micro_batch_size_per_gpu()
        if not self._assumes and self.global_rank == 0:
            warnings.warn(
                "the samples of a micro-batch cannot be counted by what the engine's forward is "
                f"given, and are taken to be the planned {samples}; give it batches of one first "
                "size, and engine.backward(loss, weight=) what the mean is over",
                stacklevel=4,
            )
        self._assumes = True
        return samples

    def _count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """How many samples a forward has that a backward may follow."""
        evaluates = not module.training and self._forwarded is not None
        if torch.is_grad_enabled() and not evaluates:
            self._forwarded = _samples_among([*args, *kwargs.values()])

    def _step_once(self, lr_kwargs: dict[str, Any] | None, *, finite: bool) -> None:
        """DeepSpeed's step; the scheduler is advanced in base batches, not here."""
        skips_by_itself = self.zero_optimization() or self.bfloat16_enabled()
        scheduler, self.lr_scheduler = self.lr_scheduler, None
        try:
            self.set_gradient_accumulation_boundary(finite or skips_by_itself)
            super().step(lr_kwargs)
        finally:
            self.lr_scheduler = scheduler
        if not (finite or skips_by_itself):  # as inside the accumulation: it would apply it
            self.global_steps += 1
            self.skipped_steps += 1
        if finite and not self.was_step_applied():
            raise GradientError(
                "DeepSpeed left the step out though every gradient is finite: their norm is not; "
                "look at the loss, and continue from a checkpoint"
            )

    def _require_own_boundary(self) -> None:
        if self.is_gradient_accumulation_boundary() != self._source.zero.boundary:
            raise LoopError(
                "somebody else set the gradient accumulation boundary; leave "
                "set_gradient_accumulation_boundary, and a trainer's accumulation, out"
            )

    def _require_stepped(self) -> None:
        if self._done and self._driven.step.complete:
            raise LoopError(_NO_STEP)

    def _require_none_begun(self, call: str) -> None:
        if self._done:
            raise LoopError(
                f"engine.{call}() after {self._done} micro-batches of a step; call it right after "
                "the engine.step() that ends one"
            )

    @property
    def _source(self) -> ZeroSource:
        source = self.bigbatch.meter.source
        assert isinstance(source, ZeroSource)
        return source

    def _carry_out_plan(self) -> None:
        plan = self.bigbatch.plan
        self.set_train_micro_batch_size(plan.micro)
        self.set_train_batch_size(plan.batch_size)
        self.tput_timer.batch_size = plan.batch_size
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Whether the caller's next micro-batch is the last; of a loader's its iterator says it."""
        last = self._announces and self._done + 1 == self.bigbatch.plan.accumulation
        self._source.synchronize(last)


def _samples_among(arguments: list[Any]) -> int:
    """In those that are batches, and not flags and the like; 0 where they differ, or none is."""
    counts = set()
    for argument in arguments:
        with suppress(BatchError):
            counts.add(count_samples(argument))
    return counts.pop() if len(counts) == 1 else 0
