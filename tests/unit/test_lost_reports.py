"""What is lost is told in turn, whatever the callback does, and nobody waits for it but close()."""

import sys
import threading

from nccl_stream.ranks.lost_reports import LostReports

PATIENCE = 30.0


def test_everything_is_told_in_turn_before_close_returns():
    reports, told = LostReports(), []
    reports.report(("before",))
    reports.tell(told.append)
    for number in range(20):
        reports.report((f"s{number}",))
    assert reports.close(PATIENCE) == []
    assert told == [("before",), *((f"s{number}",) for number in range(20))]
    assert reports.close(PATIENCE) == []


def test_a_callback_that_raises_or_exits_hears_the_next_report():
    reports, told = LostReports(), []

    def callback(lost):
        told.append(lost)
        if lost == ("a",):
            raise ZeroDivisionError("the user's own code is wrong")
        sys.exit("so is this")

    reports.tell(callback)
    for name in "abc":
        reports.report((name,))
    assert reports.close(PATIENCE) == []
    assert told == [("a",), ("b",), ("c",)]


def test_a_callback_that_blocks_holds_nobody_up_and_is_named():
    reports, told = LostReports(), []
    entered, gate = threading.Event(), threading.Event()

    def callback(lost):
        entered.set()
        gate.wait(PATIENCE)
        told.append(lost)

    reports.tell(callback)
    reports.report(("a",))
    assert entered.wait(PATIENCE)
    reports.report(("b",))
    assert told == []
    assert reports.close(0.1) == ["nccl-stream-lost"]
    gate.set()
    assert reports.close(PATIENCE) == []
    assert told == [("a",), ("b",)]


def test_a_callback_may_be_replaced_and_may_close():
    reports, told = LostReports(), []
    reports.tell(lambda lost: told.append(("old", lost)))
    reports.tell(lambda lost: told.append(("new", lost, reports.close(PATIENCE))))
    reports.report(("a",))
    assert reports.close(PATIENCE) == []
    assert told == [("new", ("a",), [])]


def test_nobody_who_asks_costs_no_thread():
    before = threading.active_count()
    reports = LostReports()
    reports.report(("a",))
    assert threading.active_count() == before
    assert reports.close(PATIENCE) == []
