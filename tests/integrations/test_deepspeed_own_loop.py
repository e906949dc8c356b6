"""A loop of one's own on DeepSpeed's stages: what some micro-batches do not reach, or weigh."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.gradients import SingleProcessSource
from bigbatch.optim import VRSGD, VarianceReduced
from deepspeed_training import config_of, data, max_difference, quiet, weights_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:k = :UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

K = 4  # micro-batches of a rank in a step
STEPS = 3
MICRO = 4
CLIP = 0.05  # below every norm
STAGES = ["0", "1", "2", "3"]
OFFLOADED = ["2, CPU offload", "3, CPU offload"]
MAKERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "VRSGD": lambda parameters: VRSGD(parameters, lr=0.5, momentum=0.9),
}


class Branched(nn.Module):
    """A layer that is used where the call says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x, *, branches):
        hidden = torch.tanh(self.first(x))
        if branches:
            hidden = hidden + torch.tanh(self.branch(hidden))
        return self.last(hidden)


REACHED = {  # (step, micro-batch) -> whether the branch is
    "always": lambda step, number: True,
    "by the last": lambda step, number: number == K - 1,
    "by the first": lambda step, number: number == 0,
    "not in one step": lambda step, number: step != 1,
}
WEIGHTS = {  # (rank, micro-batch) -> what its mean is over
    "samples": None,
    "none in the first": lambda rank, number: 0.0 if number == 0 else 3.0 + number + rank,
    "none in the last": lambda rank, number: 0.0 if number == K - 1 else 3.0 + number + rank,
    "none on a rank": lambda rank, number: 0.0 if rank == 1 else 3.0 + number,
}


def micro_batch(rank, step, number):
    """Unequally many samples."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    size = MICRO - (step + 2 * number + rank) % 3
    chosen = torch.randint(len(data()), (size,), generator=draw)
    x, y = data().tensors
    return x[chosen], y[chosen]


def on_engine(rank, ranks, stage, name, reached, weights):
    quiet()
    from bigbatch.integrations import deepspeed

    model, batch = Branched(), MICRO * K * ranks
    engine = deepspeed.initialize(
        model=model,
        optimizer=MAKERS[name](model.parameters()),
        config=config_of(ranks, stage, "fp32", CLIP)
        | {"train_batch_size": batch, "gradient_accumulation_steps": K},
        policy=bb.Fixed(batch),
        lr_scaling=None,
        min_micro_batches=K * ranks,
        every=1,
    )[0]
    records = []
    for step in range(STEPS):
        for number in range(K):
            x, y = micro_batch(rank, step, number)
            output = engine(x, branches=REACHED[reached](step, number))
            weigh = WEIGHTS[weights]
            weight = {} if weigh is None else {"weight": weigh(rank, number)}
            engine.backward(cross_entropy(output, y), **weight)
            engine.step()
        records.append(engine.bigbatch.record)
    return weights_of(engine), [(r.batch_size, r.loss) for r in records]


def in_one_process(ranks, name, reached, weights):
    """The same in float64: each group of the ranks' micro-batches is one backward."""
    model = Branched().double()
    optimizer = MAKERS[name](model.parameters())
    source = SingleProcessSource(model.parameters(), explicit=True)
    if isinstance(optimizer, VarianceReduced):
        optimizer.bind(source)
    records_of_one = []
    for step in range(STEPS):
        groups = [[micro_batch(rank, step, n) for rank in range(ranks)] for n in range(K)]
        weigh = WEIGHTS[weights] or (lambda rank, n, of=groups: len(of[n][rank][1]))
        weighted = [[weigh(rank, number) for rank in range(ranks)] for number in range(K)]
        total, loss = sum(map(sum, weighted)), 0.0
        for number, (group, own) in enumerate(zip(groups, weighted, strict=True)):
            if not sum(own):
                continue
            with source.micro_batch(sum(own)):
                branches = REACHED[reached](step, number)
                outputs = [(model(x.double(), branches=branches), y) for x, y in group]
                each = [w * cross_entropy(*pair) for w, pair in zip(own, outputs, strict=True)]
                (sum(each) / total).backward()
                loss += sum(each).item() / total
        for parameter in model.parameters():  # ZeRO steps what was not reached by zeros
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        source.zero_grad()
        records_of_one.append((sum(len(y) for group in groups for _, y in group), loss))
    return [p.detach() for p in model.parameters()], records_of_one


