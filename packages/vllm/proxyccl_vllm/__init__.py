"""A platform plug-in of vLLM that makes parallel groups on ProxyCCL. vLLM calls `detect` in each of its processes."""

from __future__ import annotations

import logging
import os

EXTENDED = ("cuda", "rocm", "cpu")
"""The names of vLLM's platforms that the plug-in extends."""


def chosen_platform() -> str | None:
    """Returns the name of the platform class that vLLM would choose without plug-ins; None if the plug-in does not
    extend that class.
    """
    from vllm.platforms import builtin_platform_plugins

    found = {name: qualified for name, look in builtin_platform_plugins.items() if (qualified := look()) is not None}
    return next(iter(found.values())) if len(found) == 1 and set(found) <= set(EXTENDED) else None


def detect() -> str | None:
    """Returns the name of the platform's class; None to decline. Registers the torch backend, which a process of vLLM
    must know before it makes groups. Logs an error before raising it, because vLLM logs errors of this function only at
    the level DEBUG, and then goes on without the plug-in.
    """
    try:
        if chosen_platform() is None:
            return None
        from vllm import envs

        import proxyccl.torch  # noqa: F401
    except Exception:
        logging.getLogger("vllm.proxyccl").exception("proxyccl-vllm failed; vLLM goes on without ProxyCCL")
        raise
    if envs.VLLM_BATCH_INVARIANT:
        os.environ.setdefault("PROXYCCL_INVARIANT", "1")
    return "proxyccl_vllm.platform.ProxyCCLPlatform"
