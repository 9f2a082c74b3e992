"""A worker that a launcher starts as a module: ``python -m tests.distributed.launched SPEC JOURNAL``."""

import json
import os
import sys

from tests.distributed import workers
from tests.distributed.harness import Journal


def main():
    spec, journal = json.loads(sys.argv[1]), Journal(sys.argv[2])
    journal.say("pid", pid=os.getpid())
    try:
        workers.target(spec, journal)
    except BaseException as exc:
        journal.say("error", type=type(exc).__name__, text=str(exc))
        raise


if __name__ == "__main__":
    main()
