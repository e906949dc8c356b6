"""A policy of the user's own by its place, as `--policy` takes it."""

import pytest

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.policies.parse import parse_policy

PROGRAM = """
from __future__ import annotations

from dataclasses import dataclass

import bigbatch as bb
from sizes import LARGEST


@dataclass
class HoldUntil:
    samples: int = 300
    word: str = ""

    def decide(self, statistics, now):
        return bb.Decision(batch_size=32 if now.samples < self.samples else LARGEST, reason="held")


class NoPolicy:
    pass


class NeedsMore:
    def __init__(self, size):
        self.size = size
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "hold_until.py").write_text(PROGRAM)
    (tmp_path / "sizes.py").write_text("LARGEST = 4096\n")
    (tmp_path / "broken.py").write_text("import bigbatch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["hold_until", "hold_until.py"])
def test_a_class_of_a_module_or_a_file_is_a_policy_with_its_arguments(folder, place):
    policy = parse_policy(f"{place}:HoldUntil:samples=100, word=some")
    assert (100, "some") == (policy.samples, policy.word)
    statistics = bb.GradientStatistics(1.0, 1.0, samples=32, micro_batches=4)
    assert 4096 == policy.decide(statistics, bb.TrainingState(32, 32, samples=100)).batch_size
    assert 300 == parse_policy(f"{place}:HoldUntil").samples


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing:Policy", "No module named 'nothing'; name a module that Python finds, or a file"),
        ("nothing.py:Policy", "No such file or directory"),
        ("hold_until:Policy", "hold_until has no class 'Policy'; write hold_until:CLASS"),
        ("hold_until:NoPolicy", "NoPolicy object at .* has no method decide"),
        ("hold_until:NeedsMore", "missing 1 required positional argument: 'size'; write"),
        ("hold_until:HoldUntil:sample=1", "unexpected keyword argument 'sample'"),
        ("hold_until:HoldUntil:1", "write '1' as KEY=VALUE"),
        ("broken.py:Policy", "broken.py fails with ZeroDivisionError"),
        ("simi-grad", "policy 'simi-grad' is unknown; choose one of: fixed"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_remedy(folder, text, said):
    with pytest.raises(SettingError, match=said.replace("(", r"\(")) as error:
        parse_policy(text)
    assert 1 == len(str(error.value).splitlines())
