"""groups= in Lightning, the HF Trainer, Accelerate and recipes; DeepSpeed refuses it."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VRSGD
from bigbatch_recipes import train_run
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.fashion_mnist import FASHION_MNIST
from lightning_training import (
    MICRO,
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
from tiny_trainer import arguments, causal_loss, gpt, texts

GROUPS = 4
SETTINGS = {
    "policy": bb.Fixed(2 * MICRO),
    "min_micro_batches": 2 * GROUPS,
    "groups": GROUPS,
    "every": 1,
}


every_optimizer = pytest.mark.parametrize("optimizer", [sgd, vrsgd], ids=["SGD", "VRSGD"])


@pytest.fixture(autouse=True)
def _nothing_kept():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def in_a_plain_loop(optimizer):
    model = network()
    return plain_loop(loader(64), model, optimizer(model.parameters()), **SETTINGS)


@every_optimizer
def test_lightning_takes_groups(optimizer):
    expected, weights = in_a_plain_loop(optimizer)
    actual = fit(adaptive(**SETTINGS), loader(64), Training(optimizer))
    assert len(expected) == len(actual.records) == 8
    for one, other in zip(expected, actual.records, strict=True):
        assert 2 == other["micro_batches"]
        assert one == pytest.approx(other, rel=1e-9, nan_ok=True)
    torch.testing.assert_close(weights[-1], actual.weights[-1], rtol=1e-10, atol=1e-12)


@every_optimizer
def test_accelerate_takes_groups(optimizer):
    expected, weights = in_a_plain_loop(optimizer)
    accelerator = Accelerator(cpu=True)
    model = network()
    parts = accelerator.prepare(model, optimizer(model.parameters()), loader(64))
    train = adaptive_batch(accelerator, *parts, **SETTINGS)
    similarities = []
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        similarities.append(step.update().similarity)
    assert pytest.approx(similarities, rel=1e-9) == [one["similarity"] for one in expected]
    torch.testing.assert_close(weights[-1], weights_of(model), rtol=1e-10, atol=1e-12)


def items_of(inputs):
    return inputs["labels"][:, 1:].ne(-100).sum(1)


@pytest.mark.parametrize("vr", [False, True])
def test_the_trainer_weighs_each_sample_by_its_labels(tmp_path, vr):
    """As micro-batches of one sample each, whose weights are their labels."""
    model, plain = gpt(exact=True), gpt(exact=True)
    make = VRSGD if vr else torch.optim.SGD
    rows = texts(8)
    trainer = AdaptiveTrainer(
        model=model,
        args=arguments(
            tmp_path, num_train_epochs=1, max_grad_norm=0.0, train_sampling_strategy="sequential"
        ),
        train_dataset=rows,
        optimizers=(make(model.parameters(), lr=0.1), None),
        policy=bb.Fixed(8),
        micro_batch=8,
        min_micro_batches=8,
        groups=8,
        every=1,
        # exact, as there are layers
        meter=lambda model: bb.GradientMeter(model, per_layer=True),
    )
    trainer.train()
    record = trainer.adaptive.record

    optimizer = make(plain.parameters(), lr=record.lr[0])
    train = bb.AdaptiveBatch(
        plain,
        optimizer,
        torch.utils.data.DataLoader(rows, batch_size=8),
        policy=bb.Fixed(8),
        min_micro_batches=8,
        every=1,
    )
    step = next(iter(train))
    for inputs in step:
        logits = plain(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        items = items_of(inputs)
        loss = causal_loss(logits, inputs["labels"], 40, max(int(items.sum()), 1))
        step.backward(loss, weight=int(items.sum()))
    expected = step.update()
    noise = expected.statistics.grad_variance
    assert pytest.approx(noise, rel=1e-7) == record.statistics.grad_variance
    assert pytest.approx(expected.similarity, rel=1e-7) == record.similarity
    assert (1, 8) == (record.micro_batches, expected.micro_batches)


@pytest.mark.parametrize("optimizer", ["momentum", "vr-momentum"])
def test_a_recipe_takes_groups(optimizer):
    changes = {"groups": 8, "samples": 256, "batch_size": 64, "optimizer": optimizer, "every": 1}
    training = train_run.Training(
        DIGITS, DIGITS.settings().with_changes({**changes, "policy": "fixed"})
    )
    records = list(training.steps())
    plan = training.train.plan
    assert 4 == len(records)
    assert (plan.accumulation * plan.ranks, 64) == (records[0].micro_batches, plan.batch_size)
    assert 8 * records[0].micro_batches == records[0].statistics.micro_batches


def test_a_recipe_with_batch_norm_says_why_it_has_no_groups():
    settings = FASHION_MNIST.settings().with_changes({"groups": 8})
    model, draw = FASHION_MNIST.model(settings), torch.Generator().manual_seed(0)
    x, y = (torch.empty_like(part, device="cpu") for part in FASHION_MNIST.example(settings, 8))
    x = torch.randint(256, x.shape, generator=draw).to(x.dtype)
    with (
        bb.GradientMeter(model, groups=8),
        pytest.raises(GradientError, match="BatchNorm normalizes over the samples of all groups"),
    ):
        FASHION_MNIST.loss(settings)(model, (x, y.zero_())).backward()


def test_deepspeed_is_refused_by_name():
    from bigbatch.integrations import deepspeed

    with pytest.raises(SettingError, match=r"groups=8: DeepSpeed reduces in every backward"):
        deepspeed.initialize(model=nn.Linear(1, 1), training_data=data(8), groups=8)
