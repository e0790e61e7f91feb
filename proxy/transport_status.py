"""Turns the status of a transport that failed into words."""

from __future__ import annotations

import os

from proxyccl.proxy._engine import lib

_COMPLETIONS = (
    ("IBV_WC_SUCCESS", "no error"),
    ("IBV_WC_LOC_LEN_ERR", "the request is longer than its queue pair allows"),
    ("IBV_WC_LOC_QP_OP_ERR", "the queue pair can't carry out the request"),
    ("IBV_WC_LOC_EEC_OP_ERR", "the end-to-end context can't carry out the request"),
    ("IBV_WC_LOC_PROT_ERR", "the local memory is not registered for the request"),
    ("IBV_WC_WR_FLUSH_ERR", "the queue pair was in its error state already"),
    ("IBV_WC_MW_BIND_ERR", "the memory window can't be bound"),
    ("IBV_WC_BAD_RESP_ERR", "the peer's response is not one to the request"),
    ("IBV_WC_LOC_ACCESS_ERR", "the local memory does not allow the access"),
    ("IBV_WC_REM_INV_REQ_ERR", "the peer's device finds the request invalid"),
    ("IBV_WC_REM_ACCESS_ERR", "the peer's memory is not registered for the access"),
    ("IBV_WC_REM_OP_ERR", "the peer's device can't carry out the request"),
    ("IBV_WC_RETRY_EXC_ERR", "the peer's device does not answer: it is down, or no route leads to it"),
    ("IBV_WC_RNR_RETRY_EXC_ERR", "the peer's device stays not ready to receive"),
    ("IBV_WC_LOC_RDD_VIOL_ERR", "the reliable datagram domains differ"),
    ("IBV_WC_REM_INV_RD_REQ_ERR", "the peer's device finds the reliable datagram invalid"),
    ("IBV_WC_REM_ABORT_ERR", "the peer's device aborted the request"),
    ("IBV_WC_INV_EECN_ERR", "the number of the end-to-end context is invalid"),
    ("IBV_WC_INV_EEC_STATE_ERR", "the state of the end-to-end context is invalid"),
    ("IBV_WC_FATAL_ERR", "the device failed"),
    ("IBV_WC_RESP_TIMEOUT_ERR", "the peer's response did not come in time"),
    ("IBV_WC_GENERAL_ERR", "the device reports an error of another kind"),
    ("IBV_WC_TM_ERR", "tag matching failed"),
    ("IBV_WC_TM_RNDV_INCOMPLETE", "the message is to be fetched by software"),
)
"""By ibv_wc_status of infiniband/verbs.h: its name, and what it means."""


_REFUSALS = {
    lib.PROXYCCL_STAGED_BAD_COUNT: "the peer counts messages that can't be",
    lib.PROXYCCL_STAGED_BAD_LENGTH: "a message of the peer is longer than the room for it",
    lib.PROXYCCL_STAGED_BAD_RANGE: "the peer put data where this rank has offered it no memory",
    lib.PROXYCCL_STAGED_BAD_WORD: "the peer signals what is no semaphore word of this rank",
}
"""What the staged transport refuses, by ProxycclStagedRefusal."""


def status_text(transport: str, status: int) -> str:
    """What a status of a transport means; empty for the copy transport, whose statuses are its driver's own.

    The staged transport's statuses continue those of the verbs transport, which it stands on.
    """
    if transport == "copy":
        return ""
    if status >= lib.PROXYCCL_STAGED_REFUSED:
        return f"refused: {_REFUSALS[status - lib.PROXYCCL_STAGED_REFUSED]}"
    if status >= lib.PROXYCCL_STAGED_COPY_IN:
        return f"the copy from pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_IN}"
    if status >= lib.PROXYCCL_STAGED_COPY_OUT:
        return f"the copy into pinned memory failed with the driver's status {status - lib.PROXYCCL_STAGED_COPY_OUT}"
    completion = status - lib.PROXYCCL_VERBS_COMPLETION
    if completion < 0:
        return os.strerror(status)
    if completion >= len(_COMPLETIONS):
        return f"work completion status {completion}"
    name, meaning = _COMPLETIONS[completion]
    return f"{name}, {meaning}"
