"""A run that continues from a Lightning checkpoint goes the way of one that was never stopped."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import bigbatch as bb
from bigbatch.optim import VRAdam
from lightning_training import MICRO, QUIET, SEED, Training, adaptive, data, fit, loader, sgd

GROWING = bb.SimiGrad(target=0.5, min_batch=12, max_batch=60, grow=1.5)


class Noisy(Training):
    """Draws random numbers while it trains."""

    def __init__(self, optimizer=sgd):
        def scheduler(made):
            falls = LambdaLR(made, lambda ticks: 0.99**ticks)
            return {"scheduler": falls, "interval": "step"}

        super().__init__(optimizer, scheduler)
        self.net.insert(2, nn.Dropout(0.2))


def vradam(parameters):
    return VRAdam(parameters, lr=0.01, beta3=0.9)


def run(batches, epochs, saved=None, optimizer=sgd, seed=SEED, module=Noisy, **options):
    torch.manual_seed(seed)
    callback = adaptive(GROWING, batch_size=12, base_batch=8, min_micro_batches=2)
    module = module(optimizer)
    torch.manual_seed(seed)
    return fit(
        callback,
        batches,
        module,
        ckpt_path=saved,
        max_epochs=epochs,
        enable_checkpointing="callbacks" in options,
        **options,
    )


def assert_continues(expected, actual):
    """The last records and weights, but for the last bit: memory may be aligned otherwise."""
    assert 2 < len(actual.records) < len(expected.records)
    for one, other in zip(expected.records[-len(actual.records) :], actual.records, strict=True):
        assert one == pytest.approx(other, rel=1e-12, nan_ok=True)
    torch.testing.assert_close(expected.weights[-1], actual.weights[-1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_from_the_end_of_an_epoch(shuffled, optimizer, tmp_path):
    batches = loader(150, shuffle=shuffled)
    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    expected = run(batches, 3, optimizer=optimizer, callbacks=[saves])

    saved = tmp_path / "epoch=0.ckpt"
    actual = run(batches, 3, saved, optimizer, seed=SEED + 1)

    assert_continues(expected, actual)
    assert [1, 2] == sorted({record["epoch"] for record in actual.records})


def resumable(samples):
    """A loader whose place Lightning saves and restores."""
    rows = data(samples)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(SEED))
    return StatefulDataLoader(rows, MICRO, sampler=sampler)


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
def test_from_the_middle_of_an_epoch(optimizer, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    expected = run(resumable(150), 2, optimizer=optimizer, callbacks=[saves])

    saved = tmp_path / "step=4.ckpt"
    actual = run(resumable(150), 2, saved, optimizer, seed=SEED + 1)

    assert 0 == actual.records[0]["epoch"]
    assert_continues(expected, actual)


class Planned(Noisy):
    """Makes the loader early, to build a schedule as long as the training."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 9
        return super().configure_optimizers()


class Validated(Noisy):
    """Validated twice an epoch, so within a step."""

    def validation_step(self, batch, _):
        self.log("val_loss", super().training_step(batch, _))

    def val_dataloader(self):
        return loader(8)


class PlannedAndValidated(Planned, Validated):
    pass


@pytest.mark.parametrize("module", [Noisy, Planned, Validated, PlannedAndValidated])
@pytest.mark.parametrize("when", ["inside", "last batch", "end"])
def test_a_resumable_loader_continues_also_if_it_was_made_early(when, module, tmp_path):
    """Lightning drops its state then, so that samples came twice, or an epoch without any."""
    saves = {"every_n_train_steps": 1}
    if when == "end":
        monitor = {"monitor": "val_loss"} if issubclass(module, Validated) else {}
        saves = {"save_on_train_epoch_end": not monitor, **monitor}
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **saves)

    def resumable():
        torch.manual_seed(SEED)
        return StatefulDataLoader(data(150), MICRO, shuffle=True)

    expected = run(resumable(), 2, module=module, callbacks=[saves])
    end = [record["epoch"] for record in expected.records].index(1)
    saved = tmp_path / f"step={4 if when == 'inside' else end}.ckpt"
    actual = run(resumable(), 2, saved, seed=SEED + 1, module=module)
    assert_continues(expected, actual)


def test_a_lost_position_of_the_loader_is_said(tmp_path):
    """Also where Lightning takes a loader for resumable whose state the checkpoint lacks."""
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    run(loader(150), 1, callbacks=[saves])
    with pytest.warns(UserWarning, match="within an epoch, after .* samples of this epoch come"):
        run(resumable(150), 1, tmp_path / "step=4.ckpt")


def test_a_checkpoint_from_within_a_step_is_of_its_start(tmp_path):
    callback = adaptive(bb.Fixed(7 * MICRO), min_micro_batches=2)
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, monitor="val_loss")

    fit(
        callback,
        loader(160),
        Validated(),
        val_check_interval=10,
        enable_checkpointing=True,
        callbacks=[saves],
    )

    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=False)
    (state,) = (s for name, s in saved["callbacks"].items() if "AdaptiveBatch" in name)
    assert 7 * MICRO == state["shared"]["counts"][1]  # after 10 batches: one step of 7
    resumed = fit(
        adaptive(bb.Fixed(7 * MICRO), min_micro_batches=2),
        loader(160),
        Validated(),
        ckpt_path=tmp_path / "step=1.ckpt",
    )
    assert 2 * 7 * MICRO == resumed.records[0]["samples"]


def test_a_checkpoint_without_the_callback_starts_it_again(tmp_path):
    fit(None, loader(64), enable_checkpointing=True, default_root_dir=tmp_path)
    (saved,) = tmp_path.rglob("*.ckpt")

    watch = fit(
        adaptive(bb.Fixed(16), min_micro_batches=2), loader(64), ckpt_path=saved, max_epochs=2
    )

    assert [16, 32, 48, 64] == [record["samples"] for record in watch.records]


def test_a_checkpoint_that_is_only_tested_starts_no_training_in_its_middle(tmp_path):
    class Tested(Training):
        def test_step(self, batch):
            pass

    callback = adaptive(bb.Fixed(16), min_micro_batches=2)
    saves = ModelCheckpoint(tmp_path, "saved")
    fit(callback, loader(64), Tested(), enable_checkpointing=True, callbacks=[saves])
    before = torch.get_rng_state()

    trainer = pl.Trainer(**QUIET, callbacks=[callback])
    trainer.test(Tested(), loader(8), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)

    assert torch.equal(before, torch.get_rng_state())
    assert 16 == fit(callback, loader(64)).records[0]["samples"]


def test_the_state_is_loaded_without_running_code_from_it(tmp_path):
    callback = adaptive(bb.Fixed(16), min_micro_batches=2)
    fit(callback, loader(64))

    torch.save(callback.state_dict(), tmp_path / "state.pt")

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert 64 == state["shared"]["counts"][1]
