"""`bigbatch advise` on a script in a process of its own, or under torchrun; the script alone."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from torchrun import run, torchrun

ABORTED = "terminate called without an active exception"  # by gloo at exit: docs/LOG.md
SCRIPTS = Path(__file__).parents[1] / "advisor" / "scripts"


@dataclass(frozen=True)
class Advised:
    """What the command left.

    Args:
        process: the finished command.
        page: the JSON file that it wrote.
    """

    process: CompletedProcess
    page: dict


def advise(folder, script, *arguments, options=("--steps", 40), ranks=1) -> Advised:
    """Runs the command on a file, or on the script of this name in tests/advisor/scripts."""
    page = folder / "advice.json"
    command = ["-m", "bigbatch", "advise", *options, "-o", page, path_of(script), *arguments]
    process = start(*command, ranks=ranks)
    assert page.exists(), f"no advice, exit status {process.returncode}\n{process.stderr}"
    return Advised(process, json.loads(page.read_text()))


def losses_of(folder, script, *arguments, under=(), ranks=1, statuses=(0,)) -> list[float]:
    """Those that a script of tests/advisor/scripts writes.

    Args:
        folder: to write them to.
        script: name of the script.
        arguments: of the script.
        under: the command that runs the script.
        ranks: processes of the script.
        statuses: with which the process may end.
    """
    file = folder / f"{len(list(folder.iterdir()))}.losses.json"
    process = start(*under, path_of(script), *arguments, "--losses", file, ranks=ranks)
    assert process.returncode in statuses, process.stderr
    return json.loads(file.read_text())


def start(*command, ranks=1) -> CompletedProcess:
    """The finished command; ranks that gloo aborts at exit are started again."""
    if ranks == 1:
        return run(sys.executable, *command, OMP_NUM_THREADS="1")
    for _ in range(4):
        process = torchrun(ranks, *command)
        if ABORTED not in process.stderr:
            break
    return process


def path_of(script) -> Path:
    return script if isinstance(script, Path) else SCRIPTS / f"{script}.py"
