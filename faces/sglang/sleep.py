"""Suspends the communicators of SGLang's groups while SGLang has released memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from proxyccl.channels.communicator import Communicator
from proxyccl.device.errors import ArgumentError, ResourceError, RuntimeUnavailableError
from proxyccl.torch.process_group import ProcessGroupProxyCCL
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import get_parallel, get_resources

_logger = logging.getLogger(__name__)


def release(original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
    """Releases SGLang's memory, and then suspends the communicators. All ranks of a tensor-parallel group call this."""
    answer = original(updater, request)
    for communicator in _communicators():
        if not communicator.suspended:
            try:
                communicator.suspend(save=False, resume_on_call=True)
            except (ArgumentError, ResourceError, RuntimeUnavailableError) as error:  # on all ranks
                _logger.warning("a communicator of %d ranks keeps its memory: %s", communicator.world_size, error)
    return answer


def resume(original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
    """Resumes SGLang's memory and, once SGLang has resumed all of it, the communicators, because replays of graphs do
    not resume them.
    """
    answer = original(updater, request)
    if not updater.offload_tags:
        for communicator in _communicators():
            if communicator.suspended:
                communicator.resume()
    return answer


def _communicators() -> Iterator[Communicator]:
    """Yields the communicators of the groups and of DeepEP's buffers whose ranks release memory together, in the same
    order on all ranks.
    """
    parallel = get_parallel()
    if parallel.enable_dp_attention_local_control_broadcast:
        return  # ranks of a group get the request at different times
    together = set(parallel.tp_group.ranks)
    for reference in parallel_state._groups.values():
        coordinator = reference()
        if coordinator is not None and together.issuperset(coordinator.ranks):
            backend = coordinator.device_group._get_backend(coordinator.device)
            if isinstance(backend, ProcessGroupProxyCCL):
                yield from backend.endpoints.in_order()
    for state in get_resources().buffers.values():  # DeepEP's buffers and other objects
        communicator = getattr(getattr(state, "buffer", None), "communicator", None)
        if isinstance(communicator, Communicator):
            yield communicator
