"""What a generator does now, for a console and for Prometheus.

counters = LiveCounters(lambda: server.statistics)
counters.figures()                                  # for a progress display
close = serve_metrics(counters, port=9090)          # http://127.0.0.1:9090/metrics
"""

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mujica_jax.errors import UserError
from mujica_jax.inference.generator import GeneratorStatistics

WINDOW_SECONDS = 10.0  # tokens a second are counted over this time, or since the reading before it
PREFIX = "mujica_"
COUNTS = {  # these only grow
    "requests": "Requests that were given a slot",
    "refused": "Requests that were answered with an error",
    "prompt_tokens": "Tokens of prompts",
    "prefilled_tokens": "Tokens of prompts that were computed and not found in memory",
    "generated_tokens": "Tokens generated",
    "evicted_pages": "Pages of KV memory whose content made room",
    "compiled_programs": "Programs compiled; one that grows under steady traffic means recompilation",
    "seconds": "Seconds inside the engine",
}
GAUGES = {
    "running": "Requests that have a slot",
    "waiting": "Requests that wait for one",
    "free_pages": "Pages of KV memory that hold nothing",
    "cache_hit_rate": "Share of prompt tokens found in memory, since the beginning",
}


class LiveCounters:
    """Readings of one generator; from any thread."""

    def __init__(
        self,
        read: Callable[[], GeneratorStatistics],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._readings: collections.deque[tuple[float, int]] = (
            collections.deque()
        )  # (when, tokens generated)
        self._lock = threading.Lock()
        self.now()

    def now(self) -> tuple[GeneratorStatistics, float]:
        """(statistics, tokens a second of late)."""
        with self._lock:
            found, when = self._read(), self._clock()
            self._readings.append((when, found.generated_tokens))
            while len(self._readings) > 2 and self._readings[1][0] <= when - WINDOW_SECONDS:
                self._readings.popleft()
            before, tokens = self._readings[0]
        return found, (found.generated_tokens - tokens) / (when - before) if when > before else 0.0

    def figures(self) -> dict[str, int | float | str]:
        """For a progress display."""
        found, tokens_a_second = self.now()
        programs = {} if found.compiled_programs is None else {"programs": found.compiled_programs}
        return {
            "running": found.running,
            "waiting": found.waiting,
            "tokens_per_second": tokens_a_second,
            "cached": f"{found.cache_hit_rate:.0%}",
        } | programs

    def collect(self) -> Iterator[Any]:
        """Prometheus metrics: a collector for `prometheus_client`."""
        found, tokens_a_second = self.now()
        for family, meanings in ((CounterMetricFamily, COUNTS), (GaugeMetricFamily, GAUGES)):
            for name, meaning in meanings.items():
                value = getattr(found, name)
                if value is not None:  # this engine does not say
                    yield family(PREFIX + name, meaning, value=value)
        yield GaugeMetricFamily(
            PREFIX + "tokens_per_second",
            "Tokens generated a second, of late",
            value=tokens_a_second,
        )


def between(before: GeneratorStatistics, after: GeneratorStatistics) -> dict[str, float | int]:
    """What happened between two readings, for a line of metrics. What the engine does not say is
    left out."""
    known = [name for name in COUNTS if getattr(after, name) is not None]
    found: dict[str, float | int] = {
        name: getattr(after, name) - getattr(before, name) for name in known
    }
    seconds = found.pop("seconds")
    prompts = found["prompt_tokens"]
    return found | {
        "engine_seconds": seconds,
        "cache_hit_rate": 1.0 - found["prefilled_tokens"] / prompts if prompts else 0.0,
        "tokens_per_second": found["generated_tokens"] / seconds if seconds > 0 else 0.0,
    }


def serve_metrics(
    counters: LiveCounters, *, port: int, host: str = "127.0.0.1"
) -> tuple[int, Callable[[], None]]:
    """Answer /metrics from a thread; port 0 takes any. Returns the port and what ends it."""
    try:
        registry = CollectorRegistry()
        registry.register(counters)  # pyright: ignore[reportArgumentType]  # it collects, which is all that is asked
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be opened ({error.strerror}): choose another port"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close
