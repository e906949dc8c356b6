"""Goodput in Lightning, the HF Trainer and DeepSpeed, with its own times and a given overhead."""

import torch

import bigbatch as bb
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.policies.step_time import StepTimes
from deepspeed_training import MICRO, engine_of, train_steps
from lightning_training import adaptive, fit, loader, network, plain_loop, sgd
from tiny_trainer import arguments, gpt, texts

GIVEN = {"policy": bb.Goodput(overhead=64), "every": 2}


def test_lightning_decides_as_a_plain_loop_does():
    model = network()
    expected, _ = plain_loop(loader(960), model, sgd(model.parameters()), **GIVEN)
    actual = fit(adaptive(**GIVEN), loader(960))
    sizes = [record["batch_size"] for record in actual.records]
    assert [record["batch_size"] for record in expected] == sizes
    assert len(set(sizes)) > 2


def test_lightning_times_its_steps():
    watch = fit(adaptive(bb.Goodput(), every=2), loader(960))
    assert len({record["batch_size"] for record in watch.records}) > 1  # it tried two


def test_the_hf_trainer_times_its_steps(tmp_path):
    trainer = AdaptiveTrainer(
        model=gpt(),
        args=arguments(tmp_path, num_train_epochs=2),
        train_dataset=texts(192),
        policy=bb.Goodput(),
        every=2,
    )
    trainer.train()
    times = StepTimes()
    times.load(trainer.adaptive.state_dict()["shared"]["step_times"])
    assert any(size.counts for size in times.sizes)


def in_deepspeed(rank, ranks):
    torch.set_num_threads(1)
    controller = bb.Controller(bb.Goodput(overhead=64, max_batch=96), 16)
    params = {"max_micro_batch_size": MICRO}
    given = {"adaptive_batch_params": params, "policy": controller}
    engine, _, batches, _ = engine_of(rank, ranks, "1", **given)
    return [(r.batch_size, r.decision.reason) for r in train_steps(engine, batches, 30)]


def test_deepspeed_takes_it(deepspeed_ranks):
    one, other = deepspeed_ranks(2)(in_deepspeed)
    assert one == other
    assert len({size for size, _ in one}) > 2
    assert any("sqrt(64 x" in reason for _, reason in one)
