"""Variance-reduced optimizers on ZeRO: moments of the shards that the ranks have joined."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.dtypes import sum_dtype
from bigbatch.gradients.grad_guard import GradGuard, Stamp
from bigbatch.gradients.leaf_tap import GradientTap
from bigbatch.gradients.rank_reducer import RankReducer
from bigbatch.integrations.deepspeed.gradient_source import ZeroSource, shape_of
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
from bigbatch.optim.apply_gsnr import AppliedGsnr, Layer, apply_gsnr
from bigbatch.optim.micro_batch_optimizer import micro_batch_optimizer
from bigbatch.optim.trust_ratio import TrustRatioOptimizer
from bigbatch.optim.variance_reduced import VarianceReduced

_AVERAGE, _STEPS = "gsnr_average", "gsnr_steps"  # in the base optimizer's state, which is saved


def bind_to_zero(optimizer: VarianceReduced, source: ZeroSource, layout: VRLayout) -> None:
    """Scales gradients over the tensors that ZeRO gives the base optimizer, before each step."""
    optimizer.bind(ZeroShards(source, layout), ZeroScaling(optimizer, layout))
    optimizer.base.register_step_pre_hook(lambda *_: optimizer.scale_gradients())


class ZeroShards(GradientSource):
    """Micro-batch j of all ranks together, as every backward leaves it in this rank's shards.

    Every backward reduces, as at stages 2 and 3 in any case. What it leaves is taken out, and the
    sum of all is put in its place after the last; so k is the accumulation alone.

    Args:
        leaves: the source of the same engine.
        layout: of its gradients.
    """

    def __init__(self, leaves: ZeroSource, layout: VRLayout) -> None:
        self._leaves, self._layout = leaves, layout
        leaves.zero.always = True
        self._sums = SumsGuard()
        reducer = RankReducer(reduces_each_backward=True)
        super().__init__(layout.parameters, GradientTap(), self._sums, reducer, explicit=True)

    @contextmanager
    def micro_batch(
        self, weight: float = 1.0, *, several_backwards: bool = False
    ) -> Iterator[None]:
        """The backward inside is one of all ranks, of so many samples together."""
        with super().micro_batch(weight):
            yield
            shards = self._layout.shards()
            for parameter, shard in shards.items():
                self._emit(parameter, shard)
            self._add(shards)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The backward inside is of no samples on any rank; nothing compares it with others."""
        with super().idle():
            yield
            self._add(self._layout.shards())

    def _add(self, shards: Shards) -> None:
        """Takes the shards out of ZeRO, or puts the sums in their place."""
        self._sums.add(shards)
        if self._leaves.zero.last:
            for parameter, shard in shards.items():
                shard.copy_(self._sums.totals[parameter])
        else:
            self._layout.clear()
        self._leaves.guard.accept_edit()


class SumsGuard(GradGuard):
    """Sums of this rank's shards; the source of the leaves sees who else writes to them."""

    def __init__(self) -> None:
        super().__init__(engine_writes=True)
        self.totals: dict[Tensor, Tensor] = {}  # float32 at least

    def add(self, shards: Shards) -> None:
        """Adds what a backward has left."""
        for parameter, shard in shards.items():
            if parameter in self.totals:
                self.totals[parameter].add_(shard)
            else:
                self.totals[parameter] = shard.to(sum_dtype(shard.dtype), copy=True)

    def begin(self, *, foreign_backward: bool) -> None:
        """Forgets the sums of the previous step."""
        self.totals.clear()

    def grad_sum(self, parameter: Tensor) -> Tensor:
        """This rank's shard of the sum so far."""
        return self.totals[parameter]

    def stamps(self) -> list[Stamp]:
        """No versions."""
        return [None] * len(self.parameters)

    def is_clean(self) -> bool:
        """Always: the other source checks it."""
        return True


