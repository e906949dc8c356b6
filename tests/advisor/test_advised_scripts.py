"""`bigbatch advise` on unmodified scripts: it measures what a loop by hand measures."""

import pytest

from advised_cases import (
    CONSECUTIVE,
    CUT,
    GROUPS,
    MICRO_BATCHES,
    Case,
    advise_case,
    assert_as_by_hand,
    parameters_of,
)
from advised_script import advise

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
    Case("timm_style", "--norm batch", CUT, 32),
    Case("timm_style", "--norm batch --amp", CUT, 32, tolerance=BF16),
    Case("timm_style", "--norm batch --grad-accum-steps 2", CUT, 64, 2),
    Case("gradient_penalty", "", CONSECUTIVE, 32, optimizer="Adam"),
    Case("two_optimizers", "", GROUPS, 24, optimizer="Muon AdamW"),
    Case("ddp_script", "", GROUPS, 32, ranks=2),
    Case("ddp_script", "--accumulation 2", MICRO_BATCHES, 64, 2, ranks=2),
]


SECOND = (
    Case("timm_style", "", GROUPS, 32),
    Case("timm_style", f"--amp {OVERFLOWS} {FOUR}", MICRO_BATCHES, 128, 4, tolerance=FP16),
    Case("timm_style", "--norm batch", CUT, 32),
    Case("two_optimizers", "", GROUPS, 24, optimizer="Muon AdamW"),
    Case("ddp_script", "", GROUPS, 32, ranks=2),
)


@pytest.mark.parametrize("case", parameters_of(CASES, first=(ACCUMULATED,), second=SECOND))
def test_an_observed_script_measures_and_trains_as_by_hand(tmp_path, case):
    assert_as_by_hand(case, *advise_case(tmp_path, case))


def test_a_script_is_ended_after_the_observed_steps(tmp_path):
    losses = tmp_path / "losses.json"
    advised = advise(tmp_path, "nanogpt_style", f"--losses={losses}", options=("--steps", 12))
    assert (advised.page["batch_size"] is None) == advised.process.returncode
    assert 12 == advised.page["steps"]
    assert not losses.exists()
