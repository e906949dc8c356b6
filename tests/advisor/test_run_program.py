"""Programs run in this process as Python itself would run them."""

import json
import os
import runpy
import sys

import pytest

from bigbatch.advisor.run_program import require_program, run_program
from bigbatch.errors import SettingError

SHOW = """
import json, sys
print(json.dumps([sys.argv, sys.path[0], __name__, __file__]))
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch, tmp_path):
    """argv, path and modules are this process's own."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


def shown(capsys):
    return json.loads(capsys.readouterr().out)


def test_a_script_has_its_own_argv_path_and_name(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    script = tmp_path / "inner" / "train.py"
    script.write_text(SHOW)
    run_program("inner/train.py", ["--lr", "1"], is_module=False)
    argv = [str(script), "--lr", "1"]  # absolute, as __file__ is: a program may change its folder
    assert [argv, str(script.parent), "__main__", str(script)] == shown(capsys)


def test_a_module_has_the_path_of_python_m(tmp_path, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(SHOW)
    run_program("package.train", ["-m", "x"], is_module=True)
    file = str(tmp_path / "package" / "train.py")
    assert [[file, "-m", "x"], str(tmp_path), "__main__", file] == shown(capsys)


def test_a_script_imports_its_neighbours(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "neighbour_of_train.py").write_text("VALUE = 7\n")
    script = tmp_path / "inner" / "train.py"
    script.write_text("import neighbour_of_train\nprint(neighbour_of_train.VALUE)\n")
    run_program(str(script), [], is_module=False)
    assert "7\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("raise ValueError('own')", ValueError),
        ("raise KeyboardInterrupt('own')", KeyboardInterrupt),
        ("raise SystemExit('own')", SystemExit),
    ],
)
def test_what_a_program_raises_passes_with_its_line(tmp_path, line, error):
    script = tmp_path / "train.py"
    script.write_text(f"x = 1\n{line}\n")
    with pytest.raises(error, match="own") as caught:
        run_program(str(script), [], is_module=False)
    last = caught.traceback[-1]
    assert (os.fspath(script), 1) == (os.fspath(last.path), last.lineno)  # lines from 0


def test_a_missing_script_is_refused_with_the_option_for_modules(tmp_path):
    with pytest.raises(SettingError, match=r"there is no script package\.train; a module needs -m"):
        require_program("package.train", is_module=False)
    require_program("package.train", is_module=True)
    (tmp_path / "train.py").write_text("")
    require_program("train.py", is_module=False)


def test_python_runs_a_script_likewise(tmp_path, capsys):
    """`runpy` itself is the reference for the names that a script sees."""
    script = tmp_path / "train.py"
    script.write_text("print(sorted(globals()))\n")
    run_program(str(script), [], is_module=False)
    actual = capsys.readouterr().out
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == actual
