"""Kinds of steps on ranks: engine, accumulation, what is measured, which optimizer."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from bigbatch.bench import baselines
from bigbatch.bench.deepspeed_steps import is_there, step_under_deepspeed
from bigbatch.bench.scaling import Model
from bigbatch.optim import VRSGD
from bigbatch.statistics.meter import GradientMeter

ENGINES = ("DDP", "FSDP2", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LAYERS = 8  # of 768 x 768: 4.7 million weights in 16 parameters, which 2, 3 and 4 divide
_SAMPLES = 64  # of a micro-batch on a rank
_BUCKET = 4  # MB, so that there are several
_NODE = 2  # ranks of a node that is made believe
_LR, _MOMENTUM = 1e-3, 0.9


@dataclass(frozen=True)
class Kind:
    """One way to do a step.

    Args:
        engine: "DDP", "FSDP2", or "ZeRO-" and a stage.
        what: for the table.
        micro_batches: of a rank.
        baseline: `what` of the kind that it is compared with; None where it is such a one.
        meter: options of a `GradientMeter`; None for none.
        vr: whether the optimizer is variance-reduced.
        nodes: whether there are two nodes, and the reduction has two levels.
        peer: "simigrad" or "vrgd", for a re-creation.
        reduced_once: whether FSDP2 keeps whole gradients until the last micro-batch.
        width: of each layer.
    """

    engine: str
    what: str
    micro_batches: int = 1
    baseline: str | None = "plain"
    meter: tuple[tuple[str, Any], ...] | None = None
    vr: bool = False
    nodes: bool = False
    peer: str | None = None
    reduced_once: bool = False
    width: int = 768

    @property
    def size(self) -> Model:
        """Of the network."""
        return Model("layers", LAYERS * self.width * (self.width + 1), 2 * LAYERS)


_FOUR = "plain, a = 4"
_NODES, _NODES_FOUR = "plain, two levels", "plain, a = 4, two levels"
_DDP = [
    Kind("DDP", "plain", baseline=None),
    Kind("DDP", "similarity", meter=()),
    Kind("DDP", "similarity and interval", meter=(("confidence", 0.9),)),
    Kind("DDP", "VR, k = ranks", vr=True),
    Kind("DDP", "SimiGrad, re-created", peer="simigrad"),
    Kind("DDP", "VRGD, re-created", peer="vrgd"),
    Kind("DDP", _FOUR, 4, baseline=None),
    Kind("DDP", "VR, a = 4, M2 in bfloat16", 4, baseline=_FOUR, vr=True),
    Kind("DDP", _NODES, baseline=None, nodes=True),
    Kind("DDP", "VR, k = ranks, two levels", baseline=_NODES, vr=True, nodes=True),
    Kind("DDP", _NODES_FOUR, 4, baseline=None, nodes=True),
    Kind("DDP", "VR, a = 4, two levels", 4, baseline=_NODES_FOUR, vr=True, nodes=True),
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
    """Those of an engine that so many ranks can do; of ZeRO two will do, if DeepSpeed is there."""
    if engine.startswith("ZeRO"):
        return [replace(kind, engine=engine) for kind in _ZERO if ranks == 2 and is_there()]
    team = _DDP if engine == "DDP" else _FSDP2
    pairs = [kind for kind in team if ranks % 2 == 0 or kind.peer != "simigrad"]
    return [kind for kind in pairs if ranks == 2 * _NODE or not kind.nodes]


def network(width: int) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*(part for pair in pairs for part in pair))


def step_of(kind: Kind) -> Callable[[], None]:
    """Makes a model and all that the kind needs, and returns one optimizer step of it."""
    torch.manual_seed(1 + dist.get_rank())  # other data on each
    batches = [
        (torch.randn(_SAMPLES, kind.width), torch.randint(kind.width, (_SAMPLES,)))
        for _ in range(kind.micro_batches)
    ]
    if kind.engine.startswith("ZeRO"):
        what = "VR" if kind.vr else "plain" if kind.meter is None else "similarity"
        stage = int(kind.engine[-1])
        return step_under_deepspeed(
            network(kind.width), batches, _LR, _MOMENTUM, stage=stage, what=what
        )
    model = _wrapped(kind)
    optimizer = _optimizer(kind, model)
    meter = None if kind.meter is None else GradientMeter(model, **dict(kind.meter))
    finish = None if kind.peer is None else getattr(baselines, kind.peer)(model)

    def step() -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with _synchronized(model, kind, last=last):
                _backward(model, batch, kind.micro_batches)
        if meter is not None:
            meter.read([_SAMPLES] * kind.micro_batches)
        if finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wrapped(kind: Kind) -> Any:
    model = network(kind.width)
    if kind.engine == "DDP":
        return DistributedDataParallel(model, bucket_cap_mb=_BUCKET)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def _optimizer(kind: Kind, model: Any) -> Optimizer:
    node, across = _node_groups() if kind.nodes else (None, None)
    if kind.nodes and not kind.vr:
        baselines.two_levels(model, node, across)
    if not kind.vr:
        return SGD(model.parameters(), _LR, _MOMENTUM, fused=kind.engine == "DDP")
    optimizer = VRSGD(model.parameters(), _LR, _MOMENTUM)
    if kind.engine == "DDP":
        optimizer.attach(model, node_group=node)
    return optimizer


def _node_groups() -> tuple[Any, Any]:
    """The ranks of this node, and those of its place on every node. Collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    inside = [list(range(first, first + _NODE)) for first in range(0, ranks, _NODE)]
    across = [list(range(place, ranks, _NODE)) for place in range(_NODE)]
    made = [(row, dist.new_group(row)) for row in [*inside, *across]]
    local = [group for row, group in made if rank in row]
    return local[0], local[1]


def _synchronized(model: Any, kind: Kind, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """The original reduces nothing by itself; FSDP2 always reduces unless switched off."""
    if kind.engine == "FSDP2":
        model.set_requires_gradient_sync(last or not kind.reduced_once)
    elif not last or kind.peer == "simigrad":
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context
    return contextlib.nullcontext()


def _backward(model: Any, batch: tuple[Tensor, Tensor], micro_batches: int) -> None:
    x, y = batch
    (cross_entropy(model(x), y) / micro_batches).backward()  # type: ignore[no-untyped-call]
