"""A device without hardware that counts what a GPU would do: its operations, waits and copies.

It is torch's PrivateUse1, named "sim": the CPU's memory and kernels, and counters. `python -m
studies.simulated_device` compiles it; it is compiled on first use otherwise.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "sim"
_SOURCE = Path(__file__).with_suffix(".cpp")
_UNNAMED = "privateuseone"  # torch's own name, before a device takes it


class SimulatedDevice:
    """Counters of the process's simulated device, from `simulated_device`.

    An operation is a call of an operator that has a kernel: a multi-tensor call is one, and a view
    is none. A wait is what blocks the host until the device has done its work. Operations run at
    once, so a race is never seen.
    """

    name = NAME

    def reset(self) -> None:
        """Sets all counts to 0, and the peak to the memory in use."""
        torch.ops.simulated_device.reset()

    def operations(self) -> Counter[str]:
        """Operations since `reset`, by torch's name without the overload: `mul`, `_foreach_add_`.

        A multi-tensor call that GPUs run tensor by tensor, since layouts differ, is as many
        operations: `_foreach_add_, one by one`.
        """
        return self._counts("operation")

    def waits(self) -> Counter[str]:
        """Waits of the host: `item`, `copy to host`, `copy to device`, `synchronize`, `nonzero`."""
        return self._counts("wait")

    def copies(self) -> Counter[str]:
        """Copies `to host` and `to device`, those included that the host waits for."""
        return self._counts("copy")

    def copied_bytes(self) -> Counter[str]:
        """Bytes of the copies `to host` and `to device`."""
        return self._counts("bytes")

    def allocations(self) -> int:
        """Calls of `empty` and `empty_strided`, also by other operators in torch's own code."""
        return self._counts("allocation").total()

    def in_use(self) -> int:
        """Bytes of the device's tensors."""
        return self._counts("memory")["in use"]

    def peak(self) -> int:
        """Most bytes in use since `reset`."""
        return self._counts("memory")["peak"]

    @staticmethod
    def _counts(kind: str) -> Counter[str]:
        counts = torch.ops.simulated_device.counts()
        parts = ((key.split("/"), number) for key, number in counts.items())
        return Counter({name: number for (found, name), number in parts if found == kind})


def simulated_device() -> SimulatedDevice:
    """Makes the device "sim" known to torch, in this process; a second call changes nothing.

    Raises:
        RuntimeError: it cannot be compiled; the process has another device of PrivateUse1, or has
            run a backward, at which autograd starts a thread for each device that it knows.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name not in (NAME, _UNNAMED):
        raise RuntimeError(f"PrivateUse1 is named {name!r} in this process; start another one")
    if name == _UNNAMED:
        torch.ops.load_library(compiled_library())  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _device_module())  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
        _run_backward()
    return SimulatedDevice()


def _run_backward() -> None:
    try:
        torch.ones((), device=NAME, requires_grad=True).neg().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        message = "call simulated_device() before the first backward of the process"
        raise RuntimeError(message) from error


def compiled_library() -> Path:
    """The compiled source, compiled now if it is not: once in each environment, in 15 seconds.

    Raises:
        RuntimeError: no compiler, or one that fails.
    """
    version = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode())
    folder = Path(sys.prefix) / "torch_extensions" / "simulated_device"
    library = folder / f"{version.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process
            if not library.exists():
                _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RuntimeError("the simulated device needs a C++ compiler; set CXX or install c++")
    unfinished, torch_folder = library.with_suffix(".tmp"), Path(torch.__file__).parent
    options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-isystem{torch_folder}/include"]
    linked = [f"-L{torch_folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [compiler, *options, str(_SOURCE), "-o", str(unfinished), *linked]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode != 0:
        raise RuntimeError(f"the simulated device does not compile: {result.stderr[-2000:]}")
    unfinished.replace(library)


def _device_module() -> ModuleType:
    """What torch asks of a device's module: `torch.sim`.

    Random numbers are drawn by the CPU's generator, so the same seed gives the same numbers.
    """
    module = ModuleType(f"torch.{NAME}")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": lambda stream: nullcontext(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    vars(module).update(answers)
    return module


if __name__ == "__main__":
    compiled_library()
