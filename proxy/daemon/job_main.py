"""The program of a job's own daemon. A rank runs this file: python job_main.py SOCKET OPTIONS STARTER.

SOCKET is the descriptor of the listening socket, OPTIONS an encoded `JobOptions`, and STARTER the process id of the
rank that runs the program. The process that the rank starts exits with status 0 once the daemon serves. The daemon is a
child of that process, so no rank has to reap the daemon.
"""

import importlib.util
import os
import sys
import types


def main(listener: int, options: str, starter: int) -> None:
    """Runs the daemon in a child. The parent exits with 0 once the child serves, or with 1 if the child ends first."""
    serves, tell = os.pipe()
    if os.fork():  # the fork comes before the imports, because imports start threads
        os.close(tell)
        os._exit(0 if os.read(serves, 1) else 1)
    os.close(serves)
    _leave_out_public_names()
    from proxyccl.device.errors import ProxyCCLError
    from proxyccl.proxy.daemon.command import run_for_job

    def on_ready() -> None:
        os.write(tell, b"x")
        os.close(tell)

    try:
        run_for_job(listener, options, starter, on_ready)
    except ProxyCCLError as error:
        sys.exit(str(error))  # writes the error to stderr, which the rank reads


def _leave_out_public_names() -> None:
    """Puts an empty package in place of `proxyccl`, whose import would also import all modules with public names."""
    spec = importlib.util.find_spec("proxyccl")
    assert spec is not None
    package = types.ModuleType("proxyccl")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["proxyccl"] = package


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
