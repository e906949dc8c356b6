"""The DeepSpeed connection in one process: its face, its loops, and what it refuses."""

import argparse
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager, redirect_stdout

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import bigbatch as bb
from bigbatch.errors import BigbatchError, SettingError
from deepspeed_training import (
    ACCUMULATION,
    BATCH,
    MICRO,
    OFFLOADED,
    PARAMS,
    SAMPLES,
    batches_of,
    config_of,
    controller_of,
    data,
    engine_of,
    loss_of,
    max_difference,
    micro_step,
    network,
    optimizer_of,
    quiet,
    record_values,
    train_steps,
    weights_of,
)

STEPS = 6
OWN = {"training_data": None}  # micro-batches are the caller's
FIXED = {"adaptive_batch_params": None, "policy": bb.Fixed(BATCH)}


def micro_batches(sizes):
    """Samples one after the other, cut into batches of these sizes."""
    x, y = data().tensors
    at = 0
    for size in itertools.cycle(sizes):
        at = 0 if at + size > len(y) else at
        yield x[at : at + size], y[at : at + size]
        at += size


# off, and on with a batch that stays


def losses_of_plain(rank, ranks, params, dtype, layout):
    """Losses of DeepSpeed itself, and of ours with these parameters; the type of ours."""
    quiet()
    import deepspeed

    from bigbatch.integrations import deepspeed as ours

    runs = []
    for initialize, given in (
        (deepspeed.initialize, {}),
        (ours.initialize, {"adaptive_batch_params": params}),
    ):
        model = network()
        engine = initialize(
            model=model, optimizer=optimizer_of(model), config=config_of(1, layout, dtype), **given
        )[0]
        batches = micro_batches([8])
        runs.append([one_loss(engine, *next(batches)) for _ in range(STEPS * ACCUMULATION)])
    return *runs, type(engine) is deepspeed.DeepSpeedEngine


