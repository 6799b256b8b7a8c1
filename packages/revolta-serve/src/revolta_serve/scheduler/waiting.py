"""The queue: who may start next.

By priority. Inside a priority the preempted requests come first, by arrival; then the tenants take turns, and inside a tenant it is
first come, first served.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from revolta_serve.scheduler.request import Request


class Waiting:
    """Requests in the queue. Nobody is in it twice."""

    def __init__(self) -> None:
        self._resuming: list[Request] = []
        # priority -> tenant -> its requests; of tenants of one priority, the one that was served the longest ago is first.
        self._tiers: dict[int, dict[str, deque[Request]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        """Add a new request at the end of its tenant's line."""
        self._tiers.setdefault(request.order[0], {}).setdefault(request.source.tenant, deque()).append(request)
        self._count += 1

    def put_back(self, request: Request) -> None:
        """Add a preempted request before all new ones of its priority."""
        insort(self._resuming, request, key=lambda other: other.order)
        self._count += 1

    def remove(self, request: Request, *, started: bool) -> None:
        """Take a request out. When it starts, its tenant's turn is over. Raises ValueError if it is not in the queue."""
        if request in self._resuming:
            self._resuming.remove(request)
        else:
            priority, tenant = request.order[0], request.source.tenant
            tenants = self._tiers.get(priority, {})
            line = tenants.get(tenant, deque())
            line.remove(request)
            if started or not line:
                del tenants[tenant]
            if started and line:
                tenants[tenant] = line
            if not tenants:
                del self._tiers[priority]
        self._count -= 1

    def __iter__(self) -> Iterator[Request]:
        """All requests, in the order in which they may start. Requests may be removed between two of them."""
        resuming = list(self._resuming)
        for priority in sorted({*self._tiers, *(request.order[0] for request in resuming)}):
            yield from (request for request in resuming if request.order[0] == priority)
            lines = [list(line) for line in self._tiers.get(priority, {}).values()]
            for place in range(max(map(len, lines), default=0)):
                for line in lines:
                    if place < len(line):
                        yield line[place]
