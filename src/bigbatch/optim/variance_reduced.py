"""Variance-reduced gradient descent: scale the gradient by r, then the base optimizer's step."""

import weakref
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.gradients import GradientSource, Subscriber
from bigbatch.gradients.auto import NO_TENSOR_PARALLELISM
from bigbatch.gradients.ddp import DDPReducer, DDPSource
from bigbatch.gradients.grad_sums import GradSums
from bigbatch.optim.apply_gsnr import LayerGsnr
from bigbatch.optim.base_step import BaseStep, can_fuse
from bigbatch.optim.composite import one_optimizer
from bigbatch.optim.ddp_comm_hook import DDPCommHook, require_attachable
from bigbatch.optim.gsnr_state import (
    GradientScaling,
    GsnrMomentum,
    GsnrState,
    StateWithGsnrMomentum,
)
from bigbatch.optim.local_step import LocalStep
from bigbatch.optim.optimizer_settings import (
    load_into,
    load_with_hooks,
    name_of,
    parts_of,
    rates_of,
    require_base,
    require_valid,
    save_with_hooks,
)
from bigbatch.optim.sharding import source_of
from bigbatch.optim.two_pass import require_kernels
from bigbatch.setting_types import CHECKED_ELSEWHERE, Gamma, RMax, Share, check_setting, checked
from bigbatch.state_checks import loads_state


