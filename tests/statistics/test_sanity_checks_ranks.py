"""GradientMeter on real processes: what it says, once and on rank 0, of a run that is ill."""

import math
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bigbatch import GradientMeter
from training_on_ranks import (
    ENGINES,
    EQUAL,
    RAGGED,
    RAGGED_SAME_TOTAL,
    SAME_COUNT,
    SAME_TOTAL,
    all_close,
    batch,
    network,
    one_step,
    share,
    synchronized,
)


def broken_sample(value):
    """`value` stands among the inputs of rank 1's second micro-batch, in the first two steps."""

    def draw(rank, step, number, n):
        x, y = batch(rank, step, number, n)
        if (rank, number) == (1, 1) and step < 2:
            x[0, 0] = value
        return x, y

    return draw


def same_data(*ranks):
    def draw(rank, step, number, n):
        return batch(ranks[0] if rank in ranks else rank, step, number, n)

    return draw


FAULTS = {
    "none": batch,
    "nan": broken_sample(math.nan),
    "inf": broken_sample(math.inf),
    "two alike": same_data(1, 2),
    "all alike": same_data(0, 1, 2),
}


def watched(rank, ranks, *, wrapper, fault, sizes, loss="weighted", steps=4, **options):
    """What was read at weights that stay, and what this rank's meter warned of, and where."""
    model = ENGINES[wrapper](network(), ranks)
    local, readings = sizes[rank], []
    with warnings.catch_warnings(record=True) as caught, GradientMeter(model, loss=loss) as meter:
        warnings.simplefilter("always")
        for step in range(steps):
            for number, n in enumerate(local):
                x, y = FAULTS[fault](rank, step, number, n)
                with synchronized(model, number == len(local) - 1):
                    (cross_entropy(model(x), y) * share(loss, n, local, sizes)).backward()
            readings.append(meter.read(local))
            model.zero_grad()
    return readings, said_here(caught)


def said_here(caught):
    """Warnings that point at the line of this file that called read(); torch has others."""
    return [str(warning.message) for warning in caught if warning.filename == __file__]


def heard(results):
    """What rank 0 said; the others are silent."""
    first, *others = [said for _, said in results]
    assert [[]] * len(others) == others
    return first


# data


@pytest.mark.parametrize("fault", ["nan", "inf"])
@pytest.mark.parametrize("wrapper", ENGINES)
def test_a_broken_sample_is_named_once_and_the_step_has_no_noise_on_any_rank(ranks, wrapper, fault):
    count = 4 if wrapper == "hsdp" else 3
    results = ranks(count)(partial(watched, wrapper=wrapper, fault=fault, sizes=EQUAL[:count]))
    (said,) = heard(results)
    assert "micro-batch 2 on rank 1 is not finite" in said.replace("the gradient of ", "")
    for readings, _ in results:
        assert [False, False, True, True] == [math.isfinite(r.grad_variance) for r in readings]
        assert [False, False, True, True] == [math.isfinite(r.similarity) for r in readings]
    answers = [one_step(network, step, EQUAL[:count]) for step in (2, 3)]
    assert all_close(answers, [readings[2:] for readings, _ in results])


@pytest.mark.parametrize("wrapper", ENGINES)
def test_two_ranks_with_the_same_data_are_named_once(ranks, wrapper):
    count = 4 if wrapper == "hsdp" else 3
    results = ranks(count)(
        partial(watched, wrapper=wrapper, fault="two alike", sizes=EQUAL[:count])
    )
    (said,) = heard(results)
    assert f"ranks 1 and 2 have the same gradients (1 such pairs of {count} ranks)" in said
    assert "DistributedSampler" in said


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_same_data_on_all_ranks_are_named_once(ranks, wrapper):
    run = partial(watched, wrapper=wrapper, fault="all alike", sizes=EQUAL[:3])
    (said,) = heard(ranks(3)(run))
    assert "ranks 0 and 1 have the same gradients (2 such pairs of 3 ranks)" in said


def test_one_micro_batch_that_all_ranks_share_has_no_noise_and_that_is_said(ranks):
    run = partial(watched, wrapper="ddp", fault="all alike", sizes=[[6]] * 3)
    results = ranks(3)(run)
    alike, agree = sorted(heard(results), key=lambda said: "to rounding" in said)
    assert "ranks 0 and 1 have the same gradients" in alike
    assert "all 3 micro-batches of a step have the same gradient to rounding" in agree
    assert all(r.grad_variance < 1e-5 * r.grad_sqnorm for readings, _ in results for r in readings)


# gradients averaged too early


