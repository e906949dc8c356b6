"""The Trainer on DeepSpeed, on two processes, against the Trainer under DDP."""

import math
from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback

import bigbatch as bb
from accelerate_process import launched
from bigbatch.errors import LoopError, SettingError
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.optim import VRSGD, VRAdam
from deepspeed_training import OFFLOADED, max_difference, quiet, weights_of
from tiny_trainer import arguments, gpt, logged, texts

FIGURES = "loss", "grad_norm", "similarity", "batch_size", "samples", "learning_rate", "epoch"
MEASURED = 3  # of the figures; the others are equal
UPDATES = 20


def config_of(stage, **more):
    """What users write; the Trainer fills in the rest."""
    zero = {"stage": stage} | more.pop("zero", {})
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    } | more


class KilledError(Exception):
    """A run ends where it is."""


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == self.step:
            raise KilledError


class Nan(AdaptiveTrainer):
    """One micro-batch of one process has a loss that is not finite."""

    calls = 0

    def compute_loss(self, *args, **kwargs):
        self.calls += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss * (math.nan if self.calls == 7 and self.args.process_index else 1)


BUILT = "optimizers", "optimizer_cls_and_kwargs"  # arguments of the Trainer


def build(folder, deepspeed, kind=AdaptiveTrainer, callbacks=(), given=None, **settings):
    built = {name: settings.pop(name) for name in BUILT if name in settings}
    settings = {
        "num_train_epochs": 3,
        "max_grad_norm": 0.5,
        "data_seed": 3,
        "adam_epsilon": 1e-5,
    } | settings
    policy = bb.SimiGrad(0.05, min_batch=8, max_batch=18, grow=1.5)
    options = {"policy": policy, "every": 1} | (given or {})
    return kind(
        model=gpt(),
        args=arguments(folder, deepspeed=deepspeed, **settings),
        train_dataset=texts(96),
        eval_dataset=texts(10),
        callbacks=list(callbacks),
        **options,
        **built,
    )


def trained(folder, deepspeed, resume=None, **how):
    """What the Trainer logs of every update, and the weights."""
    trainer = build(folder, deepspeed, **how)
    trainer.train(resume_from_checkpoint=resume)
    model = trainer.model_wrapped
    weights = weights_of(model) if deepspeed else [p.detach() for p in model.parameters()]
    return logged(trainer, *FIGURES), weights


def assert_alike(expected, actual, similar=2.5e-7, near=5.6e-5):
    (lines, weights), (others, local) = expected, actual
    assert len(lines) == len(others)
    for line, other in zip(lines, others, strict=True):
        assert line[MEASURED:] == other[MEASURED:]
        assert line[:2] == pytest.approx(other[:2], rel=1e-5)  # logged in float32
        assert line[2] == pytest.approx(other[2], rel=similar, abs=similar)
    assert near > max_difference(weights, local)


OFFLOAD = {"zero": OFFLOADED}
CELLS = {
    "stage 0": config_of(0),
    "stage 1": config_of(1),
    "stage 2": config_of(2),
    "stage 3": config_of(3),
    "stage 2, CPU offload": config_of(2, **OFFLOAD),
    "stage 3, CPU offload": config_of(3, **OFFLOAD),
}


def fp32_cells(rank, ranks, folder):
    quiet()
    with launched(rank, ranks):
        plain = trained(folder, None)
    cells = {}
    for name, config in CELLS.items():
        with launched(rank, ranks):
            cells[name] = trained(folder, config)
    return plain, cells


def test_every_stage_trains_as_ddp_does(deepspeed_ranks, tmp_path):
    for plain, cells in deepspeed_ranks(2)(fp32_cells, str(tmp_path)):
        assert len(plain[0]) >= UPDATES
        sizes = [line[MEASURED] for line in plain[0]]
        assert {True, False} <= {later > size for size, later in pairwise(sizes) if later != size}
        assert any(line[1] > 0.5 for line in plain[0])  # clipped
        assert list(CELLS) == list(cells)
        for cell in cells.values():
            assert_alike(plain, cell)


