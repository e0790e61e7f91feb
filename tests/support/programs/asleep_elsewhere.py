"""Registers an array of a suspendable communicator of ranks 0 and 1 with two other communicators: one of the same
ranks, and one that also has rank 2. Prints the errors of `suspend` while the latter has the array registered, and of a
call of the former while the memory is suspended; and whether the array is registered with the former afterwards.
"""

import sys
from pathlib import Path

from proxyccl import ArgumentError, Communicator, SuspendedError

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.cases.memory import registered
from support.processes import FileBootstrap

everyone = Communicator(FileBootstrap.from_environment(), timeout=60, suspendable=True)
if everyone.rank < 2:
    pair, other = everyone.split([0, 1]), everyone.split([0, 1])
    array = pair.empty(1 << 20, "float32").fill(1)
    everyone.register(array)
    other.register(array)
    try:
        pair.suspend()
    except ArgumentError as error:
        print(error)
    everyone.deregister(array)
    pair.suspend()
    try:
        other.all_reduce(array)
    except SuspendedError as error:
        print(error)
    pair.resume()
    print("with the same ranks:", registered(other, array.view()))
    print("sum:", float(other.all_reduce(array).numpy()[-1]))
    everyone.register(array.fill(1))
else:
    array = everyone.empty(1 << 20, "float32").fill(1)
    everyone.register(array)
    everyone.deregister(array)
    everyone.register(array)
everyone.all_reduce(array)
print("sum:", float(array.numpy()[-1]))
everyone.close()