class VarianceReduced(Optimizer):
    """Any torch optimizer, its gradient multiplied by the clipped GSNR before each step.

        r = GSNR of each weight over the micro-batches, normalized per tensor, in [gamma, r_max]
        with beta3:  p <- beta3 p + (1 - beta3) r,   p_hat = p / (1 - beta3^t)
        gradient <- r g   (p_hat g with beta3), then the base optimizer's own step

    In a loop of your own, call `backward()` at least twice between `zero_grad()` and `step()`:
    each backward counts as one micro-batch, all of the same size, with the same factor on their
    losses. In `AdaptiveBatch` the sizes are known and may differ. After `step()`, `.grad` is r g.

    `param_groups`, `state` and `defaults` are the base optimizer's own. The groups also have gamma,
    r_max, beta3 and vr, which may differ between groups; `vr=False` leaves the gradients of a group
    unscaled (embeddings, whose rows only some micro-batches reach: docs/optimizers.md).

    r is right while M2, the sum over the micro-batches of the squared deviations of what they add
    to `.grad`, is a normal number of its type: the root of M2 must be in [1.1e-19, 1.8e19] in
    float32 and bfloat16, in [1.5e-154, 1.3e154] in float64; float16 never leaves the range. The
    first step and every 16th check M2, and one warning names the layers that are out of range.

    Under DDP, `attach` scales gradients inside the all-reduce. Under fully_shard (FSDP2) the
    moments are those of the reduced shards: they cost no communication, the layer means are those
    of the whole layers, and k is the accumulation alone.

    Args:
        base: the optimizer whose gradients are scaled, over dense real parameters; of several, a
            `Composite`.
        gamma: lower clip of r, in (0, 1]. With r_max = 1, gamma = 1 turns the scaling off.
        r_max: upper clip of r, at least 1. 1 is the paper's (equation 9), with which no step is
            larger than the base optimizer's; 1 / gamma allows larger steps where the GSNR is high.
        beta3: momentum of r, in [0, 1); None for none.
        watch: whether `gsnr` records what each step did, by layer.
        fused: whether compiled kernels may be used. None: if they were built, for arrays that fit
            them (float32 on the CPU), and torch for others; True: the same, and they must be built.
    Raises:
        SettingError: a value is outside its range, or the base optimizer is variance-reduced.
        GradientError: at `step()`, fewer than two micro-batches since `zero_grad()`; at
            `backward()`, several ranks that do not share the gradients of the parameters.
    Source:
        VRGD (Jiang et al. 2023, arXiv 2309.13681), algorithm 1; for what is reconstructed from its
        text see docs/theory.md (7).
    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VarianceReduced(torch.optim.SGD([weight], lr=1.0), gamma=0.1)
        >>> for gradient in ([1.0, 1.0], [1.0, 3.0]):
        ...     (weight * torch.tensor(gradient) / 2).sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()  # the first weight's gradient is exact: r = r_max
        [-1.0, -2.0]
    """

    _chooses_fused = False  # whether it uses torch's fused step in groups without a choice

    @checked
    def __init__(
        self,
        base: Annotated[Optimizer, CHECKED_ELSEWHERE],
        *,
        gamma: Gamma = 0.1,
        r_max: RMax = 1.0,
        beta3: Share | None = None,
        watch: bool = False,
        fused: bool | None = None,
    ) -> None:
        base = check_setting("base", one_optimizer(base), Optimizer)
        if isinstance(base, VarianceReduced):
            raise SettingError(f"{type(base).__name__} is scaled already; pass its base optimizer")
        require_kernels(fused)
        self.base = base
        self.gsnr: LayerGsnr | None = None  # of the last step, with watch=True
        self._group_defaults = {"gamma": gamma, "r_max": r_max, "beta3": beta3, "vr": True}
        require_base(base, self._group_defaults)
        self.attached: DDPCommHook | None = None  # the hook of a DDP model
        self.gsnr_state = GsnrState(base, type(self).__name__, watch=watch, fused=fused)
        self._step_base = BaseStep(base, warns=not self._chooses_fused)
        # makes torch's hooks and step profiling; groups and state are the base optimizer's
        self.__setstate__({"defaults": base.defaults})
        for group in base.param_groups:
            self._prepare_group(group)
        self._subscribers: list[Subscriber] = []
        self._source: GradientSource = source_of(self.gsnr_state.vr_parameters, type(self).__name__)
        self._scaling: GradientScaling = LocalStep(self.gsnr_state)
        self.bind(self._source)

    def __getstate__(self) -> dict[str, Any]:
        options = {name: value for name, value in self._group_defaults.items() if name != "vr"}
        options |= {"watch": self.gsnr_state.watch, "fused": self.gsnr_state.fused}
        if self.attached is not None:
            self.attached.require_consolidated()
        return {"base": self.base, "options": options, "momentum": self.gsnr_state.momentum}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base" not in state:
            super().__setstate__(state)
            return
        VarianceReduced.__init__(self, state["base"], **state["options"])
        self.gsnr_state.momentum = state["momentum"]

    # groups and state of the base optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's groups."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's state, with p for the groups that have beta3."""
        averaged = self._averaged()
        if not averaged:
            return self.base.state
        return StateWithGsnrMomentum(self.base.state, self.gsnr_state.momentum, averaged)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer, and reads the gradients of its parameters."""
        if parts_of(self.base) != [self.base]:
            raise SettingError(
                f"{self.describe()} does not know which optimizer a new group is for; give the "
                "optimizers all their groups before VarianceReduced(...), frozen ones too"
            )
        self.base.add_param_group(param_group)
        try:
            self._prepare_group(self.base.param_groups[-1])
        except SettingError:
            self.base.param_groups.pop()
            raise
        self._source.add(self.gsnr_state.vr_parameters)

    def _averaged(self) -> dict[Tensor, None]:
        """The parameters that have p, or will have it."""
        groups = [g for g in self.param_groups if g.get("beta3") is not None and g["vr"]]
        return {p: None for group in groups for p in group["params"]}

    def _prepare_group(self, group: dict[str, Any]) -> None:
        for name, default in self._group_defaults.items():
            group.setdefault(name, default)
        require_valid(group, type(self))
        if group["vr"]:
            self.gsnr_state.vr_parameters.update(dict.fromkeys(group["params"]))
            # with vr=False gradients may be sparse, which no fused step takes
            if self._chooses_fused and group["fused"] is None and group["foreach"] is None:
                group["fused"] = all(can_fuse(self.base, p) for p in group["params"])

    # one step

    def attach(self, ddp: DistributedDataParallel) -> DDPCommHook:
        """Scales gradients inside the all-reduce of a DDP model. Collective; once, before training.

        With one micro-batch per rank and step it sends as much as a plain all-reduce, with several
        a quarter more: M2 in bfloat16, which changes r g by about 5e-4, or in float64 for float64
        gradients. After the last backward `.grad` is r g, the same on every rank. All backwards of
        a step except the last must run under `ddp.no_sync()`. `AdaptiveBatch` attaches by itself.

        Args:
            ddp: the wrapped model.
        Returns:
            The hook, which is also `self.attached`: `grad_norm`, `clip_grad_norm_`, `consolidate`.
        Raises:
            SettingError: `ddp` is not a DDP model or has a communication hook.
        """
        parameters = list(self.gsnr_state.vr_parameters)
        require_attachable(ddp, parameters)
        if self.attached is not None:
            self.attached.consolidate()  # p moves to the new hook
        self.attached = DDPCommHook(ddp, self.gsnr_state)
        weakref.finalize(self, self.attached.release).atexit = False
        self.bind(DDPSource(ddp, parameters), self.attached)
        return self.attached

    def reduced_source(self) -> GradientSource | None:
        """Its own source, if each backward is reduced over the ranks (fully_shard); else None."""
        return self._source if self._source.reducer.reduces_each_backward else None

    def bind_to_loop(self, source: GradientSource) -> None:
        """Reads gradients from the source of a training loop, and attaches to its DDP model."""
        if source.processes > source.ranks:
            raise SettingError(NO_TENSOR_PARALLELISM)
        if source.engine is None:  # ZeRO's groups have flat partitions in place of parameters
            self._follow_groups()
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

    def _follow_groups(self) -> None:
        """Reads the parameters that are in the groups now; accelerate puts shards there."""
        groups, state = [group for group in self.param_groups if group["vr"]], self.gsnr_state
        parameters = dict.fromkeys(p for group in groups for p in group["params"])
        if parameters.keys() != state.vr_parameters.keys() and self.attached is None:
            state.vr_parameters.clear()
            state.vr_parameters.update(parameters)
            for group in groups:
                if self._chooses_fused and group["fused"]:
                    group["fused"] = all(can_fuse(self.base, p) for p in group["params"])
            self.bind(source_of(parameters, type(self).__name__))

    def bind(self, source: GradientSource, scaling: GradientScaling | None = None) -> None:
        """Reads gradients from a source, which keeps its next sums apart from `.grad`."""
        for subscriber in self._subscribers:
            self._source.unsubscribe(subscriber)
        self._source, self._scaling = source, scaling or self._scaling
        self.gsnr_state.sums_of = source.sums_of
        if isinstance(source.guard, GradSums):
            source.guard.keeps_apart_next = True
        self._subscribers = [self.gsnr_state.moments]
        if isinstance(self._scaling, DDPCommHook):
            self._subscribers.append(self._scaling)
        for subscriber in self._subscribers:
            source.subscribe(subscriber)

    def scale_gradients(self, *, may_step: bool = False) -> bool:
        """Multiplies the gradients by r, before a step of `step()` or of an engine.

        With `may_step` the same pass may step the base optimizer too; returns whether it did.
        """
        state, applied = self.gsnr_state, self._scaling.apply(self._source, may_step=may_step)
        state.warn(applied)
        if state.watch:
            named = [(name, p) for name, p in state.named_parameters() if p in applied.layers]
            rows = [applied.layers[p] for _, p in named]
            self.gsnr = LayerGsnr(
                [name for name, _ in named],
                [p.numel() for _, p in named],
                torch.stack([row.to(rows[0]) for row in rows]) if rows else torch.zeros(0, 5),
                applied.k,
            )
        return applied.stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, and forgets the micro-batches of the step."""
        self.base.zero_grad(set_to_none)
        self._source.restart()

    @_disable_dynamo  # torch.compiler.disable would import the compiler
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Multiplies the gradients by r, and steps the base optimizer.

        Args:
            closure: computes the loss and calls `backward()` at least twice; it is called once. If
                no parameter has a gradient after it, as in some trainers, the step does nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if all(parameter.grad is None for parameter in self.gsnr_state.parameters()):
                self._source.restart()
                return loss
        attached = self.attached
        pending = self._source.micro_batches or (attached is not None and attached.has_untaken_step)
        # with rates of 0 torch's distributed checkpoints let a step only initialize state
        moves = any(rate != 0 for rate in rates_of(self))
        stepped = False
        if self.gsnr_state.vr_parameters and (pending or moves):
            stepped = self.scale_gradients(may_step=True)
        else:
            scattered = () if attached is None else attached.scattered
            for parameter in self._averaged():
                if parameter.grad is not None and parameter not in scattered:
                    self.gsnr_state.momentum.make(parameter)
        if not stepped:
            self._step_base()
        self._source.restart()
        return loss

    def describe(self) -> str:
        """Class and base optimizer, which must be equal on all ranks."""
        return f"{type(self).__name__} of {name_of(self.base)}"

    def train(self) -> None:
        """Switches a schedule-free base optimizer to training mode; others have no mode."""
        getattr(self.base, "train", lambda: None)()

    def eval(self) -> None:
        """Switches a schedule-free base optimizer to evaluation mode."""
        getattr(self.base, "eval", lambda: None)()

    # states

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers p on every rank, for `state_dict()`, if `attach` was called. Collective.

        Named as in torch's ZeroRedundancyOptimizer; `to` is ignored, as every rank gets all of p.
        """
        if self.attached is not None:
            self.attached.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dict, with p and its step count for each parameter."""
        return save_with_hooks(self, self._save)

    def _save(self) -> dict[str, Any]:
        if self.attached is not None:
            self.attached.require_consolidated()
        packed = self.base.state_dict()
        packed["state"] = {
            index: dict(state) if isinstance(state, dict) else state  # some have counters
            for index, state in packed["state"].items()
        }
        self.gsnr_state.momentum.add_to(packed, self.gsnr_state.parameters())
        return packed

    @loads_state
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of `state_dict()`, or the state dict of a bare base optimizer.

        Raises:
            StateError: p is missing from a state that was saved with beta3, or the shapes of the
                parameters differ.
        """
        load_with_hooks(self, self._load, state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        momentum = GsnrMomentum()
        base_state = momentum.load_from(state_dict, self.gsnr_state.parameters())
        before = [dict(group) for group in self.param_groups]
        load_into(self.base, self.base.load_state_dict, base_state)
        for group, own in zip(self.param_groups, before, strict=True):
            for name in self._group_defaults:
                group.setdefault(name, own[name])
            if self._chooses_fused:  # it depends on this machine, and not on the file
                group["fused"] = own["fused"]
        self.gsnr_state.momentum = momentum
        if self.attached is not None:
            self.attached.clear()
        self._source.restart()


def micro_batch_optimizer(optimizer: object) -> VarianceReduced | None:
    """The optimizer, if it reads the gradient of each micro-batch, and so needs two or more."""
    return optimizer if isinstance(optimizer, VarianceReduced) else None
