"""The suite of kcat."""

import sys

from tests.compat.kcat.client import Kcat
from tests.compat.python.program import main

if __name__ == "__main__":
    sys.exit(main("kcat", "tests.compat.kcat", Kcat, sys.argv[1:]))
