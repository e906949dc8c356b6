"""Variance-reduced optimizers, and LARS and LAMB, on DeepSpeed's stages, against one process."""

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.gradients import SingleProcessSource
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam
from deepspeed_training import config_of, data, loss_of, max_difference, network, quiet, weights_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:k = :UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

K = 8  # micro-batches of all ranks together in a step
STEPS = 5
CLIP = 0.05  # below every norm
LEARNING_RATES = {"VRSGD": 0.5, "VRMomentum": 0.1, "VRAdam": 0.01, "VRLARS": 5.0, "VRLAMB": 0.01}
RULES = [*LEARNING_RATES]
STAGES = ["0", "1", "2", "3"]
SETTINGS = {  # of ZeRO, that lay shards out otherwise
    "small sub-groups": ("3", {"sub_group_size": 20}),
    "small buckets": ("2", {"reduce_bucket_size": 20}),
    "no contiguous gradients": ("2", {"contiguous_gradients": False}),
    "round robin": ("1", {"round_robin_gradients": True}),
    "overlap": ("2", {"overlap_comm": True}),
}


def make(name, model, *, groups=1, **settings):
    each = list(model.parameters())
    cut = [{"params": each}] if groups == 1 else [{"params": each[:1]}, {"params": each[1:]}]
    lr = {"lr": LEARNING_RATES[name]} if name in LEARNING_RATES else {}
    makers = {
        "VRSGD": VRSGD,
        "VRMomentum": lambda p, **more: VRSGD(p, momentum=0.9, **more),
        "VRAdam": VRAdam,
        "VRLARS": VRLARS,
        "VRLAMB": VRLAMB,
        "VR(AdamW)": lambda p, **more: VarianceReduced(
            torch.optim.AdamW(p, lr=0.01), beta3=0.9, **more
        ),
        "LARS": lambda p: LARS(p, lr=5.0),
        "LAMB": lambda p: LAMB(p, lr=0.01),
    }
    return makers[name](cut, **lr, **settings)


def numbered():
    return TensorDataset(*data().tensors, torch.arange(len(data())))


def batches_of(rank, ranks):
    sampler = bb.ElasticDistributedSampler(numbered(), seed=1, num_replicas=ranks, rank=rank)
    return DataLoader(numbered(), 8, sampler=sampler)


def engine_of(rank, ranks, name, stage, dtype="fp32", *, zero=None, groups=1, **settings):
    quiet()
    from bigbatch.integrations import deepspeed

    model = network()
    config = config_of(ranks, stage, dtype, CLIP, zero=zero or {})
    batch = 5 * K * ranks
    config |= {"train_batch_size": batch, "gradient_accumulation_steps": K}
    return deepspeed.initialize(
        model=model,
        optimizer=make(name, model, groups=groups, **settings),
        training_data=batches_of(rank, ranks),
        config=config,
        policy=bb.Fixed(batch),
        lr_scaling=None,
        min_micro_batches=K * ranks,
        every=1,
    )


def train(engine, loader, steps):
    """The samples of every micro-batch of every step."""
    kind = next(engine.module.parameters()).dtype
    groups, done = [[]], engine.bigbatch.steps
    while True:
        for x, y, number in loader:
            groups[-1].append(number.tolist())
            engine.backward(loss_of(engine(x.to(kind)), y))
            engine.step()
            if engine.bigbatch.steps - done == len(groups):
                groups.append([])
            assert not engine.bigbatch.skipped
            if len(groups) > steps:
                return groups[:-1]


def on_engine(rank, ranks, name, stage, dtype="fp32", **settings):
    engine, _, loader, _ = engine_of(rank, ranks, name, stage, dtype, **settings)
    return train(engine, loader, STEPS), weights_of(engine)


def together(answers):
    """Of every step the groups of samples that the ranks ran together."""
    for of_ranks in zip(*(groups for groups, _ in answers), strict=True):
        yield [list(itertools.chain(*rows)) for rows in zip(*of_ranks, strict=True)]


