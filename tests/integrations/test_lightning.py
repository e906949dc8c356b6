"""AdaptiveBatchCallback in a Lightning training on one device."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import BatchError, LoopError
from bigbatch.optim import VRSGD, VRAdam
from bigbatch.policies.lr_scaling import AdaScale
from lightning_training import (
    MICRO,
    Narrow,
    Scripted,
    Training,
    adaptive,
    data,
    fit,
    loader,
    network,
    plain_loop,
    sgd,
    vrsgd,
    weights_of,
)
from stateful_policy import Patient

pytestmark = pytest.mark.filterwarnings("ignore:k = . micro-batches give a poor")

ROUNDING = {"rtol": 1e-10, "atol": 1e-12}  # float64, the loss divided and multiplied once
GROWING = bb.SimiGrad(target=0.5, min_batch=12, max_batch=60, grow=1.5)
SETTINGS = {"batch_size": 12, "base_batch": 8, "min_micro_batches": 2}


def assert_same(expected, actual, steps=None):
    """The first so many steps; what ends an epoch a plain loop may cut into other chunks."""
    records, weights = expected
    assert len(records) == len(actual.records)
    for one, other in list(zip(records, actual.records, strict=True))[:steps]:
        assert one == pytest.approx(other, rel=1e-9, nan_ok=True)
    for one, other in list(zip(weights, actual.weights, strict=True))[:steps]:
        torch.testing.assert_close(one, other, **ROUNDING)


@pytest.mark.parametrize("optimizer", [sgd, vrsgd], ids=["SGD", "VRSGD"])
def test_a_growing_batch_goes_the_way_of_a_plain_loop(optimizer):
    settings = {"policy": GROWING, **SETTINGS}
    model = network()
    expected = plain_loop(loader(750), model, optimizer(model.parameters()), **settings)

    actual = fit(adaptive(**settings), loader(750), Training(optimizer))

    assert_same(expected, actual, -1)
    assert len({record["batch_size"] for record in actual.records}) > 3


def test_epochs_follow_each_other_as_in_a_plain_loop():
    settings = {"policy": bb.Fixed(24), **SETTINGS, "batch_size": None}  # 4 steps and 4 samples
    model = network()
    _, expected = plain_loop(loader(100), model, sgd(model.parameters()), 3, **settings)

    actual = fit(adaptive(**settings), loader(100), max_epochs=3)

    assert len(expected) == len(actual.weights) == 15
    torch.testing.assert_close(expected[-1], actual.weights[-1], **ROUNDING)
    assert [100, 200, 300] == [record["samples"] for record in actual.records[4::5]]


@pytest.mark.parametrize("k", [2, 5])
def test_a_fixed_batch_is_lightnings_own_accumulation(k):
    batches = loader(2 * k * 3 * MICRO)

    expected = fit(None, batches, max_epochs=2, accumulate_grad_batches=k)
    actual = fit(
        adaptive(bb.Fixed(k * MICRO), min_micro_batches=2, lr_scaling=None), batches, max_epochs=2
    )

    assert expected.backwards == actual.backwards == [k] * 12
    torch.testing.assert_close(expected.weights, actual.weights, **ROUNDING)


def test_every_update_has_as_many_micro_batches_as_were_planned():
    planned = [2, 2, 3, 2, 5, 4, 7]  # of which the remainders of a plain modulo are others
    policy = Scripted(*(k * MICRO for k in planned))

    watch = fit(
        adaptive(policy, batch_size=2 * MICRO, min_micro_batches=2), loader(sum(planned) * MICRO)
    )

    assert planned == watch.backwards
    assert [k * MICRO for k in planned] == [record["batch_size"] for record in watch.records]
    assert by_modulo(planned) != watch.backwards


def by_modulo(planned):
    """What setting accumulate_grad_batches to the plan would do: Lightning counts from 0."""
    done, begun = [], 0
    for number in range(1, sum(planned) + 1):
        k = planned[min(len(done), len(planned) - 1)]
        if number % k == 0 or number == sum(planned):
            done.append(number - begun)
            begun = number
    return done


def test_a_step_moves_along_the_mean_gradient_of_its_samples():
    samples = 5 * MICRO + 1  # in 2 + 3 + 1 batches, the last one of a single sample
    policy = Scripted(2 * MICRO, 3 * MICRO)
    x, y = data(samples).tensors

    watch = fit(
        adaptive(policy, batch_size=2 * MICRO, min_micro_batches=2, lr_scaling=None),
        loader(samples),
        Training(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    )

    model = network()
    for first, last, after in zip((0, 8, 20), (8, 20, 21), watch.weights, strict=True):
        gradients = torch.autograd.grad(
            cross_entropy(model(x[first:last]), y[first:last]), model.parameters()
        )
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        torch.testing.assert_close(weights_of(model), after, **ROUNDING)


def test_what_is_left_at_the_end_of_an_epoch_is_a_step_that_does_not_decide():
    watch = fit(
        adaptive(Scripted(8, 8, 20, 20, 20), batch_size=8, min_micro_batches=2),
        loader(20),
        max_epochs=2,
    )

    assert [2, 2, 1, 5] == watch.backwards
    assert [8, 20, 20] == [record["next"] for record in watch.records[:3]]
    assert [0, 0, 0, 1] == [record["epoch"] for record in watch.records]


def test_a_variance_reduced_optimizer_is_left_no_single_micro_batch():
    expected = [2, 4, 3, 2]  # of 11; 4 + 4 + 1 would leave one

    watch = fit(
        adaptive(Scripted(8, 16, 16, 16), batch_size=8, min_micro_batches=2),
        loader(11 * MICRO),
        Training(vrsgd),
    )

    assert expected == watch.backwards


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
def test_every_implementation_steps_at_the_learning_rate_of_the_batch(kind, foreach, fused):
    if foreach and fused:
        pytest.skip("torch allows one of them")
    options = {"foreach": foreach} if not fused else {"fused": True}

    def made(parameters):
        return kind(parameters, lr=0.01, **options)

    settings = {"policy": bb.Fixed(16), "base_batch": 4, "min_micro_batches": 2}
    model = network()
    expected = plain_loop(loader(64), model, made(model.parameters()), **settings)

    actual = fit(adaptive(**settings), loader(64), Training(made))

    assert_same(expected, actual)
    assert {0.02} == {record["lr"] for record in actual.records}
    assert 0.01 == actual.trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("optimizer", [sgd, vrsgd], ids=["SGD", "VRSGD"])
def test_clipping_is_that_of_the_mean_gradient(optimizer):
    settings = {"policy": bb.Fixed(16), "min_micro_batches": 2}
    model = network()
    clipped = plain_loop(loader(64), model, optimizer(model.parameters()), clip=0.1, **settings)

    watch = fit(adaptive(**settings), loader(64), Training(optimizer), gradient_clip_val=0.1)

    assert_same(clipped, watch)
    assert 0.1 == watch.trainer.gradient_clip_val
    model = network()
    free = plain_loop(loader(64), model, optimizer(model.parameters()), **settings)
    assert not torch.equal(free[1][-1], watch.weights[-1])


class Faulty(Training):
    """Its loss is not finite for one batch."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        return loss * float("nan") if number == 5 else loss


