"""Owner-side delivery: the only source of truth for the samples of one target rank.

A pure state machine. Each sample walks RESIDENT → ASSIGNED → IN_FLIGHT → DELIVERED → settled, and back to RESIDENT with
the next delivery number whenever a draft dies, hands it back, refuses it, or the link fails. Every outcome names the
delivery it belongs to; one of an earlier delivery changes nothing and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_stream.coordination.messages import Announce, OwnerState, StreamEnd, StreamOpen, has_left
from nccl_stream.coordination.owned import Books, DeadLetter, LostStream, OwnedSample, OwnerDraft, OwnerPort, Phase
from nccl_stream.coordination.piece_delivery import PieceDelivery
from nccl_stream.coordination.stream_owner import OwnedStream

__all__ = ["OwnerDelivery"]


GONE_TOLD = 64  # far more drafts than can end between two messages


class OwnerDelivery:
    """Assignment, fencing and books of one owner.

    Not thread-safe; its owner calls it under one lock.

    Args:
        port: carries out what is decided.
        num_drafts: draft ranks of the run.
        static: assign sample k to draft rank ``k mod num_drafts`` instead of to the least loaded one.
        ranks: draft ranks this owner delivers to; None: all.
        prefer: draft rank that is first among equals. Owners that prefer different ones fill a last round together.
        round_samples: samples without which a draft cannot take part in a round.
        abreast: for drafts that take steps together: by how many samples one may be ahead of the one that has been
            given least. Samples given to one alone would be left over at the end. None: no bound.
        window: how many samples may be announced to one draft and not yet answered.
        max_failures: consumer failures a sample survives; one more makes it a dead letter.
    """

    def __init__(
        self,
        port: OwnerPort,
        *,
        num_drafts: int,
        static: bool,
        window: int,
        max_failures: int,
        ranks: Iterable[int] | None = None,
        abreast: int | None = None,
        round_samples: int = 1,
        prefer: int = 0,
    ) -> None:
        self._port = port
        self._num_drafts = num_drafts
        self._static = static
        self._window = window
        self._abreast = abreast
        self._max_failures = max_failures
        self._round_samples = round_samples
        self._prefer = prefer
        self._samples: dict[str, OwnedSample] = {}
        self._drafts: dict[str, OwnerDraft] = {}
        self._queues: dict[int, deque[str]] = {}
        # Ranks that somebody takes samples for now, or is expected to.
        self._awaited: set[int] = set(range(num_drafts) if ranks is None else ranks)
        self._closed = False
        self._error = ""
        self._ended = False
        self._gone: list[str] = []
        self._drop_rest = False
        self._undelivered = 0
        self.books = Books()
        self.dead_letters: list[DeadLetter] = []
        self.lost: list[LostStream] = []
        self.pieces = PieceDelivery(port, self._drafts, self.books, take_turn=self._take_turn, end_send=self._end_send)

    # -- what the user does ------------------------------------------------------------------------------------------

    def offer(
        self, sample_id: str, ref: dict[str, Any], nbytes: int, order: int, stream: OwnedStream | None = None
    ) -> None:
        """Take a sample in for delivery; ``stream`` for one whose pieces are still being appended."""
        if sample_id in self._samples:
            raise AssertionError(f"sample {sample_id!r} offered twice")  # the queue has already refused it
        sample = OwnedSample(sample_id, ref, nbytes, order, self.books.put, stream=stream)
        self._samples[sample_id] = sample
        if stream is not None:
            self.pieces.add(sample)
        self.books.put += 1
        self.books.resident += 1
        self._undelivered += 1
        if self._drop_rest:
            self._finish(sample, "dropped")
        elif stream is not None and stream.error:
            self._lose(sample, stream.error)
        else:
            self._enqueue(sample, front=False)
        self.assign()

    def close(self, error: str = "") -> None:
        """No more samples will be offered; ``error`` tells the drafts why, when it was a failure."""
        self._closed = True
        self._error = self._error or error
        self.assign()

    # -- who is there ------------------------------------------------------------------------------------------------

    def draft_joined(self, inc: str, rank: int) -> None:
        self._awaited.add(rank)
        self._drafts[inc] = OwnerDraft(inc, rank)
        self.assign()

    def draft_gone(self, inc: str, *, awaited: bool) -> None:
        """The draft died or left: what it had not settled goes to others, or waits for its next incarnation."""
        self._note_gone(inc)
        draft = self._drafts.pop(inc, None)
        if draft is None:
            self._tell_states()
            return
        if not awaited:
            self._give_up(draft.rank)
        self.pieces.forget(draft)
        self._take_back(sorted(draft.held, key=lambda sid: self._samples[sid].order), "its reader is gone")
        self.assign()

    def draft_missed(self, inc: str, rank: int, *, awaited: bool) -> None:
        """A draft was gone before it was heard of here; the last one of its rank says whether another is awaited."""
        self._note_gone(inc)
        if awaited:
            self._awaited.add(rank)
        else:
            self._give_up(rank)
        self.assign()

    def stop_awaiting(self, rank: int) -> None:
        """The dead draft of this rank has not come back in time."""
        self._give_up(rank)
        self.assign()

    def _give_up(self, rank: int) -> None:
        if not any(draft.rank == rank and not draft.ended for draft in self._drafts.values()):
            self._awaited.discard(rank)

    def draft_left(self, inc: str) -> None:
        """The draft takes nothing more; what it has in hand comes back, or is acked."""
        self._note_gone(has_left(inc))
        self.draft_ended(inc)
        self._tell_states()

    def _note_gone(self, what: str) -> None:
        self._gone = [*self._gone, what][-GONE_TOLD:]

    def draft_ended(self, inc: str) -> None:
        """The draft takes nothing more (its agreed end has come)."""
        draft = self._drafts.get(inc)
        if draft is not None:
            draft.ended = True
            self._give_up(draft.rank)
            self.assign()

    def link_up(self, inc: str, gen: int) -> None:
        draft = self._drafts.get(inc)
        if draft is None or gen <= draft.gen:
            return  # it broke before we were told that it had come up
        self._unlink(draft)
        draft.gen, draft.linked = gen, True
        draft.next_seq = draft.next_turn = draft.waiting = 0
        draft.by_seq.clear()
        self.assign()
        for sid in sorted(draft.held, key=lambda sid: self._samples[sid].order):
            self.pieces.announce(self._samples[sid])

    def link_down(self, inc: str, gen: int) -> None:
        """Everything announced or in flight on that link will be delivered anew; what was delivered stays delivered."""
        draft = self._drafts.get(inc)
        if draft is None or gen < draft.gen:
            return
        draft.gen = gen
        self._unlink(draft)
        self.assign()

    def _unlink(self, draft: OwnerDraft) -> None:
        if not draft.linked:
            return
        draft.linked = False
        self.pieces.forget(draft)
        back = [sid for sid in draft.held if self._samples[sid].phase in (Phase.ASSIGNED, Phase.IN_FLIGHT)]
        self._take_back(sorted(back, key=lambda sid: self._samples[sid].order), "the link was lost")
        draft.waiting = 0

    @property
    def anybody_left(self) -> bool:
        """Whether some draft is there, or awaited, that may still take samples."""
        return any(not draft.ended for draft in self._drafts.values()) or (bool(self._awaited) and not self._ended)

    def may_be_read(self, sample_id: str) -> bool:
        """Whether some draft has this sample, or can still get it."""
        sample = self._samples.get(sample_id)
        return self.anybody_left or (sample is not None and sample.draft in self._drafts)

    def starving(self) -> bool:
        """Whether a linked draft that takes samples has less than a round from us: the others may wait for it."""
        return any(d.linked and not d.ended and len(d.held) < self._round_samples for d in self._drafts.values())

    # -- delivery ----------------------------------------------------------------------------------------------------

    def ready(self, inc: str, gen: int, seq: int, turn: int) -> None:
        """The draft has posted its ``turn``-th receive, for ``seq``; sends go out strictly in the order of turns."""
        draft, sample = self._drafts.get(inc), self._asked_about(inc, gen, seq)
        if (
            draft is None
            or sample is None
            or sample.stream is not None
            or turn < draft.next_turn
            or turn in draft.turns
        ):
            self.books.late += 1
        else:
            self._answer(inc, gen, seq)
            draft.refusals = 0
            self._take_turn(draft, turn, (seq, sample, False))
            self.assign()

    def _take_turn(self, draft: OwnerDraft, turn: int, what: tuple[int, OwnedSample, bool]) -> None:
        draft.turns[turn] = what
        while draft.next_turn in draft.turns:
            number, sample, is_piece = draft.turns.pop(draft.next_turn)
            draft.next_turn += 1
            if is_piece:
                self._port.transmit_piece(draft.inc, draft.gen, draft.next_turn - 1, sample, number)
            else:
                self._transmit(draft, number, sample)

    def refused(self, inc: str, gen: int, seq: int, reason: str, *, fault: bool) -> None:
        """The draft will not take it; a ``fault`` counts as a failure of the sample."""
        sid = self._answer(inc, gen, seq)
        if sid is None:
            return
        if fault:
            self._fail(self._samples[sid], 1, f"refused: {reason}", handed_out=False)
        else:
            if inc in self._drafts:
                self._drafts[inc].refusals += 1
            self._take_back([sid], "refused")
        self.assign()

    def adopted(self, inc: str, gen: int, seq: int) -> None:
        """An earlier delivery of this sample has arrived there in full after all: count this one as delivered."""
        sid = self._answer(inc, gen, seq)
        if sid is not None:
            self._mark_delivered(self._samples[sid])
            self.assign()

    def _asked_about(self, inc: str, gen: int, seq: int) -> OwnedSample | None:
        """The sample of an announcement that has no answer yet."""
        draft = self._drafts.get(inc)
        if draft is None or not draft.linked or draft.gen != gen or seq not in draft.by_seq:
            return None
        return self._samples[draft.by_seq[seq]]

    def _answer(self, inc: str, gen: int, seq: int) -> str | None:
        """Take an answer; the sample it is about, None when it comes late."""
        if self._asked_about(inc, gen, seq) is None:
            self.books.late += 1
            return None
        self._drafts[inc].waiting -= 1
        return self._drafts[inc].by_seq.pop(seq)

    def _transmit(self, draft: OwnerDraft, seq: int, sample: OwnedSample) -> None:
        sample.phase = Phase.IN_FLIGHT
        sample.sends += 1
        self._port.transmit(draft.inc, draft.gen, seq, sample)

    def sent(self, inc: str, gen: int, seq: int, sample_id: str, nbytes: int) -> None:
        """The transfer has completed on our side."""
        self.books.bytes_sent += nbytes
        self.transfer_over(sample_id)
        draft = self._drafts.get(inc)
        sample = self._samples.get(sample_id)
        if draft is None or draft.gen != gen or sample is None or sample.draft != inc or sample.seq != seq:
            return
        if sample.phase is Phase.IN_FLIGHT:
            self._mark_delivered(sample)
        self._tell_states()

    def _mark_delivered(self, sample: OwnedSample) -> None:
        sample.phase = Phase.DELIVERED
        self._drafts[sample.draft].coming -= 1
        self._undelivered -= 1

    def transfer_over(self, sample_id: str) -> None:
        """A transfer of the sample has ended, well or not: its memory is no longer being read by it."""
        sample = self._samples.get(sample_id)
        if sample is not None:
            self._end_send(sample)

    def _end_send(self, sample: OwnedSample) -> None:
        sample.sends -= 1
        if sample.outcome and sample.sends == 0:
            self._release(sample)

    # -- streamed samples --------------------------------------------------------------------------------------------

    def admitted(self, inc: str, gen: int, seq: int, serial: int, delivery: int) -> None:
        """The draft has memory for a window of a streamed sample: from now on it is in its hands."""
        sample = self._asked_about(inc, gen, seq)
        if sample is None or sample.stream is None or (sample.serial, sample.delivery) != (serial, delivery):
            self.pieces.withdraw(inc, serial, delivery)
            return
        self._answer(inc, gen, seq)
        self._drafts[inc].refusals = 0
        self._mark_delivered(sample)
        sample.stream.go_on(gen, 0)
        if sample.stream.error:  # failed before anybody had it in hand: not opened, so it goes back
            self._drafts[inc].given -= 1  # it is no part of a round there
            self._port.tell(inc, StreamEnd(serial, delivery, 0, sample.stream.error[:2000]))
            self._lose(sample, sample.stream.error)
        else:
            self._port.tell(inc, StreamOpen(serial, delivery))
            self.pieces.announce(sample)
        self.assign()

    def stream_changed(self, sample_id: str, stream: OwnedStream) -> None:
        """A piece was appended to the sample, or its producer closed or failed it."""
        sample = self._samples.get(sample_id)
        if sample is None or sample.stream is not stream or sample.outcome:
            return
        if stream.error and sample.phase is Phase.RESIDENT:
            self._lose(sample, stream.error)
            self.assign()
        self.pieces.announce(sample)

    def piece_sent(self, sample_id: str, nbytes: int) -> None:
        """The transfer of a piece has completed on our side."""
        self.books.bytes_sent += nbytes
        self.transfer_over(sample_id)

    def _lose(self, sample: OwnedSample, why: str) -> None:
        """A streamed sample can be read by nobody any more: it is to be produced anew."""
        assert sample.stream is not None
        sample.stream.why = why
        self.lost.append(LostStream(sample.sample_id, why))
        self._finish(sample, "lost")

    def settle(self, inc: str, items: list[Any]) -> None:
        """Outcomes from a draft: ``[sample_id, delivery, outcome, failures, reason]`` each; see ``messages.Settle``."""
        draft = self._drafts.get(inc)
        for sample_id, delivery, outcome, failures, reason in items:
            if draft is not None:
                draft.seen += outcome != "ack"
                draft.refusals = 0
            sample = self._samples.get(sample_id)
            current = sample is not None and not sample.outcome and sample.draft == inc and sample.delivery == delivery
            if sample is None or not current or sample.phase is Phase.ASSIGNED:
                self.books.late += 1
                continue
            if outcome == "ack":
                self._finish(sample, "acked")
            elif outcome == "drop":
                self._finish(sample, "dropped")
            elif outcome in ("fail", "corrupt"):
                self._fail(sample, failures, reason, handed_out=outcome == "fail")
            else:
                self._take_back([sample_id], reason)
        self.assign()

    def drop_rest(self) -> None:
        """An agreed end: what is not in a draft's hands is dropped, now and whenever it comes back.

        What is announced or in flight is left to the draft's answer: it may have posted the receive already.
        """
        self._ended = self._drop_rest = True
        for sample in [s for s in self._samples.values() if s.phase is Phase.RESIDENT and not s.outcome]:
            self._finish(sample, "dropped")
        self.assign()

    def end(self) -> None:
        """The run has ended for all drafts: nobody is awaited any more."""
        self._ended = True
        self.assign()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _queue_of(self, sample: OwnedSample) -> int:
        slot = sample.order % self._num_drafts
        return slot if self._static and slot in self._awaited else -1

    def _enqueue(self, sample: OwnedSample, *, front: bool) -> None:
        queue = self._queues.setdefault(self._queue_of(sample), deque())
        queue.appendleft(sample.sample_id) if front else queue.append(sample.sample_id)

    def _take_back(self, sample_ids: list[str], why: str) -> None:
        """Make samples RESIDENT again under their next delivery number, ahead of those not yet assigned.

        A streamed sample of which pieces are gone is lost instead.
        """
        for sample_id in reversed(sample_ids):
            sample = self._samples[sample_id]
            if sample.draft in self._drafts:
                self._drafts[sample.draft].given -= 1
            if sample.stream is not None and not self._drop_rest:
                if not sample.stream.can_restart:
                    self._lose(sample, sample.stream.error or why)
                    continue
                sample.stream.restart()
            self._detach(sample)
            sample.phase = Phase.RESIDENT
            sample.delivery += 1
            self.books.redelivered += 1
            if self._drop_rest:
                self._finish(sample, "dropped")
            else:
                self._enqueue(sample, front=True)

    def _detach(self, sample: OwnedSample) -> None:
        """Take the sample out of its draft's hands; it then counts as undelivered."""
        if sample.phase is Phase.DELIVERED:
            self._undelivered += 1
        draft = self._drafts.get(sample.draft)
        if draft is not None and sample.sample_id in draft.held:
            draft.held.discard(sample.sample_id)
            draft.coming -= sample.phase is not Phase.DELIVERED
        sample.draft, sample.seq = "", -1

    def _fail(self, sample: OwnedSample, failures: int, reason: str, *, handed_out: bool) -> None:
        if sample.stream is not None and not sample.stream.can_restart:
            self._take_back([sample.sample_id], reason)
            return
        sample.failures += max(failures, 1)
        if sample.failures > self._max_failures:
            if not handed_out and sample.draft in self._drafts:
                self._drafts[sample.draft].given -= 1  # it was no part of a round there
            self.dead_letters.append(DeadLetter(sample.sample_id, reason, sample.failures, sample.draft))
            self._finish(sample, "dead")
        else:
            self._take_back([sample.sample_id], reason)

    def _finish(self, sample: OwnedSample, outcome: str) -> None:
        self._detach(sample)
        self._undelivered -= 1
        sample.outcome = outcome
        setattr(self.books, outcome, getattr(self.books, outcome) + 1)
        self.books.resident -= 1
        if sample.stream is not None:
            sample.stream.outcome = outcome
        if sample.sends == 0:
            self._release(sample)

    def _release(self, sample: OwnedSample) -> None:
        del self._samples[sample.sample_id]
        self.pieces.remove(sample)
        self._port.settled(sample)

    def _head(self, slot: int) -> OwnedSample | None:
        """First sample of a queue that still waits there; entries that were finished meanwhile are skipped."""
        queue = self._queues.get(slot)
        while queue:
            sample = self._samples.get(queue[0])
            if sample is not None and sample.phase is Phase.RESIDENT and not sample.outcome:
                return sample
            queue.popleft()
        return None

    def assign(self) -> None:
        """Announce what can be announced, then tell the drafts how things stand."""
        if not self._error:
            self._merge_orphaned_queues()
            for slot in sorted(self._queues):
                while (sample := self._head(slot)) is not None and (draft := self._choose(slot)) is not None:
                    self._queues[slot].popleft()
                    self._announce(draft, sample)
        self._tell_states()

    def _merge_orphaned_queues(self) -> None:
        """Samples bound to a rank that nobody awaits any more go to whoever has least."""
        for slot in [slot for slot in self._queues if slot >= 0 and slot not in self._awaited]:
            self._queues.setdefault(-1, deque()).extend(self._queues.pop(slot))

    def _choose(self, slot: int) -> OwnerDraft | None:
        able = [
            draft
            for draft in self._drafts.values()
            if draft.linked and not draft.ended and draft.waiting < self._window and slot in (-1, draft.rank)
        ]
        if self._abreast is not None and slot == -1:
            takers = [draft for draft in self._drafts.values() if not draft.ended]
            all_here = self._awaited <= {draft.rank for draft in takers}
            willing = [draft for draft in takers if not draft.refusals] or takers  # the others have no memory now
            least = min((draft.given for draft in willing), default=0) if all_here else 0
            able = [draft for draft in able if draft.given < least + self._abreast]
        return min(able, key=self._rank_of_need, default=None)

    def _rank_of_need(self, draft: OwnerDraft) -> tuple[int, int, int]:
        return draft.refusals, len(draft.held), (draft.rank - self._prefer) % self._num_drafts

    def _announce(self, draft: OwnerDraft, sample: OwnedSample) -> None:
        seq = draft.next_seq
        draft.next_seq += 1
        draft.waiting += 1
        draft.coming += 1
        draft.by_seq[seq] = sample.sample_id
        draft.held.add(sample.sample_id)
        draft.given += 1
        sample.draft, sample.seq, sample.phase = draft.inc, seq, Phase.ASSIGNED
        self._port.tell(
            draft.inc,
            Announce(draft.gen, seq, sample.serial, sample.delivery, sample.order, sample.failures, sample.ref),
        )

    def _idle_for(self, draft: OwnerDraft) -> bool:
        """Whether nothing is left that could still be delivered to this draft."""
        if not self._static:
            return self._undelivered == 0
        return draft.coming == 0 and self._head(-1) is None and self._head(draft.rank) is None

    def _tell_states(self) -> None:
        if not self._closed:
            return
        settled = self.books.resident == 0
        coming_back = any(draft.ended and draft.held for draft in self._drafts.values())
        for draft in self._drafts.values():
            state = (True, self._error, self._idle_for(draft) and not coming_back, settled, draft.seen)
            if state != draft.told or self._gone != draft.told_gone:
                draft.told, draft.told_gone = state, self._gone
                closed, error, idle, done, seen = state
                self._port.tell(draft.inc, OwnerState(closed, error, idle, done, seen, self._gone))

    # -- looking in --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def error(self) -> str:
        """Why the owner closed, when that was a failure."""
        return self._error

    @property
    def undelivered(self) -> int:
        """Samples without outcome that no draft has in full."""
        return self._undelivered

    @property
    def all_settled(self) -> bool:
        return self.books.resident == 0

    def resident_ids(self) -> list[str]:
        """Ids of the samples without outcome, oldest first."""
        return [sample.sample_id for sample in self._samples.values() if not sample.outcome]

    def phases(self) -> Mapping[str, Phase]:
        """Where each unsettled sample is; for tests and reports."""
        return {sid: sample.phase for sid, sample in self._samples.items() if not sample.outcome}

    def unacked(self) -> Mapping[str, int]:
        """Samples each draft has and has not settled."""
        return {inc: len(draft.held) for inc, draft in self._drafts.items()}
