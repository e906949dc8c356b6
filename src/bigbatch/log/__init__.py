"""Run directories, console views, figures and reports."""

from bigbatch.optional_packages import import_optional

for _package in ("filelock", "jinja2", "PIL", "matplotlib", "rich", "tensorboard", "yaml"):
    import_optional(_package, "cli")
