"""`python -m sluice` is the `sluice` command."""

from __future__ import annotations

import sys

from sluice._commands import main

if __name__ == "__main__":
    sys.exit(main())
