"""The suite of aiokafka."""

import sys

from tests.compat.aiokafka.client import Aiokafka
from tests.compat.python.program import main

if __name__ == "__main__":
    sys.exit(main("aiokafka", "tests.compat.aiokafka", Aiokafka, sys.argv[1:]))
