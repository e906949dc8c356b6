"""BatchPlan.fit: the only place that rounds."""

from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigbatch import BatchPlan, Controller, GradientStatistics, SimiGrad
from bigbatch.errors import BigbatchError, SettingError
from property_tests import property_test

LOW, HIGH = (
    GradientStatistics(-1.0, 80.0, 80, 8),
    GradientStatistics(1.0, 0.0, 80, 8),
)  # phi -1 and 1


def least_accumulation(ranks, min_micro_batches, min_accumulation):
    return next(a for a in count(1) if a >= min_accumulation and a * ranks >= min_micro_batches)


def slow_fit(wanted, ranks, micros, first, low, high):
    """Tries everything: (accumulation, batch size), or None."""
    for accumulation in range(first, max(first, high // ranks) + 1):
        sizes = [ranks * accumulation * micro for micro in micros]
        inside = [size for size in sizes if low <= size <= high]
        if inside and max(sizes) >= wanted:
            return accumulation, min(inside, key=lambda size: (abs(size - wanted), size))
    return None


settings_of_a_fit = {
    "batch_size": st.integers(1, 300),
    "ranks": st.integers(1, 8),
    "max_micro": st.integers(1, 40),
    "min_micro_batches": st.integers(1, 12),
    "min_accumulation": st.integers(1, 3),
    "min_batch": st.integers(1, 300),
    "width": st.integers(0, 100) | st.none(),
}


@given(**settings_of_a_fit)
@example(6001, 4, 40, 1, 1, 6001, 2)
@property_test(400)
def test_a_plan_is_the_nearest_of_the_least_accumulation_inside_the_bounds(
    batch_size, ranks, max_micro, min_micro_batches, min_accumulation, min_batch, width
):
    max_batch = None if width is None else min_batch + width
    least = {"min_micro_batches": min_micro_batches, "min_accumulation": min_accumulation}
    bounds = {"min_batch": min_batch, "max_batch": max_batch}
    high = 10_000 if width is None else max_batch
    wanted = min(max(batch_size, min_batch), high)
    first = least_accumulation(ranks, **least)
    expected = slow_fit(wanted, ranks, range(1, max_micro + 1), first, min_batch, high)
    if expected is None:
        with pytest.raises(SettingError, match="widen the bounds"):
            BatchPlan.fit(batch_size, ranks, max_micro=max_micro, **least, **bounds)
        return
    plan = BatchPlan.fit(batch_size, ranks, max_micro=max_micro, **least, **bounds)
    assert expected == (plan.accumulation, plan.batch_size)
    assert ranks * plan.micro * plan.accumulation == plan.batch_size
    assert ranks * plan.accumulation == plan.micro_batches >= min_micro_batches
    assert 1 <= plan.micro <= max_micro
    assert min_accumulation <= plan.accumulation
    assert min_batch <= plan.batch_size <= high
    assert abs(plan.batch_size - wanted) < ranks * plan.accumulation


@given(**settings_of_a_fit, micro=st.integers(1, 40))
@property_test(200)
def test_a_plan_of_a_given_micro_batch_is_the_nearest_inside_the_bounds(
    batch_size, ranks, max_micro, min_micro_batches, min_accumulation, min_batch, width, micro
):
    max_batch = None if width is None else min_batch + width
    fixed = {"max_micro": max_micro, "min_batch": min_batch, "max_batch": max_batch, "micro": micro}
    fixed |= {"min_micro_batches": min_micro_batches, "min_accumulation": min_accumulation}
    high = 10_000 if width is None else max_batch
    wanted = min(max(batch_size, min_batch), high)
    first = least_accumulation(ranks, min_micro_batches, min_accumulation)
    sizes = range(first * ranks * micro, high + 1, ranks * micro)
    inside = [size for size in sizes if size >= min_batch]
    if micro > max_micro or not inside:
        with pytest.raises(SettingError, match=r"raise max_micro|widen the bounds"):
            BatchPlan.fit(batch_size, ranks, **fixed)
        return
    plan = BatchPlan.fit(batch_size, ranks, **fixed)
    assert min(inside, key=lambda size: (abs(size - wanted), size)) == plan.batch_size
    assert (micro, ranks) == (plan.micro, plan.ranks)


def test_the_plan_of_the_readme_is_three_backwards_of_500():
    plan = BatchPlan.fit(batch_size=6000, ranks=4, max_micro=512)
    assert (3, 500, 4, 6000) == (plan.accumulation, plan.micro, plan.ranks, plan.batch_size)


def test_a_plan_may_need_more_backwards_than_the_batch_that_was_asked_for():
    assert BatchPlan(3, 1, 3) == BatchPlan.fit(7, 3, max_micro=2, min_batch=7, max_batch=9)


def test_a_batch_halfway_between_two_plans_takes_the_smaller():
    assert 10 == BatchPlan.fit(15, 2, max_micro=64, min_accumulation=5).batch_size
    assert 10 == BatchPlan.fit(15, 2, max_micro=64, micro=5).batch_size


@pytest.mark.parametrize(
    ("batch_size", "ranks", "fit"),
    [
        (6000, 4, {"max_micro": 512, "min_batch": 6001, "max_batch": 6003}),
        (1, 1, {"max_micro": 8, "max_batch": 1, "min_micro_batches": 2}),
        (1, 8, {"max_micro": 8, "max_batch": 7}),
        (64, 4, {"max_micro": 64, "micro": 32, "min_batch": 129, "max_batch": 255}),
        (64, 1, {"max_micro": 64, "max_batch": 64, "min_accumulation": 65}),
    ],
)
def test_bounds_that_no_plan_can_meet_are_refused(batch_size, ranks, fit):
    with pytest.raises(SettingError, match=r"no batch size between min_batch=.* and max_batch="):
        BatchPlan.fit(batch_size, ranks, **fit)


def test_a_batch_of_one_on_eight_ranks_is_the_smallest_plan():
    assert 8 == BatchPlan.fit(1, 8, max_micro=64, min_batch=1).batch_size
    assert 32 == BatchPlan.fit(1, 8, max_micro=64, min_batch=1, min_micro_batches=30).batch_size


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 64.0}, "batch_size=64.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"ranks": 0}, "ranks=0"),
        ({"max_micro": -1}, "max_micro=-1"),
        ({"min_micro_batches": 0}, "min_micro_batches=0"),
        ({"min_accumulation": 0}, "min_accumulation=0"),
        ({"min_batch": 0}, "min_batch=0"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"micro": 0}, "micro=0"),
        ({"micro": 65}, "micro=65 exceeds max_micro=64"),
        ({"min_batch": 512, "max_batch": 256}, "min_batch=512 exceeds max_batch=256"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(wrong, words):
    with pytest.raises(SettingError, match=words) as refusal:
        BatchPlan.fit(**{"batch_size": 64, "ranks": 1, "max_micro": 64, **wrong})
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, BigbatchError)


