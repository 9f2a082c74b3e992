"""The codec of control messages: every kind goes through, every wrong field is refused."""

import json
from dataclasses import fields

import pytest

from nccl_stream.coordination import messages as m
from nccl_stream.coordination.messages import decode_message, encode_message
from nccl_stream.errors import WireFormatError

EXAMPLES = [
    m.Hello(),
    m.GoneNotice("d0-1"),
    m.LinkOpen(3),
    m.LinkFailed(3, "reset"),
    m.Announce(1, 2, 3, 4, 5, 6, {"sample_id": "s"}),
    m.Ready(1, 2, 3),
    m.Refuse(1, 2, True, "too large"),
    m.Adopt(1, 2),
    m.Admit(1, 2, 3, 0),
    m.AnnouncePiece(1, 3, 0, 5, 128),
    m.PieceReady(1, 4, 3, 0, 5),
    m.PieceSkip(1, 3, 0, 5),
    m.Progress(1, 3, 0, 6, 5, False),
    m.StreamEnd(3, 0, 7, ""),
    m.StreamOpen(3, 0),
    m.Withdraw(3, 0),
    m.Settle([["s", 0, "ack", 0, ""], ["t", 1, "fail", 2, "bad"], ["u", 0, "back", 0, ""], ["v", 0, "drop", 0, ""]]),
    m.OwnerState(True, "", False, True, 7),
    m.Have("c", 8, 2, 3, False, True, "no"),
    m.Go("c", 4),
    m.End("c", ["d0-1", "d1-1"], 7, "", True),
    m.Leaving("c"),
    m.StopRequest("signal"),
    m.Estate("t0-1", ["a"], ["b"]),
    m.Obituary("t0-1"),
]
WRONG = {
    "int": [None, "1", 1.0, True, -1, 2**62, [], {}],
    "bool": [None, 0, 1, "true", [], {}],
    "str": [None, 1, b"x", [], {}, "x" * (m.MAX_TEXT + 1)],
    "list[Any]": [None, 1, "ab", {}, (), [0] * (m.MAX_ITEMS + 1)],
    "dict[str, Any]": [None, 1, "ab", [], ()],
}


def test_examples_cover_every_kind():
    assert {type(example) for example in EXAMPLES} == set(m.Message.__subclasses__())
    assert len({example.KIND for example in EXAMPLES}) == len(EXAMPLES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.KIND)
def test_message_survives_the_wire(message):
    assert decode_message(json.loads(json.dumps(encode_message(message)))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.KIND)
def test_every_wrong_field_is_refused(message):
    wire = encode_message(message)
    for field in fields(message):
        for wrong in WRONG[str(field.type)]:
            with pytest.raises(WireFormatError, match=field.name):
                decode_message({**wire, field.name: wrong})
        with pytest.raises(WireFormatError):
            decode_message({name: value for name, value in wire.items() if name != field.name})
    with pytest.raises(WireFormatError):
        decode_message({**wire, "more": 1})


@pytest.mark.parametrize("wire", [None, 1, "hello", [], {}, {"k": 1}, {"k": "nonsense"}, {"k": ""}, {"kind": "hello"}])
def test_what_is_no_message_is_refused(wire):
    with pytest.raises(WireFormatError):
        decode_message(wire)


@pytest.mark.parametrize(
    "item",
    [
        None,
        [],
        ["s", 0, "ack", 0],
        ["s", 0, "ack", 0, "", ""],
        [1, 0, "ack", 0, ""],
        ["s", "0", "ack", 0, ""],
        ["s", True, "ack", 0, ""],
        ["s", -1, "ack", 0, ""],
        ["s", 2**62, "ack", 0, ""],
        ["s", 0, "eaten", 0, ""],
        ["s", 0, "ack", -1, ""],
        ["s", 0, "ack", 0, None],
        ["s" * (m.MAX_TEXT + 1), 0, "ack", 0, ""],
        ["s", 0, "ack", 0, "x" * (m.MAX_TEXT + 1)],
    ],
)
def test_settle_with_a_bad_item_is_refused(item):
    with pytest.raises(WireFormatError):
        decode_message({"k": "settle", "items": [["fine", 0, "ack", 0, ""], item]})


@pytest.mark.parametrize("where", ["held", "acked"])
@pytest.mark.parametrize("item", [None, 1, ["s"], "x" * (m.MAX_TEXT + 1)])
def test_estate_with_a_bad_id_is_refused(where, item):
    wire = encode_message(m.Estate("t", [], []))
    with pytest.raises(WireFormatError):
        decode_message({**wire, where: ["fine", item]})


def test_error_names_the_field_and_shows_little_of_a_large_value():
    with pytest.raises(WireFormatError, match="reason") as caught:
        decode_message({"k": "stop", "reason": ["x" * 10_000]})
    assert len(str(caught.value)) < 300
