"""Variance-reduced optimizers on ZeRO: moments of the shards that the ranks have joined."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.gradients import GradientSource
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.integrations.deepspeed.gradient_source import ZeroSource
from bigbatch.integrations.deepspeed.zero_layout import (
    Accumulated,
    Layout,
    Offloaded,
    Partitioned,
    Replicated,
    Sharded,
    Shards,
    VRLayout,
)
from bigbatch.optim.apply_gsnr import AppliedGsnr, Layers, apply_gsnr
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.trust_ratio import TrustRatioOptimizer
from bigbatch.optim.variance_reduced import VarianceReduced, micro_batch_optimizer

_AVERAGE, _STEPS = "gsnr_average", "gsnr_steps"  # in the base optimizer's state, which is saved


def bind_to_zero(optimizer: VarianceReduced, source: ZeroSource, layout: VRLayout) -> None:
    """Makes a VR optimizer scale the tensors that ZeRO gives its base optimizer, before a step."""
    optimizer.bind(ZeroShards(source, layout), ZeroScaling(optimizer.gsnr_state, layout))

    def scale(*_: Any) -> None:
        optimizer.scale_gradients()

    optimizer.base.register_step_pre_hook(scale)


class ZeroShards(GradientSource):
    """Reads micro-batch j of all ranks together, which every backward leaves in the shards.

    Every backward reduces, as it does at stages 2 and 3 in any case. Its shards are taken out of
    ZeRO, and the sum over all backwards replaces them after the last; so k is the accumulation.
    """

    explicit = keeps_sums = True

    def __init__(self, leaf_source: ZeroSource, layout: VRLayout) -> None:
        self._leaf_source, self._layout = leaf_source, layout
        leaf_source.engine.reduces_always = True
        self.totals: dict[Tensor, Tensor] = {}  # S of this rank's shards, float32 at least
        super().__init__(layout.parameters, NoGuard(), RankReducer(reduces_each_backward=True))

    def _attach_hooks(self) -> None:
        """No hooks: the shards are read after each backward."""

    def _begin_step(self) -> None:
        self.totals.clear()
        super()._begin_step()

    def _sum_of(self, parameter: Tensor) -> Tensor | None:
        return self.totals.get(parameter)

    @contextmanager
    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> Iterator[None]:
        """The backward inside is of a micro-batch of all ranks, with so many samples together."""
        with super().micro_batch(weight):
            yield
            shards = self._layout.shards()
            for parameter, shard in shards.items():
                self._emit(parameter, shard)
            self._add(shards)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The backward inside has no samples on any rank, and is not compared with others."""
        with super().idle():
            yield
            self._add(self._layout.shards())

    def _add(self, shards: Shards) -> None:
        """Adds the shards to the sums; ZeRO gets the sums after the last backward, else nothing."""
        for parameter, shard in shards.items():
            if parameter in self.totals:
                self.totals[parameter].add_(shard)
            else:
                self.totals[parameter] = shard.to(sum_dtype(shard.dtype), copy=True)
        if self._leaf_source.engine.next_is_last:
            for parameter, shard in shards.items():
                shard.copy_(self.totals[parameter])
        else:
            self._layout.clear()
        self._leaf_source.guard.accept_edit()


class NoGuard(GradGuard):
    """Leaves the checks to the leaf source, which has the same shards."""

    def stamps(self) -> list[Stamp]:
        """No versions."""
        return [None] * len(self.parameters)

    def is_clean(self) -> bool:
        """Always."""
        return True