def resumed(rank, ranks, folder, stage):
    """(uninterrupted, killed and resumed), in the middle of an epoch; with evaluations."""
    quiet()
    settings = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps"}
    settings |= {"eval_steps": 3, "gradient_checkpointing": stage == 3}
    with launched(rank, ranks):
        whole = trained(f"{folder}/whole", config_of(stage), **settings)
    with launched(rank, ranks), pytest.raises(KilledError):
        trained(folder, config_of(stage), callbacks=[Kill(6)], **settings)
    with launched(rank, ranks):
        return whole, trained(folder, config_of(stage), resume=True, **settings)


@pytest.mark.parametrize(
    "stage", [2, 3, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0, 1))]
)
def test_a_killed_run_resumes_bit_for_bit(deepspeed_ranks, tmp_path, stage):
    for whole, halves in deepspeed_ranks(2)(resumed, str(tmp_path), stage):
        assert whole[0] == halves[0]
        assert all(map(torch.equal, whole[1], halves[1]))


FLOAT32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def bf16(rank, ranks, folder):
    quiet()
    results = []
    for config in (None, *map(config_of, range(4)), config_of(1, **FLOAT32_SUMS)):
        with launched(rank, ranks):
            # a target that rounding does not cross
            given = {"policy": bb.SimiGrad(0.3, min_batch=8, max_batch=24)}
            how = {"bf16": True, "num_train_epochs": 1, "given": given}
            results.append(trained(folder, config, **how)[0])
    return results


def test_bf16_takes_the_batches_of_ddp(deepspeed_ranks, tmp_path):
    for plain, *stages in deepspeed_ranks(2)(bf16, str(tmp_path)):
        assert len(stages) == 5
        for stage in stages:
            assert [line[MEASURED:] for line in plain] == [line[MEASURED:] for line in stage]
            assert [line[2] for line in plain] == pytest.approx(
                [line[2] for line in stage], abs=0.04
            )


def skipping(rank, ranks, folder):
    quiet()
    results = []
    ends = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    for stage in (0, 2, 3):
        with launched(rank, ranks):
            trainer = build(f"{folder}/{stage}", config_of(stage), Nan, num_train_epochs=1, **ends)
            trainer.train()
            loss = trainer.predict(texts(10)).metrics["test_loss"]
            assert trainer.state.best_metric == pytest.approx(loss)
            finite = all(w.isfinite().all() for w in weights_of(trainer.deepspeed))
            train, engine = trainer.adaptive, trainer.deepspeed
            results.append((train.skipped, engine.skipped_steps, train.samples, finite))
            with pytest.raises(LoopError, match="make another Trainer"):
                trainer.train()
    return results


def test_a_gradient_that_is_not_finite_skips_one_update(deepspeed_ranks, tmp_path):
    for results in deepspeed_ranks(2)(skipping, str(tmp_path)):
        assert [(1, 1, 96, True)] * 3 == results


