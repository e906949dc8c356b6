"""torch's pipeline schedules on real processes: all stages measure what one process does."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from bigbatch import AdaptiveBatch, Controller, Fixed, GradientMeter, SimiGrad
from bigbatch.errors import GradientError, SettingError
from bigbatch.optim import VRSGD
from oracles import noise as oracle

pytestmark = pytest.mark.cpu  # processes on gloo

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
MICRO_BATCHES, STEPS = 4, 2


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5)).double() for _ in range(4)]


def samples(step, count):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(count, 5, generator=draw, dtype=torch.float64) for _ in range(2)]


def numbers_of(schedule, rank):
    """Which of the four layers make the stages of a rank, for each of its stages."""
    if schedule == "ZBVZeroBubble":
        return [[rank], [3 - rank]]
    return [[rank], [rank + 2]] if "Interleaved" in schedule else [[2 * rank, 2 * rank + 1]]


def stages_of(schedule, rank, group=None, wrap=lambda module: module):
    all_layers, numbers = layers(), numbers_of(schedule, rank)
    count = 2 * len(numbers)
    indices = [some[0] * count // 4 for some in numbers]
    modules = [wrap(nn.Sequential(*map(all_layers.__getitem__, some))) for some in numbers]
    return [
        PipelineStage(module, index, count, torch.device("cpu"), group=group)
        for module, index in zip(modules, indices, strict=True)
    ]


def scheduled(schedule, stages, micro_batches=MICRO_BATCHES, loss_fn=mse_loss, **options):
    first = stages if len(stages) > 1 else stages[0]
    return SCHEDULES[schedule](first, micro_batches, loss_fn=loss_fn, **options)


def run(pipeline, stages, x, y):
    """One step, in which this rank gives what its stages need."""
    given = [x] if any(stage.is_first for stage in stages) else []
    target = {"target": y} if any(stage.is_last for stage in stages) else {}
    pipeline.step(*given, **target)


def train(rank, ranks, schedule, *, sizes=None, count=16, mesh=None, wrap=None, **options):
    """What the meter reads over some steps of SGD, on this rank."""
    copy, stage_rank, group, wrap_one = 0, rank, None, lambda module: module
    if mesh is not None:
        grid = init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "stages"))
        copy, stage_rank = grid.get_local_rank("copies"), grid.get_local_rank("stages")
        group, wrap_one = grid.get_group("stages"), partial(WRAPPERS[wrap], mesh=grid["copies"])
    stages = stages_of(schedule, stage_rank, group, wrap_one)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    pipeline = scheduled(schedule, stages, **options)
    readings = []
    with GradientMeter(stages, loss="mean" if sizes else "weighted") as meter:
        for step in range(STEPS):
            x, y = (some.chunk(2)[copy] if mesh else some for some in samples(step, count))
            run(pipeline, stages, x, y)
            readings.append(meter.read(sizes or [len(x) // MICRO_BATCHES] * MICRO_BATCHES))
            optimizer.step()
            optimizer.zero_grad()
    return [(r.grad_sqnorm, r.grad_variance, r.samples, r.micro_batches) for r in readings]


def replicated(module, mesh):
    return DistributedDataParallel(module, process_group=mesh.get_group())


def sharded(module, mesh):
    return fully_shard(module, mesh=mesh)


WRAPPERS = {"ddp": replicated, "fsdp2": sharded}


def expected(sizes=None, count=16, copies=1):
    """The same in one process: every micro-batch's own gradient, and the mean of them."""
    model = nn.Sequential(*layers())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    answers = []
    for step in range(STEPS):
        x, y = samples(step, count)
        micro_batches = [
            pair
            for one_x, one_y in zip(x.chunk(copies), y.chunk(copies), strict=True)
            for pair in zip(one_x.chunk(MICRO_BATCHES), one_y.chunk(MICRO_BATCHES), strict=True)
        ]
        rows = [
            torch.autograd.grad(mse_loss(model(one_x), one_y), parameters)
            for one_x, one_y in micro_batches
        ]
        flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        formula, sizes_of_rows = oracle.mean if sizes else oracle.weighted, sizes or [4] * len(rows)
        answer = formula(flat, sizes_of_rows)
        found = answer.grad_sqnorm, answer.grad_variance, sum(sizes_of_rows), len(rows)
        answers.append(found)
        for parameter, *gradients in zip(parameters, *rows, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return answers


def agree(answers, results):
    return all(
        found == pytest.approx(answer, rel=1e-12)
        for readings in results
        for answer, found in zip(answers, readings, strict=True)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_measures_what_one_process_does(ranks, schedule):
    assert agree(expected(), ranks(2)(partial(train, schedule=schedule)))


def test_micro_batches_of_different_sizes_are_mean_losses(ranks):
    """As of tokens: torch's stages receive equal shapes."""
    sizes = [30, 21, 5, 12]
    assert agree(expected(sizes), ranks(2)(partial(train, schedule="1F1B", sizes=sizes)))


def test_losses_that_are_summed_are_not_divided(ranks):
    """With scale_grads=False the losses are those of an accumulation."""
    loss_fn = partial(divided, by=MICRO_BATCHES)
    options = {"loss_fn": loss_fn, "scale_grads": False}
    assert agree(expected(), ranks(2)(partial(train, schedule="1F1B", **options)))


def divided(output, target, by):
    return mse_loss(output, target) / by


@pytest.mark.parametrize(
    ("schedule", "wrap"), [("1F1B", "ddp"), ("1F1B", "fsdp2"), ("InterleavedZeroBubble", "fsdp2")]
)
def test_pipelines_of_data_parallel_ranks(ranks, schedule, wrap):
    results = ranks(4)(partial(train, schedule=schedule, mesh=(2, 2), wrap=wrap, count=32))
    assert agree(expected(count=32, copies=2), results)


class InBfloat16(nn.Module):
    """A stage whose neighbours compute in another type."""

    def __init__(self, module):
        super().__init__()
        self.module = module.bfloat16()

    def forward(self, x):
        return self.module(x.bfloat16()).double()


def of_two_types(rank, ranks):
    """What is read where only the last stage rounds to bfloat16, in its gradients and sums."""
    stages = stages_of("1F1B", rank, wrap=InBfloat16 if rank else lambda module: module)
    with GradientMeter(stages) as meter:
        run(scheduled("1F1B", stages), stages, *samples(0, 16))
        return meter.read([4] * MICRO_BATCHES)


def test_stages_of_other_types_read_the_same(ranks):
    first, second = ranks(2)(of_two_types)
    assert first == second
    ((grad_sqnorm, *_), *_) = expected()
    assert grad_sqnorm == pytest.approx(first.grad_sqnorm, rel=0.1)  # in bfloat16


# a batch that follows a policy, in a loop by hand


def adapt(rank, ranks):
    """The number of micro-batches of each step; the schedule is made for it."""
    stages = stages_of("1F1B", rank)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    controller = Controller(SimiGrad(0.99, min_batch=8, max_batch=64), 16, smoothing=None)
    sizes, size = [], 16
    with GradientMeter(stages) as meter:
        for step in range(4):
            x, y = samples(step, size)
            run(scheduled("1F1B", stages, size // 4), stages, x, y)
            statistics = meter.read([4] * (size // 4))
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(size)
            size = 4 * round(controller.next(statistics).batch_size / 4)
    return sizes


def test_a_controller_by_hand_decides_the_same_on_all_stages(ranks):
    first, second = ranks(2)(adapt)
    assert first == second
    assert first == sorted(first)
    assert first[-1] > first[0]


# what is refused


def refusals(rank, ranks):
    stages = stages_of("Interleaved1F1B", rank)
    modules = nn.ModuleList(stage.submod for stage in stages)
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    loader = [torch.zeros(8, 5)]
    other = stages_of("Interleaved1F1B", rank)
    layer, mesh = other[0].submod[0][0], init_device_mesh("cpu", (2,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    calls = {
        "tensors": lambda: GradientMeter(other),
        "some": lambda: GradientMeter(stages[:1]),
        "others": lambda: GradientMeter([*stages, *modules.parameters()]),
        "confidence": lambda: GradientMeter(stages, confidence=0.9),
        "halves": lambda: GradientMeter(stages, half_batch_cosine=True),
        "clusters": lambda: GradientMeter(stages, cluster_parts=2),
        "groups": lambda: GradientMeter(stages, groups=2),
        "layers": lambda: GradientMeter(stages, per_layer=True),
        "loop": lambda: AdaptiveBatch(
            modules, optimizer, loader, policy=Fixed(8), meter=GradientMeter(stages), batch_size=8
        ),
        "micro_batch": lambda: GradientMeter(stages).micro_batch(),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((SettingError, GradientError)) as caught:
            call()
        found[name] = str(caught.value)
    return found


WORDS = {
    "tensors": "without tensor parallelism in this release",
    "some": "pass a list of all stages that this rank has",
    "others": "pass the stages alone",
    "confidence": "confidence= cannot be measured in a pipeline",
    "halves": "half_batch_cosine=True cannot be measured in a pipeline",
    "clusters": "cluster_parts= cannot be measured in a pipeline",
    "groups": "groups= needs the model",
    "layers": "per_layer=True needs the model",
    "loop": "the schedule of a pipeline runs the backwards",
    "micro_batch": "leave micro_batch() out",
}


def test_what_a_pipeline_cannot_measure_is_refused_by_name(ranks):
    for found in ranks(2)(refusals):
        assert WORDS.keys() == found.keys()
        assert all(words in found[name] for name, words in WORDS.items())


class Routed(nn.Module):
    """Every other micro-batch reaches its layer."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(5, 5).double()

    def forward(self, x):
        self.calls += 1
        return self.layer(x) if self.calls % 2 else x


def broken(rank, ranks, fault):
    """The error of a step that is not measured right."""
    stages = stages_of("GPipe", rank)
    if fault == "routed":
        stages[0].submod.append(Routed())
    sizes = [4] * MICRO_BATCHES
    with GradientMeter(stages) as meter:
        pipeline = scheduled("GPipe", stages)
        if fault == "sizes":
            sizes = [5, 5, 4, 4]
        run(pipeline, stages, *samples(0, 16))
        if fault == "twice":
            run(pipeline, stages, *samples(1, 16))
            sizes = sizes * 2
        if fault == "clipped":
            torch.nn.utils.clip_grad_norm_(stages[0].submod.parameters(), 1e-3)
        if fault == "count":
            sizes = sizes[1:]
        try:
            meter.read(sizes)
        except GradientError as error:
            message = str(error)
        stages[0].submod.zero_grad()
        if fault == "routed":
            del stages[0].submod[-1]
        run(scheduled("GPipe", stages), stages, *samples(0, 16))
        assert 4 == meter.read([4] * 4).micro_batches  # the next step is measured
    return message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("routed", "in a step of 4 micro-batches a parameter received 2 gradients"),
        ("sizes", 'state GradientMeter(loss="mean")'),
        ("twice", ".grad is not the sum"),
        ("clipped", ".grad is not the sum"),
        ("count", "4 backwards were seen but 3 sizes stated"),
    ],
)
def test_a_step_that_is_not_measured_right_is_an_error(ranks, fault, words):
    for message in ranks(2)(partial(broken, fault=fault)):
        assert words in message


def of_unequal_numbers(rank, ranks):
    """The error of two pipelines over shards, one with four micro-batches and one with two."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "stages"))
    copy, wrap = grid.get_local_rank("copies"), partial(sharded, mesh=grid["copies"])
    stages = stages_of("1F1B", grid.get_local_rank("stages"), grid.get_group("stages"), wrap)
    count = [4, 2][copy]
    with GradientMeter(stages, loss="mean") as meter:
        run(scheduled("1F1B", stages, count), stages, *samples(copy, 4 * count))
        with pytest.raises(GradientError) as caught:
            meter.read([4] * count)
    return str(caught.value)


def test_pipelines_of_unequally_many_micro_batches_are_named(ranks):
    for message in ranks(4)(of_unequal_numbers):
        assert "the ranks had 4, 2 micro-batches" in message


def unread_on_one(rank, ranks):
    """A step that one stage cannot read, and the next."""
    stages = stages_of("1F1B", rank)
    with GradientMeter(stages) as meter:
        run(scheduled("1F1B", stages), stages, *samples(0, 16))
        try:
            meter.read([4] * (MICRO_BATCHES - rank))
        except GradientError as error:
            message = str(error)
        stages[0].submod.zero_grad()
        run(scheduled("1F1B", stages), stages, *samples(1, 16))
        return message, meter.read([4] * MICRO_BATCHES).micro_batches


def test_a_stage_that_cannot_read_a_step_stops_no_later_one(ranks):
    (other, first), (own, second) = ranks(2)(unread_on_one)
    assert "could not read its step" in other
    assert "4 backwards were seen but 3 sizes stated" in own
    assert 4 == first == second


def unreduced(rank, ranks):
    try:
        train(rank, ranks, "InterleavedZeroBubble", mesh=(2, 2), wrap="ddp", count=32)
    except GradientError as error:
        return str(error)


def test_ddp_in_a_zero_bubble_is_not_reduced_by_torch(ranks):
    assert all(".grad differs between ranks" in message for message in ranks(4)(unreduced))


def variance_reduced(rank, ranks, sharded):
    """The error of a step, and its causes."""
    group, wrap = None, lambda module: module
    if sharded:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "stages"))
        rank, group, wrap = (
            rank % 2,
            grid.get_group("stages"),
            partial(fully_shard, mesh=grid["copies"]),
        )
    stages = stages_of("GPipe", rank, group, wrap)
    optimizer = VRSGD(stages[0].submod.parameters(), lr=0.1)
    pipeline = scheduled("GPipe", stages)
    try:
        run(pipeline, stages, *samples(0, 16))
        optimizer.step()
    except RuntimeError as error:  # as torch may wrap it
        return f"{error} {error.__cause__} {getattr(error.__cause__, '__cause__', '')}"


@pytest.mark.parametrize("sharded", [False, True])
def test_variance_reduced_optimizers_are_refused(ranks, sharded):
    messages = ranks(4 if sharded else 2)(partial(variance_reduced, sharded=sharded))
    assert any("a pipeline's stages cannot have" in message for message in messages)


def not_finite(rank, ranks):
    """What is read of a step with an infinite input, of the next step, and what is said."""
    stages = stages_of("1F1B", rank)
    pipeline, readings = scheduled("1F1B", stages), []
    with GradientMeter(stages) as meter, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            x, y = samples(step, 16)
            x[0, 0] = math.inf if step == 0 else x[0, 0]
            run(pipeline, stages, x, y)
            readings.append(meter.read([4] * MICRO_BATCHES).grad_variance)
            stages[0].submod.zero_grad()
    return readings, [str(one.message) for one in said if "not finite" in str(one.message)]


def test_a_step_that_is_not_finite_is_said_by_one_rank(ranks):
    (first, said), (second, unsaid) = ranks(2)(not_finite)
    assert [True, False] == [math.isnan(one) for one in first]
    assert first[1] == second[1]
    assert ([], True) == (unsaid, "the gradient of a micro-batch is not finite" in said[0])
