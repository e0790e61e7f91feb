"""SGLang's plug-in: makes the torch backend known, and with ``PROXYCCL_SGLANG=1`` replaces SGLang's collectives and
DeepEP. SGLang calls `register` by the entry point of its plug-ins.
"""

from __future__ import annotations

import os
import sys

from proxyccl.device.errors import ArgumentError

_VARIABLE = "PROXYCCL_SGLANG"


def register() -> None:
    """Registers the backend "proxyccl" with torch. If ``PROXYCCL_SGLANG`` is 1, also registers the hooks of SGLang's
    collectives, and makes `deep_ep` a name of `proxyccl.deep_ep`.

    Raises:
        ArgumentError: the variable is neither 0 nor 1.
        RuntimeError: this version of SGLang lacks functions that the hooks need, or another `deep_ep` is imported
            already. Nothing has been replaced then.
    """
    import proxyccl.torch  # noqa: F401  the import registers the backend

    value = os.environ.get(_VARIABLE) or "0"
    if value not in {"0", "1"}:
        raise ArgumentError(_VARIABLE, f"must be 0 or 1, not {value!r}")
    if value == "1":
        _name_deep_ep()
        try:
            from proxyccl.sglang import hooks
        except ImportError as error:
            del sys.modules["deep_ep"]
            raise RuntimeError(
                f"{_VARIABLE}=1: expected the functions of SGLang 0.5.23, which the hooks replace, but {error}"
            ) from error
        hooks.register()


def _name_deep_ep() -> None:
    """Lets imports of `deep_ep` find `proxyccl.deep_ep`, whatever is installed under that name."""
    import proxyccl.deep_ep

    if sys.modules.setdefault("deep_ep", proxyccl.deep_ep) is not proxyccl.deep_ep:
        found = getattr(sys.modules["deep_ep"], "__file__", None)
        raise RuntimeError(
            f"{_VARIABLE}=1: expected that deep_ep is not imported before SGLang's plug-ins, but {found} is"
        )
