"""AdaptiveBatch on what accelerate prepares with DeepSpeed, on two processes."""

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import bigbatch as bb
from accelerate_process import launched
from bigbatch.errors import SettingError
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.optim import VRSGD
from deepspeed_training import data, max_difference, network, quiet, weights_of

CLIP = 0.3
STEPS = 20
STAGES = range(4)
POLICY = {"policy": bb.SimiGrad(target=0.5, min_batch=16, max_batch=64), "batch_size": 16}


def accelerator_of(stage, **more):
    """An accelerator under DDP; or with DeepSpeed on a CPU, as the Trainer makes it."""
    PartialState(cpu=True)
    if stage is None:
        return Accelerator(cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1000.0,  # not this one, but what clip_grad_norm_ is called with
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": False},
    }
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config | more))


def built(stage, optimizer=torch.optim.SGD, config=None, **options):
    """(accelerator, AdaptiveBatch, model) in float32."""
    accelerator, model = accelerator_of(stage, **(config or {})), network()
    optimizer = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    loader = DataLoader(data(160), batch_size=4, shuffle=True, generator=torch.Generator())
    torch.manual_seed(1)
    model, *given, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    settings = {"every": 1, "scheduler": scheduler, **POLICY, **options}
    return accelerator, adaptive_batch(accelerator, model, *given, **settings), model


def run(train, model, steps):
    """Figures of so many steps."""
    rows = []
    while True:
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x), y))
            norm = float(step.clip_grad_norm_(CLIP))
            record = step.update()
            rows.append((record.batch_size, record.lr, record.similarity, record.loss, norm))
            if len(rows) == steps:
                return rows


def plain_weights(model, stage):
    return [p.detach() for p in model.parameters()] if stage is None else weights_of(model)


def on_all_stages(rank, ranks):
    quiet()
    results = []
    for stage in (None, *STAGES):
        with launched(rank, ranks):
            _, train, model = built(stage)
            assert (stage is not None) == isinstance(model, DeepSpeedEngine)
            results.append((run(train, model, STEPS), plain_weights(model, stage)))
    return results


def test_every_stage_trains_as_ddp_does(deepspeed_ranks):
    for (rows, weights), *stages in deepspeed_ranks(2)(on_all_stages):
        assert len({row[0] for row in rows}) > 2
        assert any(row[-1] > CLIP for row in rows)
        assert len(stages) == len(STAGES)
        for others, local in stages:
            for row, other in zip(rows, others, strict=True):
                assert row[:2] == other[:2]
                assert row[2:] == pytest.approx(other[2:], rel=1e-5, abs=2.5e-7)
            assert 5e-6 > max_difference(weights, local)


def with_empty_ends(rank, ranks):
    """The weights after steps whose last micro-batch has no weight."""
    quiet()
    results = []
    for stage in (None, 0, 2):
        with launched(rank, ranks):
            _, train, model = built(stage)
            for step in train:
                for x, y in step:
                    step.backward(cross_entropy(model(x), y), weight=0 if step.last else len(y))
                step.clip_grad_norm_(CLIP)
                step.update()
            results.append(plain_weights(model, stage))
    return results


def test_a_step_may_end_with_a_micro_batch_of_no_weight(deepspeed_ranks):
    ((plain, *stages),) = deepspeed_ranks(1)(with_empty_ends)
    for weights in stages:
        assert 1e-6 > max_difference(plain, weights)


def resumed(rank, ranks, folder, stage):
    """(uninterrupted, saved and loaded by other objects), in the middle of a pass."""
    quiet()
    with launched(rank, ranks):
        accelerator, train, model = built(stage)
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        run(train, model, 4)
        accelerator.save_state(folder)
        whole = run(train, model, 6), weights_of(model)
    with launched(rank, ranks):
        accelerator, train, model = built(stage)
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        accelerator.load_state(folder)
        return whole, (run(train, model, 6), weights_of(model))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_is_loaded_continues_bit_for_bit(deepspeed_ranks, tmp_path, stage):
    for whole, rest in deepspeed_ranks(2)(resumed, str(tmp_path), stage):
        assert whole[0] == rest[0]
        assert all(map(torch.equal, whole[1], rest[1]))


def variance_reduced(rank, ranks, stage, size):
    """Figures of a variance-reduced optimizer, and the weights."""
    with launched(rank, ranks):
        accelerator, model = accelerator_of(stage), network()
        optimizer = VRSGD(model.parameters(), lr=0.1)
        loader = DataLoader(data(160), batch_size=size)
        prepared = optimizer if stage is None else optimizer.base
        model, given, loader = accelerator.prepare(model, prepared, loader)
        if stage is not None:
            given = optimizer
        options = {"policy": bb.Fixed(32), "min_micro_batches": 4, "every": 1}
        train = adaptive_batch(accelerator, model, given, loader, **options)
        rows = [(row[3], row[4]) for row in run(train, model, 5)]
        return rows, plain_weights(model, stage)


def variance_reduced_stages(rank, ranks):
    quiet()
    return [variance_reduced(rank, ranks, stage, 4) for stage in STAGES]


def test_variance_reduced_stages_train_as_one_process_does(deepspeed_ranks):
    rows, weights = variance_reduced(0, 1, None, 8)  # the micro-batches of both processes
    way = max_difference(weights, network().parameters())
    for stages in deepspeed_ranks(2)(variance_reduced_stages):
        for others, local in stages:
            for row, other in zip(rows, others, strict=True):
                assert row == pytest.approx(other, rel=1e-4)  # r is a ratio of noise
            assert way / 100 > max_difference(weights, local)


REFUSED = {
    "meter": ({"meter": bb.GradientMeter(nn.Linear(1, 1))}, "meter="),
    "groups": ({"groups": 8}, "DeepSpeed reduces in every backward"),
    "a variance-reduced optimizer that was prepared": ({"optimizer": VRSGD}, r".base"),
    "fp16": ({"config": {"torch_autocast": {"enabled": True, "dtype": "float16"}}}, "use bf16"),
}


def refused(rank, ranks):
    quiet()
    messages = {}
    for name, (how, _) in REFUSED.items():
        with launched(rank, ranks), pytest.raises(SettingError) as raised:
            built(2, **how)
        messages[name] = str(raised.value)
    with launched(rank, ranks):
        _, train, model = built(2)
        with pytest.raises(SettingError, match="without DeepSpeed"):
            train.branch_test(lambda batch: cross_entropy(model(batch[0]), batch[1]))
    return messages


def test_what_is_refused_names_the_setting(deepspeed_ranks):
    (messages,) = deepspeed_ranks(1)(refused)
    for name, (_, reason) in REFUSED.items():
        assert reason in messages[name]
