"""``python -m nccl_stream`` is the ``nccl-stream`` command."""

import sys

from nccl_stream.cli import main

sys.exit(main())
