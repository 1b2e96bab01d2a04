"""Show what a generator does, on a console and for Prometheus.

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

# Tokens per second are counted over this time, or since the reading before it.
WINDOW_SECONDS = 10.0
PREFIX = "mujica_"
# Values that only grow.
COUNTS = {
    "requests": "Requests that were given a slot",
    "refused": "Requests that were answered with an error",
    "prompt_tokens": "Tokens of prompts",
    "prefilled_tokens": "Tokens of prompts that were computed and not found in memory",
    "generated_tokens": "Tokens generated",
    "evicted_pages": "Pages of KV memory whose content made room",
    "compiled_programs": (
        "Programs compiled; one that grows under steady traffic means recompilation"
    ),
    "seconds": "Seconds inside the engine",
}
GAUGES = {
    "running": "Requests that have a slot",
    "waiting": "Requests that wait for one",
    "free_pages": "Pages of KV memory that hold nothing",
    "cache_hit_rate": "Share of prompt tokens found in memory, since the beginning",
}


class LiveCounters:
    """Readings of one generator. Use it from any thread."""

    def __init__(
        self,
        read: Callable[[], GeneratorStatistics],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        # (time, tokens generated)
        self._readings: collections.deque[tuple[float, int]] = collections.deque()
        self._lock = threading.Lock()
        self.now()

    def now(self) -> tuple[GeneratorStatistics, float]:
        """Return (statistics, tokens per second in the last `WINDOW_SECONDS`)."""
        with self._lock:
            statistics = self._read()
            time_now = self._clock()
            self._readings.append((time_now, statistics.generated_tokens))
            while len(self._readings) > 2 and self._readings[1][0] <= time_now - WINDOW_SECONDS:
                self._readings.popleft()
            earlier_time, earlier_tokens = self._readings[0]
        if time_now <= earlier_time:
            return statistics, 0.0
        new_tokens = statistics.generated_tokens - earlier_tokens
        return statistics, new_tokens / (time_now - earlier_time)

    def figures(self) -> dict[str, int | float | str]:
        """Return what a progress display shows."""
        statistics, tokens_per_second = self.now()
        figures: dict[str, int | float | str] = {
            "running": statistics.running,
            "waiting": statistics.waiting,
            "tokens_per_second": tokens_per_second,
            "cached": f"{statistics.cache_hit_rate:.0%}",
        }
        if statistics.compiled_programs is not None:
            figures["programs"] = statistics.compiled_programs
        return figures

    def collect(self) -> Iterator[Any]:
        """Yield Prometheus metrics, as a collector for `prometheus_client`."""
        statistics, tokens_per_second = self.now()
        for family, meanings in ((CounterMetricFamily, COUNTS), (GaugeMetricFamily, GAUGES)):
            for name, meaning in meanings.items():
                value = getattr(statistics, name)
                if value is not None:  # None: the engine does not know it
                    yield family(PREFIX + name, meaning, value=value)
        yield GaugeMetricFamily(
            PREFIX + "tokens_per_second",
            "Tokens generated a second, of late",
            value=tokens_per_second,
        )


def between(before: GeneratorStatistics, after: GeneratorStatistics) -> dict[str, float | int]:
    """Return what happened between two readings, for a line of metrics.

    Values that the engine does not know are left out.
    """
    differences: dict[str, float | int] = {}
    for name in COUNTS:
        if getattr(after, name) is not None:
            differences[name] = getattr(after, name) - getattr(before, name)
    seconds = differences.pop("seconds")
    prompt_tokens = differences["prompt_tokens"]
    cache_hit_rate = 0.0
    if prompt_tokens:
        cache_hit_rate = 1.0 - differences["prefilled_tokens"] / prompt_tokens
    tokens_per_second = 0.0
    if seconds > 0:
        tokens_per_second = differences["generated_tokens"] / seconds
    return differences | {
        "engine_seconds": seconds,
        "cache_hit_rate": cache_hit_rate,
        "tokens_per_second": tokens_per_second,
    }


def serve_metrics(
    counters: LiveCounters, *, port: int, host: str = "127.0.0.1"
) -> tuple[int, Callable[[], None]]:
    """Answer /metrics from a thread. Port 0 takes any free one.

    Returns the port and a function that ends it.
    """
    try:
        registry = CollectorRegistry()
        # A collector needs only a method `collect`.
        registry.register(counters)  # pyright: ignore[reportArgumentType]
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
