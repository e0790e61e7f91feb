from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass
class CommunicatorMetadata: ...


@dataclass
class TensorTransportMetadata:
    tensor_meta: list[Any]
    tensor_device: str | None = None


@dataclass
class FetchRequest:
    obj_id: str
    tensors: list[Any]


class TensorTransportManager(ABC):
    @abstractmethod
    def tensor_transport_backend(self) -> str: ...

    @staticmethod
    @abstractmethod
    def is_one_sided() -> bool: ...

    @staticmethod
    @abstractmethod
    def can_abort_transport() -> bool: ...

    @abstractmethod
    def actor_has_tensor_transport(self, actor: Any) -> bool: ...

    @abstractmethod
    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> TensorTransportMetadata: ...

    @abstractmethod
    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata: ...

    @abstractmethod
    def recv_multiple_tensors(
        self, obj_id: str, metadata: Any, communicator_metadata: Any, target_buffers: list[Any] | None = None
    ) -> list[Any]: ...

    @abstractmethod
    def send_multiple_tensors(self, tensors: list[Any], metadata: Any, communicator_metadata: Any) -> None: ...

    @abstractmethod
    def garbage_collect(self, obj_id: str, metadata: Any, tensors: list[Any]) -> None: ...

    @abstractmethod
    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None: ...
