"""Backwards and optimizer steps that a DeepSpeed engine runs for an AdaptiveBatch."""

import math
import weakref
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.timer import ThroughputTimer
from torch import Tensor

from bigbatch.errors import GradientError
from bigbatch.integrations.deepspeed.zero_layout import Layout


class SamplesTimer(ThroughputTimer):
    """DeepSpeed's timer of samples per second, for steps of different sizes."""

    samples = 0  # of the timed steps

    def add(self, samples: int) -> None:
        """Adds the samples of the step that is timed now; DeepSpeed times none of the first."""
        self.batch_size = samples
        if self.global_step_count >= self.start_step:
            self.samples += samples

    def avg_samples_per_sec(self) -> float:
        """Samples of all timed steps over their time."""
        return self.samples / self.total_elapsed_time if self.samples else -math.inf


class EngineSteps:
    """The `Engine` of a ZeroSource; whose loop it is makes no difference.

    The boundary of the accumulation is set before every call, as DeepSpeed counts it with a modulo
    that breaks when the accumulation changes. DeepSpeed never steps its scheduler, which is
    advanced in base batches.
    """

    def __init__(self, engine: Any, layout: Layout) -> None:
        self._weak_engine, self._layout = weakref.ref(engine), layout
        self.next_is_last = False  # whether the next backward is the last of its step
        self.reduces_always = False  # whether every backward reduces, and not only the last
        engine.tput_timer.__class__ = SamplesTimer

    @property
    def boundary(self) -> bool:
        """Whether the next backward reduces."""
        return self.next_is_last or self.reduces_always

    def set_last(self, is_last: bool) -> None:
        """Sets whether the next backward is the last of its step."""
        self.next_is_last = is_last
        if (engine := self._weak_engine()) is not None:
            engine.set_gradient_accumulation_boundary(self.boundary)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """DeepSpeed's backward of a weighted loss; between two of them, the step that counts it."""
        engine = self._engine
        DeepSpeedEngine.backward(engine, loss, retain_graph, scale_wrt_gas=False)
        if self.next_is_last:
            self._layout.complete()
            return
        engine.set_gradient_accumulation_boundary(False)
        DeepSpeedEngine.step(engine)
        engine.set_gradient_accumulation_boundary(self.boundary)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Makes DeepSpeed clip at this norm in its next steps; the norm before, of all ranks."""
        engine = self._engine
        shards = [*self._layout.shards().values()]
        norms = torch._foreach_norm(shards, dtype=torch.float32) if shards else []
        square = torch.zeros((), dtype=torch.float32, device=engine.device)
        for norm in norms:
            square += norm.to(square.device).square()
        if self._layout.all_reduce is not None:
            self._layout.all_reduce(square)
        if math.isfinite(max_norm):
            engine._config.gradient_clipping = max_norm
            if hasattr(engine.optimizer, "clip_grad"):  # above stage 0, and in bfloat16
                engine.optimizer.clip_grad = max_norm
        return square.sqrt()

    def step(self, samples: int, *, finite: bool, lr_kwargs: dict[str, Any] | None = None) -> None:
        """DeepSpeed's step, or its skip where a gradient is not finite.

        Raises:
            GradientError: every gradient is finite, and their norm is not.
        """
        engine = self._engine
        counts = finite or engine.zero_optimization() or engine.bfloat16_enabled()
        engine.global_samples += samples - engine.train_batch_size() * counts  # DeepSpeed adds them
        engine.tput_timer.add(samples)
        scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        try:
            engine.set_gradient_accumulation_boundary(counts)
            DeepSpeedEngine.step(engine, lr_kwargs)
        finally:
            engine.lr_scheduler = scheduler
        if not counts:  # no boundary: DeepSpeed would apply the gradient
            engine.global_steps += 1
            engine.skipped_steps += 1
            engine.tput_timer.step_elapsed_time = 0
        if finite and not engine.was_step_applied():
            raise GradientError(
                "DeepSpeed skipped the step: every gradient is finite, but their norm is not; "
                "check the loss, and continue from a checkpoint"
            )

    @property
    def _engine(self) -> Any:
        engine = self._weak_engine()
        assert engine is not None
        return engine
