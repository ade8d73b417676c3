"""`python -m kcdsl`."""

import sys

from kcdsl.cli import main

if __name__ == "__main__":
    sys.exit(main())
