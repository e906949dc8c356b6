"""Launches by torchrun: rendezvous of the ranks, errors that are printed once, and restarts."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

from bigbatch.cli.exit_status import line_of, one_line
from bigbatch.errors import BigbatchError, RankError, RunError
from bigbatch.interrupts import INTERRUPTED, ignore_interrupts
from bigbatch_recipes import process_group
from bigbatch_recipes.new_directory import has_begun, launch_of, release, require_free

_RUN_ID = "TORCHELASTIC_RUN_ID"  # of torchrun's variables
_NO_ID = "none"  # the id of a launch without --rdzv-id
_DIRECTORY_KEY = "bigbatch/place"
_WORKER_LOST = re.compile(r"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)")


class Launch:
    """The processes that were started together.

    They share a store. Normally torchrun hosts it, and it outlives the workers; with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or without torchrun, rank 0 hosts it, and it ends with
    rank 0. So a run and a study also name on disk the launch that began them, for restarts.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._attempt: Any = None  # store of these workers, not of those before a restart
        self.id: str | None = None  # torchrun's id of all attempts, if it has one
        if store is not None:
            import torch.distributed as dist

            # new nodes restart the workers with the same count, but with another port
            names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
            attempt = "/".join(os.environ.get(name, "0") for name in names)
            self._attempt = dist.PrefixStore(f"bigbatch/{attempt}", store)  # type: ignore[attr-defined]
            run_id = os.environ.get(_RUN_ID, _NO_ID)
            self.id = None if run_id == _NO_ID else run_id

    @classmethod
    def join(cls, *, trains: bool) -> "Launch":
        """Joins the other ranks, if torchrun or another launcher that sets WORLD_SIZE started some.

        A command that does not train runs on rank 0 alone; the other ranks exit here.

        Raises:
            RankError: the variables are incomplete, or the rendezvous fails.
        """
        if is_single_process() or not trains:
            if not is_single_process() and os.environ.get("RANK", "0") != "0":
                sys.exit(0)
            return cls()
        import torch.distributed as dist  # seconds, which a single process takes when it trains

        from bigbatch.gradients import is_of_network

        try:
            store, rank, count = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            launch = cls(store)
            dist.init_process_group(backend(), store=launch._attempt, rank=rank, world_size=count)
        except ValueError as error:
            raise RankError(f"{error}; start the ranks by torchrun, or unset WORLD_SIZE") from None
        except RuntimeError as error:
            if not is_of_network(error):
                raise
            raise RankError(_rendezvous_failure(error)) from None
        return launch

    def report_error(self, message: str) -> None:
        """Writes why the command ends, as one line, on the first rank that reports it."""
        line = one_line(message)
        first = self._is_first(f"message {line}")
        self._is_first("failed")
        if first:
            sys.stderr.write(line)

    def _is_first(self, key: str) -> bool:
        """Whether no rank has used this key before; True if the store is gone, as with rank 0."""
        if self._attempt is not None:
            with suppress(RuntimeError):
                return bool(self._attempt.add(key, 1) == 1)
        return True

    def report_failure(self, error: Exception) -> None:
        """Reports that this rank fails, or that another is lost and has not reported why.

        Raises:
            Exception: the error itself, in a single process.
        """
        if self._attempt is None:
            raise error
        from bigbatch.gradients import is_of_network

        if not is_of_network(error):
            traceback.print_exception(error)
            message = (
                f"rank {process_group.rank()} of {process_group.world_size()}: {_describe(error)}"
            )
        else:
            message = (
                f"another rank was lost ({str(error).split('. ')[0]}), so this training ends; "
                "if it prints no reason, torchrun --max-restarts N would continue from the last "
                "checkpoint"
            )
        if self._is_first("failed"):
            self.report_error(message)

    def choose_directory(self, choose: Callable[[], Path]) -> tuple[Path, bool]:
        """The directory to train in, and whether workers before a restart began it. On rank 0.

        It is in the store; if that is gone, the run or study names the launch that began it.
        """
        stored = self._store is not None and self._store.check([_DIRECTORY_KEY])
        path = Path(self._store.get(_DIRECTORY_KEY).decode()) if stored else choose()
        is_own = stored or (self.id is not None and launch_of(path) == self.id)
        if is_own and has_begun(path):
            if not stored:
                warnings.warn(f"continuing with {path}, which launch {self.id} began", stacklevel=2)
            return path, True
        require_free(path)
        if self._store is not None:
            self._store.set(_DIRECTORY_KEY, str(path))
        return path, False

    @contextmanager
    def resumable(self, path: Path, command: str = "train") -> Iterator[None]:
        """Reports the command that resumes the run or study at `path` after an interrupt or error.

        If nothing has begun there, the path is free again afterwards.

        Raises:
            RunError: a worker of the DataLoader was killed.
        """
        remedy = f"`bigbatch {command} --resume {path}` continues"
        try:
            yield
        except KeyboardInterrupt:
            if not has_begun(path):
                raise
            ignore_interrupts()  # torchrun sends it twice
            self.report_error(f"interrupted; {remedy}")
            sys.exit(INTERRUPTED)
        except Exception as error:
            is_lost = isinstance(error, ConnectionError) or _WORKER_LOST.search(str(error))
            if not (is_lost and has_begun(path)):
                raise
            sys.unraisablehook = lambda _: None  # the loader's __del__ may miss the worker too
            reason = str(error).strip(". ")
            raise RunError(
                f"a worker of the DataLoader was lost ({reason}), often for lack of memory; "
                + remedy
            ) from None
        finally:
            release(path)

    def end(self, status: Any) -> NoReturn:
        """Ends the process."""
        sys.stdout.flush()
        sys.stderr.flush()
        if process_group.world_size() > 1:
            os._exit(int(status or 0))  # gloo's threads may crash Python's finalization
        sys.exit(status)