def one_loss(engine, x, y):
    loss = loss_of(engine(x.to(next(engine.module.parameters()).dtype)), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("params", [None, {}, {"enable_adjust": False}, {"enable_adjust": None}])
@pytest.mark.parametrize(("layout", "dtype"), [("0", "fp32"), ("2", "bf16")])
def test_without_adaptation_the_engine_is_deepspeeds_own(deepspeed_ranks, params, layout, dtype):
    plain, ours, its_own = deepspeed_ranks(1)(losses_of_plain, params, dtype, layout)[0]
    assert its_own
    assert plain == ours


def losses_of_fixed(rank, ranks, layout):
    quiet()
    import deepspeed

    model = network()
    config = config_of(1, layout, clip=0.25)
    plain = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    ours, _, loader, _ = engine_of(0, 1, layout, clip=0.25, lr_scheduler=None, **OWN, **FIXED)
    assert loader is None
    batches = list(itertools.islice(micro_batches([8]), STEPS * ACCUMULATION))
    return [[one_loss(engine, *batch) for batch in batches] for engine in (plain, ours)]


@pytest.mark.parametrize("layout", ["0", "1", "2", "3"])
def test_a_fixed_batch_is_deepspeeds_own_training(deepspeed_ranks, layout):
    plain, ours = deepspeed_ranks(1)(losses_of_fixed, layout)[0]
    assert plain[0] != plain[-1]
    assert pytest.approx(plain, abs=1e-6) == ours


# DeepSpeed's module by our name


FORWARDED = """
from bigbatch.integrations import deepspeed
from bigbatch.integrations.deepspeed import add_config_arguments, comm, zero
import argparse
import deepspeed as theirs

named = [name for name in dir(theirs) if name.islower() and not name.startswith("__")]
assert set(named) <= set(dir(deepspeed))
named.remove("initialize")
others = [name for name in named if getattr(deepspeed, name) is not getattr(theirs, name)]
assert not others, others
assert (comm, zero.Init) == (theirs.comm, theirs.zero.Init)
assert deepspeed.initialize is not theirs.initialize
assert deepspeed.init_distributed is theirs.init_distributed
assert deepspeed.__version__ == theirs.__version__
assert add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"]).deepspeed
try:
    deepspeed.no_such_name
except AttributeError as error:
    print(error)
"""


@pytest.mark.thorough
def test_what_is_not_ours_is_deepspeeds_own():
    ended = subprocess.run(
        [sys.executable, "-c", FORWARDED], capture_output=True, text=True, check=False, timeout=120
    )
    assert 0 == ended.returncode, ended.stderr
    assert ended.stdout.splitlines()[-1] == (
        "module 'bigbatch.integrations.deepspeed' has no attribute 'no_such_name', "
        "nor has deepspeed"
    )


# the call of the paper's README, and the loop that its readers wrote


README = {"batch_size_lower_bound": 24, "batch_size_upper_bound": 96, "max_micro_batch_size": 12}


def readme(rank, ranks, path, target):
    """Warnings, and of each step: what the engine says, what the loop gave, the weights."""
    quiet()
    from bigbatch.integrations import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--similarity_target", type=float)
    parser.add_argument("--deepspeed_config")
    args = parser.parse_args(["--deepspeed_config", path, "--similarity_target", str(target)])
    model = network()
    with warnings.catch_warnings(record=True, action="always") as said:
        model, optimizer, _, _ = deepspeed.initialize(  # noqa: RUF059
            args=args,
            model=model,
            model_parameters=model.parameters(),
            every=1,
            adaptive_batch_params={
                "enable_adjust": args.similarity_target,
                "verbose": True,
                "similarity_target": args.similarity_target,
                **README,
            },
        )
    said = [str(each.message) for each in said if "enable_adjust" in str(each.message)]
    loader = DataLoader(data(), batch_size=1)  # its samples are collected
    steps, given, collected, boundaries = [], [], [], []
    for sample in itertools.chain.from_iterable(itertools.repeat(loader, 3)):
        collected.append(sample)
        if len(collected) < model.train_micro_batch_size_per_gpu():
            continue
        x, y = (torch.cat(column) for column in zip(*collected, strict=True))
        collected = []
        wanted = (
            model.train_batch_size(),
            model.train_micro_batch_size_per_gpu(),
            model.gradient_accumulation_steps(),
        )
        boundaries.append(model.is_gradient_accumulation_boundary())
        model.backward(cross_entropy(model(x), y))
        given.append((x, y))
        model.step()
        if model.was_step_applied():
            recorded = (wanted, boundaries, model.bigbatch.record)
            steps.append((recorded, given, weights_of(model)))
            given, boundaries = [], []
    return said, steps


@pytest.mark.parametrize("target", [0.55, 0.0])
def test_the_call_and_the_loop_of_the_papers_readers(deepspeed_ranks, tmp_path, target):
    path = tmp_path / "config.json"
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
    }
    path.write_text(json.dumps(config))
    said, steps = deepspeed_ranks(1)(readme, str(path), target)[0]
    assert len(said) == 1
    assert said[0].startswith(f"enable_adjust={target} is a number and counts as True")
    model = network()
    assert len({record.batch_size for (_, _, record), _, _ in steps}) > 2
    for ((batch, micro, accumulation), boundaries, record), given, weights in steps:
        assert [False] * (accumulation - 1) + [True] == boundaries
        assert [micro] * accumulation == [len(y) for _, y in given]
        assert batch == micro * accumulation == record.batch_size
        assert 24 <= batch <= 96
        assert pytest.approx(0.1 * math.sqrt(batch / 32)) == record.lr[0]
        assert_stepped(model, given, record.lr[0], weights)


def assert_stepped(model, given, lr, weights):
    """`model` takes one step of SGD on the mean over all samples; to where the engine came."""
    x, y = (torch.cat(column) for column in zip(*given, strict=True))
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= lr * gradient
    assert max_difference(model.parameters(), weights) < 1e-6


def logged(engine):
    """What the paper's scripts log after each step."""
    params, cosine = engine.adaptive_batch_params, engine.cos_placeholder
    assert torch.Size([]) == cosine.shape
    with pytest.raises(TypeError):
        params["global_lr_modifier"] = 2.0
    assert 1 == engine.gradient_step_size
    return (
        cosine.item(),
        engine.train_batch_size(),
        params["global_lr_modifier"],
        params["original_batch_size"],
        params["batch_size_similiarity_record"],
        params["similarity_target"],
    )


def logs(rank, ranks):
    """Before the first step, and after each of three; without a schedule."""
    engine, _, loader, _ = engine_of(rank, ranks, lr_scheduler=None)
    first, micro_batches = logged(engine), iter(loader)
    steps = [(train_steps(engine, micro_batches, 1)[0], logged(engine)) for _ in range(3)]
    return first, steps


