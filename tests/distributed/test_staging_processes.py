"""Where a target's samples wait changes nothing about what arrives."""

import pytest

from tests.distributed.harness import Run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("staging", "device_bytes", "places"),
    [("device", None, {"device"}), ("pinned", None, {"host"}), ("auto", 30_000, {"device", "host"})],
)
def test_samples_arrive_from_wherever_they_wait(tmp_path, staging, device_bytes, places):
    config = {"staging": staging, "device_bytes": device_bytes, "verify_checksums": True, "end": "ragged"}
    with Run(tmp_path, targets=1, drafts=2, config=config, samples=40, watch_memory=True) as run:
        owners, takers = run.start_all(draft={"stall_at": (1, "all put")})
        run.wait_for(
            "all to be put", lambda: owners[0].said("all put")
        )  # so that they wait, however slow the target is
        run.open_gate("all put")
        run.wait_ended(*owners, *takers)
        assert [worker.error for worker in (*owners, *takers)] == [None] * 3
        assert sorted(number for taker in takers for number in taker.acked) == list(range(40))
        seen = owners[0].said("memory")
        assert {place for entry in seen for place in ("device", "host") if entry[place]} == places
        assert all(entry["device"] <= 30_000 for entry in seen) or staging == "device"
        assert (seen[-1]["device"], seen[-1]["host"]) == (0, 0)
