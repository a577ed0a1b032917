"""``python -m loadgen``: the same as ``slai-loadgen``."""

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
