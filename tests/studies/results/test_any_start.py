"""Shares of trainings that reach the target, and the sign test between two policies."""

from itertools import product

import pytest

from made_runs import fresh, log_of
from studies.results.any_start import (
    BATCHES,
    POLICIES,
    RATES,
    WARMUPS,
    arm_of,
    figure,
    sign_test,
    successes,
    tables,
)
from studies.results.comparison_log import LoggedRun

FIXED, ADAPTIVE, *_ = POLICIES


@pytest.mark.parametrize(("wins", "losses"), list(product((0, 1, 2, 5, 30), repeat=2)))
def test_the_sign_test_is_scipys(wins, losses):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert pytest.approx(expected) == sign_test(wins, losses)


def made_log(score_of):
    """All trainings; `score_of` says the score of a policy, batch, warm-up, rate and seed."""
    settings = product(POLICIES, BATCHES, WARMUPS, RATES, (0, 1))
    return log_of(
        *(
            fresh(arm_of(policy, batch, warmup), seed, score_of(policy, rate, seed), lr=rate)
            for policy, batch, warmup, rate, seed in settings
        )
    )


def test_shares_and_wins_are_counted_over_all_settings():
    def score(policy, rate, seed):
        return 90.0 if rate <= (RATES[1] if policy == FIXED else RATES[4]) or seed else 50.0

    text = tables(made_log(score), 90.0)
    table = text.split("Not in the rule")[0]
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    fixed, adaptive = lines[FIXED], lines[ADAPTIVE]
    assert fixed.count("27 of 42") == 2  # 7 rates of one seed and 2 of the other, 3 batches
    assert adaptive.count("36 of 42") == 2
    assert adaptive.count(f"+9 -0, p = {2 / 2**9:.2g}") == 2


def test_a_training_that_failed_or_diverged_reaches_nothing():
    log = made_log(lambda *_: 90.0)
    first = log.runs[0]
    log.runs[0] = LoggedRun(first.arm, first.lr, first.seed, tuning=False, failure="killed")
    log.runs[1] = fresh(log.runs[1].arm, 1, 99.0, lr=log.runs[1].lr, diverged=True)
    found = successes(log, 90.0, FIXED, next(iter(WARMUPS)))
    assert (42, 40) == (len(found), sum(found.values()))
    assert not found[BATCHES[0], RATES[0], 0]
    assert len(BATCHES) * len(WARMUPS) == len(figure(log, 90.0))
