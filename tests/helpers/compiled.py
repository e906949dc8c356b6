"""What DeepSpeed compiles on first use, for up to a minute: once for each environment."""

import os
import sys
from pathlib import Path


def keep_compiled() -> None:
    """In this environment: two that share torch's folder compile again whenever they take turns."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def compile_deepspeed() -> None:
    """Its collectives for a CPU; at once where they are compiled."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


if __name__ == "__main__":
    keep_compiled()
    compile_deepspeed()