@pytest.mark.parametrize("optimizer", [sgd, vrsgd], ids=["SGD", "VRSGD"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer):
    callback = adaptive(bb.Fixed(16), min_micro_batches=2)

    watch = fit(callback, loader(64), Faulty(optimizer))

    assert [False, True, False, False] == [record["skipped"] for record in watch.records]
    assert torch.equal(watch.weights[0], watch.weights[1])
    assert not torch.equal(watch.weights[1], watch.weights[2])
    assert (3, 1) == (callback.train.steps, callback.train.skipped)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reduced", [False, True], ids=["SGD", "VRSGD"])
def test_float16_with_a_scaler_goes_the_way_of_a_plain_loop(reduced, fused):
    def made(parameters):
        return (VRSGD if reduced else torch.optim.SGD)(parameters, lr=0.05, fused=fused)

    settings = {"policy": bb.Fixed(16), "min_micro_batches": 2}
    model, scaler = network().float(), scaler_of_float16()
    half = {"autocast": torch.float16, "scaler": scaler, **settings}
    expected, _ = plain_loop(loader(64), model, made(model.parameters()), **half)

    callback = adaptive(**settings)
    precision = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler_of_float16())
    actual = fit(callback, loader(64), Narrow(made, dtype=torch.float32), plugins=[precision])

    assert 1 <= callback.train.skipped < 4
    assert [r["skipped"] for r in expected] == [r["skipped"] for r in actual.records]
    for one, other in zip(expected, actual.records, strict=True):
        assert one == pytest.approx(other, rel=2e-3, nan_ok=True)  # float16 has 11 bits
    torch.testing.assert_close(weights_of(model), actual.weights[-1], rtol=1e-3, atol=1e-4)
    assert scaler.get_scale() == precision.scaler.get_scale()


