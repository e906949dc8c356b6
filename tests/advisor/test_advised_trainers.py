"""`bigbatch advise` on unmodified scripts of accelerate, Lightning, transformers and DeepSpeed."""

import pytest

from advised_cases import GROUPS, MICRO_BATCHES, Case, advise_case, assert_as_by_hand, parameters_of
from advised_script import losses_of

BF16 = 3e-2  # a group's gradient is rounded to 8 bits, and the hand loop rounds another sum
ADAM, ADAMW = {"optimizer": "Adam"}, {"optimizer": "AdamW"}
CASES = [
    Case("accelerate_example", "", GROUPS, 32, 2, **ADAMW),
    Case("accelerate_example", "--gradient_accumulation_steps 1", GROUPS, 16, **ADAMW),
    Case("accelerate_example", "--gradient_accumulation_steps 4", MICRO_BATCHES, 64, 4, **ADAMW),
    Case("accelerate_example", "--mixed_precision bf16", GROUPS, 32, 2, **ADAMW, tolerance=BF16),
    Case("lightning_module", "", GROUPS, 16, **ADAM),
    Case("lightning_module", "--accumulate_grad_batches 4", MICRO_BATCHES, 64, 4, **ADAM),
    Case("hf_trainer", "", GROUPS, 16, **ADAMW),
    Case("hf_trainer", "--gradient_accumulation_steps 4", MICRO_BATCHES, 64, 4, **ADAMW),
]
DEEPSPEED = [
    Case("deepspeed_script", "--stage 0", MICRO_BATCHES, 32, 2, ranks=2),
    Case("deepspeed_script", "--stage 1", MICRO_BATCHES, 32, 2, ranks=2),
    Case("deepspeed_script", "--stage 2", MICRO_BATCHES, 32, 2, ranks=2),
    Case("deepspeed_script", "--stage 3", MICRO_BATCHES, 32, 2, ranks=2),
]


SECOND = (
    Case("accelerate_example", "", GROUPS, 32, 2, **ADAMW),
    Case("lightning_module", "", GROUPS, 16, **ADAM),
    Case("hf_trainer", "--gradient_accumulation_steps 4", MICRO_BATCHES, 64, 4, **ADAMW),
)


@pytest.mark.parametrize("case", parameters_of(CASES, second=SECOND))
def test_an_observed_trainer_measures_and_trains_as_by_hand(tmp_path, case):
    assert_as_by_hand(case, *advise_case(tmp_path, case))


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", parameters_of(DEEPSPEED, second=(DEEPSPEED[1],)))
def test_deepspeed_is_refused_and_trains_as_the_script_alone(tmp_path, case):
    advised, losses = advise_case(tmp_path, case)
    assert "DeepSpeed" in advised.page["refusal"]
    assert [] == advised.page["measurements"]
    assert losses_of(tmp_path, case.script, *case.given, ranks=case.ranks) == losses
