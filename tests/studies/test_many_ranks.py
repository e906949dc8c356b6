"""Bytes of a step do not grow with the ranks; ranks with faults decide alike."""

import pytest

from studies import many_ranks, scaling


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_sends_as_much_on_any_number_of_ranks_but_where_these_are_compared():
    for ranks in (2, 3000):
        light, measured, compared = (
            (int(row["bytes"].replace(",", "")), int(row["messages"]))
            for row in many_ranks.cost_rows(ranks)
        )
        sums = scaling.loop()["all-reduce"]
        assert (8 * 12, 1) == light
        assert (sums, 1) == measured
        assert (sums + scaling.compared_ranks(ranks)["all-reduce"], 2) == compared


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", ["late", "nan", "dies"])
def test_ranks_decide_alike_whatever_happens_to_one_of_them(fault):
    without, found = many_ranks.decisions(3), many_ranks.decisions(3, fault, rank=1, at=2)
    if fault == "late":
        assert without == found
    elif fault == "nan":
        assert [False, False, True, False, False, False] == [skipped for *_, skipped in found[0]]
        assert all(own == found[0] for own in found)
    else:
        assert all(len(own) in (1, 2) and own == without[0][: len(own)] for own in found)
