"""What torchrun started: the ranks meet here, say what goes wrong once, and survive a restart."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bigbatch.errors import RankError
from bigbatch.experiments import process_group
from bigbatch.gradients import is_of_network
from bigbatch.interrupts import INTERRUPTED, ignore_interrupts
from bigbatch.runs.atomic_files import has_begun, release, require_free
from bigbatch.runs.run_config import launch_of

_RUN_ID = "TORCHELASTIC_RUN_ID"  # of torchrun's variables
_NO_ID = "none"  # of every launch that was given no name and no rendezvous
_PLACE = "bigbatch/place"


class Launch:
    """The processes that were started together.

    What they have in common is kept in a store. As a rule torchrun itself keeps it, and it outlives
    the workers; with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or without torchrun, rank 0 does, and it
    ends with that. So what a restart has to know stands on the disk too: a run and a study name the
    launch that began them.

    Args:
        store: of the ranks; None for a process that was started alone.
    """

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._now: Any = None  # what belongs to these workers, not to those before
        self.id: str | None = None  # torchrun's name for all attempts, where it is one
        if store is not None:
            # the count stays where workers start again because nodes came; the port does not
            names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
            attempt = "/".join(os.environ.get(name, "0") for name in names)
            self._now = dist.PrefixStore(f"bigbatch/{attempt}", store)  # type: ignore[attr-defined]
            given = os.environ.get(_RUN_ID, _NO_ID)
            self.id = None if given == _NO_ID else given

    @classmethod
    def join(cls, *, trains: bool) -> "Launch":
        """Meets the other ranks, where there are some: under torchrun, or what sets WORLD_SIZE too.

        A command that trains nothing is done by rank 0, which meets nobody; the others end here.

        Raises:
            RankError: the variables are incomplete, or the others are not met where they say.
        """
        if alone() or not trains:
            if not alone() and os.environ.get("RANK", "0") != "0":
                sys.exit(0)
            return cls()
        try:
            store, rank, count = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
            launch = cls(store)
            dist.init_process_group(backend(), store=launch._now, rank=rank, world_size=count)
        except ValueError as error:
            raise RankError(f"{error}; start the ranks by torchrun, or unset WORLD_SIZE") from None
        except RuntimeError as error:
            if not is_of_network(error):
                raise
            raise RankError(_unmet(error)) from None
        return launch

    def tell(self, message: str) -> None:
        """Writes why the command ends, as one line, on the first rank that says so."""
        printable = message.encode(errors="backslashreplace").decode()  # bytes of no text typed
        line = f"bigbatch: {' '.join(printable.split())}\n"
        first = self._is_first(f"message {line}")
        self._is_first("failed")
        if first:
            sys.stderr.write(line)

    def _is_first(self, key: str) -> bool:
        """Whether no rank has asked this before; yes where the store is gone, with rank 0 say."""
        if self._now is not None:
            with suppress(RuntimeError):
                return bool(self._now.add(key, 1) == 1)
        return True

    def tell_failure(self, error: Exception) -> None:
        """What to say where this rank fails, or where another is gone and has not said why.

        Raises:
            Exception: the error itself, where this process is alone.
        """
        if self._now is None:
            raise error
        if not is_of_network(error):
            traceback.print_exception(error)
            message = f"rank {process_group.rank()} of {process_group.count()}: {_in_words(error)}"
        else:
            message = (
                f"another rank was lost ({str(error).split('. ')[0]}), so this training ends; "
                "where it says no reason, torchrun --max-restarts N would continue from the last "
                "checkpoint"
            )
        if self._is_first("failed"):
            self.tell(message)

    def place(self, choose: Callable[[], Path]) -> tuple[Path, bool]:
        """Where to train, and whether workers before a restart have begun there. On rank 0.

        The store remembers; where it is gone, the launch that the run or study names tells.

        Raises:
            RunError: something is there that this launch did not begin.
        """
        stored = self._store is not None and self._store.check([_PLACE])
        place = Path(self._store.get(_PLACE).decode()) if stored else choose()
        ours = stored or (self.id is not None and launch_of(place) == self.id)
        if ours and has_begun(place):
            if not stored:
                warnings.warn(
                    f"continuing with {place}, which launch {self.id} began", stacklevel=2
                )
            return place, True
        require_free(place)
        if self._store is not None:
            self._store.set(_PLACE, str(place))
        return place, False

    @contextmanager
    def resumable(self, place: Path, command: str = "train") -> Iterator[None]:
        """Says by which command what is at `place` continues, where it is interrupted.

        Where nothing has begun, the place is free again afterwards.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not has_begun(place):
                raise
            ignore_interrupts()  # torchrun sends it twice
            self.tell(f"interrupted; `bigbatch {command} --resume {place}` continues")
            sys.exit(INTERRUPTED)
        finally:
            release(place)

    def end(self, status: Any) -> NoReturn:
        """Ends the process."""
        sys.stdout.flush()
        sys.stderr.flush()
        if process_group.count() > 1:
            os._exit(int(status or 0))  # gloo's threads and Python's finalization do not get along
        sys.exit(status)


def alone() -> bool:
    """Whether neither torchrun nor what sets WORLD_SIZE has started several processes, or one."""
    return os.environ.get("WORLD_SIZE", "1") == "1" and _RUN_ID not in os.environ


@contextmanager
def heard_if_leading() -> Iterator[None]:
    """Standard output of rank 0 alone goes anywhere."""
    if process_group.leads():
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


def backend() -> str:
    """By which ranks talk; where there are GPUs, each rank takes its own of its machine."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _in_words(error: Exception) -> str:
    """Type, message, and what we noted on it."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("bigbatch: ")]
    said = [
        f"{type(error).__name__}: {error}",
        *(note.removeprefix("bigbatch: ") for note in notes),
    ]
    return "; ".join(said)


def _unmet(error: Exception) -> str:
    where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    reason = str(error).partition("\n")[0]
    return (
        f"the ranks did not meet at {where} ({reason}); see that all of them are started and that "
        "rank 0 has this port to itself, or start them by torchrun"
    )