def is_single_process() -> bool:
    """Whether no launcher started this process: neither torchrun nor one that sets WORLD_SIZE."""
    return os.environ.get("WORLD_SIZE", "1") == "1" and _RUN_ID not in os.environ


@contextmanager
def stdout_of_rank_zero() -> Iterator[None]:
    """Discards the standard output of all ranks but 0."""
    if process_group.is_rank_zero():
        yield
        return
    with Path(os.devnull).open("w") as devnull, redirect_stdout(devnull):
        yield


def backend() -> str:
    """The backend of the process group; with GPUs, each rank takes one of its machine."""
    import torch
    import torch.distributed as dist

    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _describe(error: Exception) -> str:
    prefix = "bigbatch: "
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(prefix)]
    return "; ".join(
        [f"{type(error).__name__}: {error}", *(note.removeprefix(prefix) for note in notes)]
    )


def _rendezvous_failure(error: Exception) -> str:
    address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = str(error).partition("\n")[0]
    return (
        f"the ranks did not meet at {address} ({reason}); check that all of them are started and "
        "that no other process uses this port of rank 0, or start them by torchrun"
    )


Command = Callable[[list[str], Launch], int | None]


def run(name: str, function: Command, arguments: list[str]) -> NoReturn:
    """Runs a command on all ranks, and exits."""
    if not process_group.is_rank_zero():
        warnings.showwarning = lambda *_, **__: None  # rank 0 shows it
    launch = Launch()
    try:
        try:
            launch = Launch.join(trains=name == "train")
            with stdout_of_rank_zero():
                status = function(arguments, launch) or 0
        finally:
            ignore_interrupts()
    except (BigbatchError, OSError) as error:
        launch.report_error(_line_of(error))
        status = 2
    except KeyboardInterrupt:
        launch.report_error("interrupted")
        status = INTERRUPTED
    except Exception as error:
        launch.report_failure(error)
        status = 1
    except SystemExit as ending:
        launch.end(ending.code)
    launch.end(status)


def _line_of(error: Exception) -> str:
    """The message of an error, without the traceback that torch adds in a DataLoader worker."""
    text, name = line_of(error), type(error).__name__
    if f"Caught {name} in DataLoader worker process" in text:
        return text.rpartition(f"{name}: ")[2]
    return text