@pytest.mark.parametrize("optimizer", [sgd, vrsgd], ids=["SGD", "VRSGD"])
def test_bfloat16_goes_the_way_of_a_plain_loop(optimizer):
    settings = {"policy": bb.Fixed(16), "min_micro_batches": 2}
    model = network().float()
    half = {"autocast": torch.bfloat16, **settings}
    expected, _ = plain_loop(loader(64), model, optimizer(model.parameters()), **half)

    module = Narrow(optimizer, dtype=torch.float32)
    actual = fit(adaptive(**settings), loader(64), module, precision="bf16-mixed")

    for one, other in zip(expected, actual.records, strict=True):
        assert one == pytest.approx(other, rel=2e-2, nan_ok=True)  # bfloat16 has 8 bits
    torch.testing.assert_close(weights_of(model), actual.weights[-1], rtol=1e-2, atol=1e-3)


def scaler_of_float16():
    return torch.amp.GradScaler("cpu", init_scale=2.0**20)  # infinite in float16: one is skipped


class Validated(Training):
    """Also validated, in the middle of steps."""

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def val_dataloader(self):
        return loader(20)


def test_a_validation_within_a_step_changes_nothing():
    settings = {"policy": GROWING, **SETTINGS}

    plain = fit(adaptive(**settings), loader(100))
    validated = fit(adaptive(**settings), loader(100), Validated(), val_check_interval=2)

    assert plain.records == validated.records
    assert torch.equal(plain.weights[-1], validated.weights[-1])


def test_samples_are_counted_as_one_says():
    def twice(batch):
        return 2 * len(batch[0])

    callback = adaptive(
        bb.Fixed(32), micro_batch=2 * MICRO, min_micro_batches=2, count=twice, lr_scaling=None
    )
    watch = fit(callback, loader(64))

    assert [32, 64, 96, 128] == [record["samples"] for record in watch.records]
    assert [4, 4, 4, 4] == watch.backwards


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchError, match="has 0 samples"):
        fit(adaptive(bb.Fixed(16), min_micro_batches=2, count=lambda _: 0), loader(64))


@pytest.mark.parametrize("missing", [1, 3], ids=["within a step", "at its end"])
def test_a_batch_without_a_loss_is_refused(missing):
    class Silent(Training):
        def training_step(self, batch, number):
            return None if number == missing else super().training_step(batch, number)

    with pytest.raises(LoopError, match="training_step returned no loss"):
        fit(adaptive(bb.Fixed(16), min_micro_batches=2), loader(64), Silent())


def test_an_epoch_that_is_left_early_is_refused():
    class Leaving(Training):
        def on_train_batch_start(self, batch, number):
            return -1 if number == 6 else None

    with pytest.raises(LoopError, match=r"returned -1.*limit_train_batches"):
        fit(adaptive(bb.Fixed(16), min_micro_batches=2), loader(64), Leaving(), max_epochs=2)


def test_a_training_may_be_stopped_within_a_step():
    class Stopping(Training):
        def on_train_batch_end(self, outputs, batch, number):
            self.trainer.should_stop = number == 5

    callback = adaptive(bb.Fixed(16), min_micro_batches=2)
    watch = fit(callback, loader(64), Stopping(), max_epochs=3)

    assert [4] == watch.backwards
    assert 16 == callback.state_dict()["shared"]["counts"][1]
    assert 1 == watch.trainer.accumulate_grad_batches


def test_a_limit_of_batches_is_where_an_epoch_ends():
    watch = fit(
        adaptive(bb.Fixed(12), min_micro_batches=2), loader(64), limit_train_batches=5, max_epochs=2
    )

    assert [3, 2, 3, 2] == watch.backwards
    assert [0, 0, 1, 1] == [record["epoch"] for record in watch.records]


def test_most_steps_are_updates_whatever_their_size():
    watch = fit(
        adaptive(Scripted(8, 8, 16, 24), batch_size=8, min_micro_batches=2),
        loader(80),
        max_steps=3,
        max_epochs=-1,
    )

    assert [2, 2, 4] == watch.backwards


def test_a_loop_may_be_sent_to_other_processes():
    sent = pickle.loads(pickle.dumps(adaptive(GROWING, **SETTINGS)))

    expected, actual = fit(adaptive(GROWING, **SETTINGS), loader(100)), fit(sent, loader(100))

    assert expected.records == actual.records


def test_an_optimizer_step_that_is_left_out_is_refused():
    class Idle(Training):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            closure()

    with pytest.raises(LoopError, match=r"step\(\) was not called where Lightning does"):
        fit(adaptive(bb.Fixed(16), min_micro_batches=2), loader(64), Idle())


def test_what_is_logged_divided_is_the_loss_divided_as_lightning_says():
    class Losses(pl.Callback):
        def __init__(self):
            self.means = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.means.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)

    losses, model = Losses(), network()
    (x, y) = data(8).tensors
    fit(adaptive(bb.Fixed(8), min_micro_batches=2), loader(8), callbacks=[losses])

    expected = [cross_entropy(model(x[i : i + 4]), y[i : i + 4]).item() for i in (0, 4)]
    assert expected == pytest.approx(losses.means)


