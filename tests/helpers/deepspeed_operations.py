"""Compiles DeepSpeed's operations, up to a minute: once in each environment."""

import os
import sys
from pathlib import Path


def keep_compiled() -> None:
    """Caches them in this environment: two with one cache would replace each other's.

    Another ninja than the last would compile again, so the environment's own is always taken last.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)


def compile_deepspeed() -> None:
    """Compiles its collectives for CPUs, or loads them where they are compiled."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


if __name__ == "__main__":
    keep_compiled()
    compile_deepspeed()
