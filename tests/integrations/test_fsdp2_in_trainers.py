"""The HF Trainer and Accelerate on FSDP2, against DDP and a loop by hand.

On a CPU accelerate takes DDP without a word, so `sharding` tells its state to shard.
"""

from functools import partial

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import bigbatch as bb
from accelerate_process import launched, sharding
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VRSGD, VRAdam
from numbered_samples import Numbered, network, steps_of, whole
from tiny_trainer import arguments, gpt, logged, texts

BLOCKS = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
ENGINES = {"ddp": {}, "fsdp2": {"fsdp": True, "fsdp_config": BLOCKS}}
POLICY = bb.SimiGrad(target=0.3, min_batch=8, max_batch=48)
GROWING = bb.Schedule("8, 16 from 48 samples, 24 from 80 samples")
FIGURES = ("loss", "grad_norm", "batch_size", "samples", "learning_rate", "similarity")


def are_sharded(model):
    """Whether fully_shard has sharded every parameter."""
    placements = [p.placements for p in model.parameters() if isinstance(p, DTensor)]
    count = len(list(model.parameters()))
    return len(placements) == count and all(shard.is_shard() for (shard,) in placements)


class Sharded(TrainerCallback):
    """Notes whether the parameters of every update are sharded."""

    def __init__(self):
        self.found = set()

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.found.add(are_sharded(model))


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop |= state.global_step == self.step


def exact_gpt(dropout=0.0):
    """Without gradients of rounding alone, as a key's bias has, which r and Adam scale up."""
    model = gpt(exact=True, dropout=dropout)
    for block in model.transformer.h:
        block.attn.c_attn.bias.requires_grad_(False)
    return model


def trained(rank, ranks, folder, engine, optimizer, callbacks=(), resume=None, **settings):
    """The figures of every update, and the weights."""
    with launched(rank, ranks), sharding():
        trainer = AdaptiveTrainer(
            model=exact_gpt(settings.pop("dropout", 0.0)),
            args=arguments(
                folder, train_sampling_strategy="sequential", **ENGINES[engine], **settings
            ),
            train_dataset=texts(67),
            policy=GROWING,
            optimizer_cls_and_kwargs=(optimizer, {"lr": 1e-2}),
            callbacks=[noted := Sharded(), *callbacks],
            every=1,
        )
        trainer.train(resume_from_checkpoint=resume)
        assert noted.found == {engine == "fsdp2"}
        assert (engine == "fsdp2") == (trainer.accelerator.is_fsdp2)
        return logged(trainer, *FIGURES), [whole(p) for p in trainer.model.parameters()]


def assert_same(expected, results, atol=1e-12):
    """Whether every rank has these figures and weights."""
    lines, weights = expected
    for found, others in results:
        assert len(lines) == len(found)
        for line, other in zip(lines, found, strict=True):
            assert line == pytest.approx(other, rel=1e-6, abs=atol)  # losses are logged in float32
        for one, other in zip(weights, others, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


def composite():
    """What docs/transformers.md calls a factory."""

    def make(model, lr):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return bb.Composite(momentum(matrices, lr), torch.optim.AdamW(others, lr))

    return make


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, composite])
def test_the_trainer_goes_the_way_of_ddp(ranks, tmp_path, optimizer):
    expected, _ = ranks(2)(trained, str(tmp_path), "ddp", optimizer)
    assert len({line[2] for line in expected[0]}) > 2
    results = ranks(2)(trained, str(tmp_path), "fsdp2", optimizer)
    assert_same(expected, results, atol=1e-10)


def by_hand(rank, ranks):
    """What the Trainer does, in a loop over a model that fully_shard has sharded."""
    model, data = exact_gpt(), texts(67)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = VRAdam(model.parameters(), lr=1e-2)
    sampler = bb.ElasticDistributedSampler(data, shuffle=False, num_replicas=ranks, rank=rank)
    loader = DataLoader(data, 4, sampler=sampler)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=GROWING, micro_batch=4, every=1)
    steps, lines = train.base_steps(2), []
    train.scheduler = LambdaLR(optimizer, lambda n: 1 - n / steps)
    for _ in train.epochs(2):
        for step in train:
            for batch in step:
                tokens = int(batch["labels"][:, 1:].ne(-100).sum())
                step.backward(model(**batch).loss, weight=tokens)
            norm = whole(step.clip_grad_norm_(1.0)).item()
            r = step.update()
            lines.append((r.loss, norm, r.batch_size, r.samples, r.lr[0], r.similarity))
    return lines, [whole(p) for p in model.parameters()]


