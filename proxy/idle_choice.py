"""The idle policy of a proxy for which none was asked: by the cores that it shares with the programs it serves."""

from __future__ import annotations

from proxyccl.device.process.cores import cores_allowed
from proxyccl.proxy.thread import IdlePolicy


def choose_idle(cores: int, programs: int, threads: int, within: tuple[int, int] | None = None) -> IdlePolicy:
    """The policy of threads that have to share cores with programs.

    A program may spin while it waits for its GPU, and a thread while it has work, so each of them needs a core.

    Args:
        cores: that all of them may run on.
        programs: ranks of this machine that use the threads.
        threads: of all their proxies.
        within: of these, the programs and threads of this process's container, which share its quota; None for all.
    """
    allowed = cores_allowed()
    suffice = cores >= programs + threads and (allowed is None or allowed >= sum(within or (programs, threads)))
    return IdlePolicy.where_cores_suffice() if suffice else IdlePolicy()
