"""Whole ranks without threads, with samples that travel in pieces among those that travel whole."""

import torch

from nccl_stream.coordination.stream_intake import IncomingPiece
from nccl_stream.errors import NcclStreamError, PeerTimeoutError, StreamBrokenError, StreamLostError
from nccl_stream.refs import FeatureSpec
from nccl_stream.streamed.sample import OpenFeatureSpec
from nccl_stream.transport.layout import ALIGN_BYTES, HEADER_BYTES
from tests.property.stream_world import DraftRank, TargetRank, World

PIECE = 8
SPECS = {
    "aux_hidden_states": OpenFeatureSpec((1, -1, 6), torch.float32),
    "input_ids": OpenFeatureSpec((1, -1), torch.int64),
    "attention_mask": OpenFeatureSpec((1, -1), torch.int64),
    "loss_mask": OpenFeatureSpec((1, -1), torch.int64),
    "constant": FeatureSpec((3, 5), torch.float64),
}


class Streamed(dict):
    """The features of a sample that travels in pieces."""

    def __init__(self, number, length):
        super().__init__(
            aux_hidden_states=torch.arange(length * 6.0).reshape(1, length, 6) + 1000 * number,
            input_ids=torch.arange(length).reshape(1, length) + number,
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            loss_mask=torch.ones(1, length, dtype=torch.int64),
            constant=torch.full((3, 5), float(number), dtype=torch.float64),
        )
        self.length = length

    def piece(self, start, length):
        piece = {}
        for name, spec in SPECS.items():
            if isinstance(spec, OpenFeatureSpec):
                piece[name] = self[name].narrow(spec.dim, start, length)
            elif start == 0:
                piece[name] = self[name]
        return piece


class Writing:
    """A streamed sample under production."""

    def __init__(self, writer, sample):
        self.writer, self.sample, self.done = writer, sample, 0
        self.owned = writer._sample

    def step(self):
        """Append the next piece, or close; returns whether that was the last step."""
        if self.done == self.sample.length:
            self.writer.close()
            return True
        length = min(PIECE, self.sample.length - self.done)
        try:
            self.writer.append(self.sample.piece(self.done, length), timeout=0.0)
        except PeerTimeoutError:
            return False  # a transfer that has ended, and of which we were not told, still has the memory
        self.done += length
        return False

    def can_step(self, side):
        stream, ring = self.owned.stream, self.owned._ring
        if stream.outcome or stream.stopped or not side.delivery.may_be_read(self.owned.ref.sample_id):
            return True  # and is told so
        if self.done == self.sample.length:
            return True
        index = len(stream.lengths)
        room = stream.retain or ring.largest_free_bytes >= self.owned.windows.slot_bytes(index)
        return stream.has_room and room


class StreamedTarget(TargetRank):
    """A target whose producers work on several samples at once."""

    def __init__(self, world, rank, to_put):
        super().__init__(world, rank, to_put)
        self.writing = []

    def put(self):
        sample_id, sample = self.to_put[0]
        if not isinstance(sample, Streamed):
            super().put()
            return
        if self.side.consumers_gone:
            self.to_put.clear()
            return
        writer = self.store.open_stream(
            sample_id, SPECS, "run", piece_length=PIECE, window=self.world.window, retain=self.world.retain
        )
        self.writing.append(Writing(writer, sample))
        self.side.offer(writer.ref)
        self.to_put.pop(0)
        self.offered += 1

    def write(self, writing):
        try:
            if writing.step():
                self.writing.remove(writing)
        except NcclStreamError as exc:
            self.world.write_errors.append(type(exc))
            writing.writer.fail(exc)
            self.writing.remove(writing)

    def fail_writer(self, writing):
        self.world.producer_failures -= 1
        writing.writer.fail("the forward went wrong")
        self.writing.remove(writing)

    def work(self):
        if self.state != "up":
            return []
        events = [(1, lambda w=w: self.write(w)) for w in self.writing if w.can_step(self.side)]
        if self.world.producer_failures:
            events += [(0.1, lambda w=w: self.fail_writer(w)) for w in self.writing]
        if self.to_put:
            sample = self.to_put[0][1]
            nbytes = self.world.window_bytes if isinstance(sample, Streamed) else sum(t.nbytes for t in sample.values())
            if self.store.room_for(nbytes) or self.side.consumers_gone:
                events.append((1, self.put))
        elif not self.side.delivery.closed:
            events.append((1, self.side.close_queue))
        elif not self.writing and self.done():
            events.append((1, self.leave))
        return events


class Reading:
    """A streamed sample under consumption."""

    def __init__(self, draft, lease):
        self.draft, self.lease = draft, lease
        self.reader = draft.store.open_reader(lease.ref)
        self.key = lease.ref.store_uri.rpartition("/")[2], lease.ref.sample_id
        self.sample = draft.world.samples[self.key]
        self.held = []
        self.position = 0
        self.complete = False

    def can_step(self):
        if self.held:
            return True
        stream, index = self.reader._stream, self.reader._count.num_pieces
        return stream.over or index in stream.here or stream.total == index or stream.broke_off_at(index)

    def step(self):
        """Read a piece, or release one of those in hand."""
        rng, window = self.draft.world.rng, self.lease.ref.stream.window
        stream, index = self.reader._stream, self.reader._count.num_pieces
        if self.held and (len(self.held) == window or index not in stream.here or rng.random() < 0.5):
            self.held.pop(rng.randrange(len(self.held))).release()
            return
        piece = self.reader.next(timeout=0.0)
        if piece is None:
            assert self.position == self.sample.length, "the end came too early"
            self.complete = True
            return
        assert piece.start == self.position
        expected = self.sample.piece(piece.start, piece.length)
        assert list(piece.tensors) == list(expected)
        assert all(torch.equal(piece.tensors[name], expected[name]) for name in expected)
        self.position += piece.length
        self.held.append(piece)

    def check(self):
        """Nobody wrote into what is in hand."""
        for piece in self.held:
            expected = self.sample.piece(piece.start, piece.length)
            assert all(torch.equal(piece.tensors[name], expected[name]) for name in expected)


