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


def test_seesaw_follows_the_scheduler_that_the_trainer_has():
    watch = fit(
        adaptive(bb.Seesaw(max_batch=32), batch_size=8, min_micro_batches=2),
        loader(136),
        Training(scheduler=by_steps(lambda optimizer: StepLR(optimizer, 4, gamma=0.25))),
    )

    # 4 base batches, one cut by 4; then 4 more in one step, and a cut that the cap leaves
    assert [8, 8, 8, 8, 32, 32, 32] == [record["batch_size"] for record in watch.records][:7]
    rates = [record["lr"] / 0.05 for record in watch.records]
    assert [1, 1, 1, 1, 1 / 2, 1 / 8, 1 / 32] == pytest.approx(rates[:7])


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


class Cycle(Training):
    """One cycle over as many steps as the trainer, or somebody, says."""

    def __init__(self, total=lambda trainer: trainer.estimated_stepping_batches):
        super().__init__()
        self.total = total

    def configure_optimizers(self):
        optimizer = sgd(self.parameters())
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=self.total(self.trainer))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({"policy": bb.Fixed(4 * MICRO)}, 24),
        ({"policy": Scripted(16, 40), "batch_size": 16}, 24),
        ({"policy": bb.Fixed(4 * MICRO), "base_batch": 2 * MICRO}, 48),
        ({"policy": bb.Controller(bb.Fixed(8 * MICRO), 32, base_batch=16)}, 24),
        ({"policy": Scripted(16, 40)}, 96),
    ],
    ids=["fixed", "batch_size", "base_batch", "controller", "the loader's"],
)
def test_estimated_stepping_batches_are_base_batches(settings, total, recwarn):
    watch = fit(adaptive(min_micro_batches=2, **settings), loader(192), Cycle(), max_epochs=2)

    scheduler = watch.trainer.lr_scheduler_configs[0].scheduler
    assert (total, total - 1) == (scheduler.total_steps, scheduler.last_epoch)  # from 0: its end
    assert not said(recwarn, "reaches its end")
    assert 1 == watch.trainer.accumulate_grad_batches


def test_numbers_of_the_trainer_are_right_in_a_training_too():
    """Its length is no other one in each batch, and a step ends with one batch of it."""

    class Counting(Cycle):
        def training_step(self, batch, index):
            trainer = self.trainer
            assert 24 == trainer.estimated_stepping_batches
            ends = (index + 1) % trainer.accumulate_grad_batches == 0
            assert ends != trainer.fit_loop._should_accumulate()
            self.steps += ends
            return super().training_step(batch, index)

    module = Counting()
    module.steps = 0
    policy = Scripted(16, 40)
    watch = fit(
        adaptive(policy, batch_size=16, min_micro_batches=2), loader(192), module, max_epochs=2
    )
    assert 96 > len(watch.records) == module.steps == watch.trainer.global_step


def test_the_rate_over_a_fixed_batch_is_that_of_lightnings_own_accumulation():
    expected = fit(None, loader(200), Cycle(), max_epochs=2, accumulate_grad_batches=5)
    actual = fit(
        adaptive(bb.Fixed(5 * MICRO), min_micro_batches=2), loader(200), Cycle(), max_epochs=2
    )

    torch.testing.assert_close(expected.weights, actual.weights, rtol=1e-10, atol=1e-12)


def test_other_numbers_of_the_trainer_count_base_batches_too():
    def by_hand(trainer):
        loaders = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        assert 96 == loaders == trainer.num_training_batches * trainer.max_epochs
        assert trainer.accumulate_grad_batches > 1
        assert 6 == int(trainer.accumulate_grad_batches)
        return loaders // trainer.accumulate_grad_batches

    watch = fit(
        adaptive(bb.Fixed(6 * MICRO), min_micro_batches=2),
        loader(192),
        Cycle(by_hand),
        max_epochs=2,
    )

    assert 16 == watch.trainer.lr_scheduler_configs[0].scheduler.total_steps


@pytest.mark.parametrize("total", [96, 6])
def test_a_schedule_that_ends_elsewhere_than_the_training_is_said(total):
    with pytest.warns(UserWarning, match=rf"end in {total - 1} steps.*advances it 24 times"):
        fit(
            adaptive(bb.Fixed(4 * MICRO), min_micro_batches=2),
            loader(192),
            Cycle(lambda trainer: total),
            max_epochs=2,
        )


def test_most_steps_and_a_batch_that_grows_are_said_to_end_at_different_places():
    with pytest.warns(UserWarning, match=r"max_steps=6 ends .* max_epochs ends both together"):
        fit(
            adaptive(Scripted(16, 40), batch_size=16, min_micro_batches=2),
            loader(192),
            Cycle(),
            max_epochs=-1,
            max_steps=6,
        )


def said(warned, what):
    return [each for each in warned if what in str(each.message)]
