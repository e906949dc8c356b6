"""`bigbatch advise` as a command: its options, and the exit status of the program."""

import json
import re
import sys
from pathlib import Path

import pytest

from bigbatch import advisor
from bigbatch.cli.advise_command import advise as command
from bigbatch.cli.advise_command import argument_parser
from torchrun import run

LOOP = """
import atexit, sys, torch
from torch.utils.data import DataLoader, TensorDataset

def main(steps, workers=0, context=None, target=5, lr=0.001):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = TensorDataset(torch.randn(64 * steps, 4))
    for (x,) in DataLoader(data, 64, num_workers=workers, multiprocessing_context=context):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    print("trained", steps)

if __name__ == "__main__":
    atexit.register(print, "at exit")
"""


def advise(folder, body, *options, arguments=(), under=("-m", "bigbatch", "advise")):
    """(exit status, standard output, standard error) of the command on LOOP and this body."""
    script = folder / "train.py"
    script.write_text(LOOP + "".join(f"    {line}\n" for line in body.splitlines()))
    done = run(sys.executable, *under, *options, script, *arguments, OMP_NUM_THREADS="1")
    return done.returncode, done.stdout, done.stderr


def test_a_program_prints_what_it_prints_and_then_the_advice(tmp_path):
    page = tmp_path / "page.json"
    options = ("--steps", 20, "--go-on", "-o", page, "-o", tmp_path / "page.html")
    status, out, error = advise(tmp_path, "main(30)", *options)
    assert (0, "") == (status, error)
    before, after = out.split("Noise scale")
    assert before.startswith("trained 30\n")
    assert after.endswith("at exit\n")
    assert 20 == json.loads(page.read_text())["steps"]
    assert (tmp_path / "page.html").exists()


ENDS_WITHOUT_STDOUT = {
    "None": "sys.stdout = None",
    "closed": "sys.stdout.close()",
    "a closed file of its own": "sys.stdout = open('log.txt', 'w'); sys.stdout.close()",
    "ASCII": "sys.stdout.reconfigure(encoding='ascii')",
}


@pytest.mark.parametrize("name", ENDS_WITHOUT_STDOUT)
def test_the_files_and_the_page_survive_what_the_program_did_to_its_output(tmp_path, name):
    page = tmp_path / "page.json"
    options = ("--steps", 20, "--go-on", "-o", page)
    status, out, error = advise(tmp_path, f"main(30)\n{ENDS_WITHOUT_STDOUT[name]}", *options)
    assert 0 == status
    assert "" == json.loads(page.read_text())["refusal"]
    assert "Noise scale" in out + error
    assert f"advice: {page}" in out + error


SHAPES = """
model, optimizer = torch.nn.LSTM(6, 8), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(9, 20, 6))[0].square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("stated", ["20", "20@1"])
def test_samples_in_another_dimension_are_stated_once_and_timed(tmp_path, stated):
    page = tmp_path / "page.json"
    options = ("--micro-batch", stated, "-o", page)
    _, out, error = advise(tmp_path, SHAPES, *options)
    found = json.loads(page.read_text())
    assert ("", "", 20) == (error, found["refusal"], found["found"]["batch_size"])
    counted = "1 x 1 x 20, counted in dimension 1 of the model's first tensor"
    assert counted in out
    assert 1 == out.count("counted")
    assert not any("time of other" in unseen for unseen in found["unseen"])
    assert found["largest_micro_batch"] > 20


def test_a_dimension_without_the_stated_samples_is_refused(tmp_path):
    status, out, _ = advise(tmp_path, SHAPES, "--micro-batch", "20@2")
    assert 1 == status
    assert "20@2, but the model's first tensor has shape (9, 20, 6)" in out


def test_a_program_that_freezes_its_garbage_is_seen(tmp_path):
    """Before the first step, as before forks."""
    body = "import gc\nzeros = torch.optim.SGD.zero_grad\n"
    body += "def zero_grad(self): zeros(self); gc.freeze()\n"
    body += "torch.optim.SGD.zero_grad = zero_grad\nmain(30)"
    _, out, _ = advise(tmp_path, body)
    assert "Noise scale" in out


BALANCED = """
model = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(25):
    x = torch.randn(32, 4)
    optimizer.zero_grad()
    rows = torch.cat([x, -x])[torch.randperm(64)]  # the gradient of all is 0
    model(rows).mean().backward()
    optimizer.step()
