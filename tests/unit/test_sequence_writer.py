"""Positions in, slots out: a streamed sample must be the one that a backend makes of the whole."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_stream.capture import shift_left
from nccl_stream.errors import MisuseError, PeerTimeoutError, SchemaError, StreamBrokenError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec
from nccl_stream.schema import FRAME_ATTRIBUTE, NORM_ATTRIBUTE, schema_of
from nccl_stream.stores.local import LocalFeatureStore
from nccl_stream.streamed.writer import SequenceWriter, open_specs


def make_whole(algorithm, length, *, last_hidden=False):
    """Unshifted features of every position."""
    shapes = {
        FeatureAlgorithm.EAGLE3: {"aux_hidden_states": 15, "last_hidden_states" if last_hidden else "logits": 5},
        FeatureAlgorithm.DFLASH: {"hidden_states": 4},
        FeatureAlgorithm.DSPARK: {"target_hidden_states": 4, "target_last_hidden_states": 2},
    }[algorithm]
    generator = torch.Generator().manual_seed(length)
    whole = {name: torch.randn(1, length, width, generator=generator) for name, width in shapes.items()}
    for name in ("input_ids", "attention_mask", "loss_mask"):
        if name in schema_of(algorithm).required:
            whole[name] = torch.randint(1, 9, (1, length), generator=generator)
    return whole


def open_writer(store, algorithm, whole, piece_length, window, attributes=None):
    writer = store.open_stream(
        "s",
        open_specs(algorithm, whole),
        "run",
        algorithm,
        2 if "last_hidden_states" in whole else 1,
        piece_length=piece_length,
        window=window,
        attributes=attributes,
    )
    schema_of(algorithm).validate(writer.ref, shapes=True)
    return writer


@settings(max_examples=120, deadline=None)
@given(
    algorithm=st.sampled_from(FeatureAlgorithm),
    portions=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    piece_length=st.integers(1, 6),
    frame=st.sampled_from([None, "shifted", "unshifted"]),
)
def test_sample_is_the_one_of_the_whole_whatever_the_portions(algorithm, portions, piece_length, frame):
    last_hidden = frame is not None and algorithm is FeatureAlgorithm.EAGLE3
    whole = make_whole(algorithm, sum(portions), last_hidden=last_hidden)
    attributes = {FRAME_ATTRIBUTE: frame, NORM_ATTRIBUTE: "pre"} if last_hidden else None
    shifted = {*schema_of(algorithm).shifted, *(["last_hidden_states"] if frame == "shifted" else [])}
    with LocalFeatureStore() as store:
        writer = open_writer(store, algorithm, whole, piece_length, window=sum(portions) + 1, attributes=attributes)
        start = 0
        with SequenceWriter(writer) as sequence:
            for portion in portions:
                source = {name: tensor[:, start : start + portion].clone() for name, tensor in whole.items()}
                sequence.extend(source)
                for tensor in source.values():
                    tensor.zero_()  # the caller's again
                start += portion
        tensors, _ = store.get(writer.ref)
    for name, tensor in whole.items():
        assert torch.equal(tensors[name], shift_left(tensor) if name in shifted else tensor), name


def test_no_piece_waits_for_more_than_one_position():
    whole = make_whole(FeatureAlgorithm.EAGLE3, 9)
    with LocalFeatureStore() as store:
        writer = open_writer(store, FeatureAlgorithm.EAGLE3, whole, piece_length=4, window=4)
        reader = store.open_reader(writer.ref)
        sequence = SequenceWriter(writer)
        sequence.extend({name: tensor[:, :4] for name, tensor in whole.items()})
        with pytest.raises(PeerTimeoutError):
            reader.next(timeout=0.0)  # the fourth slot has no label yet
        sequence.extend({name: tensor[:, 4:5] for name, tensor in whole.items()})
        assert reader.next(timeout=0.0).length == 4
        sequence.extend({name: tensor[:, 5:] for name, tensor in whole.items()})
        assert sequence.close() == 3


def positions(whole, start, stop):
    return {name: tensor[:, start:stop].clone() for name, tensor in whole.items()}


@pytest.mark.parametrize("algorithm", FeatureAlgorithm)
@pytest.mark.parametrize("portion", [1, 3, 10])
def test_call_that_timed_out_can_be_made_again(algorithm, portion):
    """The loop that everybody writes: no position comes twice, and none is missing."""
    whole = make_whole(algorithm, 20)
    got = []
    with LocalFeatureStore() as store:
        writer = open_writer(store, algorithm, whole, piece_length=3, window=1)
        reader = store.open_reader(writer.ref)

        def read_one():
            piece = reader.next(timeout=0.0)
            got.append({name: tensor.clone() for name, tensor in piece.tensors.items()})
            piece.release()

        def insist(call):
            timeouts = 0
            while True:
                try:
                    call()
                    return timeouts
                except PeerTimeoutError:
                    timeouts += 1
                    read_one()

        sequence = SequenceWriter(writer)
        timeouts = 0
        for start in range(0, 20, portion):
            source = positions(whole, start, start + portion)
            timeouts += insist(lambda source=source: sequence.extend(source, timeout=0.0))
            for tensor in source.values():
                tensor.zero_()  # the caller's again
        timeouts += insist(lambda: sequence.flush(timeout=0.0))
        timeouts += insist(lambda: sequence.close(timeout=0.0))
        assert timeouts >= 5
        read_one()
        assert reader.next(timeout=0.0) is None
    shifted = schema_of(algorithm).shifted
    for name, tensor in whole.items():
        joined = torch.cat([piece[name] for piece in got], 1)
        assert torch.equal(joined, shift_left(tensor) if name in shifted else tensor), name


def test_nothing_can_follow_the_end_even_if_it_could_not_be_appended():
    whole = make_whole(FeatureAlgorithm.EAGLE3, 12)
    with LocalFeatureStore() as store:
        writer = open_writer(store, FeatureAlgorithm.EAGLE3, whole, piece_length=4, window=1)
        sequence = SequenceWriter(writer)
        sequence.extend(whole, timeout=0.0)
        with pytest.raises(PeerTimeoutError):
            sequence.close(timeout=0.0)
        with pytest.raises(MisuseError, match="has its end"):
            sequence.extend(whole, timeout=0.0)  # the end may be filled with zeros by now


class NoMemoryError(Exception):
    """What the test raises."""


def write_with_failing_copy(monkeypatch, whole, step):
    """Make the call during which copy number ``step`` failed again; return whether there was such a copy."""
    portions = [positions(whole, start, stop) for start, stop in ((0, 3), (3, 6), (6, 9), (9, 14))]
    calls = 0

    def failing(real):
        def copy(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == step:
                raise NoMemoryError
            return real(*args, **kwargs)

        return copy

    with LocalFeatureStore() as store:
        writer = open_writer(store, FeatureAlgorithm.EAGLE3, whole, piece_length=4, window=9)
        sequence = SequenceWriter(writer)
        monkeypatch.setattr(torch, "cat", failing(torch.cat))
        monkeypatch.setattr(torch.Tensor, "clone", failing(torch.Tensor.clone))
        try:
            for call in (*(partial(sequence.extend, portion) for portion in portions), sequence.close):
                try:
                    call()
                except NoMemoryError:
                    call()
        except MisuseError as error:
            sequence.fail(error)
        monkeypatch.undo()
        if sequence._spoilt:
            with pytest.raises(StreamBrokenError, match="has lost positions"):
                store.get(writer.ref)
        else:
            tensors, _ = store.get(writer.ref)
            for name, tensor in whole.items():
                shifted = name in schema_of(FeatureAlgorithm.EAGLE3).shifted
                assert torch.equal(tensors[name], shift_left(tensor) if shifted else tensor), name
    return calls >= step


def test_memory_that_cannot_be_had_never_makes_a_wrong_sample(monkeypatch):
    """Whichever copy fails: the call made again brings each position once, or says that it cannot."""
    whole = make_whole(FeatureAlgorithm.EAGLE3, 14)
    steps = 1
    while write_with_failing_copy(monkeypatch, whole, steps):
        steps += 1
    assert steps > 10


def test_features_without_a_sequence_come_once():
    whole = make_whole(FeatureAlgorithm.EAGLE3, 6)
    specs = {**open_specs(FeatureAlgorithm.EAGLE3, whole), "vocabulary": FeatureSpec((3,), torch.int64)}
    with LocalFeatureStore() as store:
        writer = store.open_stream("s", specs, "run", piece_length=2, window=8)
        sequence = SequenceWriter(writer)
        constant = torch.arange(3)
        with pytest.raises(MisuseError, match="vocabulary"):
            sequence.extend({name: tensor[:, :3] for name, tensor in whole.items()})
        sequence.extend({**{name: tensor[:, :3] for name, tensor in whole.items()}, "vocabulary": constant})
        with pytest.raises(MisuseError, match="vocabulary"):
            sequence.extend({**{name: tensor[:, 3:] for name, tensor in whole.items()}, "vocabulary": constant})
        sequence.extend({name: tensor[:, 3:] for name, tensor in whole.items()})
        sequence.close()
        tensors, _ = store.get(writer.ref)
        assert torch.equal(tensors["vocabulary"], torch.arange(3))


def test_positions_that_do_not_fit_change_nothing():
    whole = make_whole(FeatureAlgorithm.EAGLE3, 6)
    with LocalFeatureStore() as store:
        writer = open_writer(store, FeatureAlgorithm.EAGLE3, whole, piece_length=2, window=8)
        sequence = SequenceWriter(writer)
        with pytest.raises(MisuseError):
            sequence.close()
        for bad in (
            {},
            {**whole, "more": whole["input_ids"]},
            {**whole, "input_ids": whole["input_ids"][:, 1:]},
            {**whole, "input_ids": whole["input_ids"].int()},
            {**whole, "input_ids": whole["input_ids"][0]},
            {**whole, "logits": whole["logits"][..., 1:]},
            {name: tensor[:, :0] for name, tensor in whole.items()},
        ):
            with pytest.raises(MisuseError):
                sequence.extend(bad)
        sequence.extend(whole)
        assert sequence.close() == 3
        tensors, _ = store.get(writer.ref)
        assert torch.equal(tensors["input_ids"], shift_left(whole["input_ids"]))


def test_exception_in_the_loop_fails_the_sample():
    whole = make_whole(FeatureAlgorithm.EAGLE3, 6)
    with LocalFeatureStore() as store:
        writer = open_writer(store, FeatureAlgorithm.EAGLE3, whole, piece_length=2, window=8)

        def prefill():
            with SequenceWriter(writer) as sequence:
                sequence.extend(whole)
                raise KeyError("prefill")

        with pytest.raises(KeyError):
            prefill()
        with pytest.raises(StreamBrokenError, match="prefill"):
            store.get(writer.ref)


def test_packed_sample_cannot_be_opened():
    whole = {**make_whole(FeatureAlgorithm.EAGLE3, 6), "seq_lens": torch.tensor([[6]])}
    with pytest.raises(SchemaError, match="packed"):
        open_specs(FeatureAlgorithm.EAGLE3, whole)
