"""`bigbatch advise` on unmodified scripts: it measures what a loop by hand measures."""

import pytest

from advised_cases import (
    CONSECUTIVE,
    GROUPS,
    MICRO_BATCHES,
    Case,
    advise_case,
    assert_measured,
    assert_unchanged,
    parameters_of,
)

BF16 = 3e-2  # a group's gradient is rounded to 8 bits, and the hand loop rounds another sum
FP16 = 1e-2  # likewise, to 11 bits
OVERFLOWS = "--amp-dtype float16 --init-scale 1e7"  # in the first steps, which the scaler skips
FOUR = "--grad-accum-steps 4"
ADAMW = {"optimizer": "AdamW"}
ONE_BACKWARD = "--gradient_accumulation_steps 1"
ACCUMULATED = Case("nanogpt_style", "", MICRO_BATCHES, 32, 4, **ADAMW)
CASES = [
    ACCUMULATED,
    Case("nanogpt_style", "--bf16", MICRO_BATCHES, 32, 4, **ADAMW),
    Case("nanogpt_style", "--grad_clip 0", MICRO_BATCHES, 32, 4, **ADAMW),
    Case("nanogpt_style", "--compile aot_eager", MICRO_BATCHES, 32, 4, **ADAMW),
    Case("nanogpt_style", f"--compile aot_eager {ONE_BACKWARD}", CONSECUTIVE, 8, **ADAMW),
    Case("timm_style", "", GROUPS, 32),
    Case("timm_style", "--amp", GROUPS, 32, tolerance=BF16),
    Case("timm_style", f"--amp {OVERFLOWS}", GROUPS, 32, tolerance=FP16),
    Case("timm_style", f"--amp {OVERFLOWS} {FOUR}", MICRO_BATCHES, 128, 4, tolerance=FP16),
    Case("timm_style", "--batch-size 13", GROUPS, 13),
    Case("timm_style", "--grad-accum-steps 2", GROUPS, 64, 2),
    Case("timm_style", f"--amp {FOUR}", MICRO_BATCHES, 128, 4),
    Case("timm_style", "--norm batch", CONSECUTIVE, 32),
    Case("timm_style", "--norm batch --grad-accum-steps 2", MICRO_BATCHES, 64, 2),
    Case("gradient_penalty", "", CONSECUTIVE, 32, optimizer="Adam"),
    Case("two_optimizers", "", GROUPS, 24, optimizer="Muon AdamW"),
    Case("ddp_script", "", GROUPS, 32, ranks=2),
    Case("ddp_script", "--accumulation 2", MICRO_BATCHES, 64, 2, ranks=2),
]


@pytest.mark.parametrize("case", parameters_of(CASES, first=(ACCUMULATED,)))
def test_measured_steps_have_the_numbers_of_the_hand_loop(tmp_path, case):
    assert_measured(case, advise_case(tmp_path, case))


@pytest.mark.parametrize("case", parameters_of(CASES))
def test_a_script_that_trains_to_its_end_has_the_losses_of_the_script_alone(tmp_path, case):
    assert_unchanged(case, tmp_path)
