"""The methods, besides the calls on tensors, that torch before 2.15 needs of a process group written in Python."""

from __future__ import annotations

from collections.abc import Callable

import torch


class WholeGroup:
    """A mixin: names, devices, and itself in the place of a backend.

    Attributes:
        bound_device_id: the device that was passed to `init_process_group`.
    """

    _group_name: str
    _group_desc: str
    bound_device_id: torch.device | None = None

    def setGroupName(self, name: str) -> None:  # noqa: N802  torch's names, here and below
        """Called by torch."""
        self._group_name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which torch's functional collectives find the group."""
        return self._group_name

    group_name = property(getGroupName)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch."""
        self._group_desc = description

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        """The program's name of the group."""
        return self._group_desc

    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, _: torch.device) -> WholeGroup:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, _: Callable[..., None]) -> None:
        raise RuntimeError("proxyccl: hooks on completion need torch 2.15")

    def _wait_for_pending_works(self) -> None:
        pass
