"""The time of a step on other numbers of devices, and the batch size of the least time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.advisor.cluster_time import ClusterTime, Network
from bigbatch.errors import SettingError
from made_observations import found, machine
from property_tests import property_test

FREE = Network(1e12, 0)  # an all-reduce takes no time


def grid(devices, most):
    """Every size that may be advised."""
    each = {1, *(2**i for i in range(45)), *(3 * 2**i for i in range(45))}
    return [devices * n for n in sorted(each) if devices * n <= max(most, devices)]


def on(devices, network=FREE, ranks=1, **times):
    return ClusterTime(machine(**times), found(ranks=ranks), network, devices)


@property_test(100)
@given(fixed=st.floats(1e-4, 1), per_sample=st.floats(1e-6, 1e-2), scale=st.floats(1, 1e6))
def test_the_fastest_batch_is_where_the_closed_form_has_a_time_of_five_percent_more(
    fixed, per_sample, scale
):
    """(fixed + per_sample B) (1 + scale / B) = 1.05 (sqrt(fixed) + sqrt(per_sample scale))^2.

    Neighbours of the grid are at most 1.5 apart, and the least of the grid is above that of all.
    """
    best = on(1, fixed=fixed, per_sample=per_sample).fastest(scale, math.inf)
    spread = 1.05 * (math.sqrt(fixed) + math.sqrt(per_sample * scale)) ** 2
    spread -= fixed + per_sample * scale
    root = math.sqrt(max(0, spread**2 - 4 * fixed * per_sample * scale))
    smallest = (spread - root) / (2 * per_sample)
    assert smallest / 1.5 <= best <= max(smallest * 1.5, 1)


@property_test(100)
@given(
    devices=st.integers(1, 600),
    largest=st.none() | st.integers(1, 1000),
    scale=st.floats(0, 1e7),
    most=st.floats(1, 1e7),
    ranks=st.sampled_from([1, 2, 3, 8]),
)
def test_it_is_the_first_size_of_the_grid_that_takes_five_percent_more_than_the_least(
    devices, largest, scale, most, ranks
):
    cluster = on(devices, Network(), ranks, optimizer=0.003, rest=0.02, largest=largest)
    best = cluster.fastest(scale, most)
    seconds = {size: cluster.relative_seconds(size, scale) for size in sorted(grid(devices, most))}
    most_seconds = 1.05 * min(seconds.values())
    assert best == next(size for size, time in seconds.items() if time <= most_seconds)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7, 8, 10, 12, 512])
def test_the_fastest_size_is_a_multiple_of_any_number_of_devices(devices):
    best = on(devices, fixed=0.1).fastest(1e4, math.inf)
    closed = math.sqrt(0.1 / 1e-4 * devices * 1e4)  # each device has its own fixed time
    assert 0 == best % devices
    assert closed / 2.5 <= best <= closed


def test_the_least_size_has_a_sample_for_each_device():
    assert 512 == on(512).fastest(0.0, 1.0)


def test_the_optimizer_and_the_rest_count_once_and_the_data_with_the_samples():
    cluster = on(1, optimizer=0.5, data=0.128, rest=0.7, fixed=0.25, per_sample=0.001)
    assert pytest.approx(0.5 + 0.7 + 0.25 + 128 * 0.001 + 2 * 0.128) == cluster.seconds(128)


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_observed_rank_gets_its_own_samples(ranks):
    """64 samples of all ranks, 16 of each of four: a device of 32 then needs twice the time."""
    cluster = on(ranks, ranks=ranks, data=0.1, per_sample=0.0)
    assert pytest.approx(0.01 + 2 * 0.1) == cluster.seconds(128)


@pytest.mark.parametrize(("samples", "backwards"), [(32, 1), (33, 2), (64, 2), (65, 3)])
def test_limited_memory_takes_more_backwards(samples, backwards):
    cluster = on(1, fixed=0.25, per_sample=0.001, largest=32)
    assert pytest.approx(backwards * 0.25 + samples * 0.001) == cluster.seconds(samples)


def test_limited_memory_makes_larger_batches_no_faster_by_sample():
    """Then a sample costs the same in every batch, so a step without noise is best when small."""
    limited, unlimited = (on(1, fixed=1.0, largest=n).fastest(1e4, 1e9) for n in (16, None))
    assert limited < unlimited


@pytest.mark.parametrize(
    ("devices", "sent", "messages"),
    [(2, 1.0, 2), (3, 4 / 3, 4), (8, 1.75, 6), (512, 1.99609375, 18)],
)
def test_an_all_reduce_sends_a_ring_s_bytes_and_a_tree_s_messages(devices, sent, messages):
    seconds = Network(2, 50).all_reduce_seconds(10**9, devices)
    assert pytest.approx(sent / 2 + messages * 50e-6) == seconds


def test_one_device_reduces_nothing():
    assert 0.0 == Network().all_reduce_seconds(10**9, 1)


def test_the_all_reduce_is_added_on_other_numbers_of_devices():
    network = Network(1, 10)
    alone, eight = on(1, network), on(8, network)
    expected = alone.seconds(16) + network.all_reduce_seconds(4000, 8)
    assert pytest.approx(expected) == eight.seconds(8 * 16)


def test_on_the_observed_ranks_the_rest_is_fixed_and_the_network_unused():
    cluster = on(4, Network(1e-3, 1e6), ranks=4, fixed=0.1, per_sample=0.001, rest=0.3)
    assert pytest.approx(0.1 + 0.016 + 0.3) == cluster.seconds(64)
    assert pytest.approx(0.1 + 0.032 + 0.3) == cluster.seconds(128)


def test_on_other_ranks_than_the_observed_ones_the_rest_is_left_out():
    """It holds the all-reduce of the observed ranks."""
    network = Network(1, 10)
    cluster = on(8, network, ranks=4, fixed=0.1, per_sample=0.001, rest=0.3)
    expected = 0.1 + 0.008 + network.all_reduce_seconds(4000, 8)
    assert pytest.approx(expected) == cluster.seconds(64)


@pytest.mark.parametrize("settings", [(0, 30), (-1, 30), (12.5, -1), (math.nan, 30)])
def test_a_network_without_bandwidth_is_refused(settings):
    with pytest.raises(SettingError):
        Network(*settings)
