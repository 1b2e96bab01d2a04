"""Show the counters of a generator on the console, in metrics files and to Prometheus.

counters = LiveCounters(lambda: server.statistics)
counters.figures()                                  # for a progress display
port, close = serve_metrics(counters, port=9090)    # http://127.0.0.1:9090/metrics
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

# `LiveCounters` averages the tokens per second over this time. If readings are further apart, it
# averages since the last reading before this window.
WINDOW_SECONDS = 10.0
PREFIX = "mujica_"
# Values that only grow, with their descriptions for Prometheus.
COUNTS = {
    "requests": "Requests that were started",
    "refused": "Requests that ended with an error",
    "prompt_tokens": "Prompt tokens of all started requests",
    "prefilled_tokens": "Prompt tokens that were computed and not found in the prefix cache",
    "generated_tokens": "Generated tokens",
    "evicted_pages": "Pages that were evicted from the prefix cache",
    "compiled_programs": (
        "Compiled programs; if the number keeps growing under steady traffic, shapes are recompiled"
    ),
    "seconds": "Seconds inside prefill and decode calls",
}
# Values that grow and shrink, with their descriptions for Prometheus.
GAUGES = {
    "running": "Requests that are running",
    "waiting": "Requests that are waiting in the queue",
    "free_pages": "Empty pages of the KV cache",
    "cache_hit_rate": "Share of prompt tokens found in the prefix cache since the start, 0 to 1",
}


class LiveCounters:
    """Counters and throughput of one generator. Use it from any thread."""

    def __init__(
        self,
        read: Callable[[], GeneratorStatistics],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the counters with `read`, and the time in seconds with `clock`."""
        self._read = read
        self._clock = clock
        # (time in seconds, generated tokens since the generator was made), oldest first.
        self._readings: collections.deque[tuple[float, int]] = collections.deque()
        self._lock = threading.Lock()
        self.now()

    def now(self) -> tuple[GeneratorStatistics, float]:
        """Return (statistics, generated tokens per second over the last `WINDOW_SECONDS`)."""
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
        """Return the values for a progress display, by their short names."""
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
        """Yield all metrics. `prometheus_client` calls this method for each scrape."""
        statistics, tokens_per_second = self.now()
        for family, meanings in ((CounterMetricFamily, COUNTS), (GaugeMetricFamily, GAUGES)):
            for name, meaning in meanings.items():
                value = getattr(statistics, name)
                # None means that the engine does not report this value.
                if value is not None:
                    yield family(PREFIX + name, meaning, value=value)
        yield GaugeMetricFamily(
            PREFIX + "tokens_per_second",
            f"Generated tokens per second over the last {WINDOW_SECONDS:.0f} seconds",
            value=tokens_per_second,
        )


def between(before: GeneratorStatistics, after: GeneratorStatistics) -> dict[str, float | int]:
    """Return the differences between two readings, for one line of `metrics.jsonl`.

    The result also has `engine_seconds`, `cache_hit_rate` and `tokens_per_second` of this period.
    Values that the engine does not report are left out.
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
    """Serve the metrics to Prometheus at `http://host:port/metrics`, from a background thread.

    Port 0 means any free port. Returns (port, function that stops the server). Raises UserError if
    the port cannot be opened.
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
