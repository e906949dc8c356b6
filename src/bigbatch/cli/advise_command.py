"""`bigbatch advise`: runs a program, observes its training, prints advice about the batch size.

It has no launcher of its own: the program handles ranks, signals and warnings as it does alone.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from bigbatch.advisor.advise import Advice, parse_seconds, require_ending
from bigbatch.advisor.cluster_time import Network
from bigbatch.advisor.observations import Limits
from bigbatch.advisor.run_program import require_program, run_program
from bigbatch.advisor.sample_count import parse_samples
from bigbatch.advisor.training_observer import EndOfProgram, TrainingObserver
from bigbatch.advisor.trial import Program, TrialLimits, new_folder, parse_limit, try_advice
from bigbatch.advisor.trial_ranks import TrialRanks
from bigbatch.advisor.trial_result import sentences
from bigbatch.errors import SettingError
from bigbatch.log.text_table import wrapped

_INTERRUPTED = 130  # the exit status of a shell's command that Ctrl-C has ended


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def advise(arguments: Sequence[str]) -> NoReturn:
    """Runs the command, and exits: 0 with advice, 1 without, or as the program does."""
    options = argument_parser().parse_args(arguments)
    try:
        seconds = parse_seconds(options.budget)
        limits = Limits(
            options.steps,
            seconds,
            options.groups,
            ends_program=not options.go_on,
            is_last=True,
            micro_batch=parse_samples(options.micro_batch),
        )
        network = Network(options.bandwidth, options.latency)
        require_program(options.target, is_module=options.module)
        for path in options.out:
            require_ending(path)
        paths = [Path(path).absolute() for path in options.out]  # programs change the folder
        for path in paths:
            _make_folder(path.parent)
        trial = ranks = None
        if options.trial:
            tries_in = new_folder(options.try_in)
            trial = TrialLimits(*parse_limit(options.try_for), options.seeds, tries_in)
            ranks = TrialRanks(os.environ)
        folder, began = Path.cwd(), time.perf_counter()
    except SettingError as error:
        argument_parser().error(str(error))
    observer = TrainingObserver(limits)
    status: int | str | None = None
    try:
        with observer:
            run_program(options.target, options.arguments, is_module=options.module)
    except EndOfProgram:
        pass
    except SystemExit as ending:
        status = ending.code
    finally:
        advice = Advice(observer.observations, network)
        _show(advice, paths)
    if trial is not None and ranks is not None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run outlives this process
        try:
            if ranks.rank:
                ranks.follow()
            elif not status and not advice.refusal:
                seconds = time.perf_counter() - began
                arguments = tuple(options.arguments)
                program = Program(options.target, arguments, options.module, folder, seconds)
                advice = _try(advice, program, trial, ranks, paths)
        except KeyboardInterrupt:
            _print(f"\nThe trial was stopped. Its folder can be deleted: {trial.folder}\n")
            status = _INTERRUPTED
        finally:
            ranks.end()
    if not status and not options.go_on:
        failed = advice.trial is not None and advice.trial.failure
        status = int(advice.batch_size is None or bool(failed))
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


def _make_folder(path: Path) -> None:
    """Makes the folder of a page; raises SettingError if that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out: {path} cannot be made: {error.strerror}") from None


def _try(
    advice: Advice, program: Program, limits: TrialLimits, ranks: TrialRanks, paths: Sequence[Path]
) -> Advice:
    """The advice with what its trial has shown, which is printed and written."""
    result = try_advice(advice, program, limits, ranks, lambda line: _print(f"{line}\n"))
    if isinstance(result, str):
        _print(f"Nothing was tried: {result}.\n")
        return advice
    advice = replace(advice, trial=result)
    _write(advice, paths)
    _print("\n" + "".join(f"{line}\n" for line in sentences(result)))
    return advice


def _show(advice: Advice, paths: Sequence[Path]) -> None:
    """Writes the files and prints the page, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    lines = _write(advice, paths)
    _print("".join([f"\n{advice}", *lines]))


def _write(advice: Advice, paths: Sequence[Path]) -> list[str]:
    """Writes the files; returns a line for each."""
    lines = []
    for path in paths:
        try:
            advice.write(path)
            lines.append(f"advice: {path}\n")
        except OSError as error:
            lines.append(f"bigbatch: {path} cannot be written: {error.strerror}\n")
    return lines


def _print(text: str) -> None:
    """Prints on the first stream that the program has left open."""
    streams = (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__)
    for stream in filter(None, streams):
        with suppress(OSError, ValueError):  # broken or closed
            stream.flush()
            if stream.isatty():
                text = f"{wrapped(text)}\n"
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
            return


def argument_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        "bigbatch advise",
        usage="bigbatch advise [OPTIONS] SCRIPT [ARGS]...\n"
        "       bigbatch advise [OPTIONS] -m MODULE [ARGS]...\n"
        "       torchrun ... -m bigbatch advise [OPTIONS] SCRIPT [ARGS]...",
        description="Runs your training script as it is, and advises a batch size. It measures the "
        "gradient noise and changes nothing in the training. Options for advise stand before the "
        "script, those of the script after it.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    add = parser.add_argument_group("how long to observe, and what to write").add_argument
    add("--steps", type=_count, default=2000, help="optimizer steps to observe [2000]")
    budget = "or at most so long, 90s or 5min, from the first step on [2min]"
    add("--budget", default="2min", metavar="TIME", help=budget)
    add("--go-on", action="store_true", help="let the program continue; default: end it")
    out = "also write a .html page, a .json or a .txt file; may be repeated"
    add("-o", "--out", action="append", default=[], metavar="FILE", help=out)
    add = parser.add_argument_group("trying the advice").add_argument
    tries = "afterwards train at the present and at the advised batch, and compare the losses"
    add("--try", dest="trial", action="store_true", help=tries)
    length = "how long each run trains: 90s, 5min, or 50000 for samples [as observed, at most 1min]"
    add("--try-for", metavar="LENGTH", help=length)
    add("--seeds", type=_count, default=2, help="runs at each batch size [2]")
    folder = "a new folder for the runs and their files [advise-trial]"
    add("--try-in", default="advise-trial", metavar="FOLDER", help=folder)
    add = parser.add_argument_group("assumptions").add_argument
    groups = "groups of samples of a backward that are compared [8]"
    add("--groups", type=_count, default=8, help=groups)
    micro_batch = "samples of a backward and rank, 20@1 if they are in dimension 1 [found]"
    add("--micro-batch", metavar="N", help=micro_batch)
    bandwidth = "assumed for a device's network [12.5]"
    add("--bandwidth", type=float, default=12.5, metavar="GB/s", help=bandwidth)
    latency = "assumed for a message, in microseconds [30]"
    add("--latency", type=float, default=30, metavar="US", help=latency)
    parser.add_argument("target", metavar="SCRIPT", help="your script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser
