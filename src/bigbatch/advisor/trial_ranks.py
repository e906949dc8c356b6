"""The processes of a run: one, or one for each rank of torchrun, of which rank 0 decides."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bigbatch.advisor.trial_process import Trial
from bigbatch.errors import SettingError

_KEY = "bigbatch/trial"
_PATIENCE = timedelta(hours=24)  # of the other ranks for a next run
_POLL = 0.2  # seconds between two looks at whether rank 0 has ended


class TrialRanks:
    """Starts the runs on every rank of this machine.

    Ranks share what torchrun's agent keeps (its store), since the program's own process group may
    be gone. Each run gets a port of its own for its process group. Rank 0 ends a run; those of
    the other ranks, which wait for it then, are killed.

    Args:
        environment: that of this process before the program ran.
    Raises:
        SettingError: the ranks are on several machines, or without torchrun.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self.rank = int(environment.get("RANK", 0))
        ranks = int(environment.get("WORLD_SIZE", 1))
        self._runs = 0
        self._store: Any = None
        if ranks == 1:
            return
        if environment.get("LOCAL_WORLD_SIZE") != str(ranks):
            raise SettingError("--try runs on one machine, started by python or by torchrun")
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store: Any = vars(dist)["TCPStore"]
        self._store = store(address, port, is_master=False, timeout=_PATIENCE)

    def run(self, trial: Trial, variables: Mapping[str, str], output: Path, seconds: float) -> int:
        """Runs a trial on all ranks; returns rank 0's exit status.

        Raises:
            subprocess.TimeoutExpired: it did not end within so many seconds.
        """
        variables = dict(variables)
        if self._store is not None:
            variables |= {"MASTER_PORT": str(_free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            self._store.set(f"{_KEY}/{self._runs}", json.dumps([trial.as_json(), variables]))
        try:
            with output.open("wb") as file, self._process(trial, variables, file) as process:
                try:
                    return process.wait(seconds)
                finally:
                    process.kill()
        finally:
            if self._store is not None:
                self._store.set(f"{_KEY}/{self._runs}/ended", "")
            self._runs += 1

    def end(self) -> None:
        """Lets the other ranks know that no run follows."""
        if self._store is not None:
            self._store.set(f"{_KEY}/{self._runs}", "null")

    def follow(self) -> None:
        """Takes part in the runs of rank 0, until it ends."""
        for number in range(sys.maxsize):
            run = json.loads(self._store.get(f"{_KEY}/{number}"))
            if run is None:
                return
            trial = Trial.from_json(run[0]).of_other_rank()
            with self._process(trial, run[1], subprocess.DEVNULL) as process:
                try:
                    while not self._store.check([f"{_KEY}/{number}/ended"]):
                        with suppress(subprocess.TimeoutExpired):
                            process.wait(_POLL)
                            break
                    self._store.get(f"{_KEY}/{number}/ended")
                finally:
                    process.kill()

    def _process(
        self, trial: Trial, variables: Mapping[str, str], output: Any
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(  # noqa: S603  # what the user runs
            [sys.executable, "-m", "bigbatch.advisor.trial_process", trial.as_json()],
            cwd=trial.users,
            env={**self._environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