def test_what_the_papers_scripts_read_is_there(deepspeed_ranks):
    first, steps = deepspeed_ranks(1)(logs)[0]
    assert math.isnan(first[0])
    assert (BATCH, 1.0, BATCH, {}, PARAMS["similarity_target"]) == first[1:]
    assert len({batch for _, (_, batch, *_) in steps}) > 1
    for record, (cosine, batch, modifier, base, _, _) in steps:
        assert pytest.approx(record.similarity, rel=1e-6) == cosine  # of float32
        assert math.sqrt(batch / BATCH) == modifier
        assert BATCH == base
    for (_, (_, _, modifier, *_)), (record, _) in itertools.pairwise(steps):
        assert pytest.approx(0.1 * modifier) == record.lr[0]
    assert {record.batch_size: record.similarity for record, _ in steps} == steps[-1][1][4]


def logs_of_plain(rank, ranks):
    params = {"enable_adjust": False, "similarity_target": -0.1}
    return logged(engine_of(rank, ranks, adaptive_batch_params=params, training_data=None)[0])


def test_it_is_there_without_adaptation_too(deepspeed_ranks):
    (cosine, *others) = deepspeed_ranks(1)(logs_of_plain)[0]
    assert math.isnan(cosine)
    assert [BATCH, 1.0, BATCH, {}, -0.1] == others


RAGGED = [7, 3, 12, 1, 9]


def ragged(rank, ranks, layout):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(0, 1, layout, model=model, optimizer=optimizer, lr_scheduler=None, **OWN)[0]
    steps, given = [], []
    for x, y in itertools.islice(micro_batches(RAGGED), 40):
        given.append((x, y))
        if micro_step(engine, x, y):
            steps.append((given, engine.bigbatch.record, weights_of(engine)))
            given = []
    return steps, engine.global_samples


@pytest.mark.parametrize("layout", ["0", "1", "2", "2, CPU offload", "3", "3, CPU offload"])
def test_micro_batches_of_any_size_add_up_to_the_true_gradient(deepspeed_ranks, layout):
    steps, samples = deepspeed_ranks(1)(ragged, layout)[0]
    model = network()
    assert len(steps) > 3
    for given, record, weights in steps:
        assert sum(len(y) for _, y in given) == record.batch_size
        assert len(given) == record.micro_batches
        assert_stepped(model, given, record.lr[0], weights)
    assert sum(record.batch_size for _, record, _ in steps) == samples


