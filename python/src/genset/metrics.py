"""An engine's metrics: counters, gauges and histograms that accumulate, and are published together.

    metrics = Metrics()
    steps = metrics.counter("my_engine_steps_total", "Steps of the scheduler")
    seconds = metrics.histogram("my_engine_step_seconds", "Time of a step", bounds=[0.01, 0.1, 1.0])
    ...
    steps.add(), seconds.observe(0.02)
    self.worker.publish_metrics(metrics.samples())
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Mapping, Sequence

from genset.types import Metric


def _head(kind: str, name: str, help: str, labels: Mapping[str, object]) -> Metric:
    # The worker reads only text labels; others would make it drop all series published with this one.
    return Metric(name=name, help=help, kind=kind, labels={label: str(value) for label, value in labels.items()})


class Counter:
    """A number that only grows. Its name ends with `_total`."""

    def __init__(self, name: str, help: str, labels: Mapping[str, object]) -> None:
        self._head = _head("counter", name, help, labels)
        self._value = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0) -> None:
        """Adds to the counter. Any thread may call it."""
        if amount < 0:
            raise ValueError("a counter only grows")
        with self._lock:
            self._value += float(amount)

    def sample(self) -> Metric:
        """The series' current value."""
        return {**self._head, "value": self._value}


class Gauge:
    """A number that goes up and down."""

    def __init__(self, name: str, help: str, labels: Mapping[str, object]) -> None:
        self._head = _head("gauge", name, help, labels)
        self._value = 0.0

    def set(self, value: float) -> None:
        """Sets the value. Any thread may call it."""
        # A bool, or a number of another library, would make the worker drop all series published with this one.
        self._value = float(value)

    def sample(self) -> Metric:
        """The series' current value."""
        return {**self._head, "value": self._value}


class Histogram:
    """Counts observations by bucket."""

    def __init__(self, name: str, help: str, labels: Mapping[str, object], bounds: Sequence[float]) -> None:
        finite = [float(bound) for bound in bounds if bound != math.inf]
        if finite != sorted(set(finite)) or any(math.isnan(bound) for bound in finite):
            raise ValueError("bounds must rise")
        self._head = _head("histogram", name, help, labels)
        self._bounds = finite
        self._counts = [0] * (len(finite) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts an observation. Any thread may call it."""
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += float(value)

    def sample(self) -> Metric:
        """The series' current value."""
        with self._lock:
            buckets = list(zip([*self._bounds, math.inf], self._counts, strict=True))
            return {**self._head, "buckets": buckets, "sum": self._sum}


class Metrics:
    """An engine's metrics. A name may be used several times with different labels. Label values are published as text."""

    def __init__(self) -> None:
        self._all: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, help: str, **labels: object) -> Counter:
        """A new counter, from 0."""
        counter = Counter(name, help, labels)
        self._all.append(counter)
        return counter

    def gauge(self, name: str, help: str, **labels: object) -> Gauge:
        """A new gauge, at 0."""
        gauge = Gauge(name, help, labels)
        self._all.append(gauge)
        return gauge

    def histogram(self, name: str, help: str, bounds: Sequence[float], **labels: object) -> Histogram:
        """A new histogram without observations. `bounds` are the upper bounds, ascending; observations above the last count too."""
        histogram = Histogram(name, help, labels, bounds)
        self._all.append(histogram)
        return histogram

    def samples(self) -> list[Metric]:
        """The current values of all series, for `WorkerHandle.publish_metrics`."""
        return [metric.sample() for metric in self._all]
