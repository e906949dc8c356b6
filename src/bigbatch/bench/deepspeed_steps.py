"""Kinds of steps under DeepSpeed, as `kinds` has them under DDP and FSDP2."""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from bigbatch.optim import VRSGD
from bigbatch.policies.policy import Fixed


def is_there() -> bool:
    """Whether DeepSpeed is, and a compiler: it compiles a part of itself on first use."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    return find_spec("deepspeed") is not None and compiler is not None


def step_under_deepspeed(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    momentum: float,
    *,
    stage: int,
    what: str,
) -> Callable[[], None]:
    """One optimizer step of a model.

    Args:
        model: is trained.
        batches: micro-batches of this rank.
        lr: of SGD.
        momentum: likewise.
        stage: of ZeRO.
        what: "plain"; "similarity", measured and acted on; or "VR".
    Raises:
        MissingPackageError: DeepSpeed is not installed.
    """
    from bigbatch.integrations import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # ninja may be there alone
    micro, accumulation = len(batches[0][0]), len(batches)
    batch = micro * accumulation * dist.get_world_size()
    make: Any = VRSGD if what == "VR" else SGD
    more = {} if what == "VR" else {"fused": stage > 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make(model.parameters(), lr, momentum, **more),
            config={
                "train_micro_batch_size_per_gpu": micro,
                "gradient_accumulation_steps": accumulation,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            policy=None if what == "plain" else Fixed(batch),
            min_micro_batches=accumulation * dist.get_world_size(),
        )

    def step() -> None:
        for x, y in batches:
            engine.backward(cross_entropy(engine(x), y))
            engine.step()

    return step
