"""How fast a count has grown lately. Pure."""

from collections import deque

WINDOW_S = 10.0


class Rate:
    """Of a count that only grows, over the last `WINDOW_S` or so."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        # (time, count), the oldest first; one of them at least a window old once there are any so old

    def note(self, count: float, now: float) -> None:
        self._seen.append((now, count))
        while len(self._seen) > 1 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else 0.0
