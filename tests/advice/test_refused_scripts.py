"""`bigbatch advise` refuses scripts whose numbers would be wrong, and says what it saw."""

import re
from dataclasses import dataclass

import pytest

from advised_script import advise, losses_of


@dataclass(frozen=True)
class Refused:
    """One call of a script that cannot be advised.

    Args:
        script: its name.
        said: a regular expression of what was seen, without regard to case.
        arguments: in one string.
        ranks: processes.
    """

    script: str
    said: str
    arguments: str = ""
    ranks: int = 1


GAN = Refused("gan", r"optimizers.*GAN")
SHARED = Refused("actor_critic", r"no forward of its own", "--kind shared")
LATER = [
    Refused("actor_critic", r"same samples", "--kind replayed"),
    Refused("actor_critic", r"optimizers", "--kind separate"),
    Refused("sparse_embedding", r"sparse"),
    Refused("lbfgs", r"LBFGS"),
    Refused("sam", r"zeroed between two backwards.*sharpness"),
    Refused("never_zeroed", r"zero_grad"),
    Refused("manual_allreduce", r"none of them shares", ranks=2),
]
CASES = [
    pytest.param(case, id=f"{case.script} {case.arguments}".strip(), marks=marks)
    for marks, cases in (([], [GAN, SHARED]), ([pytest.mark.thorough], LATER))
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_names_what_was_seen_and_no_number(tmp_path, case):
    advised = advise(tmp_path, case.script, *case.arguments.split(), ranks=case.ranks)
    assert re.search(case.said, advised.page["refusal"], re.IGNORECASE), advised.page["refusal"]
    assert 1 == advised.process.returncode
    assert [] == advised.page["measurements"]
    assert "Traceback" not in advised.process.stderr or case.ranks > 1  # torchrun writes its own


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case.values[0] for case in CASES], ids=lambda case: case.script)
def test_a_refused_script_that_trains_to_its_end_has_the_losses_of_the_script_alone(tmp_path, case):
    """It may end with the exit status of a refusal."""
    given = case.arguments.split()
    under = ["-m", "bigbatch", "advise", "--go-on"]
    expected = losses_of(tmp_path, case.script, *given, ranks=case.ranks)
    actual = losses_of(
        tmp_path, case.script, *given, under=under, ranks=case.ranks, statuses=(0, 1)
    )
    assert expected == actual
