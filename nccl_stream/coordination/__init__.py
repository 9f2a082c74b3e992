"""Control plane: a typed TCPStore adapter, membership, reliable mail, owner-side delivery, draft-side intake, rounds.

Nothing here moves tensors or imports the transport. ``delivery``, ``intake``, ``rounds`` and ``mailbox`` are pure state
machines (no thread, no clock of their own, no I/O); ``node`` owns the threads and the store connection.
"""
