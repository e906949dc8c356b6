"""Run directories, console views, figures and reports."""

from bigbatch.optional_packages import required

for _package in ("filelock", "jinja2", "PIL", "matplotlib", "rich", "tensorboard", "yaml"):
    required(_package, "cli")