"""

STATUSES = {
    "without a size": (BALANCED, 1, "No batch size: ", ""),
    "without an upper end": ("main(9)", 1, "No batch size: the fastest one may be any from ", ""),
    "without a training": ("pass", 1, "No advice: the program ended without a step", ""),
    "too short": ("main(3)", 1, "at least 6 are needed", ""),
    "of its own": ("main(30)\nsys.exit(3)", 3, "Noise scale", ""),
    "in words": ("main(30)\nsys.exit('a reason')", 1, "Noise scale", "a reason\n"),
    "zero": ("main(30)\nsys.exit(0)", 0, "Noise scale", ""),
    "an error": ("main(30)\nraise ValueError('own')", 1, "Noise scale", "ValueError: own\n"),
    "an interrupt": ("main(30)\nraise KeyboardInterrupt", -2, "Noise scale", "KeyboardInterrupt\n"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STATUSES)
def test_the_status_is_that_of_the_program(tmp_path, name):
    body, expected, shown, said = STATUSES[name]
    status, out, error = advise(tmp_path, body)
    assert expected == status
    assert shown in out
    assert error.endswith(said)
    assert ('train.py", line' in error) == (name in {"an error", "an interrupt"})
    assert name == "an interrupt" or "at exit" in out


@pytest.mark.thorough
def test_the_end_of_the_observation_ends_the_program_in_order(tmp_path):
    body = "try:\n    main(10_000)\nfinally:\n    print('finally')\nprint('never')"
    status, out, error = advise(tmp_path, body, "--steps", 12)
    assert (1, "") == (status, error)  # the noise scale has no upper end yet
    assert out.startswith("finally\n")
    assert out.endswith("at exit\n")
    assert "never" not in out


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("steps", [15, 1000])
def test_workers_of_a_loader_end_with_the_program(tmp_path, context, steps):
    body = f"main(40, workers=1, context={context!r})"
    status, out, error = advise(tmp_path, body, "--steps", steps)
    assert (0, "") == (status, error)
    assert 1 == out.count("Noise scale")
    assert 1 == out.count("at exit")


@pytest.mark.thorough
def test_the_help_of_bigbatch_lists_advise():
    done = run(sys.executable, "-m", "bigbatch", "--help")
    assert "advise" in done.stdout


# without a process of its own


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: SCRIPT"),
        (["nowhere.py"], "there is no script nowhere.py; a module needs -m"),
        (["--steps", "0", __file__], "0 is not at least 1"),
        (["--steps", "many", __file__], "invalid _count value: 'many'"),
        (["--groups", "-1", __file__], "-1 is not at least 1"),
        (["--budget", "5 days", __file__], "'5 days' is no time such as"),
        (["--bandwidth", "0", __file__], "gigabytes_per_second"),
        (["--latency", "-1", __file__], "microseconds"),
        (["-o", "page.pdf", __file__], "page.pdf must end in .html, .json, .txt"),
        (["--micro-batch", "0", __file__], "'0' must be samples of a backward, as 20, or as 20@1"),
        (["--micro-batch", "20@", __file__], "'20@' must be samples of a backward"),
        (["--step", "5", __file__], "unrecognized arguments: --step"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ending:
        command(arguments)
    printed = capsys.readouterr()
    assert (2, "") == (ending.value.code, printed.out)
    last = printed.err.splitlines()[-1]
    assert said in last
    assert last.startswith("bigbatch advise: error: ")
    assert "Traceback" not in printed.err


def test_options_of_the_script_are_its_own(tmp_path, capsys, monkeypatch):
    """Even those that advise has, too."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    with pytest.raises(SystemExit) as ending:
        command([str(script), "--steps", "many", "-o", "x.pdf", "--", "-m"])
    assert 1 == ending.value.code  # without a training
    assert "['--steps', 'many', '-o', 'x.pdf', '--', '-m']\n" in capsys.readouterr().out


def test_the_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ending:
        command(["--help"])
    assert 0 == ending.value.code
    text = capsys.readouterr().out
    for option in ("-m", "--steps", "--budget", "--go-on", "--out", "--groups", "--bandwidth"):
        assert option in text


@pytest.mark.thorough
def test_the_example_of_the_readme_has_advice(tmp_path):
    page = tmp_path / "page.json"
    example = Path(__file__).parents[2] / "examples" / "digits.py"
    options = ("--steps", 400, "-o", page)
    done = run(sys.executable, "-m", "bigbatch", "advise", *options, example, OMP_NUM_THREADS="1")
    assert 0 == done.returncode
    found = json.loads(page.read_text())
    assert ("SGD", 8, "groups") == tuple(
        found["found"][name] for name in ("optimizer", "batch_size", "way")
    )
    assert [1, 8, 64, 512] == [row["devices"] for row in found["devices"]]
    assert all(text in done.stdout for text in ("Noise scale", "Fastest batch", "How sure"))


def test_every_option_that_a_page_or_a_refusal_names_is_one_of_the_command():
    known = {option for action in argument_parser()._actions for option in action.option_strings}
    sources = Path(advisor.__file__).parent.glob("*.py")
    trainers = {"--micro-batch-size", "--global-batch-size"}  # Megatron-LM's
    for source in sources:
        text = source.read_text()
        assert set(re.findall(r"(?<![-\w])--[a-z][-a-z]+", text)) <= known | trainers, source
        assert "groups=None" not in text
