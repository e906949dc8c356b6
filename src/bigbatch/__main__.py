"""`python -m bigbatch`, and `torchrun ... -m bigbatch`."""

from bigbatch.cli import main

main()
