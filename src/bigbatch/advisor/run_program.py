"""Runs a program in this process as Python itself would."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import SettingError


def run_program(target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Runs a script, or a module as `python -m` does, as `__main__`."""
    sys.argv = [target, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(Path(target).absolute()), run_name="__main__")


def require_program(target: str, *, is_module: bool) -> None:
    """Raises SettingError if there is no such script."""
    if not is_module and not Path(target).exists():
        raise SettingError(f"there is no script {target}; a module needs -m")
