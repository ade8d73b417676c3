"""`python -m kcdsl`: the command line, which nothing of this package is imported for before."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("kcdsl.cli").main())
