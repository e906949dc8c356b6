"""AdaptiveBatchCallback under DeepSpeedStrategy, on two processes, against DDP.

Lightning lets DeepSpeed run on CUDA alone. `OnCpu` leaves out its checks of the device; all else is
the real strategy, on the CPU.
"""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

import bigbatch as bb
from bigbatch.errors import SettingError
from deepspeed_training import OFFLOADED, max_difference, quiet, weights_of
from lightning_training import Narrow, adaptive, fit, loader, sgd, vrsgd

GROWING = bb.SimiGrad(target=0.5, min_batch=16, max_batch=96, grow=1.5)
CLIP = 0.2  # below most norms
EPOCHS = 3
SAMPLES = 160
CELLS = {"stage 0": (0, {}), "stage 1": (1, {}), "stage 2": (2, {}), "stage 3": (3, {})}
CELLS["stage 2, CPU offload"] = 2, OFFLOADED
MEASURED = "loss", "similarity", "noise_scale"


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
    """In float32, with a validation, and a schedule as long as the training."""

    def __init__(self, optimizer=sgd, lost=None):
        super().__init__(optimizer, self.schedule, dtype=torch.float32)
        self.lost, self.batches = lost, 0  # the number of a batch whose loss is not finite

    def schedule(self, optimizer):
        total = self.trainer.estimated_stepping_batches
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
        return {"scheduler": linear, "interval": "step"}

    def training_step(self, batch, number):
        self.batches += 1
        loss = super().training_step(batch, number)
        return loss * math.nan if self.batches == self.lost and self.global_rank else loss

    def val_dataloader(self):
        return loader(20)

    def validation_step(self, batch, number):
        self.log("val_loss", super().training_step(batch, number), sync_dist=True)


class Weights(pl.Callback):
    """Those of the end, whole."""

    def on_train_end(self, trainer, pl_module):
        self.engine = trainer.model
        self.weights = weights_of(trainer.model)


def strategy_of(stage, zero):
    if stage is None:
        return "ddp"
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
    }
    return OnCpu(config=config)


def trained(ranks, stage, zero=None, module=None, callbacks=(), given=None, **options):
    """(records, weights, validation loss, updates, what was watched)."""
    watch = fit(
        adaptive(GROWING, base_batch=16, **(given or {})),
        module=module or Validated(),
        batches=loader(SAMPLES),
        strategy=strategy_of(stage, zero or {}),
        devices=ranks,
        max_epochs=EPOCHS,
        gradient_clip_val=CLIP,
        callbacks=[weights := Weights(), *callbacks],
        **options,
    )
    return watch.records, weights.weights, watch.backwards, watch.trainer.global_step


def on_all_stages(rank, ranks):
    quiet()
    return [trained(ranks, stage, zero) for stage, zero in [(None, {}), *CELLS.values()]]


def test_every_stage_trains_as_ddp_does(deepspeed_ranks):
    for (plain, weights, *counts), *stages in deepspeed_ranks(2)(on_all_stages):
        assert len({record["batch_size"] for record in plain}) > 2
        assert len({record["lr"] for record in plain}) > 8
        assert len(CELLS) == len(stages)
        for records, local, *others in stages:
            assert counts == others
            assert 1e-6 > max_difference(weights, local)
            for record, other in zip(plain, records, strict=True):
                assert {**record, **dict.fromkeys(MEASURED)} == {**other, **dict.fromkeys(MEASURED)}
                for name in MEASURED[:2]:
                    assert record[name] == pytest.approx(other[name], rel=2.5e-7, abs=2.5e-7)


def resumed(rank, ranks, folder, stage):
    """(uninterrupted, resumed from the checkpoint of an epoch)."""
    quiet()
    whole = trained(ranks, stage)
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saves]}
    trained(ranks, stage, **options)
    return whole, trained(ranks, stage, ckpt_path=f"{folder}/epoch=1.ckpt", **options)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_stopped_training_resumes_bit_for_bit(deepspeed_ranks, tmp_path, stage):
    for whole, rest in deepspeed_ranks(2)(resumed, str(tmp_path), stage):
        assert whole[0][-len(rest[0]) :] == rest[0]
        assert 1 < len(rest[0]) < len(whole[0])
        assert all(map(torch.equal, whole[1], rest[1]))
        assert whole[3] == rest[3]


def skipping(rank, ranks):
    quiet()
    skipped = []
    for stage in (0, 2, 3):
        watch = Weights()
        records, weights, *_ = trained(ranks, stage, module=Validated(lost=7), callbacks=[watch])
        finite = all(weight.isfinite().all() for weight in weights)
        skipped.append((sum(r["skipped"] for r in records), watch.engine.skipped_steps, finite))
    return skipped


def test_a_gradient_that_is_not_finite_skips_one_update(deepspeed_ranks):
    for skipped in deepspeed_ranks(2)(skipping):
        assert [(1, 1, True)] * 3 == skipped


REFUSED = {
    "groups": ({"given": {"groups": 8}}, "DeepSpeed reduces in every backward"),
    "transport": ({"given": {"transport": True}}, "transport"),
    "a variance-reduced optimizer": ({"module": Validated(vrsgd)}, "DeepSpeedStrategy"),
    "an accumulation": ({"accumulate_grad_batches": 2}, "batch_size="),
}


def refused(rank, ranks):
    quiet()
    messages = {}
    for name, (how, _) in REFUSED.items():
        with pytest.raises(SettingError) as raised:
            trained(ranks, 2, **how)
        messages[name] = str(raised.value)
    return messages


def test_what_is_refused_names_the_setting(deepspeed_ranks):
    (messages,) = deepspeed_ranks(1)(refused)
    for name, (_, reason) in REFUSED.items():
        assert reason in messages[name]
