"""AdaptiveBatch on what accelerate prepares, in two processes."""

from itertools import chain

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)
from transformers import get_linear_schedule_with_warmup

import bigbatch as bb
from accelerate_process import launched
from bigbatch.errors import SettingError
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.optim import VRSGD
from numbered_samples import each_step, steps_of

SEED = 3
SAMPLES = 51  # in batches of 5, one of two ranks has a last batch that is full
POLICY = {"policy": bb.SimiGrad(target=0.4, min_batch=8, max_batch=40), "batch_size": 12}


class Numbered(Dataset):
    """Samples that carry their number."""

    def __init__(self):
        draw = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
        self.y = (self.x[:, 0] + torch.randn(SAMPLES, generator=draw) > 0).long()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return self.x[number], self.y[number], number


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbered())


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def summary_of(done):
    """(numbers of the samples, batch size, loss, rates) of every step."""
    return [(list(chain(*numbers)), r.batch_size, r.loss, r.lr) for numbers, r in done]


def built(configuration, data=None, optimizer=torch.optim.SGD, options=None, settings=None):
    options = {"batch_size": 5, "shuffle": True} if options is None else options
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    model = network()
    optimizer = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=9)
    loader = DataLoader(data or Numbered(), **options)
    torch.manual_seed(SEED + accelerator.process_index)  # a seed of its own
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    settings = POLICY | (settings or {})
    train = adaptive_batch(
        accelerator, model, optimizer, loader, scheduler=scheduler, **{"every": 1, **settings}
    )
    return accelerator, train, model


def trained(rank, ranks, configuration, epochs=3, options=None):
    with launched(rank, ranks):
        _, train, model = built(configuration, options=options)
        done = summary_of(steps_of(train, epochs))
        return done, [p.detach().clone() for p in model.parameters()]


def of_a_pass(results, epoch):
    """The numbers that all ranks saw in one epoch, in no order."""
    seen = []
    for done, _ in results:
        counted, before = 0, epoch * SAMPLES
        for numbers, size, *_ in done:
            if before <= counted < before + SAMPLES:
                seen += numbers
            counted += size
    return sorted(seen)


@pytest.mark.parametrize(
    "configuration",
    [{}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True}],
    ids=lambda given: next(iter(given), "default"),
)
def test_two_processes_see_every_sample_once_in_every_epoch(ranks, configuration):
    results = ranks(2)(trained, configuration)
    for epoch in range(3):
        assert list(range(SAMPLES)) == of_a_pass(results, epoch)


def test_a_batch_that_is_split_is_that_of_all_processes(ranks):
    options = {"batch_size": 10}
    for sizes, size in ranks(2)(split, options):
        assert ([12], 5) == (sizes, size)


def split(rank, ranks, options):
    with launched(rank, ranks):
        _, train, _ = built({"split_batches": True}, options=options)
        sizes = [size for _, size, *_ in summary_of(steps_of(train, 1))]
        assert SAMPLES == sum(sizes)
        return sizes[:1], train.batches.batch_size


def test_two_processes_train_as_one_that_plays_both(ranks):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=9)
    loader = bb.Batches(DataLoader(Numbered(), 10), virtual_ranks=2)
    train = bb.AdaptiveBatch(
        model, optimizer, loader, scheduler=scheduler, micro_batch=5, **{"every": 1, **POLICY}
    )
    train.scheduler_batch = 5  # accelerate's: one batch of the loader
    expected = summary_of(steps_of(train, 3))
    (first, weights), (second, others) = ranks(2)(trained, {}, 3, {"batch_size": 5})

    assert len({size for _, size, *_ in expected}) > 2
    for one, local, yours in zip(expected, first, second, strict=True):
        assert sorted(one[0]) == sorted(local[0] + yours[0])
        assert one[1] == local[1] == yours[1]
        assert one[2] == pytest.approx(local[2], rel=1e-12)  # the loss
        assert one[3] == local[3]  # the learning rate
    for one, local, yours in zip(model.parameters(), weights, others, strict=True):
        torch.testing.assert_close(one, local, rtol=1e-12, atol=1e-12)
        assert torch.equal(local, yours)


def test_a_variance_reduced_optimizer_is_that_of_a_plain_loop(ranks):
    plain, prepared = (ranks(2)(variance_reduced, by_hand) for by_hand in (True, False))
    assert plain[0] == prepared[0]
    assert plain[1] == prepared[1]


def variance_reduced(rank, ranks, by_hand):
    with launched(rank, ranks):
        if not by_hand:
            _, train, _ = built({}, optimizer=VRSGD, options={"batch_size": 5})
            return summary_of(steps_of(train, 2))
        model = DistributedDataParallel(network())
        optimizer = VRSGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=9)
        ledger = bb.ElasticDistributedSampler(
            Numbered(), seed=0, num_replicas=ranks, rank=rank, shuffle=False
        )
        loader = DataLoader(Numbered(), 5, sampler=ledger)
        train = bb.AdaptiveBatch(
            model, optimizer, loader, scheduler=scheduler, **{"every": 1, **POLICY}
        )
        train.scheduler_batch = 5
        return summary_of(steps_of(train, 2))


def test_a_saved_training_continues_in_two_processes(ranks, tmp_path):
    whole = [done for done, _ in ranks(2)(trained, {}, 2)]
    halves = ranks(2)(interrupted, str(tmp_path))
    for expected, actual in zip(whole, halves, strict=True):
        assert expected == actual


