"""Kinds of steps on ranks: engine, accumulation, measurement, optimizer."""

import contextlib
import itertools
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from bigbatch.optim import VRSGD
from bigbatch.policies.policy import Fixed
from bigbatch.statistics.meter import GradientMeter
from studies.scaling import Model
from studies.sized_networks import MicroBatches

ENGINES: tuple[str, ...] = ("DDP", "FSDP2", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LAYERS = 8  # of 768 x 768: 4.7 million weights in 16 parameters, which 2, 3 and 4 divide
_SAMPLES = 64  # samples of a micro-batch on a rank
_BUCKET = 4  # MB of a DDP bucket; there are several
_LR, _MOMENTUM = 1e-3, 0.9


@dataclass(frozen=True)
class Kind:
    """A kind of step."""

    engine: str  # "DDP", "FSDP2", or "ZeRO-" and a stage
    what: str  # the name in the table
    micro_batches: int = 1  # of a rank
    baseline: str | None = "plain"  # `what` of the kind it is compared with
    meter: tuple[tuple[str, Any], ...] | None = None  # options; None for no meter
    vr: bool = False
    reduced_once: bool = False  # whether FSDP2 keeps unsharded gradients until the last one
    width: int = 768  # of each layer

    @property
    def size(self) -> Model:
        """Size of the network."""
        return Model("layers", LAYERS * self.width * (self.width + 1), 2 * LAYERS)


_FOUR = "plain, a = 4"
_DDP = [
    Kind("DDP", "plain", baseline=None),
    Kind("DDP", "similarity", meter=()),
    Kind("DDP", "similarity and interval", meter=(("confidence", 0.9),)),
    Kind("DDP", "VR, k = ranks", vr=True),
    Kind("DDP", _FOUR, 4, baseline=None),
    Kind("DDP", "VR, a = 4, M2 in bfloat16", 4, baseline=_FOUR, vr=True),
]
_FSDP2 = [
    Kind("FSDP2", "plain", baseline=None),
    Kind("FSDP2", "similarity", meter=()),
    Kind("FSDP2", "similarity and interval", meter=(("confidence", 0.9),)),
    Kind("FSDP2", _FOUR, 4, baseline=None),
    Kind("FSDP2", "VR, a = 4", 4, baseline=_FOUR, vr=True),
    Kind("FSDP2", "plain, a = 4, reduced once", 4, baseline=_FOUR, reduced_once=True),
]
_ZERO = [
    Kind("ZeRO", _FOUR, 4, baseline=None),
    Kind("ZeRO", "similarity, a = 4", 4, baseline=_FOUR, meter=()),
    Kind("ZeRO", "VR, a = 4", 4, baseline=_FOUR, vr=True),
]


def kinds(engine: str, ranks: int) -> list[Kind]:
    """Kinds of steps of an engine that this number of ranks can run; ZeRO runs on two ranks."""
    if engine.startswith("ZeRO"):
        runs = ranks == 2 and deepspeed_is_available()
        return [replace(kind, engine=engine) for kind in _ZERO] if runs else []
    return _DDP if engine == "DDP" else _FSDP2


def network(width: int) -> nn.Sequential:
    """The network, with the same weights on every rank."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*itertools.chain(*pairs))


def step_of(kind: Kind) -> Callable[[], None]:
    """Builds a model and all that the kind needs; returns a function that runs one step."""
    torch.manual_seed(1 + dist.get_rank())  # other data on each rank
    batches = [
        (torch.randn(_SAMPLES, kind.width), torch.randint(kind.width, (_SAMPLES,)))
        for _ in range(kind.micro_batches)
    ]
    if kind.engine.startswith("ZeRO"):
        return _deepspeed_step(kind, batches)
    model = _wrap_network(kind)
    optimizer = _optimizer(kind, model)
    meter = None if kind.meter is None else GradientMeter(model, **dict(kind.meter))

    def step() -> None:
        for number, (x, y) in enumerate(batches, start=1):
            with _sync_context(model, kind, last=number == len(batches)):
                loss = cross_entropy(model(x), y) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
        if meter is not None:
            meter.read([_SAMPLES] * kind.micro_batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def deepspeed_is_available() -> bool:
    """Whether DeepSpeed is installed, and a compiler, which its first use needs."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    return find_spec("deepspeed") is not None and compiler is not None


def _deepspeed_step(kind: Kind, batches: MicroBatches) -> Callable[[], None]:
    """A function that runs one step under DeepSpeed; a policy measures the similarity."""
    from bigbatch.integrations import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # ninja may be only there
    ranks, stage, model = dist.get_world_size(), int(kind.engine[-1]), network(kind.width)
    optimizer: Optimizer
    if kind.vr:
        optimizer = VRSGD(model.parameters(), _LR, _MOMENTUM)
    else:
        optimizer = SGD(model.parameters(), _LR, _MOMENTUM, fused=stage > 0)
    has_policy = kind.vr or kind.meter is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": _SAMPLES,
                "gradient_accumulation_steps": kind.micro_batches,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            policy=Fixed(_SAMPLES * kind.micro_batches * ranks) if has_policy else None,
            min_micro_batches=kind.micro_batches * ranks,
            every=1,
        )

    def step() -> None:
        for x, y in batches:
            engine.backward(cross_entropy(engine(x), y))
            engine.step()

    return step


def _wrap_network(kind: Kind) -> Any:
    model = network(kind.width)
    if kind.engine == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=_BUCKET)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def _optimizer(kind: Kind, model: Any) -> Optimizer:
    if not kind.vr:
        return SGD(model.parameters(), _LR, _MOMENTUM, fused=kind.engine == "DDP")
    optimizer = VRSGD(model.parameters(), _LR, _MOMENTUM)
    if kind.engine == "DDP":
        optimizer.attach(model)
    return optimizer


def _sync_context(model: Any, kind: Kind, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """The context of a backward, in which gradients are reduced or not."""
    if kind.engine == "FSDP2":
        model.set_requires_gradient_sync(last or not kind.reduced_once)
    elif not last:
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context
    return contextlib.nullcontext()
