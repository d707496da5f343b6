"""The suite of kafka-python."""

import sys

from tests.compat.kafka_python.client import KafkaPython
from tests.compat.python.program import main

if __name__ == "__main__":
    sys.exit(main("kafka_python", "tests.compat.kafka_python", KafkaPython, sys.argv[1:]))
