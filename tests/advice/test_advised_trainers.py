"""`bigbatch advise` on unmodified scripts of accelerate, Lightning, transformers and DeepSpeed."""

import pytest

from advised_cases import (
    GROUPS,
    MICRO_BATCHES,
    Case,
    advise_case,
    assert_measured,
    assert_unchanged,
    parameters_of,
)
from advised_script import losses_of
from oracles.hand_loop import repeat

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


@pytest.mark.parametrize("case", parameters_of(CASES))
def test_steps_of_a_trainer_have_the_numbers_of_the_hand_loop(tmp_path, case):
    assert_measured(case, advise_case(tmp_path, case))


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", parameters_of(DEEPSPEED))
def test_steps_of_deepspeed_are_right_or_refused(tmp_path, case):
    advised = advise_case(tmp_path, case)
    if advised.page["refusal"]:
        assert "DeepSpeed" in advised.page["refusal"]
        assert [] == advised.page["measurements"]
        assert 0 != advised.process.returncode
    else:
        assert_measured(case, advised)


@pytest.mark.parametrize("case", parameters_of(CASES))
def test_a_trainer_that_trains_to_its_end_has_the_losses_of_the_script_alone(tmp_path, case):
    assert_unchanged(case, tmp_path)


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", parameters_of(DEEPSPEED))
def test_deepspeed_that_trains_to_its_end_has_the_losses_of_the_script_alone(tmp_path, case):
    assert_unchanged(case, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["accelerate_example", "lightning_module", "hf_trainer"])
def test_a_hand_loop_has_the_losses_of_its_trainer(tmp_path, name):
    arguments = ["--steps=12"]
    assert losses_of(tmp_path, name, *arguments) == repeat(name, arguments, groups=8).losses


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", parameters_of(DEEPSPEED))
def test_a_hand_loop_has_the_losses_of_deepspeed(tmp_path, case):
    """DeepSpeed averages ranks and micro-batches in another order."""
    expected = losses_of(tmp_path, case.script, *case.given, ranks=case.ranks)
    assert expected == pytest.approx(case.repeat().losses, rel=1e-5)