def test_an_error_leaves_learning_rate_and_trainer_as_they_were():
    class Failing(Training):
        def on_before_optimizer_step(self, optimizer):
            raise ZeroDivisionError("of my own")

    module = Failing(vrsgd)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        gradient_clip_val=0.5,
        callbacks=[adaptive(bb.Fixed(16), base_batch=4, min_micro_batches=2)],
    )

    with pytest.raises(ZeroDivisionError, match="of my own"):
        trainer.fit(module, loader(64))

    assert 0.05 == trainer.optimizers[0].param_groups[0]["lr"]
    assert (1, 0.5) == (trainer.accumulate_grad_batches, trainer.gradient_clip_val)


def test_a_second_training_with_the_same_callback_starts_from_the_beginning():
    callback = adaptive(GROWING, **SETTINGS)

    first = fit(callback, loader(100))
    second = fit(callback, loader(100))

    assert first.records == second.records
    assert torch.equal(first.weights[-1], second.weights[-1])
    assert 1 == second.trainer.accumulate_grad_batches


@pytest.mark.parametrize("what", ["policy", "controller", "rule"])
def test_what_remembers_something_starts_from_the_beginning_too(what):
    policy, rule = GROWING, None
    if what == "controller":
        policy = bb.Controller(GROWING, 8)
    elif what == "policy":
        policy = Patient()
    else:
        rule = AdaScale(8)
    start = None if what == "controller" else 8
    callback = adaptive(policy, batch_size=start, min_micro_batches=2, lr_scaling=rule)

    first = fit(callback, loader(100))
    second = fit(callback, loader(100))

    assert first.records == second.records
    assert len({record["batch_size"] for record in first.records}) > 2


def test_a_training_leaves_no_hook_on_the_gradients():
    module = Training()

    fit(adaptive(bb.Fixed(16), min_micro_batches=2), loader(64), module)

    assert [] == [name for name, p in module.named_parameters() if p._backward_hooks]


def test_a_dry_run_of_one_batch_is_one_step():
    watch = fit(
        adaptive(bb.SimiGrad(target=0.5), batch_size=16, min_micro_batches=2),
        loader(64),
        fast_dev_run=True,
    )

    assert [1] == watch.backwards


RARE = torch.tensor([0.1, 1.0, 9.0], dtype=torch.float64)


def mask(batch):
    return batch[0][:, 2] > 0


class Masked(Training):
    """A mean over the samples of a mask, whose number torch's graph does not have."""

    def training_step(self, batch, _=None):
        x, y = batch
        each = cross_entropy(self.net(x), y, reduction="none")
        return (each * mask(batch)).sum() / mask(batch).sum().clamp(min=1)


class ClassWeights(Training):
    def training_step(self, batch, _=None):
        return cross_entropy(self.net(batch[0]), batch[1], weight=RARE)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Masked, {"weight": lambda batch: mask(batch).sum()}),
        (Masked, {"weight": mask, "groups": 4}),
        (ClassWeights, {}),
        (ClassWeights, {"groups": 4}),
    ],
)
def test_a_mean_over_other_elements_trains_as_the_uncut_loop(module, options):
    uncut, expected = module(), []
    optimizer = sgd(uncut.parameters())
    for batch in loader(96, batch_size=24):
        optimizer.zero_grad()
        uncut.training_step(batch).backward()
        optimizer.step()
        expected.append(weights_of(uncut.net))
    watch = fit(adaptive(bb.Fixed(24), lr_scaling=None, **options), loader(96), module())
    torch.testing.assert_close(expected, watch.weights, rtol=1e-12, atol=1e-14)
    assert [6] * 4 == watch.backwards


def test_three_batches_to_overfit_are_one_step_an_epoch():
    """Fewer than the four that a step has by default: as Lightning's own accumulation."""
    few = {"overfit_batches": 3, "max_epochs": 4}
    ours = fit(adaptive(bb.Fixed(16), lr_scaling=None), loader(64), **few)
    plain = fit(None, loader(64), accumulate_grad_batches=3, **few)
    assert [3, 3, 3, 3] == ours.backwards == plain.backwards
    torch.testing.assert_close(plain.weights, ours.weights, rtol=1e-12, atol=1e-14)


def test_a_meter_of_ones_own_measures():
    def with_interval(model):
        return bb.GradientMeter(model, confidence=0.9)

    callback = adaptive(bb.Fixed(16), min_micro_batches=2, meter=with_interval, every=2)
    watch = fit(callback, loader(64), Training(lambda p: VRAdam(p, lr=0.01)))

    measured = [record["similarity"] == record["similarity"] for record in watch.records]
    assert [True, False, True, False] == measured
