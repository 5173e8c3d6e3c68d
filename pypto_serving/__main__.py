"""`python -m pypto_serving`: the same command line as `pypto-serving`."""

import sys

from pypto_serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
