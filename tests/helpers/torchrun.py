"""Commands under the real torchrun, and in one process."""

import os
import subprocess
import sys

SECONDS = 240  # far more than needed: a hang ends as a failure


def torchrun(ranks, *command, restarts=0, killed_at=0, **variables):
    """The finished torchrun, whose own lines begin with a level and a date."""
    options = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    return run(*launcher, *command, OMP_NUM_THREADS="1", KILLED_AT=str(killed_at), **variables)


def alone(*command):
    return run(sys.executable, *command)


def run(*command, **variables):
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, **variables},
    )


def said(result):
    """The lines of bigbatch on standard error."""
    return [line for line in result.stderr.splitlines() if line.startswith("bigbatch: ")]
