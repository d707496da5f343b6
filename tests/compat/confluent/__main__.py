"""The suite of librdkafka through confluent-kafka."""

import sys

from tests.compat.confluent.client import Confluent, ServerSideConfluent
from tests.compat.python.program import main

if __name__ == "__main__":
    sys.exit(main("confluent", "tests.compat.confluent", Confluent, sys.argv[1:], server_side=ServerSideConfluent))
