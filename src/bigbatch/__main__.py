"""`python -m bigbatch`, and `torchrun ... -m bigbatch`."""

from bigbatch.cli import main

if __name__ == "__main__":  # also imported by a sweep's processes
    main()
