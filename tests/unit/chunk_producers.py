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

    def produce(self, sample_id, length, *, delay=0.0, fail_after=None, fill=0, **kwargs):
        writer = self.open(sample_id, **kwargs)
        whole = make_whole(length, fill)

        def run():
            try:
                with writer:
                    for index, start in enumerate(range(0, length, PIECE)):
                        if index == fail_after:
                            raise KeyError("the prefill went wrong")
                        time.sleep(delay)
                        writer.append(cut(whole, start, min(start + PIECE, length)))
            except (NcclStreamError, KeyError) as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return whole

    def join(self):
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