def assert_as_in_one_process(answers, *how):
    expected, records_of_one = in_one_process(len(answers), *how)
    for weights, records in answers:
        assert [size for size, _ in records_of_one] == [size for size, _ in records]
        losses = [loss for _, loss in records]
        assert pytest.approx([loss for _, loss in records_of_one], abs=1e-5) == losses
        assert max_difference(expected, weights) < 1e-6  # float32 against float64


@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_some_micro_batches_do_not_reach(deepspeed_ranks, stage, name, reached):
    answers = deepspeed_ranks(2)(on_engine, stage, name, reached, "samples")
    assert_as_in_one_process(answers, name, reached, "samples")


@pytest.mark.parametrize(
    ("stage", "reached"), [(s, r) for s in ["3", *OFFLOADED] for r in REACHED]
)  # one list, of which CI runs all
def test_a_layer_of_which_deepspeed_keeps_what_it_had(deepspeed_ranks, stage, reached):
    answers = deepspeed_ranks(2)(on_engine, stage, "SGD", reached, "samples")
    assert_as_in_one_process(answers, "SGD", reached, "samples")


@pytest.mark.parametrize("weights", [each for each in WEIGHTS if each != "samples"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_of_no_weight(deepspeed_ranks, stage, name, weights):
    answers = deepspeed_ranks(2)(on_engine, stage, name, "always", weights)
    assert_as_in_one_process(answers, name, "always", weights)


class Pair(nn.Module):
    """Two numbers, so that of three ranks one has none; and an argument that is no batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)

    def forward(self, x, others=None):
        return self.layer(x[:, :1]).squeeze(1)


def engine_of_a_pair(ranks, stage):
    quiet()
    from bigbatch.integrations import deepspeed

    model, batch = Pair(), MICRO * K * ranks
    return deepspeed.initialize(
        model=model,
        optimizer=MAKERS["SGD"](model.parameters()),
        config=config_of(ranks, stage)
        | {"train_batch_size": batch, "gradient_accumulation_steps": K},
        policy=bb.Fixed(batch),
        lr_scaling=None,
        min_micro_batches=K * ranks,
        every=1,
    )[0]


def fewer_numbers_than_ranks(rank, ranks, stage):
    engine = engine_of_a_pair(ranks, stage)
    for number in range(K):
        x, y = micro_batch(rank, 0, number)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss, weight=1.0 + number + rank)
        engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_may_have_no_shard_of_any_layer(deepspeed_ranks, stage):
    model = Pair().double()
    optimizer = MAKERS["SGD"](model.parameters())
    weights = {(rank, n): 1.0 + n + rank for rank in range(3) for n in range(K)}
    for (rank, number), weight in weights.items():
        x, y = micro_batch(rank, 0, number)
        loss = (model(x.double()) - y).square().mean()
        (loss * weight / sum(weights.values())).backward()
    optimizer.step()
    for actual in deepspeed_ranks(3)(fewer_numbers_than_ranks, stage):
        assert max_difference([p.detach() for p in model.parameters()], actual) < 1e-6


def warnings_of_assumed_samples(rank, ranks):
    engine = engine_of_a_pair(ranks, "0")
    with warnings.catch_warnings(record=True, action="always") as said:
        for number in range(K):
            x, y = micro_batch(rank, 0, number)
            loss = (engine(x, others=torch.zeros(17, 2)) - y).square().mean()
            engine.backward(loss)
            engine.step()
    return [str(w.message) for w in said if "cannot be counted" in str(w.message)]


def test_samples_that_cannot_be_counted_are_assumed_with_one_warning(deepspeed_ranks):
    (said,) = deepspeed_ranks(1)(warnings_of_assumed_samples)
    (message,) = said
    assert f"assumed to be the planned {MICRO}" in message
