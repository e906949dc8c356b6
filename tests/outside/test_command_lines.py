"""Random command lines: each is carried out, or refused in one line with exit status 2."""

import random
import re

import pytest

LINES = 400
VALUES = [
    *["", " ", "-", "--", "nan", "inf", "-inf", "-1", "0", "1", "2", "64", "4096", "0.3", "-0.3"],
    *["1e9", "1e40", "1e-40", "1_000", "0x10", "2.5", "true", "None", "magic", "nowhere", "."],
    *["/dev/null", "{}", "[1]", "[digits]", "a=b", "=", "=1", "lr=", "lr=1,lr=2", "target=2"],
    *["simigrad", "simigrad:0.4", "simigrad:", "fixed:64", "fixed:-1", "schedule:64,x2@5"],
    *["schedule:", "sgd", "vr-momentum", "sqrt", "linear", "cosine", "\u2603", "a b", "\udcff"],
    *["9" * 30, "-9" * 10, "1/2", "64,", ",", "16 steps", "4K samples", "gamma=1", "arm=x"],
]
RECIPES = ["digits", "cifar10-resnet18", "bert-pretrain", "char-lm", "nonsense", ""]
RUN_LESS = {"train": ["--dry-run"], "sweep": ["--dry-run"], "report": [], "replay": []}


@pytest.fixture
def options(bigbatch):
    """Of each command, those that its help names."""
    found = {}
    for command in [*RUN_LESS, "compare", "list"]:
        status, said, _ = bigbatch(command, "--help")
        assert 0 == status
        found[command] = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", said)) - {"--help"})
    return found


def line_of(chance, options):
    """A command, most often a recipe, and up to five options with values that may be nonsense."""
    command = chance.choice([*["train"] * 6, *options])
    words = [command]
    if command in ("train", "sweep"):
        words += chance.choices([["digits"], [chance.choice(RECIPES)], []], [6, 2, 1])[0]
    for _ in range(chance.randrange(5)):
        words.append(chance.choice([*options[command], "--bogus"]))
        if chance.random() < 0.9:
            words.append(chance.choice(VALUES))
    return [*words, *RUN_LESS.get(command, [])]  # so that what is accepted trains nothing


@pytest.mark.parametrize("seed", range(4))
def test_a_command_line_is_carried_out_or_refused_in_one_line(
    bigbatch, options, tmp_path, monkeypatch, seed
):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    wrong, refused = [], 0
    for _ in range(LINES // 4):
        line = line_of(chance, options)
        try:
            status, _, err = bigbatch(*line)
        except BaseException as error:
            wrong.append((line, repr(error)))
            continue
        refused += status == 2
        in_one = err.startswith("bigbatch: ") and err.count("\n") == 1
        if status not in (0, 2) or (status == 2 and not in_one) or "Traceback" in err:
            wrong.append((line, status, err[-300:]))
    assert [] == wrong
    assert refused > LINES // 16
