"""What DeepSpeed compiles on first use, for up to a minute."""

from deepspeed.accelerator import get_accelerator


def compile_deepspeed() -> None:
    """Its collectives for a CPU; at once where they are in torch's cache of extensions."""
    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


if __name__ == "__main__":
    compile_deepspeed()
