"""The linear regression of the VRGD paper against its published numbers; docs/known-answers.md."""

import pytest

from bigbatch_recipes.linear_regression import (
    DISTRIBUTIONS,
    Findings,
    sgd,
    train,
    vr_sgd,
    vr_sgd_wide,
)

LR, SEEDS = 0.2, 3


@pytest.mark.thorough
def test_vr_sgd_reaches_sgds_loss_in_half_the_steps_and_is_sgd_with_gamma_one():
    """VRGD (Jiang et al. 2023, 2309.13681), sections 7.2 and 7.3; U(0, 1), r at most 1 / gamma."""
    (uniform,) = (inputs for inputs in DISTRIBUTIONS if inputs.name == "U(0, 1)")
    plain, vr, same = sgd(LR), vr_sgd_wide(LR), vr_sgd(LR, gamma=1.0)
    findings = Findings(uniform, train(uniform, [plain, vr, same], SEEDS))
    # about 50 of 100; the paper does not name its inputs and its rate
    assert pytest.approx(50, abs=10) == findings.steps_needed(vr, plain).median
    assert pytest.approx(1.0, abs=1e-9) == findings.relative(same).median