def averaged_early(rank, ranks, *, sizes):
    """A hook of the user's averages each gradient over ranks before the meter sees it."""
    model = network()
    for p in model.parameters():
        p.register_hook(mean_over_ranks)
    model = ENGINES["ddp"](model, ranks)
    with warnings.catch_warnings(record=True) as caught, GradientMeter(model) as meter:
        warnings.simplefilter("always")
        for step in range(4):
            for number, n in enumerate(sizes[rank]):
                with synchronized(model, number == len(sizes[rank]) - 1):
                    x, y = batch(rank, step, number, n)
                    (cross_entropy(model(x), y) * n / sum(sizes[rank])).backward()
            reading = meter.read(sizes[rank])
            model.zero_grad()
    return [reading], said_here(caught)


def mean_over_ranks(gradient):
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@pytest.mark.parametrize("sizes", [[[6]] * 3, [[4, 6, 2]] * 3], ids=["one", "three"])
def test_gradients_averaged_before_the_meter_sees_them_are_suspected(ranks, sizes):
    said = heard(ranks(3)(partial(averaged_early, sizes=sizes)))
    assert 1 == sum("are gradients averaged before the meter's hooks?" in each for each in said)
    if sizes[0] == [6]:
        assert 1 == sum("was the gradient averaged before it was measured?" in s for s in said)


# loss scaling


def overflowing(rank, ranks):
    """As float16 starts: the first scale is too large on rank 1."""
    model = ENGINES["ddp"](network(), ranks)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(record=True) as caught,
        GradientMeter(model, scaler=scaler) as meter,
    ):
        warnings.simplefilter("always")
        readings = []
        for step in (1, 2):
            for number, n in enumerate(EQUAL[rank]):
                x, y = FAULTS["inf"](rank, step, number, n)
                with synchronized(model, number == len(EQUAL[rank]) - 1):
                    loss = cross_entropy(model(x), y) * n / sum(EQUAL[rank])
                    scaler.scale(loss).backward()
            readings.append(meter.read(EQUAL[rank]))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return readings, said_here(caught)


def test_an_overflow_that_a_grad_scaler_expects_is_not_warned_of(ranks):
    results = ranks(2)(overflowing)
    assert [] == heard(results)
    assert all(not math.isfinite(readings[0].grad_variance) for readings, _ in results)
    # the scaler left out the update and halved its scale
    assert all_close([one_step(network, 2, EQUAL[:2])], [readings[1:] for readings, _ in results])


# health


@pytest.mark.parametrize(
    ("wrapper", "loss", "sizes"),
    [
        pytest.param("ddp", "weighted", EQUAL[:3], marks=pytest.mark.release),
        ("ddp", "weighted", RAGGED_SAME_TOTAL),
        ("ddp", "mean", RAGGED),
        ("ddp", "weighted", [[5], [5]]),
        ("fsdp2", "weighted", SAME_TOTAL[:2]),
        pytest.param("fsdp2", "mean", SAME_COUNT[:3], marks=pytest.mark.release),
        pytest.param("hsdp", "weighted", SAME_TOTAL, marks=pytest.mark.release),
        ("hsdp", "mean", SAME_COUNT),
    ],
)
def test_nothing_is_said_of_twenty_healthy_steps(ranks, wrapper, loss, sizes):
    run = partial(watched, wrapper=wrapper, fault="none", sizes=sizes, loss=loss, steps=20)
    assert [] == heard(ranks(len(sizes))(run))


@pytest.mark.parametrize(("loss", "stated"), [("mean", "weighted"), ("weighted", "mean")])
def test_losses_of_the_other_kind_are_found_by_their_lengths(ranks, loss, stated):
    (said,) = heard(ranks(2)(partial(misstated, loss=loss, stated=stated)))
    assert f'state GradientMeter(loss="{loss}")' in said


def misstated(rank, ranks, *, loss, stated):
    """Sizes from 1 to 32, and 20 steps: enough to tell a slope of 0 from one of 2."""
    model = ENGINES["ddp"](network(), ranks)
    sizes = [[1, 32, 4, 8], [16, 2, 24, 3]]
    with warnings.catch_warnings(record=True) as caught, GradientMeter(model, loss=stated) as meter:
        warnings.simplefilter("always")
        for step in range(20):
            for number, n in enumerate(sizes[rank]):
                x, y = batch(rank, step, number, n)
                with synchronized(model, number == len(sizes[rank]) - 1):
                    loss_of_one = cross_entropy(model(x), y)
                    (loss_of_one * share(loss, n, sizes[rank], sizes)).backward()
            meter.read(sizes[rank])
            model.zero_grad()
    return None, said_here(caught)
