"""vLLM's NixlConnector with grants: a decoder notices if a prefiller reuses blocks of the KV cache before the decoder
has read them.

    --kv-transfer-config '{"kv_connector": "GrantingNixlConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "proxyccl_vllm.kv_connector"}'

The scheduler gives each request that a peer may read a key, which travels in the request's `kv_transfer_params`. Each
worker makes a grant with this key, and revokes the grant before the scheduler frees the request's blocks.
"""

from __future__ import annotations

import itertools
import json
import secrets
import zlib
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from proxyccl.transfer import Grant

KEY = "proxyccl_grant"
"""The name of the key in `kv_transfer_params`, whose value `_bind` has bound to the request's blocks."""

_KEYS = 1 << 40
"""The number of keys of grants. A router may pass on any integer."""

_LONGEST_WAIT = 0.1
"""The longest time in seconds for which a worker waits for reads of blocks whose lease has ended."""


def _bind(key: int, block_ids: Any) -> int:
    """Returns a key that is valid only together with a request's blocks: a second call with the same blocks returns the
    original key, and with other blocks almost certainly a key that no grant has.
    """
    return (key ^ zlib.crc32(json.dumps(block_ids).encode())) % _KEYS


class _Scheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keys: dict[str, int] = {}  # the key of each request that may be read
        self._new_keys = itertools.count(secrets.randbits(39))  # random, so that a restarted engine has other keys

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = {request: self._keys.setdefault(request, next(self._new_keys)) for request in self._reqs_in_batch}
        read = {request: needed[0].kv_transfer_params for request, needed in self._reqs_need_recv.items()}
        metadata = super().build_connector_meta(scheduler_output)
        metadata.proxyccl_grants = made
        for request, passed in read.items():
            if KEY in passed:
                given = passed[KEY] if type(passed[KEY]) is int else 0  # a router may pass on anything
                key = _bind(given, passed["remote_block_ids"])
                metadata.reqs_to_recv[request].remote.proxyccl_grant = key
        return metadata

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delays, parameters = super().request_finished(request, block_ids)
        key = self._keys.pop(request.request_id, None)
        if parameters is not None and key is not None:
            parameters[KEY] = _bind(key, parameters["remote_block_ids"])
        return delays, parameters


class _Worker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not hasattr(self.nixl_wrapper, "grant"):
            raise RuntimeError("GrantingNixlConnector needs the distribution proxyccl-nixl in the place of NIXL")
        self._grants: dict[str, Grant] = {}

    def start_load_kv(self, metadata: Any) -> None:
        for request, key in metadata.proxyccl_grants.items():
            if request not in self._grants:
                granted = self._registered_descs[0].trim()
                granted.rows = granted.rows[:1]  # readers that pass a key do not check the grant's blocks
                self._grants[request] = self.nixl_wrapper.grant(granted, key=key)
        super().start_load_kv(metadata)
        self._revoke_grants()

    def get_finished(self) -> tuple[set[str], set[str]]:
        finished: tuple[set[str], set[str]] = super().get_finished()
        self._revoke_grants()
        return finished

    def get_transfer_results(self) -> Any:  # vLLM 0.26 has only `get_finished`
        results = super().get_transfer_results()
        self._revoke_grants()
        return results

    def _revoke_grants(self) -> None:
        """Revokes the grants of requests that were read or aborted, or whose lease has ended, before the scheduler is
        told to free their blocks.
        """
        for request in self._grants.keys() - self._reqs_to_process:
            self._grants.pop(request).revoke(wait=_LONGEST_WAIT)

    def _read_blocks(self, read_spec: Any, **options: Any) -> Any:
        metadata = self._recving_metadata.get(options["request_id"])
        key = None if metadata is None else getattr(metadata.remote, "proxyccl_grant", None)
        if key is not None:
            handle = options["remote_xfer_side_handle"]
            options["remote_xfer_side_handle"] = self.nixl_wrapper.granted_dlist(handle, key)
        return super()._read_blocks(read_spec, **options)


class GrantingNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's NixlConnector, whose reads fail if the blocks were freed before the read was complete. vLLM then
    recomputes the blocks or fails the request, as `kv_load_failure_policy` says. Both servers need this connector; with
    a peer that has NixlConnector, reads are not checked.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)  # makes neither of these objects
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = _Scheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = _Worker(vllm_config, self.engine_id, kv_cache_config)
