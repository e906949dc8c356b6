"""What the ranks compare: class, settings and rates of an optimizer, as text."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam

from bigbatch.data.rank_consistency import (
    are_equal,
    checksum_sums,
    differences,
    facts_of,
    optimizer_facts,
)
from bigbatch.optim import VRAdam
from bigbatch.optim.variance_reduced import micro_batch_optimizer
from property_tests import property_test


def facts(optimizer, *, waits=True):
    reader = micro_batch_optimizer(optimizer)
    kind = type(optimizer).__name__ if reader is None else reader.describe()
    return optimizer_facts(optimizer, kind, waits=waits)


def two():
    return [nn.Parameter(torch.zeros(3)) for _ in range(2)]


def test_two_optimizers_made_alike_have_no_difference():
    for make in (lambda p: SGD(p, 0.1), lambda p: Adam(p), lambda p: VRAdam(p, 0.1)):
        assert [] == list(differences(facts(make(two())), facts(make(two()))))


def test_how_the_same_step_is_computed_is_no_difference():
    one, other = Adam(two(), foreach=True), Adam(two(), fused=True)
    assert [] == list(differences(facts(one), facts(other)))


def test_every_group_is_compared():
    groups = [{"params": two()}, {"params": two(), "lr": 0.2}]
    one = SGD(groups, lr=0.1)
    other = SGD([{"params": two()}, {"params": two(), "lr": 0.3}], lr=0.1)
    assert ["lr of parameter group 1 is 0.3 there and 0.2 on rank 0"] == list(
        differences(facts(one), facts(other))
    )


def test_a_number_of_numpy_is_the_same_number():
    one, other = SGD(two(), lr=0.1), SGD(two(), lr=np.float64(0.1))
    assert [] == list(differences(facts(one), facts(other)))


def test_an_object_that_has_no_text_of_its_own_is_left_out():
    optimizer = SGD(two(), lr=0.1)
    optimizer.param_groups[0]["made_by"] = object()
    assert not [name for name in facts(optimizer) if "made_by" in name]


def test_a_rate_on_a_device_stands_by_how_often_it_was_written_until_it_is_waited_for():
    optimizer = Adam(two(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")  # which nobody can read
    name = "lr of parameter group 0"
    before = facts(optimizer, waits=False)[name]
    assert before == facts(optimizer, waits=False)[name]
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert before != facts(optimizer, waits=False)[name]


def test_a_setting_that_one_rank_lacks_is_named():
    texts = list(differences(facts_of({"a": 1, "b": {"c": 2.0}}), facts_of({"a": 1})))
    assert ["b.c is missing there and 2.0 on rank 0"] == texts


@property_test(60)
@given(st.integers(2, 8192), st.integers(0, 0xFFFFFF), st.integers(0, 0xFFFFFF))
def test_checksums_of_many_ranks_are_compared_exactly_by_sums(ranks, first, other):
    of_first, of_other = (torch.tensor(checksum_sums(float(x))) for x in (first, other))
    alike = of_first.double() * ranks
    assert are_equal(alike.tolist(), ranks)
    one_differs = alike - of_first + of_other
    assert are_equal(one_differs.tolist(), ranks) == (first == other)
