from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

__all__ = ["CommunicatorMetadata", "TensorTransportManager", "TensorTransportMetadata", "register_tensor_transport"]

registered: dict[str, tuple[list[str], type, type]] = {}


def register_tensor_transport(
    transport_name: str, devices: list[str], transport_manager_class: type, data_type: type
) -> None:
    if transport_name.upper() in registered:
        raise ValueError(f"Transport {transport_name} already registered.")
    assert issubclass(transport_manager_class, TensorTransportManager)
    registered[transport_name.upper()] = (devices, transport_manager_class, data_type)
