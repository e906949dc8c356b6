"""Schedulers of a Lightning module: those that count steps count base batches."""

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import bigbatch as bb
from lightning_training import MICRO, Scripted, Training, adaptive, fit, loader, sgd


def by_steps(make, **rest):
    return lambda optimizer: {"scheduler": make(optimizer), "interval": "step", **rest}


def falling(optimizer):
    return LambdaLR(optimizer, lambda ticks: 1 / (1 + ticks))


def test_a_step_scheduler_advances_once_per_base_batch():
    policy = Scripted(8, 8, 16, 24)  # 1, 1, 2 and 3 base batches

    watch = fit(
        adaptive(policy, batch_size=8, min_micro_batches=2, lr_scaling=None),
        loader(56),
        Training(scheduler=by_steps(falling)),
    )

    assert [8, 8, 16, 24] == [record["batch_size"] for record in watch.records]
    expected = [0.05 / (1 + ticks) for ticks in (0, 1, 2, 4)]
    assert expected == pytest.approx([record["lr"] for record in watch.records])
    assert 7 == watch.trainer.lr_scheduler_configs[0].scheduler.last_epoch


def test_a_fixed_batch_keeps_the_schedule_that_lightning_has():
    training = by_steps(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))

    expected = fit(None, loader(96), Training(scheduler=training), accumulate_grad_batches=4)
    actual = fit(
        adaptive(bb.Fixed(4 * MICRO), min_micro_batches=2), loader(96), Training(scheduler=training)
    )

    torch.testing.assert_close(expected.weights[-1], actual.weights[-1], rtol=1e-10, atol=1e-12)


def test_a_schedule_over_estimated_stepping_batches_ends_with_the_training():
    """Where the base batch is the loader's: Lightning counts its batches then."""

    class Cycle(Training):
        def configure_optimizers(self):
            optimizer = sgd(self.parameters())
            total = self.trainer.estimated_stepping_batches
            scheduler = OneCycleLR(optimizer, 0.1, total_steps=total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    watch = fit(
        adaptive(bb.Fixed(5 * MICRO), base_batch=MICRO, min_micro_batches=2, lr_scaling=None),
        loader(200),
        Cycle(),
        max_epochs=2,
    )

    scheduler = watch.trainer.lr_scheduler_configs[0].scheduler
    assert (100, 99) == (scheduler.total_steps, scheduler.last_epoch)
    assert 1e-6 > scheduler.get_last_lr()[0]


def test_an_epoch_scheduler_is_left_to_lightning():
    watch = fit(
        adaptive(Scripted(8, 8, 16, 24), batch_size=8, min_micro_batches=2, lr_scaling=None),
        loader(56),
        Training(scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 4)),
        max_epochs=2,
    )

    rates = [record["lr"] for record in watch.records]
    expected = 0.05 * (1 + 0.5**0.5) / 2
    assert [0.05] * 4 + [pytest.approx(expected)] * (len(rates) - 4) == rates
    assert 2 == watch.trainer.lr_scheduler_configs[0].scheduler.last_epoch


def test_the_learning_rate_monitor_sees_the_schedule(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    monitor = pl.callbacks.LearningRateMonitor("step")

    fit(
        adaptive(bb.Fixed(16), min_micro_batches=2),
        loader(64),
        Training(scheduler=by_steps(falling)),
        callbacks=[monitor],
        logger=logger,
        log_every_n_steps=1,
    )

    assert pytest.approx([0.05, 0.025, 0.05 / 3, 0.0125]) == distinct(monitor.lrs["lr-SGD"])


def distinct(values):
    return list(dict.fromkeys(values))
