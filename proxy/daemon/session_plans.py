"""The plans of one client of the daemon."""

from __future__ import annotations

from proxyccl.device.errors import ProtocolError
from proxyccl.proxy.daemon.protocol import AddPlan, Done, PlanAdded, RemovePlan
from proxyccl.proxy.daemon.session_memories import REST_SECONDS
from proxyccl.proxy.service import ProxyService


class SessionPlans:
    """Plans by number. What a plan names is looked up when it runs, in what the client was given.

    Args:
        proxy: the client's service.
    """

    def __init__(self, proxy: ProxyService) -> None:
        self._proxy = proxy
        self._numbers: set[int] = set()

    def handle(self, request: AddPlan | RemovePlan) -> PlanAdded | Done:
        """Does what a request asks for."""
        match request:
            case AddPlan(plan=plan):
                number = self._proxy.add_plan(plan)
                self._numbers.add(number)
                return PlanAdded(number)
            case RemovePlan(number=number):
                if number not in self._numbers:
                    raise ProtocolError(f"number: this client has no plan {number}")
                with self._proxy.paused(REST_SECONDS):  # a stream may ring it all the same
                    self._proxy.remove_plan(number)
                self._numbers.remove(number)
                return Done()