def interrupted(rank, ranks, folder):
    with launched(rank, ranks):
        accelerator, train, _ = built({})
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        done = []
        for each in each_step(train):
            done.append(each)
            if len(done) == 3:
                accelerator.save_state(folder)
                break
    with launched(rank, ranks):
        accelerator, train, _ = built({})
        accelerator.register_for_checkpointing(bb.DistributedState(train))
        accelerator.load_state(folder)
        return summary_of(done + steps_of(train, 2))


class Whole(BatchSampler):
    """A batch sampler of somebody's own."""


def test_what_repeats_samples_in_a_way_that_cannot_be_undone_is_refused(ranks):
    for messages in ranks(2)(refusals):
        for message, remedy in zip(messages, REMEDIES, strict=True):
            assert remedy in message


REMEDIES = [
    "dispatch_batches=False",
    "drop_last=True",
    "even_batches=False",
    "shuffle=True",
    "leave rng_types out",
]


def refusals(rank, ranks):
    own = Whole(SequentialSampler(range(SAMPLES)), 5, drop_last=False)
    ledger = bb.ElasticDistributedSampler(Numbered(), num_replicas=2, rank=rank)
    given = [
        ({}, Stream(), {"batch_size": 5}, {}),
        ({"dispatch_batches": False}, Stream(), {"batch_size": 5}, {}),
        ({}, None, {"batch_sampler": own}, {}),
        ({}, None, {"batch_size": 5, "sampler": ledger}, {}),
        ({}, None, {"batch_size": 5}, {"rng_types": ["torch"]}),
    ]
    messages = []
    for configuration, data, options, others in given:
        with launched(rank, ranks):
            accelerator = Accelerator(
                cpu=True, dataloader_config=DataLoaderConfiguration(**configuration), **others
            )
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(data or Numbered(), **options)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            try:
                adaptive_batch(accelerator, model, optimizer, loader, **{"every": 1, **POLICY})
            except SettingError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("what", ["stream", "own"])
def test_what_repeats_nothing_trains(ranks, what):
    for numbers in ranks(2)(unrepeated, what):
        assert len(numbers) == len(set(numbers)) >= 20
    first, second = ranks(2)(unrepeated, what)
    assert not set(first) & set(second)


def unrepeated(rank, ranks, what):
    own = Whole(SequentialSampler(range(SAMPLES)), 5, drop_last=False)
    given = {
        "stream": ({"dispatch_batches": False}, Stream(), {"batch_size": 5, "drop_last": True}),
        "own": ({"even_batches": False}, None, {"batch_sampler": own}),
    }
    configuration, data, options = given[what]
    with launched(rank, ranks):
        _, train, _ = built(configuration, data, options=options)
        return [number for step, *_ in summary_of(steps_of(train, 1)) for number in step]


EPOCHS, EVEN = 3, 48  # samples, a multiple of every batch
SPLIT, BY_ITSELF = {"split_batches": True}, {"step_scheduler_with_optimizer": False}


def scheduled(rank, ranks, configuration, accelerator, batch_size):
    """(samples, rate of each update), by accelerate alone or, with a batch size, by ours."""
    with launched(rank, ranks):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**configuration), **accelerator
        )
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Subset(Numbered(), range(EVEN)), 4, shuffle=True)
        steps = len(loader) * EPOCHS  # before `prepare`, as Hugging Face's examples count them
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 6, steps)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        if batch_size is None:
            return by_accelerate(*prepared)
        model, optimizer, loader, scheduler = prepared
        train = adaptive_batch(
            accelerator,
            model,
            optimizer,
            loader,
            scheduler=scheduler,
            policy=bb.Fixed(batch_size),
            lr_scaling=None,
            min_micro_batches=2,
            every=1,
        )
        done = steps_of(train, EPOCHS)
        return [(r.batch_size * number, r.lr[0]) for number, (_, r) in enumerate(done)]


def by_accelerate(model, optimizer, loader, scheduler):
    done = 0
    rates = []
    for _ in range(EPOCHS):
        for x, y, _ in loader:
            rates.append((done, optimizer.param_groups[0]["lr"]))
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += loader.total_batch_size
    return rates


@pytest.mark.parametrize(
    ("configuration", "accelerator", "own"),
    [({}, {}, 8), (SPLIT, {}, 4), ({}, BY_ITSELF, 8)],
    ids=["processes", "split_batches", "step_scheduler_with_optimizer"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_the_rate_over_the_samples_is_that_of_accelerate(
    ranks, configuration, accelerator, own, times
):
    expected, other = ranks(2)(scheduled, configuration, accelerator, None)
    actual, same = ranks(2)(scheduled, configuration, accelerator, own * times)

    assert EPOCHS * EVEN // own == len(expected)
    assert expected[::times] == actual  # the same rate once as many samples are done
    assert (expected, actual) == (other, same)


def evaluated(rank, ranks, evaluates):
    with launched(rank, ranks):
        accelerator, train, model = built({})
        prepared = accelerator.prepare(DataLoader(Numbered(), 4))
        done = []
        for _ in train.epochs(2):
            done += summary_of(each_step(train))
            if evaluates:
                model.eval()
                with torch.no_grad():
                    right = [
                        accelerator.gather_for_metrics(model(x).argmax(-1) == y)
                        for x, y, _ in prepared
                    ]
                model.train()
                assert SAMPLES == sum(map(len, right))
        return done


def test_an_evaluation_between_epochs_changes_nothing(ranks):
    assert ranks(2)(evaluated, False) == ranks(2)(evaluated, True)
