"""Variance-reduced gradient descent: scale the gradient by r, then the base optimizer's step."""

import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.ddp import DDPReducer, DDPSource
from bigbatch.optim.apply_gsnr import AppliedGsnr, GsnrOptions
from bigbatch.optim.base_optimizers import require_base
from bigbatch.optim.ddp_comm_hook import DDPCommHook, Groups, require_attachable
from bigbatch.optim.fused_step import BaseStep
from bigbatch.optim.gsnr_momentum import GsnrMomentum, StateWithGsnrMomentum
from bigbatch.optim.gsnr_options import Factor, Gamma, RMax, require_kinds, require_valid
from bigbatch.optim.gsnr_state import GradientScaling, GsnrState
from bigbatch.optim.layer_gsnr import LayerGsnr
from bigbatch.optim.local_step import LocalStep
from bigbatch.optim.sharding import source_of
from bigbatch.optim.two_pass import require_kernels
from bigbatch.setting_types import Share, check_setting, checked
from bigbatch.statistics.second_moment import GradientMoments


class VarianceReduced(Optimizer):
    """Any torch optimizer, its gradient multiplied by the clipped GSNR before each step.

        r = GSNR of each weight over the micro-batches, normalized per tensor, in [gamma, r_max]
        with beta3:  p <- beta3 p + (1 - beta3) r,   p_hat = p / (1 - beta3^t)
        gradient <- r g   (p_hat g with beta3), then the base optimizer's own step

    In a loop of your own, call `backward()` at least twice between `zero_grad()` and `step()`:
    every backward is one micro-batch of the same size and its losses share one factor. In
    `AdaptiveBatch` the sizes are known and may differ. After `step()`, `.grad` holds r g.

    `param_groups`, `state` and `defaults` are the base optimizer's own. gamma, r_max, beta3 and
    vr stand in the groups and may differ between them; `vr=False` leaves a group's gradients
    as they are (embeddings, whose rows are seen by some micro-batches only: docs/optimizers.md).

    r is right while M2, the sum over the micro-batches of the squared deviations of what they add
    to `.grad`, is a normal number of its type: the root of M2 has to lie in [1.1e-19, 1.8e19] in
    float32 and bfloat16, in [1.5e-154, 1.3e154] in float64; float16 never leaves the range. Layers
    that do are looked for in the first step and in one of 16, and named by one warning.

    Under DDP, `attach` scales gradients inside the all-reduce. Under fully_shard (FSDP2)
    the moments are those of the reduced shards: nothing is sent for them, the layer means are those
    of the whole layers, and k is the accumulation alone.

    Args:
        base: the optimizer to be scaled, over dense real parameters.
        gamma: lower clip of r, in (0, 1]; 0 too where the factor is not "gsnr". 1 turns the
            scaling off where r_max is 1 too.
        r_max: upper clip of r, at least 1. 1 as printed in the paper (equation 9), which makes
            every step at most the base optimizer's; 1 / gamma lets well-known weights go further.
        beta3: momentum of r, in [0, 1); None for none.
        factor: "gsnr", the paper's. Not from the paper, without a layer mean that one outlier could
            own, and never above 1: "shrinkage" (M-SVAG) and "positive-part"; see `rules`.
        watch: whether `factors` tells what each step did, by layer.
        fused: whether compiled kernels may do it; None: where they were built and fit (float32 on
            the CPU), torch elsewhere; True: the same, but they have to have been built.
        compiled: whether `torch.compile` is given what the kernels do not do: for GPUs.
    Raises:
        SettingError: a value outside its range, or a base optimizer that is scaled already.
        GradientError: at `step()`, fewer than two micro-batches since `zero_grad()`; at
            `backward()`, more than one rank, and parameters that none of them shares.
    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), algorithm 1; what is reconstructed from its
        text: docs/theory.md (7).
    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VarianceReduced(torch.optim.SGD([weight], lr=1.0), gamma=0.1)
        >>> for gradient in ([1.0, 1.0], [1.0, 3.0]):
        ...     (weight * torch.tensor(gradient) / 2).sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()  # the first weight's gradient is exact: r = r_max
        [-1.0, -2.0]
    """

    _chooses_fused = False  # of itself, for groups that say nothing

    @checked
    def __init__(
        self,
        base: Optimizer,
        *,
        gamma: Gamma = 0.1,
        r_max: RMax = 1.0,
        beta3: Share | None = None,
        factor: Factor = "gsnr",
        watch: bool = False,
        fused: bool | None = None,
        compiled: bool = False,
    ) -> None:
        if isinstance(base, VarianceReduced):
            raise SettingError(f"{type(base).__name__} is scaled already; pass its base optimizer")
        require_kernels(fused)
        self.base = base
        self.gsnr: LayerGsnr | None = None  # of the last step, where watch is on
        self._own = {"gamma": gamma, "r_max": r_max, "beta3": beta3, "vr": True}
        require_base(base, self._own)
        self.attached: DDPCommHook | None = None  # to a DDP model
        self._state = GsnrState(
            base, type(self).__name__, factor=factor, watch=watch, fused=fused, compiled=compiled
        )
        self._step_base = BaseStep(base, warns=not self._chooses_fused)
        # torch's hooks and step profiling; groups and state are the base optimizer's
        self.__setstate__({"defaults": base.defaults})
        for group in base.param_groups:
            self._adopt(group)
        self._subscribers: list[Subscriber] = []
        self._source: GradientSource = source_of(self._state.scaled, type(self).__name__)
        self._scaling: GradientScaling = LocalStep(self._state)
        self.bind(self._source)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self._own.items() if name != "vr"}
        names = ("factor", "watch", "fused", "compiled")
        options = own | {name: getattr(self._state, name) for name in names}
        self._require_consolidated()
        return {"base": self.base, "options": options, "momentum": self._state.momentum}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" not in state:
            super().__setstate__(state)
            return
        VarianceReduced.__init__(self, state["base"], **state["options"])
        self._state.momentum = state["momentum"]

    # the base optimizer's, under our name

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's groups."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state, and p where a group has beta3."""
        averaging = [g for g in self.param_groups if g.get("beta3") is not None and g["vr"]]
        if not averaging:
            return self.base.state
        averaged = {p for group in averaging for p in group["params"]}
        return StateWithGsnrMomentum(self.base.state, self._state.momentum, averaged)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer and watches its gradients."""
        self.base.add_param_group(param_group)
        try:
            self._adopt(self.base.param_groups[-1])
        except SettingError:
            self.base.param_groups.pop()
            raise
        self._source.add(self._state.scaled)

    # one step

    def attach(
        self,
        ddp: DistributedDataParallel,
        *,
        groups: Groups = "all",
        m2_dtype: torch.dtype | None = None,
        node_group: dist.ProcessGroup | None = None,
    ) -> DDPCommHook:
        """Scales gradients inside the all-reduce of a DDP model. Collective; once, before training.

        Where every rank has one micro-batch a step it sends what a plain all-reduce does, and a
        quarter more where they have several (in float32 M2 half as much more). After the last
        backward `.grad` holds r g, the same on every rank; all backwards of a step but the last run
        under `ddp.no_sync()`. `AdaptiveBatch` attaches by itself.

        Args:
            ddp: the wrapped model.
            groups: whose gradients r compares: those of all micro-batches of all ranks, or of
                "ranks", each rank's being one; then no M2 is kept or sent. From 8 ranks on that
                is good enough.
            m2_dtype: in which M2 is sent. None: bfloat16, in which the error of r g is about 5e-4,
                and float64 where gradients are float64.
            node_group: the ranks of this node, where there are several nodes of as many ranks.
        Returns:
            The attachment: `grad_norm`, `clip_grad_norm_`, `consolidate`. Also `self.attached`.
        Raises:
            SettingError: no DDP model, or one with a communication hook, or an unknown option.
        Source:
            docs/decisions/0009.
        """
        scaled = self._state.scaled
        require_attachable(ddp, list(scaled), groups, m2_dtype)
        if self.attached is not None:
            self.attached.consolidate()  # p moves to the new hook
        self.attached = DDPCommHook(ddp, self._state, groups, m2_dtype, node_group)
        weakref.finalize(self, self.attached.release).atexit = False
        self.bind(DDPSource(ddp, scaled), self.attached)
        return self.attached

    def reduced_source(self) -> GradientSource | None:
        """Its own gradients, where a micro-batch is that of all ranks together (fully_shard)."""
        return self._source if self._source.reducer.reduces_each_backward else None

    def bind_to_loop(self, source: GradientSource) -> None:
        """Reads its gradients from the source of a training loop, on one rank or many.

        Raises:
            SettingError: it is attached to another DDP model.
        """
        if self.reduced_source() is not None:
            self._source.explicit = True
            return
        ddp = source.reducer.ddp if isinstance(source.reducer, DDPReducer) else None
        if ddp is not None and source.ranks > 1 and self.attached is None:
            self.attach(ddp)
        if self.attached is not None and (ddp is None or not self.attached.is_of(ddp)):
            raise SettingError(
                f"{type(self).__name__} is attached to another DDP model than the one that is "
                "trained; attach it to that, or let AdaptiveBatch do so"
            )
        self.bind(source)

    def bind(self, source: GradientSource, scaling: GradientScaling | None = None) -> None:
        """Reads its gradients from `source`.

        Args:
            source: of the micro-batches.
            scaling: where gradients are multiplied by r; None: where they were until now.
        """
        for subscriber in self._subscribers:
            self._source.unsubscribe(subscriber)
        self._source = source
        self._scaling = scaling or self._scaling
        self._scaling.bind(source)
        self._subscribers = self._scaling.subscribers
        for subscriber in self._subscribers:
            source.subscribe(subscriber)

    def scale_gradients(self) -> None:
        """Multiplies the gradients by r, before the base optimizer's step.

        `step()` does so. An engine that steps the base optimizer by itself calls it just before.
        """
        self._report(self._scaling.apply(self._source))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empties the gradients; the micro-batches seen so far are forgotten."""
        self.base.zero_grad(set_to_none)
        self._source.restart()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # torch.compiler.disable would import the compiler
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Multiplies the gradients by r and lets the base optimizer step.

        Args:
            closure: computes the loss and calls `backward()` at least twice; called once. Where
                it empties every gradient in the end, a trainer's say, the step does nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if all(parameter.grad is None for parameter in self._parameters()):
                self._source.restart()
                return loss
        pending = self._scaling.is_pending(self._source)
        if self._state.scaled and (pending or not self._changes_nothing()):
            self.scale_gradients()
        else:
            self._make_state()
        self._step_base()
        self._source.restart()
        return loss

    def _changes_nothing(self) -> bool:
        """Whether the step is one that only makes state, as torch's checkpoints do."""
        return all(float(group.get("lr", 1.0)) == 0 for group in self.param_groups)

    def _make_state(self) -> None:
        """p of every parameter, as it is before the first step."""
        for group in self.param_groups:
            for parameter in group["params"] if group["vr"] else ():
                kept = self.attached is not None and self.attached.keeps(parameter)
                if group["beta3"] is not None and parameter.grad is not None and not kept:
                    self._state.momentum.make(parameter)

    def _report(self, done: AppliedGsnr) -> None:
        """Warns of what makes r doubtful, and keeps what it did to each layer."""
        self._state.warnings.warn(done, self._named)
        if self._state.watch:
            named = [(name, p) for name, p in self._named() if p in done.layers]
            rows = [done.layers[p].to(done.layers[named[0][1]]) for _, p in named]
            self.gsnr = LayerGsnr(
                [name for name, _ in named],
                [p.numel() for _, p in named],
                torch.stack(rows) if rows else torch.zeros(0, 5),
                done.k,
            )

    @property
    def moments(self) -> GradientMoments:
        """Of this rank's micro-batches."""
        return self._state.moments

    def options(self, group: dict[str, Any]) -> GsnrOptions:
        """How the gradients of a group are scaled in this step."""
        return self._state.options(group, self.moments.weight, self.moments.micro_batches)

    @property
    def watch(self) -> bool:
        """Whether `gsnr` is kept."""
        return self._state.watch

    def describe(self) -> str:
        """Class, base optimizer and factor: what must be equal on all ranks."""
        factor = self._state.factor
        return f"{type(self).__name__} of {type(self.base).__name__}, factor={factor!r}"

    def train(self) -> None:
        """Before steps: switches a schedule-free base to training; other bases do nothing."""
        self._set_mode("train")

    def eval(self) -> None:
        """Before an evaluation, the same."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        if callable(set_mode := getattr(self.base, mode, None)):
            set_mode()

    # what is saved

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings p together; trainers call it before `state_dict()`, on every rank. Collective.

        Under the name that torch's ZeroRedundancyOptimizer has for it; nothing to do where it is
        not attached.

        Args:
            to: the rank that will be asked for its state; every one may be.
        """
        if self.attached is not None:
            self.attached.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dict; p and its step count stand with each parameter."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._require_consolidated()
        packed = self.base.state_dict()
        packed["state"] = {
            index: dict(state) if isinstance(state, dict) else state  # some count steps there
            for index, state in packed["state"].items()
        }
        self._state.momentum.add_to(packed, self._parameters())
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or the state dict of a bare base optimizer.

        Raises:
            StateError: it was saved with p, and p is not in it; or for parameters of other shapes.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        momentum = GsnrMomentum()
        rest = momentum.take_from(state_dict, self._parameters())
        own = [{name: group[name] for name in self._own} for group in self.param_groups]
        self.base.load_state_dict(rest)
        for group, options in zip(self.base.param_groups, own, strict=True):
            for name, value in options.items():
                group.setdefault(name, value)
        self._state.momentum = momentum
        if self.attached is not None:
            self.attached.forget()
        self._source.restart()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _require_consolidated(self) -> None:
        if self.attached is not None:
            self.attached.require_consolidated()

    # groups

    def _parameters(self) -> list[Tensor]:
        """Of all groups, in the order of the state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _named(self) -> list[tuple[str, Tensor]]:
        """The same with names: those that the optimizer was given, else their numbers."""
        parameters = self._parameters()
        names = [
            name
            for group in self.param_groups
            for name in group.get("param_names", [""] * len(group["params"]))
        ]
        return [
            (name or str(i), p) for i, (name, p) in enumerate(zip(names, parameters, strict=True))
        ]

    def _adopt(self, group: dict[str, Any]) -> None:
        for name, default in self._own.items():
            group.setdefault(name, default)
        require_kinds(group, type(self))
        check_setting("vr", group["vr"], bool)
        require_valid(group, self._state.factor)
        if group["vr"]:
            self._state.scaled.update(dict.fromkeys(group["params"]))
