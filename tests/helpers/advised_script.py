"""`bigbatch advise` on a script in a process of its own, or under torchrun; the script alone."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from torchrun import run, torchrun

SCRIPTS = Path(__file__).parents[1] / "advise" / "scripts"


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
    """Runs the command on a file, or on the script of this name in tests/advise/scripts."""
    page = folder / "advice.json"
    command = ["-m", "bigbatch", "advise", *options, "-o", page, path_of(script), *arguments]
    process = start(*command, ranks=ranks)
    assert page.exists(), f"no advice, exit status {process.returncode}\n{process.stderr}"
    return Advised(process, json.loads(page.read_text()))


def losses_of(folder, script, *arguments, under=(), ranks=1) -> list[float]:
    """Those that a script of tests/advise/scripts writes.

    Args:
        folder: to write them to.
        script: name of the script.
        arguments: of the script.
        under: the command that runs the script.
        ranks: processes of the script.
    """
    file = folder / f"{len(list(folder.iterdir()))}.losses.json"
    process = start(*under, path_of(script), *arguments, "--losses", file, ranks=ranks)
    assert 0 == process.returncode, process.stderr
    return json.loads(file.read_text())


def start(*command, ranks=1) -> CompletedProcess:
    if ranks > 1:
        return torchrun(ranks, *command)
    return run(sys.executable, *command, OMP_NUM_THREADS="1")


def path_of(script) -> Path:
    return script if isinstance(script, Path) else SCRIPTS / f"{script}.py"
