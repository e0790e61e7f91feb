"""ProxyCCL as a torch.distributed backend: ``torch.distributed.init_process_group("proxyccl")``.

From version 2.15 on, torch finds the backend even if the program does not import this module. With earlier versions, a
program must import this module before it uses the backend.
"""

from proxyccl.torch.flight_recorder import write_flight_record
from proxyccl.torch.operators import communicator_of
from proxyccl.torch.process_group import Options, ProcessGroupProxyCCL, register
from proxyccl.torch.store_bootstrap import StoreBootstrap

__all__ = ["Options", "ProcessGroupProxyCCL", "StoreBootstrap", "communicator_of", "register", "write_flight_record"]

register()