# what the published code of SimiGrad got wrong (spec/simigrad.md 1.5)


def batches_under(noise, start, ranks, max_micro, steps, micro=None, **bounds):
    """Batch sizes that are really used while every step measures the same."""
    controller = Controller(SimiGrad(target=0.2, **bounds), start, smoothing=None, **bounds)
    sizes = []
    for _ in range(steps + 1):
        target = controller.decision.batch_size
        plan = BatchPlan.fit(target, ranks, max_micro=max_micro, micro=micro, **bounds)
        sizes.append(plan.batch_size)
        controller.next(noise)
    return sizes


def test_the_batch_shrinks_at_accumulation_one():
    sizes = batches_under(HIGH, 2048, ranks=4, max_micro=512, steps=60)
    assert sorted(sizes, reverse=True) == sizes
    assert (2048, 1844, 4) == (sizes[0], sizes[1], sizes[-1])


def test_the_batch_does_not_double_where_a_second_backward_becomes_necessary():
    sizes = batches_under(LOW, 1700, ranks=4, max_micro=512, steps=8)
    assert max(later / size for size, later in pairwise(sizes)) < 1.11
    assert sizes[-1] > 2048 > sizes[0]


def test_the_batch_does_not_double_where_the_micro_batch_is_small():
    assert [32, 36, 36, 40, 44] == batches_under(LOW, 32, ranks=4, max_micro=64, steps=4)


def test_the_batch_does_not_jump_where_the_largest_micro_batch_is_below_the_first():
    sizes = batches_under(LOW, 2048, ranks=16, max_micro=64, steps=1)
    assert [2048, 2256] == sizes  # 3 x 47 x 16; wanted 2252


def test_the_upper_bound_holds():
    sizes = batches_under(LOW, 128, ranks=4, max_micro=64, steps=40, max_batch=300)
    assert 296 == max(sizes)  # two backwards on four ranks come in eights
    assert sorted(sizes) == sizes
    rough = batches_under(LOW, 128, ranks=4, max_micro=64, steps=40, micro=64, max_batch=300)
    assert {256} == set(rough)


def test_the_lower_bound_holds_from_the_first_step():
    sizes = batches_under(HIGH, 4096, ranks=4, max_micro=512, steps=40, min_batch=3000)
    assert 3000 == min(sizes) == sizes[-1]
    assert {1024} == set(batches_under(HIGH, 128, ranks=4, max_micro=512, steps=3, min_batch=1024))
    rough = batches_under(HIGH, 4096, ranks=4, max_micro=512, steps=40, micro=512, min_batch=3000)
    assert 4096 == min(rough)


def test_a_micro_batch_that_may_not_be_chosen_is_the_quantum():
    sizes = batches_under(LOW, 128, ranks=4, max_micro=32, steps=40, micro=32)
    assert all(size % 128 == 0 for size in sizes)
    assert {0, 128} >= {later - size for size, later in pairwise(sizes[:20])}
    assert sizes[-1] > 4 * 128  # the remembered target is not rounded, so it does not stall
