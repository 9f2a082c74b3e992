"""What the tests of chunked loading have in common: producers of streamed samples, each in a thread of its own."""

import threading
import time

from nccl_stream.chunk_policy import LeftContextChunkPolicy
from nccl_stream.errors import NcclStreamError
from nccl_stream.testing.stream_suite import PIECE, SPECS, cut, make_whole

POLICY = LeftContextChunkPolicy(2, 1)  # pieces; a window of 4 holds a chunk, its context and one more
WAIT_S = 60.0


class Producers:
    """Opens streamed samples in ``store``, and puts their refs on ``queue``."""

    def __init__(self, store, queue):
        self.source, self.sink = store, queue
        self.threads = []
        self.errors = []

    def open(self, sample_id, *, window=4, **kwargs):
        writer = self.source.open_stream(sample_id, SPECS, "run", piece_length=PIECE, window=window, **kwargs)
        self.sink.put(writer.ref)
        return writer

    def produce(self, sample_id, length, *, before=lambda: None, fail_after=None, fill=0, **kwargs):
        """Append pieces in a thread of their own; ``before`` is called there before each."""
        writer = self.open(sample_id, **kwargs)
        whole = make_whole(length, fill)

        def run():
            try:
                with writer:
                    for index, start in enumerate(range(0, length, PIECE)):
                        if index == fail_after:
                            raise KeyError("the prefill went wrong")
                        before()
                        writer.append(cut(whole, start, min(start + PIECE, length)))
            except (NcclStreamError, KeyError) as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return whole

    @staticmethod
    def pass_time(table, clock):
        """What to call before each piece: it lets the clock of a lease table run on, and waits for a renewal."""

        def wait_until(condition):
            limit = time.monotonic() + WAIT_S
            while not condition():
                assert time.monotonic() < limit, "the lease is not renewed"
                time.sleep(0.005)

        def before():
            wait_until(lambda: table.next_deadline() is not None)
            clock.advance(0.6 * table.visibility_timeout.seconds)  # two of these without a renewal would end the lease
            wait_until(lambda: table.next_deadline() >= clock.now + table.visibility_timeout.seconds)

        return before

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
