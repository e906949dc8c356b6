"""The command line before, around and after its commands: version, help, Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

import bigbatch as package
from bigbatch.cli import COMMANDS

# interrupts itself where a module is looked up for the first time
AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from bigbatch.cli import main
main()
"""
AFTER = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
from bigbatch.cli import main
main()
"""


def command(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it after &
    )


def test_the_version_is_said_without_torch():
    code = "import sys; from bigbatch.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    shown = command(code, "--version")
    version, modules = shown.stdout.splitlines()
    assert (0, "", f"bigbatch {package.__version__}") == (shown.returncode, shown.stderr, version)
    assert not {"torch", "numpy", "rich", "bigbatch.errors"} & set(modules.split())


def test_an_interrupt_before_anything_has_begun_is_one_line():
    ended = command(AT.format(module="numpy"), "compare", "runs")
    assert (130, "bigbatch: interrupted\n", "") == (ended.returncode, ended.stderr, ended.stdout)


def test_an_interrupt_after_the_end_changes_nothing():
    ended = command(AFTER, "--version")
    assert (0, "") == (ended.returncode, ended.stderr)


def test_the_list_of_commands_needs_no_torch():
    code = "import sys; from bigbatch.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    for arguments, status in ([], 2), (["--help"], 0):
        shown = command(code, *arguments)
        listed, _, modules = shown.stdout.rstrip().rpartition("\n")
        assert (status, "") == (shown.returncode, shown.stderr)
        assert {*COMMANDS} <= {*listed.split()}
        assert not {"torch", "numpy", "bigbatch.errors"} & set(modules.split())


REFUSED = [["compare", "nowhere"], ["report", "--no"], ["replay", "nowhere", "--policy=fixed"]]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_commands_that_read_logs_refuse_without_torch(arguments):
    code = "import sys; from bigbatch.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    refused = command(code, *arguments)
    assert (2, 1) == (refused.returncode, refused.stderr.count("\n"))
    assert not {"torch", "matplotlib"} & {*refused.stdout.split()}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_each_command_what_its_own_help_says(bigbatch, name):
    status, out, _ = bigbatch(name, "--help")
    assert 0 == status
    assert f"bigbatch {name} " in out
    assert COMMANDS[name] in " ".join(out.split())
    assert [] == [line for line in out.splitlines() if len(line) > 80]


def test_the_list_of_commands_fits_on_a_page(bigbatch):
    _, out, _ = bigbatch("--help")
    lines = out.splitlines()
    assert len(lines) <= 26
    for name, text in COMMANDS.items():
        assert f"  {name:7}  {text}" in lines


def test_ranks_but_the_first_do_not_list_the_commands(bigbatch, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert (0, "", "") == bigbatch("--help")


@pytest.fixture
def installed(tmp_path):
    """Installs a package with two commands; returns a runner of `python -m bigbatch`."""
    (tmp_path / "other_commands.py").write_text(
        '"""Commands."""\n'
        "from bigbatch.errors import RunError\n\n"
        "def greet(arguments):\n"
        '    """Greets by name."""\n'
        '    print("hello", *arguments)\n'
        "    return 3 if arguments else None\n\n"
        "def fail(arguments):\n"
        '    """Fails."""\n'
        '    raise RunError("it broke; mend it")\n'
    )
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[bigbatch.commands]\ngreet = other_commands:greet\nfail = other_commands:fail\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "bigbatch", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )

    return run


def test_commands_of_another_package_are_listed_under_its_name_and_run(installed):
    listed = installed("--help").stdout
    assert "Commands of other:\n  greet    Greets by name.\n  fail     Fails.\n" in listed
    greeted = installed("greet", "you")
    assert (3, "hello you\n", "") == (greeted.returncode, greeted.stdout, greeted.stderr)
    assert 0 == installed("greet").returncode
    failed = installed("fail")
    assert (2, "bigbatch: it broke; mend it\n") == (failed.returncode, failed.stderr)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("walk", "there is no command 'walk'; bigbatch --help lists them"),
        ("raport", "there is no command 'raport'; did you mean 'report'?"),
    ],
)
def test_an_unknown_command_is_one_line(bigbatch, name, message):
    assert (2, "", f"bigbatch: {message}\n") == bigbatch(name)
