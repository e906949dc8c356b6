"""Schedule-free optimizers, Lookahead and what cannot be stepped, in a loop and in trainers."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VarianceReduced
from lightning_training import Training, adaptive, data, fit, loader, network, plain_loop
from third_party_optimizers import Lookahead, ScheduleFree
from tiny_trainer import arguments, gpt, texts

FIXED = {"policy": bb.Fixed(16), "min_micro_batches": 2}
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}  # float64, the loss divided and multiplied once


def lookahead(parameters):
    return Lookahead(torch.optim.SGD(parameters, lr=0.05))


def schedule_free(parameters):
    optimizer = ScheduleFree(parameters)
    optimizer.train()
    return optimizer


def by_hand(optimizer, epochs):
    """The weights after training in float64 on the whole batches."""
    model = network()
    steps = optimizer(model.parameters())
    x, y = data(64).tensors
    for _ in range(epochs):
        for first in range(0, 64, 16):
            steps.zero_grad()
            cross_entropy(model(x[first : first + 16]), y[first : first + 16]).backward()
            steps.step()
    if hasattr(steps, "eval"):
        steps.eval()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", [schedule_free, lookahead])
def test_a_loop_of_ones_own_steps_them(optimizer):
    model = network()
    local = optimizer(model.parameters())
    plain_loop(loader(64), model, local, 2, **FIXED)
    if optimizer is schedule_free:
        local.eval()

    actual = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(by_hand(optimizer, 2), actual, **ROUNDING)


def reduced(parameters):
    """Schedule-free itself: r is 1 everywhere."""
    return VarianceReduced(ScheduleFree(parameters), gamma=1.0)


def test_a_variance_reduced_one_is_set_by_trainers_too():
    fit(adaptive(**FIXED), loader(64), module := Validated(reduced), val_check_interval=5)

    actual = torch.cat([p.detach().flatten() for p in module.net.parameters()])
    torch.testing.assert_close(by_hand(schedule_free, 1), actual, **ROUNDING)


def test_a_variance_reduced_one_that_saves_otherwise_is_refused():
    with pytest.raises(SettingError, match=r"Lookahead saves \['inside', 'slow', 'steps'\]"):
        VarianceReduced(lookahead(network().parameters()))


class Validated(Training):
    """Validated with the weights that its optimizer has for that."""

    def validation_step(self, batch, _):
        for group in self.trainer.optimizers[0].param_groups:
            assert not group.get("training", False)
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def val_dataloader(self):
        return loader(20)


@pytest.mark.parametrize("optimizer", [ScheduleFree, lookahead])
def test_lightning_steps_validates_and_resumes_them(tmp_path, optimizer):
    saved = ModelCheckpoint(tmp_path, "one", save_on_train_epoch_end=True)
    saves = {"enable_checkpointing": True, "callbacks": [saved]}
    fit(adaptive(**FIXED), loader(64), Validated(optimizer), val_check_interval=5, **saves)
    watch = fit(
        adaptive(**FIXED),
        loader(64),
        module := Validated(optimizer),
        max_epochs=2,
        val_check_interval=5,
        ckpt_path=tmp_path / "one.ckpt",
    )

    expected = by_hand(schedule_free if optimizer is ScheduleFree else optimizer, 2)
    actual = torch.cat([p.detach().flatten() for p in module.net.parameters()])
    assert 4 == len(watch.records)
    torch.testing.assert_close(expected, actual, **ROUNDING)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [ScheduleFree, lookahead])
def test_the_trainer_steps_evaluates_and_resumes_them(tmp_path, optimizer):
    def trained(folder, **resumed):
        model = gpt()
        trainer = AdaptiveTrainer(
            model=model,
            args=arguments(
                folder,
                lr_scheduler_type="constant",
                eval_strategy="steps",
                eval_steps=3,
                save_strategy="steps",
                save_steps=3,
            ),
            train_dataset=texts(),
            eval_dataset=texts(8),
            optimizers=(optimizer(model.parameters()), None),
            policy=bb.Fixed(16),
            every=1,
        )
        trainer.train(**resumed)
        return trainer.state.log_history[-2]["eval_loss"], list(model.parameters())

    whole, expected = trained(tmp_path)
    rest, actual = trained(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert whole == pytest.approx(rest, rel=1e-5)  # float32; the mode is changed back and forth
    torch.testing.assert_close(expected, actual, rtol=1e-4, atol=1e-5)


class Hookless(Lookahead):
    """One whose hooks nobody can put anything on."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        del self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks


def several(parameters):
    return [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]


UNSTEPPABLE = {
    r"LBFGS\.step\(\) needs a closure": torch.optim.LBFGS,
    "Lookahead is a wrapper that no hook can be put on": (
        lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1), dict)
    ),
    "Hookless is a wrapper that no hook can be put on": (
        lambda parameters: Hookless(torch.optim.SGD(parameters, lr=0.1))
    ),
}
SEVERAL = r"optimizers are given as a list.* bb.Composite\(\*optimizers\)"


@pytest.mark.parametrize(("message", "made"), [*UNSTEPPABLE.items(), (SEVERAL, several)])
def test_what_cannot_be_stepped_is_refused_with_its_reason(tmp_path, message, made):
    model = network()
    with pytest.raises(SettingError, match=message):
        bb.AdaptiveBatch(model, made(model.parameters()), loader(64), **{"every": 1, **FIXED})

    other = gpt()
    with pytest.raises(SettingError, match=message):
        AdaptiveTrainer(
            model=other,
            args=arguments(tmp_path),
            train_dataset=texts(),
            optimizers=(made(other.parameters()), None),
            policy=bb.Fixed(16),
            every=1,
        )


@pytest.mark.parametrize(("message", "made"), UNSTEPPABLE.items())
def test_lightning_refuses_it_too(message, made):
    with pytest.raises(SettingError, match=message):
        fit(adaptive(**FIXED), loader(64), Training(made))
