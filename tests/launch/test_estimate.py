"""How long a plan takes, said before it starts: arithmetic on a rate, never on this machine's."""

from __future__ import annotations

from drover.launch import forecast
from drover.launch.forecast import matrix_rate

RATE = 1e11


def test_the_look_is_by_processor_time_and_ends(monkeypatch):
    # Two products, of 0.5 and 0.25 s of processor time; the clock on the wall stops the look after the second.
    processor, wall = iter([0.0, 0.5, 1.0, 1.25]), iter([0.0, 0.05, 7.0])
    monkeypatch.setattr(forecast.time, "process_time", lambda: next(processor))
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(forecast, "SIZE", 64)
    assert matrix_rate(cores=2) == 2 * 2 * 64**3 / 0.25
