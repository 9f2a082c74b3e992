"""``python -m nccl_stream`` is the ``nccl-stream`` command."""

import sys

from nccl_stream.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