def test_a_variance_reduced_optimizer_of_the_trainer_is_that_of_a_loop_by_hand(ranks, tmp_path):
    expected, _ = ranks(2)(by_hand)
    assert_same(expected, ranks(2)(trained, str(tmp_path), "fsdp2", VRAdam), atol=1e-10)


def test_a_trainer_continues(ranks, tmp_path):
    options = {"dropout": 0.1}
    run = ("fsdp2", torch.optim.AdamW)
    saves = {"save_strategy": "steps", "save_steps": 4, **options}
    expected = ranks(2)(partial(trained, **options), str(tmp_path / "whole"), *run)
    stopped = str(tmp_path / "halves")
    ranks(2)(partial(trained, callbacks=[StopAt(4)], **saves), stopped, *run)
    actual = ranks(2)(partial(trained, resume=True, **saves), stopped, *run)
    for (lines, weights), (found, others) in zip(expected, actual, strict=True):
        assert lines == found
        assert all(map(torch.equal, weights, others))


def prepared(engine, make):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=40
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if engine == "fsdp2" else None)
    assert accelerator.is_fsdp2 == (engine == "fsdp2")
    model = network()
    loader = DataLoader(Numbered(96), 4)
    model, optimizer, loader = accelerator.prepare(model, make(model.parameters(), lr=0.1), loader)
    assert are_sharded(model) == (engine == "fsdp2")
    train = adaptive_batch(accelerator, model, optimizer, loader, policy=POLICY, every=1)
    return accelerator, train


def figures(train, done):
    lines = [(r.batch_size, r.samples, r.loss, r.similarity) for _, r in done]
    return lines, [whole(p) for p in train.model.parameters()]


def accelerated(rank, ranks, engine, make):
    with launched(rank, ranks), sharding():
        _, train = prepared(engine, make)
        return figures(train, steps_of(train, 2))


def accelerated_by_hand(rank, ranks):
    model, data = network(), Numbered(96)
    fully_shard(model[0])
    fully_shard(model)
    sampler = bb.ElasticDistributedSampler(data, shuffle=False, num_replicas=ranks, rank=rank)
    loader = DataLoader(data, 4, sampler=sampler)
    optimizer = VRSGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(model, optimizer, loader, policy=POLICY, every=1)
    return figures(train, steps_of(train, 2))


def test_accelerate_goes_the_way_of_ddp(ranks):
    expected, _ = ranks(2)(accelerated, "ddp", torch.optim.SGD)
    assert len({line[0] for line in expected[0]}) > 2
    assert_same(expected, ranks(2)(accelerated, "fsdp2", torch.optim.SGD))


def test_a_variance_reduced_optimizer_of_accelerate_is_that_of_a_loop_by_hand(ranks):
    expected, _ = ranks(2)(accelerated_by_hand)
    assert_same(expected, ranks(2)(accelerated, "fsdp2", VRSGD))


def interrupted(rank, ranks, folder):
    with launched(rank, ranks), sharding():
        accelerator, train = prepared("fsdp2", momentum)
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        done = steps_of(train, 2, most=3)
        accelerator.save_state(folder)
    with launched(rank, ranks), sharding():
        accelerator, train = prepared("fsdp2", momentum)
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        accelerator.load_state(folder)
        return figures(train, done + steps_of(train, 2))


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def test_accelerate_continues(ranks, tmp_path):
    expected = ranks(2)(accelerated, "fsdp2", momentum)
    for (lines, weights), (found, others) in zip(
        expected, ranks(2)(interrupted, str(tmp_path)), strict=True
    ):
        assert lines == found
        assert all(map(torch.equal, weights, others))


def on_a_cpu(rank, ranks):
    with launched(rank, ranks):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        return Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type


def test_accelerate_by_itself_takes_ddp_on_a_cpu(ranks):
    assert [DistributedType.MULTI_CPU] * 2 == ranks(2)(on_a_cpu)
