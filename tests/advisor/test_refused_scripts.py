"""`bigbatch advise` refuses scripts whose numbers would be wrong, and says what it saw."""

import json
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
LATER = [
    Refused("actor_critic", r"no forward of its own", "--kind shared"),
    Refused("sam", r"zeroed between two backwards.*sharpness"),
    Refused("actor_critic", r"same samples", "--kind replayed"),
    Refused("actor_critic", r"optimizers", "--kind separate"),
    Refused("sparse_embedding", r"sparse"),
    Refused("lbfgs", r"LBFGS"),
    Refused("never_zeroed", r"zero_grad"),
    Refused("manual_allreduce", r"none of them shares", ranks=2),
]
CASES = [
    pytest.param(case, id=f"{case.script} {case.arguments}".strip(), marks=marks)
    for marks, cases in (([], [GAN]), ([pytest.mark.release], LATER))
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_names_what_was_seen_and_no_number(tmp_path, case):
    """The script trains to its end as it does alone."""
    given, observed = case.arguments.split(), tmp_path / "observed.json"
    advised = advise(
        tmp_path, case.script, *given, f"--losses={observed}", options=["--go-on"], ranks=case.ranks
    )
    assert re.search(case.said, advised.page["refusal"], re.IGNORECASE), advised.page["refusal"]
    assert 0 == advised.process.returncode
    assert [] == advised.page["measurements"]
    assert "Traceback" not in advised.process.stderr or case.ranks > 1  # torchrun writes its own
    assert losses_of(tmp_path, case.script, *given, ranks=case.ranks) == json.loads(
        observed.read_text()
    )


def test_a_refusal_ends_the_script_with_status_1(tmp_path):
    losses = tmp_path / "losses.json"
    advised = advise(tmp_path, "lbfgs", f"--losses={losses}")
    assert 1 == advised.process.returncode
    assert "LBFGS" in advised.page["refusal"]
    assert not losses.exists()
