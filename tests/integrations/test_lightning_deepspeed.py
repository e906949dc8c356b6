"""AdaptiveBatchCallback under DeepSpeedStrategy, on two processes, against DDP.

Lightning lets DeepSpeed run on CUDA alone. `OnCpu` leaves out this check of its; all else is the
real strategy, on the CPU.
"""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VRSGD
from deepspeed_training import OFFLOADED, max_difference, quiet
from lightning_training import Narrow, Training, adaptive, fit, loader, sgd

GROWING = bb.SimiGrad(target=0.5, min_batch=16, max_batch=96, grow=1.5)
CLIP = 0.2


class OnCpu(DeepSpeedStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    @property
    def root_device(self):
        return torch.device("cpu", 0)  # DeepSpeed wants its number

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Validated(Narrow):
    def __init__(self, *args):
        super().__init__(*args, dtype=torch.float32)

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _))


def strategy_of(stage, **zero):
    if stage is None:
        return "ddp"
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **zero},
    }
    return OnCpu(config=config)


def trained(stage, ranks, zero=None, **options):
    """What was watched."""
    return fit(
        adaptive(GROWING, base_batch=16),
        loader(160),
        Validated(sgd, scheduler),
        strategy=strategy_of(stage, **(zero or {})),
        devices=ranks,
        gradient_clip_val=CLIP,
        max_epochs=2,
        **options,
    )


def scheduler(optimizer):
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    return {"scheduler": linear, "interval": "step"}


def on_all_stages(rank, ranks):
    quiet()
    results = []
    for stage in (None, 0, 1, 2, 3):
        watch = trained(stage, ranks)
        results.append((watch.records, watch.backwards, watch.trainer.global_step))
    return results


def test_every_stage_trains_as_ddp_does(deepspeed_ranks):
    for plain, *stages in deepspeed_ranks(2)(on_all_stages):
        for stage in stages:
            for a, b in zip(plain[0], stage[0]): print({k: (a[k], b[k]) for k in a if a[k] != b[k]})
        print(plain)
    assert 0