class ZeroScaling:
    """Scales gradients in the step of the base optimizer, over the tensors that ZeRO gives it.

    DeepSpeed has clipped before, by the norm of the gradient itself. p is part of the base
    optimizer's state, so DeepSpeed saves and loads it.
    """

    def __init__(self, state: GsnrState, layout: VRLayout) -> None:
        self._state, self._layout = state, layout
        self._averages: dict[Tensor, tuple[Tensor, int]] = {}  # (p, its steps) of the current step
        state.base.register_step_post_hook(self._store_averages)

    def apply(self, source: GradientSource, *, may_step: bool = False) -> AppliedGsnr:
        """Scales the gradients that the base optimizer has now: all, or those of one sub-group."""
        moments = self._state.moments
        for group in self._state.base.param_groups:
            flats = [p for p in group["params"] if group["vr"] and p.grad is not None]
            if flats and (layers := self._layers(flats, group["beta3"])) is not None:
                all_reduce, fused = self._layout.all_reduce, self._state.uses_kernels
                apply_gsnr(layers, group, moments.weight, all_reduce, fused=fused)
        return AppliedGsnr(moments.micro_batches, {}, agree=False)

    def _layers(self, flats: list[Tensor], beta3: float | None) -> Layers | None:
        parts: list[tuple[Tensor, Tensor]] = []  # a parameter, this rank's shard of its gradient
        averages: list[Tensor] = []
        corrections: list[float] = []
        for flat in flats:
            assert flat.grad is not None
            shards = self._layout.split(flat, flat.grad)
            parts += shards
            if beta3 is not None:
                average, correction = self._average(flat, beta3)
                averages += [shard for _, shard in self._layout.split(flat, average)]
                corrections += [correction] * len(shards)
        if not parts:
            return None
        parameters, gradients = map(list, zip(*parts, strict=True))
        moments = self._state.moments
        totals, m2s = moments.sums_and_m2s(parameters, self._state.sums_of, gradients)
        momentum = (averages, corrections) if beta3 is not None else ()
        return Layers(totals, m2s, gradients, *momentum)

    def _average(self, flat: Tensor, beta3: float) -> tuple[Tensor, float]:
        state = self._state.base.state.get(flat, {})
        average = state.get(_AVERAGE)
        if average is None:
            average = torch.zeros_like(flat, dtype=sum_dtype(flat.dtype), requires_grad=False)
        steps = int(state.get(_STEPS, 0)) + 1
        self._averages[flat] = average, steps
        return average, 1 / (1 - beta3**steps)

    def _store_averages(self, *_: Any) -> None:
        """Stores p after the step, in which the base optimizer fills a state that is empty."""
        for flat, (average, steps) in self._averages.items():
            self._state.base.state[flat].update(
                {_AVERAGE: average, _STEPS: torch.tensor(float(steps), dtype=torch.float32)}
            )
        self._averages.clear()


def set_layers(optimizer: Optimizer, layout: Layout) -> None:
    """Lets LARS and LAMB find layers in partitions; raises SettingError where it is not tested."""
    if not isinstance(optimizer, TrustRatioOptimizer) or isinstance(layout, Replicated):
        return
    if isinstance(layout, Accumulated):
        raise SettingError(
            f"{type(optimizer).__name__} with bf16 at stage 1 and float32 accumulation: it needs "
            "norms of whole layers, which are not tested there; set "
            '"data_types": {"grad_accum_dtype": "bf16"}, or use stage 2'
        )
    assert isinstance(layout, Partitioned | Sharded | Offloaded)
    optimizer.partition = layout


def require_base_optimizer(engine: Any) -> None:
    """Raises SettingError where DeepSpeed has a VR optimizer, and not the base inside.

    It would step that by itself: with another r on every rank, or without gradients.
    """
    optimizer = engine.basic_optimizer
    if micro_batch_optimizer(optimizer) is not None:
        raise SettingError(
            f"DeepSpeed has the {type(optimizer).__name__} itself, and needs the optimizer inside; "
            "make it first and pass it as optimizer= of initialize, not by a function; pass it as "
            "optimizer_cls_and_kwargs= of AdaptiveTrainer; or let accelerate prepare its .base, "
            "and pass it to adaptive_batch. Lightning's DeepSpeedStrategy has no such way"
        )


def require_vr_layout(engine: Any, optimizer: VarianceReduced, layout: Layout) -> VRLayout:
    """The layout; raises SettingError if r would be wrong there, or is not tested."""
    state, stage = optimizer.gsnr_state, engine.zero_optimization_stage()
    if isinstance(layout, Offloaded):
        reason = "its gradients, offloaded to the CPU, are not where ranks reduce them"
    elif isinstance(layout, Accumulated):
        reason = "with bf16 and float32 accumulation gradients are added up outside .grad"
    elif isinstance(layout, Replicated) and engine.bfloat16_enabled():
        reason = "with bf16 the optimizer steps float32 copies of the parameters"
    elif state.watch:
        reason = "watch=True would name partitions and not layers; leave it out"
    elif optimizer.base is not engine.basic_optimizer:
        reason = f"the engine steps a {type(engine.basic_optimizer).__name__} and not its base"
    else:
        assert isinstance(layout, VRLayout)
        return layout
    raise SettingError(
        f"{state.name} at stage {stage}: {reason}; "
        "docs/deepspeed.md has the stages and types that work"
    )