class ZeroScaling:
    """Scales gradients in the step of the base optimizer, over the tensors that ZeRO gave it.

    DeepSpeed has clipped by then, by the norm of the gradient itself. p is kept in the base
    optimizer's state, so DeepSpeed saves and loads it.

    Args:
        optimizer: whose base optimizer the engine steps.
        layout: of the gradients.
    """

    def __init__(self, optimizer: VarianceReduced, layout: VRLayout) -> None:
        self._optimizer, self._layout = optimizer, layout
        self._made: dict[Tensor, tuple[Tensor, int]] = {}  # (p, its steps), until the step is done
        optimizer.base.register_step_post_hook(self._keep)

    @property
    def subscribers(self) -> list[Subscriber]:
        """The moments."""
        return [self._optimizer.moments]

    def bind(self, source: GradientSource) -> None:
        """The source has the sums too."""
        self._optimizer.moments.sum_guard = source.guard

    def is_pending(self, source: GradientSource) -> bool:
        """Whether there are gradients that no step has used."""
        return source.micro_batches > 0

    def apply(self, source: GradientSource) -> AppliedGsnr:
        """Scales the gradients that the base optimizer has now: all, or one sub-group's."""
        moments = self._optimizer.moments
        for group in self._optimizer.param_groups:
            options = self._optimizer.options(group)
            layers = [
                layer
                for flat in (group["params"] if group["vr"] else ())
                for layer in self._layers(flat, group["beta3"])
            ]
            if layers:
                apply_gsnr(options, layers, self._layout.join)
        return AppliedGsnr(moments.micro_batches, {}, agree=False)

    def _layers(self, flat: Tensor, beta3: float | None) -> Iterator[Layer]:
        if flat.grad is None:
            return
        average, corrected = (None, 1.0) if beta3 is None else self._average(flat, beta3)
        cut = self._layout.cut(flat, flat.grad)
        averages = [None] * len(cut) if average is None else self._layout.cut(flat, average)
        for (parameter, gradient), stored in zip(cut, averages, strict=True):
            total, m2 = self._optimizer.moments.of(parameter, gradient)
            yield Layer(total, m2, gradient, None if stored is None else stored[1], corrected)

    def _average(self, flat: Tensor, beta3: float) -> tuple[Tensor, float]:
        state = self._optimizer.base.state.get(flat, {})
        average = state.get(_AVERAGE)
        if average is None:
            average = torch.zeros_like(flat, dtype=sum_dtype(flat.dtype), requires_grad=False)
        steps = int(state.get(_STEPS, 0)) + 1
        self._made[flat] = average, steps
        return average, 1 / (1 - beta3**steps)

    def _keep(self, *_: Any) -> None:
        """Once the base optimizer has state of its own, which it makes where there is none."""
        for flat, (average, steps) in self._made.items():
            self._optimizer.base.state[flat].update(
                {_AVERAGE: average, _STEPS: torch.tensor(float(steps), dtype=torch.float32)}
            )
        self._made.clear()


class Layers:
    """What LARS and LAMB need to know of the layers in ZeRO's partitions.

    Args:
        layout: of the engine.
    """

    def __init__(self, layout: Partitioned | Sharded | Offloaded) -> None:
        self.join = layout.join
        self._layout = layout

    def cut(self, flat: Tensor, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """Shards of a tensor like a partition, and the dimensions of their layers."""
        return [(len(shape_of(p)), shard) for p, shard in self._layout.cut(flat, tensor)]


def tell_layers(optimizer: Optimizer, layout: Layout) -> None:
    """Where ZeRO has put partitions in the place of layers, LARS and LAMB learn of these.

    Raises:
        SettingError: they cannot be.
    """
    if not isinstance(optimizer, TrustRatioOptimizer) or isinstance(layout, Replicated):
        return
    if isinstance(layout, Accumulated):
        raise SettingError(
            f"{type(optimizer).__name__} with bf16 at stage 1 and float32 accumulation: it needs "
            "norms of whole layers, which were not tried there; set "
            '"data_types": {"grad_accum_dtype": "bf16"}, or use stage 2'
        )
    assert isinstance(layout, Partitioned | Sharded | Offloaded)
    optimizer.partition = Layers(layout)


def require_not_made(engine: Any) -> None:
    """Raises SettingError where a function has made DeepSpeed a variance-reduced optimizer.

    DeepSpeed would step it by itself: every rank by an r of its own, or over no gradients.
    """
    made = engine.basic_optimizer
    if micro_batch_optimizer(made) is not None:
        raise SettingError(
            f"{type(made).__name__} was made by a function that was passed as optimizer=; make it "
            "first, and pass the optimizer itself"
        )


def vr_layout_of(engine: Any, optimizer: VarianceReduced, layout: Layout) -> VRLayout:
    """The layout, if a variance-reduced optimizer can work there.

    Raises:
        SettingError: r would not be right, or was not tried.
    """
    name, stage = type(optimizer).__name__, engine.zero_optimization_stage()
    if isinstance(layout, Offloaded):
        why = "with the optimizer offloaded to the CPU gradients are not where they are joined"
    elif isinstance(layout, Accumulated):
        why = "with bf16 at stage 1 and float32 accumulation gradients are added up outside .grad"
    elif isinstance(layout, Replicated) and engine.bfloat16_enabled():
        why = "with bf16 at stage 0 the optimizer steps float32 copies of the parameters"
    elif optimizer.watch:
        why = "watch=True would name partitions and not layers; leave it out"
    else:
        assert isinstance(layout, Replicated | Partitioned | Sharded)
        return layout
    raise SettingError(
        f"{name} at stage {stage}: {why}; docs/deepspeed.md has the stages and types that work"
    )