class StreamedDraft(DraftRank):
    """A draft that reads what travels in pieces before it trains on its batch."""

    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.reading = []
        self.broken = []

    def begin(self, lease):
        if lease.ref.stream is None:
            super().begin(lease)
        else:
            self.reading.append(Reading(self, lease))

    def read(self, reading):
        try:
            reading.step()
        except (StreamBrokenError, StreamLostError) as exc:
            self.give_up(reading, exc)

    def give_up(self, reading, exc):
        if isinstance(exc, StreamBrokenError):
            assert exc.num_positions == reading.position
        self.broken.append((reading.key, str(exc)))  # the error itself would keep frames, and with them memory
        self.reading.remove(reading)
        reading.reader.close()
        self.queue.fail(reading.lease, reason=exc)

    def stop_early(self, reading):
        self.world.early_stops -= 1
        self.reading.remove(reading)
        if self.world.rng.random() < 0.5:  # content with what it has
            self.consumed.append(reading.key)
            if self.side.ack(reading.lease) and not reading.reader._stream.broken:  # else it is lost with its owner
                self.acked.append(reading.key)
            reading.reader.release()
        else:
            reading.reader.close()
            self.queue.fail(reading.lease, reason="no use for it")

    def train(self):
        for reading in self.reading:
            assert reading.complete
            self.consumed.append(reading.key)
            if self.side.ack(reading.lease):
                self.acked.append(reading.key)
            reading.reader.release()
        self.reading.clear()
        super().train()

    def finish(self):
        for reading in self.reading:
            reading.reader.close()
        self.reading.clear()  # what is leased goes back
        super().finish()

    def in_hand(self):
        return len(self.batch) + len(self.reading)

    def may_train(self):
        return all(reading.complete for reading in self.reading)

    def work(self):
        events = super().work()
        if self.state != "up":
            return events
        for reading in self.reading:
            reading.check()
            if not reading.complete and reading.can_step():
                events.append((2, lambda r=reading: self.read(r)))
            if self.world.early_stops and not reading.complete:
                events.append((0.1, lambda r=reading: self.stop_early(r)))
        return events


class StreamedWorld(World):
    """As :class:`World`; ``streamed`` is the share of samples that travel in pieces.

    ``tight``: the arena of each draft holds what one batch needs, and not a window more.
    """

    make_target = StreamedTarget
    make_draft = StreamedDraft

    def __init__(
        self, seed, *, streamed, window, pieces, retain=False, tight=False, producer_failures=0, early_stops=0, **kwargs
    ):
        self.streamed, self.window, self.pieces, self.retain, self.tight = streamed, window, pieces, retain, tight
        self.producer_failures, self.early_stops = producer_failures, early_stops
        self.write_errors = []
        self.flipped_pieces = 0
        first, later = Streamed(0, PIECE).piece(0, PIECE), Streamed(0, 2 * PIECE).piece(PIECE, PIECE)
        first, later = ([t.nbytes for t in piece.values()] for piece in (first, later))
        self.window_bytes = sum(first) + (window - 1) * sum(later)
        slots = [HEADER_BYTES + sum(-(-n // ALIGN_BYTES) * ALIGN_BYTES for n in piece) for piece in (first, later)]
        self.window_slot = slots[0] + (window - 1) * slots[1]
        super().__init__(seed, **kwargs)

    def make_sample(self, number):
        if self.rng.random() >= self.streamed:
            return super().make_sample(number)
        length = PIECE * self.rng.randint(0, self.pieces) + self.rng.choice([0, 1, PIECE - 1])
        return Streamed(number, max(1, length))

    def corrupt(self, token, buffers):
        """Pieces too arrive with a bit flipped."""
        if not isinstance(token, IncomingPiece):
            super().corrupt(token, buffers)
        elif self.flips and self.rng.random() < 0.4:
            self.flips -= 1
            self.flipped_pieces += 1
            layout = token.delivery.stream.window.layout.layout(token.index, token.length)
            name = self.rng.choice(sorted(layout.specs))
            place = layout.offsets[name] + self.rng.randrange(layout.specs[name].nbytes)
            buffers[place // layout.chunk_bytes][place % layout.chunk_bytes] ^= 1 << self.rng.randrange(8)

    def largest_sample(self):
        return max(super().largest_sample(), self.window_bytes)

    def smallest_arena(self, batch):
        if self.tight:
            return batch * self.window_slot
        return (4 * batch - 1) * max(self.largest_sample() + 6 * 256, self.window_slot)

    def memory_kept(self, draft):
        """The window of a piece in transfer is in use too."""
        while not draft.side._jobs.empty():  # of the moment in which it left
            draft.janitor()
        rings = [window.ring for window in draft.side.streams._closing]
        flying = {id(ring) for ring in rings if any("transfer" in why for _, _, why in ring.holders())}
        slots = [w.slot for w in draft.side.streams._closing if id(w.ring) in flying]
        labels = {slot.label for slot in slots}
        return [why for label, _, why in draft.arena.holders() if "transfer" not in why and label not in labels]

    def broken(self):
        return [entry for rank in self.survivors("draft") for entry in rank.broken]
