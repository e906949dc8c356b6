"""Several optimizers in one Composite, in trainers: as without the trainer, and resumed exactly."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

import bigbatch as bb
from accelerate_process import launched
from bigbatch.errors import SettingError
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VarianceReduced
from lightning_training import Training, adaptive, fit, loader, plain_loop
from lightning_training import network as lightning_network
from numbered_samples import ledger_loader, network, steps_of
from tensors import same
from tiny_trainer import arguments, gpt, logged, records_of_loop, texts

pytestmark = pytest.mark.filterwarnings("ignore:k = . micro-batches give a poor")

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64, sums in another order


def composite(parameters, matrices=SGD):
    parameters = [*parameters]
    options = {"momentum": 0.9} if matrices is SGD else {}
    first = matrices([p for p in parameters if p.ndim == 2], lr=0.05, **options)
    return bb.Composite(first, AdamW([p for p in parameters if p.ndim != 2], lr=0.01))


def muon(parameters):
    return composite(parameters, Muon)


def reduced(parameters):
    return VarianceReduced(composite(parameters))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# the HF Trainer


def trainer_of(folder, make=composite, model=None, **settings):
    model = gpt(exact=True) if model is None else model
    return AdaptiveTrainer(
        model=model,
        args=arguments(folder, per_device_train_batch_size=2, **settings),
        train_dataset=texts(),
        optimizers=(make(model.parameters()), None),
        policy=bb.Fixed(16),
        every=1,
    )


def test_the_trainer_trains_as_its_plain_one(tmp_path):
    model = gpt(exact=True)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    plain = Trainer(
        model=model,
        args=arguments(tmp_path, **settings),
        train_dataset=texts(),
        optimizers=(composite(model.parameters()), None),
    )
    plain.train()
    trainer = trainer_of(tmp_path)
    trainer.train()
    for one, other in zip(
        logged(plain, "loss", "learning_rate"),
        logged(trainer, "loss", "learning_rate"),
        strict=True,
    ):
        assert one == pytest.approx(other, rel=1e-6)
    torch.testing.assert_close(weights(model), weights(trainer.model), rtol=1e-6, atol=1e-8)
    assert 2 == len(trainer.adaptive.record.lr)


def test_the_trainer_resumes_it_exactly(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(tmp_path, muon, **settings)
    whole.train()
    resumed = trainer_of(tmp_path, muon, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(whole.model), weights(resumed.model))


def test_the_trainer_scales_it_by_gsnr_as_a_loop_by_hand(tmp_path):
    settings = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    trainer = trainer_of(tmp_path, reduced, **settings)
    trainer.train()
    other = gpt(exact=True)
    batches = torch.utils.data.DataLoader(texts(), 2)
    train = bb.AdaptiveBatch(
        other, reduced(other.parameters()), batches, policy=bb.Fixed(16), every=1
    )
    records_of_loop(train, other)
    torch.testing.assert_close(weights(other), weights(trainer.model), rtol=1e-5, atol=1e-6)
    plain = trainer_of(tmp_path, **settings)
    plain.train()
    last = weights(plain.model)[-1]
    assert not torch.allclose(last, weights(trainer.model)[-1], rtol=1e-2)


# Lightning


@pytest.mark.parametrize("make", [composite, reduced])
def test_lightning_trains_as_a_plain_loop(make):
    settings = {"policy": bb.Fixed(32), "base_batch": 16}
    model = lightning_network()
    plain_loop(loader(192), model, make(model.parameters()), **settings)
    fit(adaptive(**settings), loader(192), module := Training(make))
    torch.testing.assert_close(weights(model), weights(module.net), **CLOSE)


def test_lightning_resumes_it_exactly(tmp_path):
    settings = {"policy": bb.Fixed(16)}
    saved = ModelCheckpoint(tmp_path, "one", save_on_train_epoch_end=True)
    saves = {"enable_checkpointing": True, "callbacks": [saved]}

    def schedule(optimizer):
        return {"scheduler": LambdaLR(optimizer, lambda tick: 0.9**tick), "interval": "step"}

    fit(adaptive(**settings), loader(64), Training(muon, schedule), **saves)
    whole, rest = Training(muon, schedule), Training(muon, schedule)
    fit(adaptive(**settings), loader(64), whole, max_epochs=2)
    fit(adaptive(**settings), loader(64), rest, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert same(weights(whole.net), weights(rest.net))


# Accelerate


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def over_all(optimizer):
    return LambdaLR(optimizer, lambda tick: 0.9**tick)


def of_each(optimizer):
    inner = getattr(optimizer, "base", optimizer)
    return [LambdaLR(part, lambda tick: 0.9**tick) for part in inner.optimizers]


def parts(make, schedule):
    model = network()
    optimizer = make(model.parameters())
    return model, optimizer, ledger_loader(0, 1, 200), schedule(optimizer)


@pytest.mark.parametrize("schedule", [over_all, of_each])
@pytest.mark.parametrize("make", [composite, reduced])
def test_what_accelerate_prepares_trains_as_what_it_does_not(accelerator, make, schedule):
    policy = {"policy": bb.SimiGrad(target=0.4, min_batch=16, max_batch=64), "every": 1}
    model, optimizer, batches, scheduler = parts(make, schedule)
    plain = bb.AdaptiveBatch(model, optimizer, batches, scheduler=scheduler, **policy)
    plain.scheduler_batch = 16  # accelerate's: one batch of the loader
    expected = steps_of(plain, 2)
    other, optimizer, batches, scheduler = parts(make, schedule)
    other, optimizer, batches = accelerator.prepare(other, optimizer, batches)
    prepared = (
        [accelerator.prepare(each) for each in scheduler]
        if isinstance(scheduler, list)
        else accelerator.prepare(scheduler)
    )
    train = adaptive_batch(accelerator, other, optimizer, batches, scheduler=prepared, **policy)
    actual = steps_of(train, 2)
    assert [(r.loss, r.lr) for _, r in expected] == [(r.loss, r.lr) for _, r in actual]
    assert len({r.batch_size for _, r in actual}) > 1
    assert same(weights(model), weights(other))


def test_a_list_that_accelerate_did_not_prepare_is_refused(accelerator):
    model, optimizer, batches, schedulers = parts(composite, of_each)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    with pytest.raises(SettingError, match="is a LambdaLR that accelerate did not prepare"):
        adaptive_batch(
            accelerator, model, optimizer, batches, scheduler=schedulers, policy=bb.Fixed(16)
        )


def test_a_list_of_a_scheduler_and_a_function_is_refused(accelerator):
    model, optimizer, batches, schedulers = parts(composite, of_each)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    both = [accelerator.prepare(schedulers[0]), lambda tick: 0.01]
    with pytest.raises(SettingError, match=r"both schedulers and functions.*functions alone"):
        adaptive_batch(accelerator, model, optimizer, batches, scheduler=both, policy=bb.Fixed(16))


def on_two(rank, ranks, make):
    with launched(rank, ranks):
        model = network()
        optimizer = make(model.parameters())
        data = torch.utils.data.DataLoader(ledger_loader(0, 1, 200).dataset, 8)
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer, data = accelerator.prepare(model, optimizer, data)
        train = adaptive_batch(
            accelerator, wrapped, optimizer, data, policy=bb.Fixed(64), micro_batch=8, every=1
        )
        for step in train:
            for x, y, _ in step:
                step.backward(cross_entropy(wrapped(x), y))
            step.update()
        return weights(model)


@pytest.mark.parametrize("make", [composite, reduced])
def test_two_processes_of_accelerate_train_as_one_that_plays_both(ranks, make):
    model = network()
    data = torch.utils.data.DataLoader(ledger_loader(0, 1, 200).dataset, 16)
    train = bb.AdaptiveBatch(
        model,
        make(model.parameters()),
        bb.Batches(data, virtual_ranks=2),
        policy=bb.Fixed(64),
        micro_batch=8,
        every=1,
    )
    steps_of(train, 1)
    for others in ranks(2)(on_two, make):
        torch.testing.assert_close(weights(model), others, rtol=1e-8, atol=1e-10)


# DeepSpeed


def given_to_deepspeed(rank, ranks):
    import bigbatch.integrations.deepspeed as adaptive_deepspeed

    model, messages = network(), []
    both = composite(model.parameters())

    class Container(Optimizer):
        """As torchtitan's."""

        def __init__(self):
            self.optimizers = both.optimizers
            super().__init__(model.parameters(), {})

    for optimizer in (both, VarianceReduced(both), Container()):
        try:
            adaptive_deepspeed.initialize(
                model=model, optimizer=optimizer, config={"train_batch_size": 8}, policy=bb.Fixed(8)
            )
        except SettingError as error:
            messages.append(str(error))
    return messages


def test_deepspeed_refuses_several_optimizers(deepspeed_ranks):
    (messages,) = deepspeed_ranks(1)(given_to_deepspeed)
    assert 3 == len(messages)
    for message, kind in zip(messages, ("Composite", "Composite", "Container"), strict=True):
        assert message.startswith(f"several optimizers in a {kind}: ZeRO has one optimizer")