WARMUP = 4
DEEPSPEEDS = {
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
            "torch_adam": True,
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def scheduled(rank, ranks, folder):
    quiet()
    results = []
    configs = [None, config_of(2, **DEEPSPEEDS), config_of(2, optimizer=DEEPSPEEDS["optimizer"])]
    for config in configs:
        with launched(rank, ranks):
            results.append(trained(folder, config, warmup_steps=WARMUP))
    return results


def test_deepspeeds_scheduler_counts_base_batches(deepspeed_ranks, tmp_path):
    for plain, own, theirs in deepspeed_ranks(2)(scheduled, str(tmp_path)):
        assert_alike(plain, theirs)  # with the Trainer's scheduler
        for line in own[0]:
            batch, samples, lr = line[MEASURED : MEASURED + 3]
            ticks = max(0, (samples - batch) // 8 - 1)  # DeepSpeed's first step repeats its start
            factor = ticks / WARMUP if ticks < WARMUP else (36 - ticks) / (36 - WARMUP)
            assert pytest.approx(1e-2 * factor * (batch / 8) ** 0.5) == lr


def variance_reduced(folder, deepspeed, size, **settings):
    return trained(
        folder,
        deepspeed,
        **settings,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=size,
        lr_scheduler_type="constant",
        optimizer_cls_and_kwargs=(VRSGD, {"lr": 0.5}),
        given={"policy": bb.Fixed(32), "min_micro_batches": 4},
    )


def variance_reduced_cells(rank, ranks, folder):
    quiet()
    cells = []
    for stage in range(4):
        with launched(rank, ranks):
            cells.append(variance_reduced(folder, config_of(stage), 4))
    for stage in (1, 2, 3):
        with launched(rank, ranks):
            cells.append(variance_reduced(folder, config_of(stage), 4, bf16=True))
    return cells


def test_variance_reduced_stages_train_as_one_process_does(deepspeed_ranks, tmp_path):
    lines, weights = variance_reduced(tmp_path, None, 8)  # the micro-batches of both processes
    way = max_difference(weights, gpt().parameters())
    for cells in deepspeed_ranks(2)(variance_reduced_cells, str(tmp_path)):
        fp32, bf16 = cells[:4], cells[4:]
        for others, local in bf16:
            for line, other in zip(lines, others, strict=True):
                assert line[:2] == pytest.approx(other[:2], rel=0.02)
            assert way / 5 > max_difference(weights, local), (way, max_difference(weights, local))
        for others, local in fp32:
            assert [line[MEASURED:] for line in lines] == [line[MEASURED:] for line in others]
            for line, other in zip(lines, others, strict=True):
                assert line[:2] == pytest.approx(other[:2], rel=1e-4)  # r is a ratio of noise
            assert way / 50 > max_difference(weights, local)


class Handed(AdaptiveTrainer):
    """Hands over an optimizer where the mixin does not see it."""

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = VRAdam(self.model.parameters(), lr=1e-2)
        return self.optimizer


VR = {"optimizer_cls_and_kwargs": (VRAdam, {"lr": 1e-2})}
REFUSED = {  # how it is built, its configuration, a part of the message
    "groups": ({"given": {"groups": 8}}, config_of(2), "DeepSpeed reduces in every backward"),
    "transport": ({"given": {"transport": True}}, config_of(2), "transport"),
    "an optimizer that is not used": (
        {"optimizers": (VRAdam([torch.zeros(1, requires_grad=True)]), None)},
        config_of(2),
        "optimizer_cls_and_kwargs",
    ),
    "a variance-reduced optimizer of a subclass": ({"kind": Handed}, config_of(0), "optimizer_cls"),
    "a variance-reduced optimizer of a subclass, stage 2": (
        {"kind": Handed},
        config_of(2),
        "optimizer_cls",
    ),
    "a variance-reduced optimizer, CPU offload": (VR, config_of(2, **OFFLOAD), "offloaded to"),
    "a variance-reduced optimizer, stage 0, bf16": (
        {**VR, "bf16": True},
        config_of(0),
        "float32 copies of the parameters",
    ),
    "a variance-reduced optimizer, stage 1, float32 sums": (
        {**VR, "bf16": True},
        config_of(1, **FLOAT32_SUMS),
        "gradients are added up outside .grad",
    ),
    "gradients that are summed": ({}, config_of(2, gradient_allreduce_op="sum"), '"sum"'),
}


def refused(rank, ranks, folder):
    quiet()
    messages = {}
    for name, (how, config, _) in REFUSED.items():
        with launched(rank, ranks), pytest.raises(SettingError) as raised:
            build(folder, config, **how).train()
        messages[name] = str(raised.value)
    return messages


def test_what_is_refused_names_the_setting(deepspeed_ranks, tmp_path):
    (messages,) = deepspeed_ranks(1)(refused, str(tmp_path))
    for name, (_, _, reason) in REFUSED.items():
        assert reason in messages[name]


def evaluated_first(rank, ranks, folder):
    quiet()
    with launched(rank, ranks):
        trainer = build(folder, config_of(3), num_train_epochs=1)
        trainer.evaluate()
        with pytest.raises(LoopError, match=r"an earlier.*evaluate\(\).*eval_on_start=True"):
            trainer.train()
    with launched(rank, ranks):
        trainer = build(folder, config_of(3), num_train_epochs=1, eval_on_start=True)
        trainer.train()
        return [*trainer.state.log_history[0]]


def test_an_engine_of_an_evaluation_is_not_trained(deepspeed_ranks, tmp_path):
    (first,) = deepspeed_ranks(1)(evaluated_first, str(tmp_path))
    assert "eval_loss" in first
