"""Which draft incarnations train together: agreed once, by documents in the store, before any round is handed out."""

from __future__ import annotations

import time
import uuid
from typing import Any

from nccl_stream.coordination.node import Node
from nccl_stream.errors import PeerTimeoutError

__all__ = ["form_cohort"]

POLL_S = 0.05


def form_cohort(node: Node, rank: int, num_drafts: int, deadline: float) -> tuple[str, list[str]]:
    """Agree with the other draft ranks; returns the cohort's id and its incarnations by rank.

    Draft rank 0 proposes the incarnations it sees; each confirms; then it says go. When one is replaced meanwhile (a
    restart), it proposes anew. Blocks up to ``deadline`` (monotonic seconds).

    Raises:
        PeerTimeoutError: names the drafts that did not confirm.
    """
    documents = node.documents()
    proposal: dict[str, Any] = {}
    confirmed = ""
    while True:
        node.raise_if_fatal()
        if rank == 0:
            members = [member.inc for member in node.alive("draft")]
            if len(members) == num_drafts and members != proposal.get("members"):
                proposal = {"id": uuid.uuid4().hex[:16], "members": members}
                documents.set("cohort", proposal)
        current = proposal if rank == 0 else documents.get("cohort")
        if type(current) is dict and type(current.get("members")) is list and node.inc in current["members"]:
            cohort, members = str(current["id"]), [str(inc) for inc in current["members"]]
            if confirmed != cohort:
                confirmed = cohort
                documents.set(f"cohort/{cohort}/ok/{node.inc}", True)
            if rank == 0 and documents.exists([f"cohort/{cohort}/ok/{inc}" for inc in members]):
                documents.set(f"cohort/{cohort}/go", True)
                return cohort, members
            if rank != 0 and documents.exists([f"cohort/{cohort}/go"]):
                return cohort, members
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                "the draft ranks did not agree on training together: some are missing, or still train in an earlier "
                "group. Drafts that train together restart together; use end='ragged' for independent ones."
            )
        node.wait(POLL_S)
