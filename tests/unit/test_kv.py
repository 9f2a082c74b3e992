"""The typed face of a real TCPStore."""

import threading

import pytest

from nccl_stream.coordination.kv import MAX_VALUE_BYTES, ControlStore, clone_store, dump_json, load_json, tcp_store
from nccl_stream.errors import ControlStoreError, WireFormatError


@pytest.fixture
def raw():
    return tcp_store("127.0.0.1", 0, serve=True, timeout=10.0)


@pytest.fixture
def store(raw):
    return ControlStore(raw, "run/a", timeout=10.0)


def test_values_come_back_and_missing_ones_are_none(store):
    value = {"a": [1, "ü", None, True], "b": {"c": 0.5}}
    assert store.get("k") is None
    store.set("k", value)
    assert store.get("k") == value
    store.delete("k")
    assert store.get("k") is None


def test_prefixes_keep_runs_apart(raw, store):
    other = ControlStore(raw, "run/b", timeout=10.0)
    store.set("k", 1)
    assert other.get("k") is None
    assert store.scoped("e").get("k") is None
    store.scoped("e").set("k", 2)
    assert store.get("e/k") == 2


def test_many_values_in_one_call(store):
    store.set_many({"x": 1, "y": [2]})
    store.set_many({})
    assert store.get_many(["y", "x"]) == [[2], 1]
    assert store.get_many([]) == []
    assert store.exists(["x", "y"])
    assert not store.exists(["x", "z"])


def test_damaged_value_among_many_comes_back_as_its_error(raw, store):
    store.set("x", 1)
    raw.set("run/a/y", "{not json")
    first, second = store.get_many(["x", "y"])
    assert first == 1
    assert isinstance(second, WireFormatError)
    with pytest.raises(WireFormatError):
        store.get("y")


def test_compare_set_creates_replaces_and_refuses(store):
    assert store.compare_set("k", None, {"by": 1})
    assert not store.compare_set("k", None, {"by": 2})
    assert not store.compare_set("k", {"by": 3}, {"by": 2})
    assert store.get("k") == {"by": 1}
    assert store.compare_set("k", {"by": 1}, {"by": 2})
    assert store.get("k") == {"by": 2}


def test_compare_set_with_an_expectation_never_creates(store):
    assert not store.compare_set("k", {"by": 1}, {"by": 2})
    assert store.get("k") is None


def test_compare_set_has_one_winner_among_threads(store):
    won = []

    def compete(number):
        if store.clone("run/a").compare_set("k", None, {"by": number}):
            won.append(number)

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert store.get("k") == {"by": won[0]}


def put(raw, key, text):
    raw.set(key, text)
    raw.get(key)  # a set returns before the server has answered, and other clients have connections of their own


def test_replace_spares_only_what_is_to_be_kept(raw, store):
    def is_kept(value):
        if value == 7:
            raise WireFormatError("not a value of this kind")
        return value == {"keep": True}

    for number, damaged in enumerate(["x", "", b"\x00\xff\xfe", "{}", '{ "keep" : false }', "7"]):
        put(raw, "run/a/k", damaged)
        assert store.replace("k", {"by": number}, unless=is_kept)
        assert store.get("k") == {"by": number}
    assert store.replace("missing", 1, unless=is_kept)
    assert store.get("missing") == 1
    put(raw, "run/a/k", '{ "keep": true }')
    assert not store.replace("k", {"by": "x"}, unless=is_kept)
    assert store.get("k") == {"keep": True}


def test_replace_has_one_winner_among_threads(raw, store):
    put(raw, "run/a/k", "damaged")
    start, won = threading.Barrier(6), []

    def compete(number):
        client = store.clone("run/a")
        start.wait(20)
        if client.replace("k", {"by": number}, unless=lambda value: "by" in value):
            won.append(number)

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert store.get("k") == {"by": won[0]}


def test_queue_is_first_in_first_out_and_pop_waits(store):
    popped = []
    popper = store.clone("run/a")
    thread = threading.Thread(target=lambda: popped.extend(popper.pop("q") for _ in range(2)))
    thread.start()
    store.push("q", dump_json(1))
    store.push("q", dump_json(2))
    thread.join(20)
    assert [load_json(raw) for raw in popped] == [1, 2]


def test_too_large_a_value_is_refused_before_it_is_sent(store):
    with pytest.raises(WireFormatError, match="exceeds"):
        store.set("k", "x" * MAX_VALUE_BYTES)
    assert store.get("k") is None


@pytest.mark.parametrize("text", ["", "{", "NaN", "Infinity", "[1,", "\xff", "[" * 100_000])
def test_what_is_not_plain_json_is_refused(text):
    with pytest.raises(WireFormatError):
        load_json(text)


def test_not_a_number_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        dump_json(float("nan"))


def test_store_that_cannot_be_cloned_is_refused():
    with pytest.raises(ControlStoreError, match="TCPStore"):
        clone_store(object())