def observed(rank, ranks, own, layout, folder):
    """What DeepSpeed's monitor and timer say of some steps of one epoch, and its records."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    more = {"csv_monitor": monitor}
    engine, _, loader, _ = engine_of(rank, ranks, layout, more=more, **(OWN if own else {}))
    records, ends = [], []
    for x, y in itertools.islice(micro_batches(RAGGED), 60) if own else loader:
        if micro_step(engine, x, y):
            records.append(engine.bigbatch.record)
        ends.append(engine.is_gradient_accumulation_boundary())
    rows = [file.read_text().split() for file in folder.rglob("*lr.csv")]
    monitored = [int(row.split(",")[0]) for row in rows[0][1:]] if rank == 0 else None
    timer = engine.tput_timer
    timed = timer.avg_samples_per_sec() * timer.total_elapsed_time
    return monitored, timed, sum(ends), [record.batch_size for record in records]


@pytest.mark.parametrize("layout", ["0", "2"])
@pytest.mark.parametrize(("count", "own"), [(1, True), (1, False), (2, False)])
def test_the_monitor_and_the_timer_get_true_sizes(deepspeed_ranks, tmp_path, count, own, layout):
    """Not those planned, which the end of an epoch changes; the boundary comes once a step."""
    answers = deepspeed_ranks(count)(observed, own, layout, tmp_path)
    for _, timed, ends, sizes in answers:
        assert len(sizes) == ends > 3
        assert sum(sizes[2:]) == pytest.approx(timed)  # DeepSpeed times none of the first two
    monitored, *_, sizes = answers[0]
    assert list(itertools.accumulate(sizes)) == monitored
    assert own or sum(sizes) == SAMPLES


# parameters


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"similarity": 0.3},
            "adaptive_batch_params has unknown keys ['similarity']; it takes ['enable_adjust', "
            "'similarity_target', 'batch_size_lower_bound', 'batch_size_upper_bound', "
            "'max_micro_batch_size', 'verbose']",
        ),
        ({"enable_adjust": "yes"}, "enable_adjust='yes' must be True or False"),
        ({"similarity_target": None}, "enable_adjust needs a similarity_target"),
        ({"similarity_target": "0.3"}, "similarity_target='0.3' must be a number in [-1, 1]"),
        ({"similarity_target": True}, "similarity_target=True must be a number in [-1, 1]"),
        ({"similarity_target": 1.5}, "similarity_target=1.5 must be a number in [-1, 1]"),
        ({"similarity_target": math.nan}, "similarity_target=nan must be a number in [-1, 1]"),
        ({"batch_size_lower_bound": 0}, "batch_size_lower_bound=0 must be a whole number"),
        ({"batch_size_upper_bound": 96.0}, "batch_size_upper_bound=96.0 must be a whole number"),
        ({"max_micro_batch_size": True}, "max_micro_batch_size=True must be a whole number"),
        ({"batch_size_lower_bound": 96, "batch_size_upper_bound": 24}, "min_batch=96"),
        ({"verbose": 3}, "verbose=3 must be a whole number"),
        ({"verbose": "2"}, "verbose='2' must be a whole number"),
    ],
)
def test_a_wrong_parameter_is_named_before_anything_is_built(wrong, named):
    from bigbatch.integrations import deepspeed

    with pytest.raises(SettingError, match=f"^{re.escape(named)}"):
        deepspeed.initialize(adaptive_batch_params={**PARAMS, **wrong})


def test_parameters_that_are_left_out_are_those_of_none():
    from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams

    given = {"enable_adjust": False, "verbose": 0}
    for some in (None, {}, given):
        assert AdaptiveBatchParams(enable_adjust=False) == AdaptiveBatchParams.of(some)


def test_every_size_may_be_a_single_sample():
    from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams

    sizes = dict.fromkeys(README, 1)
    params = AdaptiveBatchParams.of({**PARAMS, **sizes})
    assert sizes == {name: getattr(params, name) for name in sizes}


def test_the_papers_parameters_are_by_single_steps_as_in_the_paper():
    from bigbatch.integrations.deepspeed.simigrad_config import AdaptiveBatchParams

    controller = AdaptiveBatchParams.of(PARAMS).controller(BATCH)
    expected = controller_of()
    assert repr(expected.facts()) == repr(controller.facts())
    step = bb.GradientStatistics(1.0, 576.0, samples=BATCH, micro_batches=4)
    assert expected.next(step) == controller.next(step)
    assert BATCH < controller.decision.batch_size


def test_a_wrong_interval_is_named_before_anything_is_built():
    from bigbatch.integrations import deepspeed

    with pytest.raises(SettingError, match=r"^every=-1 must be a whole number of at"):
        deepspeed.initialize(adaptive_batch_params=PARAMS, every=-1)


def test_it_adds_up_gradients_itself_and_that_is_said():
    from bigbatch.integrations import deepspeed

    with pytest.raises(SettingError, match=r"^accumulate_float32_above=4: DeepSpeed .*grad_accum"):
        deepspeed.initialize(model=nn.Linear(1, 1), accumulate_float32_above=4)


def test_another_policy_than_the_papers_is_refused():
    from bigbatch.integrations import deepspeed

    with pytest.raises(SettingError, match="policy= and enable_adjust both decide"):
        deepspeed.initialize(adaptive_batch_params=PARAMS, policy=bb.Fixed(32))


def lines_of(rank, ranks, verbose):
    """What is printed at DeepSpeed's own log level."""
    from deepspeed.utils import logger

    before = logger.level
    engine, _, loader, _ = engine_of(
        rank, ranks, adaptive_batch_params={**PARAMS, "verbose": verbose}
    )
    logger.setLevel(before)
    with redirect_stdout(io.StringIO()) as printed:
        records = train_steps(engine, loader, 2)
    lines = printed.getvalue().splitlines()
    return [line.partition("] ")[2] for line in lines if "similarity" in line], records


@pytest.mark.parametrize(
    ("verbose", "speak"), [(False, []), (0, []), (True, [0]), (1, [0]), (2, [0, 1])]
)
def test_decisions_are_said_on_rank_0_or_on_all(deepspeed_ranks, verbose, speak):
    for rank, (lines, records) in enumerate(deepspeed_ranks(2)(lines_of, verbose)):
        if rank not in speak:
            assert lines == []
            continue
        for line, record in zip(lines, records, strict=True):
            expected = f"batch size {record.batch_size}, similarity {record.similarity:.4f}: next "
            assert line.startswith(expected)
            assert line.endswith(f"({record.decision.reason})")


# settings that are refused


