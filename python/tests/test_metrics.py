"""Metrics accumulate, and are published in the worker's form."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any

import pytest

from genset.metrics import Metrics


def test_samples_are_what_happened_so_far() -> None:
    metrics = Metrics()
    steps = metrics.counter("my_steps_total", "Steps", rank="0")
    queue = metrics.gauge("my_queue", "Requests that wait")
    seconds = metrics.histogram("my_step_seconds", "Time of a step", [0.1, 1.0])
    steps.add()
    steps.add(2)
    queue.set(7)
    for value in (0.05, 0.1, 0.5, 9.0):
        seconds.observe(value)
    assert metrics.samples() == [
        {"name": "my_steps_total", "help": "Steps", "kind": "counter", "labels": {"rank": "0"}, "value": 3.0},
        {"name": "my_queue", "help": "Requests that wait", "kind": "gauge", "labels": {}, "value": 7},
        {
            "name": "my_step_seconds",
            "help": "Time of a step",
            "kind": "histogram",
            "labels": {},
            "buckets": [(0.1, 2), (1.0, 1), (math.inf, 1)],
            "sum": pytest.approx(9.65),
        },
    ]


def test_labels_are_published_as_texts() -> None:
    metrics = Metrics()
    metrics.counter("c_total", "C", rank=0)
    metrics.gauge("g", "G", rank=1)
    metrics.histogram("h", "H", [1.0], rank=2)
    assert [sample["labels"] for sample in metrics.samples()] == [{"rank": "0"}, {"rank": "1"}, {"rank": "2"}]


def test_values_are_published_as_floats() -> None:
    metrics = Metrics()
    metrics.gauge("is_loaded", "1 once it is").set(True)
    half: Any = Fraction(1, 2)
    metrics.counter("c_total", "C").add(half)
    metrics.histogram("h", "H", [half]).observe(half)
    gauge, counter, histogram = metrics.samples()
    assert (gauge["value"], counter["value"], histogram["sum"], histogram["buckets"][0]) == (1.0, 0.5, 0.5, (0.5, 1))
    values = (gauge["value"], counter["value"], histogram["sum"], histogram["buckets"][0][0])
    assert [type(value) for value in values] == [float] * 4


def test_threads_lose_no_observation() -> None:
    metrics = Metrics()
    counter = metrics.counter("n_total", "N")
    histogram = metrics.histogram("h", "H", [1.0])

    def work() -> None:
        for _ in range(1000):
            counter.add()
            histogram.observe(2.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.sample()["value"] == 4000
    assert histogram.sample()["buckets"] == [(1.0, 0), (math.inf, 4000)]


def test_what_makes_no_sense_is_refused() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="rise"):
        metrics.histogram("h", "H", [2.0, 1.0])
    with pytest.raises(ValueError, match="grows"):
        metrics.counter("c_total", "C").add(-1)
