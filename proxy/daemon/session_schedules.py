"""The schedules of one client of the daemon."""

from __future__ import annotations

from proxyccl.device.errors import ProtocolError
from proxyccl.proxy.daemon.protocol import AddSchedule, Done, RemoveSchedule, ScheduleAdded
from proxyccl.proxy.daemon.session_memories import REST_SECONDS
from proxyccl.proxy.service import ProxyService


class SessionSchedules:
    """Schedules by number. What a schedule names is looked up when it runs, in what the client was given.

    Args:
        proxy: the client's service.
    """

    def __init__(self, proxy: ProxyService) -> None:
        self._proxy = proxy
        self._numbers: set[int] = set()

    def handle(self, request: AddSchedule | RemoveSchedule) -> ScheduleAdded | Done:
        """Does what a request asks for."""
        match request:
            case AddSchedule(schedule=schedule):
                number = self._proxy.add_schedule(schedule)
                self._numbers.add(number)
                return ScheduleAdded(number)
            case RemoveSchedule(number=number):
                if number not in self._numbers:
                    raise ProtocolError(f"number: this client has no schedule {number}")
                with self._proxy.paused(REST_SECONDS):  # a stream may ring it all the same
                    self._proxy.remove_schedule(number)
                self._numbers.remove(number)
                return Done()