class Mpu:
    """What a user of Megatron hands over."""

    def get_model_parallel_rank(self):
        return 0

    get_data_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self):
        return 1

    get_data_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self):
        return torch.distributed.group.WORLD

    get_data_parallel_group = get_model_parallel_group


def experts():
    from deepspeed.moe.layer import MoE

    return nn.Sequential(nn.Linear(5, 6), MoE(6, nn.Linear(6, 6), num_experts=2), nn.Linear(6, 3))


def pipeline():
    from deepspeed import init_distributed
    from deepspeed.pipe import PipelineModule

    init_distributed("gloo")
    return PipelineModule([nn.Linear(5, 6), nn.Linear(6, 3)], num_stages=1)


BY_CONFIG = {"optimizer": None, "model_parameters": True}
UNCOMPILED = {"lr": 0.1, "torch_adam": True}  # DeepSpeed's own Adam takes a minute to compile
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False}
REFUSED = {
    "no optimizer": (BY_CONFIG, {}, "0", "no optimizer: its learning rates follow the batch"),
    "float16": (
        {},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        "0",
        "fp16: at stage 0 DeepSpeed divides by a loss scale that it never multiplied by",
    ),
    "sum": (
        {},
        {"gradient_allreduce_op": "sum"},
        "1",
        '"gradient_allreduce_op": "sum": gradients would be summed over ranks',
    ),
    "no norm": (
        {},
        {"zero": {"compute_grad_norm": False}},
        "2",
        '"compute_grad_norm": false: a gradient that is not finite would be applied',
    ),
    "no look at overflow": (
        {},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        "2",
        '"check_grad_overflow": false: a gradient that is not finite would be applied',
    ),
    "unmanaged": (
        {},
        {"managed_gradient_accumulation": False},
        "1",
        '"managed_gradient_accumulation": false: every engine.step() would be an update, so that',
    ),
    "experts": ({"model": experts}, {}, "0", "mixture of experts: it is not tested"),
    "mpu": ({"mpu": Mpu()}, {}, "0", "tensor or model parallelism: it is not tested"),
    "ZenFlow": (
        BY_CONFIG,
        {**SGD, "zero": {**OFFLOADED, "zenflow": ZENFLOW}},
        "2",
        "ZenFlow: it is not tested",
    ),
    "quantized": (
        {},
        {"zero": {"zero_quantized_gradients": True}},
        "3",
        '"zero_quantized_gradients": gradients are rounded as they are reduced',
    ),
    "Muon": (
        BY_CONFIG,
        {"optimizer": {"type": "Muon", "params": UNCOMPILED}},
        "1",
        "Muon: ZeRO applies it to the gradient before the gradient can be read",
    ),
    "data efficiency": (
        {},
        {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
        "0",
        "curriculum or data-efficiency sampling: its sampler sets the batch size too",
    ),
    "DeepCompile": (
        {},
        {"compile": {"deepcompile": True}},
        "1",
        "DeepCompile: it reduces gradients by itself",
    ),
    "universal": (
        {"groups": 2},
        {"checkpoint": {"load_universal": True}},
        "3",
        "a universal checkpoint at stage 3 with several parameter groups: DeepSpeed resumes them "
        "with the optimizer state of other parameters; use one group",
    ),
    "hybrid": ({}, {"hybrid_engine": {"enabled": True}}, "0", "DeepSpeedHybridEngine"),
    "pipeline": ({**BY_CONFIG, "model": pipeline}, SGD, "0", "PipelineEngine"),
}


def refusal(rank, ranks, name):
    given, more, layout, _ = REFUSED[name]
    given = {"lr_scheduler": None, **given}
    given["model"] = given["model"]() if "model" in given else network()
    if given.get("model_parameters"):
        given["model_parameters"] = given["model"].parameters()
    try:
        engine_of(0, 1, layout, more=more, **given)
    except BigbatchError as error:
        return str(error)
    return "built"


def test_what_would_be_wrong_or_is_not_tested_is_refused(deepspeed_ranks):
    process = deepspeed_ranks(1)
    for name, (*_, expected) in REFUSED.items():
        (message,) = process(refusal, name)
        assert expected == message[: len(expected)]
        assert message.endswith("(docs/deepspeed.md has what works)")


# loops that go wrong


def second_driver(engine, batches):
    batch = next(batches)
    engine.set_gradient_accumulation_boundary(True)
    micro_step(engine, *batch)


def second_driver_of_the_step(engine, batches):
    x, y = next(batches)
    engine.backward(loss_of(engine(x), y))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def backward_past_the_engine(engine, batches):
    x, y = next(batches)
    loss_of(engine(x), y).backward()
    engine.step()


def backward_past_the_engine_once(engine, batches):
    for number, (x, y) in enumerate(itertools.islice(batches, 2 * ACCUMULATION)):
        if number == 2:
            loss_of(engine(x), y).backward()
        micro_step(engine, x, y)


def backward_past_the_engine_before(engine, batches):
    x, y = next(batches)
    loss_of(engine(x), y).backward()
    micro_step(engine, x, y)


def backward_past_the_engine_after(engine, batches):
    for x, y in batches:
        engine.backward(loss_of(engine(x), y))
        if engine.is_gradient_accumulation_boundary():
            loss_of(engine(x), y).backward()
        engine.step()


def step_without_backward(engine, batches):
    x, _ = next(batches)
    engine(x)
    engine.step()


def step_twice(engine, batches):
    micro_step(engine, *next(batches))
    engine.step()


def step_twice_at_the_end(engine, batches):
    train_steps(engine, batches, 1)
    engine.step()


def forgotten_step(engine, batches):
    for x, y in itertools.islice(batches, ACCUMULATION + 1):
        engine.backward(loss_of(engine(x), y))


def two_backwards(engine, batches):
    x, y = next(batches)
    output = engine(x)
    engine.backward(loss_of(output, y), retain_graph=True)
    engine.backward(output.square().mean())


def saved_inside(engine, batches):
    micro_step(engine, *next(batches))
    engine.save_checkpoint("/nowhere")


def loaded_inside(engine, batches):
    micro_step(engine, *next(batches))
    engine.load_checkpoint("/nowhere")


def loss_of_each_sample(engine, batches):
    x, y = next(batches)
    engine.backward(cross_entropy(engine(x), y, reduction="none"))


def moved_schedule(engine, batches):
    for x, y in batches:
        if micro_step(engine, x, y):
            engine.lr_scheduler.step()


ITS_OWN = "Direct calls to tensor.backward() are not supported"  # DeepSpeed's, at stage 0
WRONG = {
    second_driver: "somebody else set the gradient accumulation boundary",
    second_driver_of_the_step: "somebody else set the gradient accumulation boundary",
    backward_past_the_engine: "engine.step() without engine.backward(loss) before it",
    backward_past_the_engine_once: "a backward of your own changed .grad between two micro-batches",
    backward_past_the_engine_before: "a backward of your own came before the step",
    backward_past_the_engine_after: "a backward of your own changed .grad between the last",
    step_without_backward: "engine.step() without engine.backward(loss) before it",
    step_twice: "engine.step() without engine.backward(loss) before it",
    step_twice_at_the_end: "engine.step() without engine.backward(loss) before it",
    forgotten_step: "the accumulation is complete and engine.step() was not called",
    two_backwards: ("engine.backward(loss) without a forward", "step.backward was called twice"),
    saved_inside: "engine.save_checkpoint() after 1 micro-batches of a step",
    loaded_inside: "engine.load_checkpoint() after 1 micro-batches of a step",
    loss_of_each_sample: "the loss has shape (8,); pass its mean, one number",
    moved_schedule: "the ExponentialLR was left at tick",
}


def wrong_loop(rank, ranks, wrong, layout, own):
    engine, _, loader, _ = engine_of(0, 1, layout, **(OWN if own else {}))
    try:
        wrong(engine, micro_batches([8]) if own else iter(loader))
    except (BigbatchError, RuntimeError) as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("own", [True, False], ids=["own loop", "loader"])
@pytest.mark.parametrize("layout", ["0", "1", "2", "3"])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_loop_that_goes_wrong_is_warned_how(deepspeed_ranks, wrong, layout, own):
    said = deepspeed_ranks(1)(wrong_loop, wrong, layout, own)[0]
    past_the_engine = wrong.__name__.startswith("backward_past")
    expected = ITS_OWN if layout == "0" and past_the_engine else WRONG[wrong]
    assert said.startswith(expected)


def left_out(rank, ranks):
    """A loader's micro-batch without a backward; and a backward without one."""
    said = []
    engine, _, loader, _ = engine_of(0, 1)
    x, y = data()[:8]
    with recorded(said):
        engine.backward(loss_of(engine(x), y))
    with recorded(said):
        for _ in loader:
            pass
    return said


@contextmanager
def recorded(said):
    try:
        yield
    except BigbatchError as error:
        said.append(str(error))


def test_a_loaders_micro_batch_is_one_backward(deepspeed_ranks):
    said = deepspeed_ranks(1)(left_out)[0]
    assert said[0].startswith("no micro-batch was read for this backward")
    assert said[1].startswith("a micro-batch was left without step.backward(loss)")


def validated(rank, ranks, layout, own, between):
    """Steps with forwards of other sizes between, in eval mode or without gradients."""
    engine, _, loader, _ = engine_of(0, 1, layout, **(OWN if own else {}))
    batches = micro_batches([8, 5]) if own else itertools.chain(loader, loader)
    x_all, _ = data()[:40]
    records = []
    while len(records) < STEPS:
        x, y = next(batches)
        output = engine(x)
        if between == "eval":
            engine.eval()
            engine(x_all)
            engine.train()
        if between == "no_grad":
            with torch.no_grad():
                engine(x_all)
        engine.backward(loss_of(output, y))
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        if ends:
            records.append(engine.bigbatch.record)
    return record_values(records), weights_of(engine)


@pytest.mark.parametrize("own", [True, False], ids=["own loop", "loader"])
@pytest.mark.parametrize("layout", ["0", "2", "3"])
def test_forwards_for_validation_change_nothing(deepspeed_ranks, layout, own):
    pool = deepspeed_ranks(1)
    expected, weights = pool(validated, layout, own, None)[0]
    for between in ("eval", "no_grad"):
        actual, local = pool(validated, layout, own, between)[0]
        assert expected == actual
        assert all(map(torch.equal, weights, local))


def broken_off(rank, ranks):
    """One pass in batches of seven micro-batches, `break` between."""
    engine, _, loader, _ = engine_of(0, 1)
    seen_samples, micro = 0, 0
    while engine.bigbatch.epoch == 0:
        for x, y in loader:
            micro_step(engine, x, y)
            seen_samples, micro = seen_samples + len(y), micro + 1
            if micro % 7 == 0:
                break
    return seen_samples, engine.bigbatch.samples, engine.global_samples


def test_a_break_inside_the_accumulation_loses_no_sample(deepspeed_ranks):
    assert (SAMPLES,) * 3 == deepspeed_ranks(1)(broken_off)[0]


# models


class Reused(nn.Module):
    """A layer in two places, by itself, tied, or under checkpointing."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(5, 6), nn.Linear(6, 6)
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.how = how
        if how == "tied":
            self.again.weight = self.shared.weight
        elif how in ("twice", "checkpointed", "reentrant twice"):
            self.again = self.shared

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        for layer in (self.shared, self.again):
            hidden = self.through(layer, hidden)
        return self.last(torch.tanh(hidden))

    def through(self, layer, hidden):
        if self.how == "deepspeed checkpointing":
            from deepspeed import checkpointing

            return checkpointing.checkpoint(lambda h: torch.tanh(layer(h)), hidden)
        if self.how.startswith("reentrant"):
            return checkpoint(lambda h: torch.tanh(layer(h)), hidden, use_reentrant=True)
        if self.how == "checkpointed":
            return checkpoint(lambda h: torch.tanh(layer(h)), hidden, use_reentrant=False)
        return torch.tanh(layer(hidden))


MODELS = ["tied", "twice", "checkpointed", "deepspeed checkpointing", "reentrant"]


def reused(rank, ranks, layout, how):
    model = Reused(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if layout is None:
        train = bb.AdaptiveBatch(
            model, optimizer, batches_of(), policy=controller_of(), micro_batch=MICRO, every=1
        )
        records = []
        for step in itertools.islice(train, STEPS):
            for x, y in step:
                step.backward(loss_of(model(x), y))
            records.append(step.update())
        return record_values(records)
    engine, _, loader, _ = engine_of(
        0, 1, layout, model=model, optimizer=optimizer, lr_scheduler=None
    )
    with recorded(said := []):
        return record_values(train_steps(engine, loader, STEPS))
    return said[0]


@pytest.mark.parametrize("layout", ["0", "1", "2", "3"])
@pytest.mark.parametrize("how", MODELS)
def test_layers_that_are_reused_or_recomputed_count_once(deepspeed_ranks, how, layout):
    expected = reused(0, 1, None, how)
    actual = deepspeed_ranks(1)(reused, layout, how)[0]
    assert expected["batch_size"] == actual["batch_size"]
    assert pytest.approx(expected["similarity"], abs=1e-6) == actual["similarity"]


@pytest.mark.parametrize("layout", ["0", "1", "2", "3"])
def test_a_layer_in_two_reentrant_segments_is_refused(deepspeed_ranks, layout):
    """Its gradient comes in two batches, whose squares are not that of the sum."""
    said = deepspeed_ranks(1)(reused, layout, "reentrant twice")[0]
    assert said.startswith("a parameter received two gradients in one micro-batch")
    assert "use_reentrant=False" in said


# schedules


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 9},
}
TORCH = {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}}


def scheduled(rank, ranks, schedule):
    """(samples, learning rate between steps, factor that was used) of each step."""
    engine, _, loader, scheduler = engine_of(0, 1, more={"scheduler": schedule}, lr_scheduler=None)
    rates = []
    for x, y in itertools.chain(loader, loader):
        before = engine.get_lr()
        if micro_step(engine, x, y):
            record = engine.bigbatch.record
            rates.append((record, before, engine.get_lr(), scheduler.get_last_lr()))
    return rates


def by_hand(schedule):
    """The rate after so many ticks."""
    optimizer = optimizer_of(network())
    if schedule is TORCH:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, **TORCH["params"])
    else:
        from deepspeed.runtime.lr_schedules import WarmupLR

        scheduler = WarmupLR(optimizer, **WARMUP["params"])
    while True:
        yield optimizer.param_groups[0]["lr"]
        scheduler.step()


@pytest.mark.parametrize("schedule", [WARMUP, TORCH], ids=lambda each: each["type"])
def test_a_configured_schedule_counts_base_batches_and_never_sees_the_factor(
    deepspeed_ranks, schedule
):
    rates = deepspeed_ranks(1)(scheduled, schedule)[0]
    expected = list(itertools.islice(by_hand(schedule), 2 * SAMPLES // BATCH + 1))
    assert len({record.batch_size for record, *_ in rates}) > 3
    for record, before, after, its_own in rates:
        ticks = [(record.samples - record.batch_size) // BATCH, record.samples // BATCH]
        assert pytest.approx([expected[tick] for tick in ticks]) == [*before, *after]
        assert after == its_own
        assert pytest.approx(before[0] * math.sqrt(record.batch_size / BATCH)) == record.lr[0]


# data


class Listed(torch.utils.data.Dataset):
    """A data set that the processes of a loader can open."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        x, y = data().tensors
        return x[number], y[number]


def epoch_of(rank, ranks, form):
    forms = {
        "data set": Listed,
        "loader": lambda: DataLoader(data(), 10),
        "batches": lambda: batches_of(rank, ranks),
    }
    engine, _, loader, _ = engine_of(rank, ranks, training_data=forms[form]())
    rows, records = [], []
    for x, y in loader:
        rows.append(x)
        if micro_step(engine, x, y):
            records.append(engine.bigbatch.record)
    return torch.cat(rows), record_values(records), engine.global_samples


@pytest.mark.parametrize("form", ["loader", "batches"])
def test_training_data_of_any_form_is_read_once_an_epoch(deepspeed_ranks, form):
    assert_read_once(*deepspeed_ranks(1)(epoch_of, form)[0])


@pytest.mark.release
def test_a_data_set_is_loaded_as_deepspeed_loads_it_by_two_workers(deepspeed_ranks):
    """In a process of its own, which may have others."""
    read, write = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=by_workers, args=(write,))
    process.start()
    try:
        assert read.poll(120)
        assert_read_once(*read.recv())
    finally:
        process.kill()
        process.join()


def by_workers(answer):
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        os.environ["LOCAL_RANK"] = "0"
        rows, *rest = epoch_of(0, 1, "data set")
        answer.send((rows.tolist(), *rest))


def assert_read_once(rows, records, samples):
    expected, _ = data().tensors
    assert sorted(expected.tolist()) == sorted(torch.as_tensor(rows).tolist())
    assert SAMPLES == samples == sum(records["batch_size"]) == records["samples"][-1]
    assert len(set(records["batch_size"])) > 2


# without the package


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import bigbatch
import bigbatch.integrations.deepspeed
"""


def test_without_deepspeed_the_error_is_the_command_that_installs_it():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.stderr.splitlines()[-1] == (
        "bigbatch.errors.MissingPackageError: bigbatch[deepspeed] needs deepspeed, which is not "
        'installed; run: pip install "deepspeed>=0.19.8" "ninja>=1.11"'
    )
