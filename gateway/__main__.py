"""`python -m gateway` is `sluice`."""

import sys

from gateway.cli import main

sys.exit(main())