def in_one_process(name, steps, groups=1, left_out=(), **settings):
    """The weights, in float64, from the same groups; some parameter groups are not scaled."""
    model, (x, y) = network().double(), data().tensors
    optimizer = make(name, model, groups=groups, **settings)
    source = SingleProcessSource(model.parameters(), explicit=True)
    if isinstance(optimizer, VarianceReduced):
        optimizer.bind(source)
    for number in left_out:
        optimizer.param_groups[number]["vr"] = False
    for step in steps:
        for group in step:
            with source.micro_batch(len(group)):
                loss = cross_entropy(model(x[group].double()), y[group])
                (loss * len(group) / sum(map(len, step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        source.zero_grad()
    return [p.detach() for p in model.parameters()]


def error(name, answers, **settings):
    """Of the way that the weights went."""
    expected = in_one_process(name, together(answers), **settings)
    way = distance(expected, [p.detach() for p in network().parameters()])
    return distance(expected, answers[0][1]) / way


def distance(one, other):
    return sum((a - b.double()).square().sum() for a, b in zip(one, other, strict=True)).sqrt()


def trained(ranks, count, *arguments, **settings):
    return ranks(count)(on_engine_with, arguments, settings)


def on_engine_with(rank, ranks, arguments, settings):
    return on_engine(rank, ranks, *arguments, **settings)


@pytest.mark.early
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_one_process(deepspeed_ranks, name, stage, count):
    answers = trained(deepspeed_ranks, count, name, stage)
    assert error(name, answers) < 1e-5  # float32 against float64
    plain = {"gamma": 1.0}
    assert error(name, answers, **plain) > 1e-2  # r is seen
    for _, weights in answers[1:]:
        assert max_difference(answers[0][1], weights) == 0


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_in_bfloat16_is_near_it(deepspeed_ranks, name, stage):
    answers = trained(deepspeed_ranks, 2, name, stage, "bf16")
    assert error(name, answers) < 0.1  # the step's gradients have 8 bits


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB"])
def test_however_shards_are_laid_out(deepspeed_ranks, name, setting):
    stage, zero = SETTINGS[setting]
    answers = trained(deepspeed_ranks, 3, name, stage, zero=zero)
    assert error(name, answers) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_with_several_groups_and_any_base_optimizer(deepspeed_ranks, stage):
    answers = trained(deepspeed_ranks, 3, "VR(AdamW)", stage, groups=2)
    assert error("VR(AdamW)", answers, groups=2) < 1e-5


@pytest.mark.parametrize("stage", ["1", "2", "3", "2, CPU offload", "3, CPU offload"])
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_lars_and_lamb_have_norms_of_whole_layers(deepspeed_ranks, name, stage):
    answers = trained(deepspeed_ranks, 3, name, stage)
    assert error(name, answers) < 1e-5


def half_left_out(rank, ranks, stage):
    engine, _, loader, _ = engine_of(rank, ranks, "VRAdam", stage, groups=2)
    engine.basic_optimizer.param_groups[1]["vr"] = False
    return train(engine, loader, STEPS), weights_of(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_with_vr_false_is_left_alone(deepspeed_ranks, stage):
    answers = deepspeed_ranks(2)(half_left_out, stage)
    assert error("VRAdam", answers, groups=2, left_out=[1]) < 1e-5
    assert error("VRAdam", answers, groups=2) > 1e-2


# the batch adapts too


def adapted(rank, ranks, stage, optimizer):
    quiet()
    from bigbatch.integrations import deepspeed

    model = network()
    own = make(optimizer, model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.0)
    if optimizer:
        own.param_groups[0]["lr"] = 0.0  # so that both see the same gradients
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=own,
        training_data=batches_of(rank, ranks),
        config=config_of(ranks, stage) | {"train_batch_size": 96, "gradient_accumulation_steps": 8},
        policy=bb.SimiGrad(0.5, max_batch=160),
        min_micro_batches=8 * ranks,
        every=1,
    )
    records = []
    for x, y, _ in loader:
        engine.backward(loss_of(engine(x), y))
        engine.step()
        record = engine.bigbatch.record
        if record is not None and record.step > len(records):
            records.append(record)
    return [(r.batch_size, r.similarity) for r in records]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_measured_does_not_hang_on_the_optimizer(deepspeed_ranks, stage):
    expected = deepspeed_ranks(2)(adapted, stage, None)[0]
    actual = deepspeed_ranks(2)(adapted, stage, "VRSGD")[0]
    assert len({size for size, _ in expected}) > 1
    assert [size for size, _ in expected] == [size for size, _ in actual]
    for (_, a), (_, b) in zip(expected, actual, strict=True):
        assert pytest.approx(a, abs=1e-5) == b


# checkpoints


def interrupted(rank, ranks, stage, folder):
    engine, _, loader, _ = engine_of(rank, ranks, "VRAdam", stage)
    train(engine, loader, 2)
    engine.save_checkpoint(folder)
    train(engine, loader, 3)
    expected = weights_of(engine)
    engine, _, loader, _ = engine_of(rank, ranks, "VRAdam", stage)
    engine.load_checkpoint(folder)
    train(engine, loader, 3)
    return expected, weights_of(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_p_is_saved_and_continues(deepspeed_ranks, stage, tmp_path):
    for expected, actual in deepspeed_ranks(2)(interrupted, stage, str(tmp_path)):
        assert max_difference(expected, actual) == 0


# what is refused

REFUSED = {
    ("0", "bf16"): "steps float32 copies of the parameters",
    ("1, fp32 accumulation", "bf16"): "gradients are added up outside .grad",
    ("2, CPU offload", "fp32"): "offloaded to the CPU",
    ("3, CPU offload", "fp32"): "offloaded to the CPU",
}


def refusal(rank, ranks, name, stage, dtype, settings):
    try:
        engine_of(rank, ranks, name, stage, dtype, **settings)
    except SettingError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(("stage", "dtype"), REFUSED)
def test_where_r_would_not_be_right_it_is_refused(deepspeed_ranks, stage, dtype):
    (said,) = deepspeed_ranks(1)(refusal, "VRAdam", stage, dtype, {})
    assert f"VRAdam at stage {stage[0]}: " in said
    assert REFUSED[stage, dtype] in said


def test_lamb_is_refused_where_it_would_have_norms_of_partitions(deepspeed_ranks):
    (said,) = deepspeed_ranks(1)(refusal, "LAMB", "1, fp32 accumulation", "bf16", {})
    assert "norms of whole layers" in said


def test_watching_is_refused(deepspeed_ranks):
    (said,) = deepspeed_ranks(1)(refusal, "VRAdam", "2", "fp32", {"watch": True})
    assert "watch=True" in said


def made_by_a_function(rank, ranks, policy):
    quiet()
    from bigbatch.integrations import deepspeed

    model = network()
    try:
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=lambda parameters: VRSGD(parameters, lr=0.1),
            config=config_of(ranks),
            policy=policy,
        )
    except SettingError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("policy", [bb.Fixed(48), None], ids=["on", "off"])
def test_one_that_a_function_makes_is_refused_since_deepspeed_would_step_it(
    deepspeed_ranks, policy
):
    (said,) = deepspeed_ranks(1)(made_by_a_function, policy)
    assert said.startswith("DeepSpeed has the VRSGD itself, and needs the optimizer inside")
    assert "pass it as optimizer= of initialize, not by a function" in said


# what ZeRO pads with


def with_padding_that_is_no_number(rank, ranks):
    engine, _, loader, _ = engine_of(rank, ranks, "VRLAMB", "3")
    optimizer = engine.optimizer
    padded = 0
    for flat, parameters in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
    ):
        lengths = [p.partition_numel() for p in parameters]
        for p, shard in zip(parameters, flat.detach().split(lengths), strict=True):
            real = max(0, min(p.partition_numel(), p.ds_numel - rank * p.partition_numel()))
            shard[real:] = float("nan")
            padded += len(shard) - real
    return padded, train(engine, loader, STEPS), weights_of(engine)


def test_what_pads_a_shard_is_of_no_layer(deepspeed_ranks):
    answers = deepspeed_ranks(3)(with_padding_that_is_no_number)
    assert answers[-1][0] > 0
    assert error("VRLAMB", [answer[1:] for answer in answers]) < 1e-5
