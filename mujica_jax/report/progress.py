"""Show the progress of a run's stages on the console.

A terminal gets a live display. A file or a pipe gets a plain line every few seconds instead.
"""

import contextlib
import io
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mujica_jax.report.text import encoding_of, is_terminal, plain, visible, write

Figure = int | float | str | None

# Redrawing the display takes a fraction of a millisecond, so it uses well under one percent of the
# time.
REFRESHES_PER_SECOND = 4
# Seconds between two lines of plain output.
SECONDS_BETWEEN_LINES = 5.0
# A rate over less time would be noise.
MIN_RATE_SECONDS = 0.5
# How many units have to be finished before the remaining time is estimated, or a twentieth of all
# units if that is less. The first units wait for compilation and would mislead.
MIN_ETA_UNITS = 20
# The rate is computed over this time. A rate since the start would always include compilation.
RATE_WINDOW_SECONDS = 30.0
# How figures are called on the console. Other figures use their own names, with blanks for "_".
FIGURE_LABELS = {"tokens_per_second": "tokens/s", "k": "threshold K", "em": "EM", "f1": "F1"}


class Progress:
    """The user's console: progress of stages, lines of text, and tables.

        report = Progress()
        with report.stage("warm-up", total=600, unit="steps") as stage:
            stage.update(120, loss=0.71, tokens_per_second=41_000)

    A stage inside another stage is shown below it. `stream` is where the output goes (None:
    stdout). `live` chooses between the live display (True) and plain lines (False). None means a
    live display if the stream is a terminal.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live = is_terminal(self._stream) if live is None else live
        self._clock = clock
        self._open: list[Stage] = []
        self._last_line_time = clock()
        self._terminal: Console | None = None

    @contextlib.contextmanager
    def stage(
        self,
        name: str,
        *,
        total: int | None = None,
        unit: str = "steps",
        done: int = 0,
        live: Callable[[], Mapping[str, Figure]] = dict,
    ) -> Iterator["Stage"]:
        """Show a stage until the block ends, then print one closing line.

        `name` is the stage's name on the console. `total` is its number of units (None: unknown),
        and `unit` is what they are called. `done` is the number of units that an earlier start of
        the run finished. `live` returns figures of the current moment. It is called whenever the
        stage is drawn; on a terminal the call comes from the display's own thread.
        """
        stage = Stage(self, name, total=total, unit=unit, done=done, live=live)
        needs_display = self._live and not self._open
        with self._display() if needs_display else contextlib.nullcontext():
            self._open.append(stage)
            try:
                yield stage
            except BaseException:
                self._close(stage, "stopped at ")
                raise
            self._close(stage, "")

    def line(self, text: str) -> None:
        """Print one line of text, above the live display if there is one."""
        text = visible(text)
        if self._live:
            self._console().print(Text(text))
        else:
            write(self._stream, text + "\n")

    def show(self, renderable: RenderableType) -> None:
        """Print a table or a tree, in colour on a terminal, and as plain aligned text elsewhere."""
        if self._live:
            self._console().print(renderable)
        else:
            write(self._stream, plain(renderable, encoding=encoding_of(self._stream)))

    def _updated(self, stage: "Stage") -> None:
        """Print a line if the last one is old enough. A live display redraws itself instead."""
        if self._live or stage.seen - self._last_line_time < SECONDS_BETWEEN_LINES:
            return
        self._last_line_time = stage.seen
        self.line(f"{stage.name}: {', '.join([stage.counts(), *stage.figures_now()])}")

    def _close(self, stage: "Stage", manner: str) -> None:
        """Remove a stage from the display, and print its closing line after the words `manner`."""
        self._open.remove(stage)
        self.line(f"{stage.name}: {manner}{stage.summary()}")

    def _console(self) -> Console:
        if self._terminal is None:
            self._terminal = Console(
                file=self._stream,
                force_terminal=True,
                force_jupyter=False,
                highlight=False,
                markup=False,
                emoji=False,
            )
        return self._terminal

    def _display(self) -> contextlib.AbstractContextManager[Any]:
        return Live(
            console=self._console(),
            get_renderable=self._stages,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def _stages(self) -> Group:
        """Return the live display: two lines for each open stage."""
        rows: list[RenderableType] = []
        for stage in tuple(self._open):
            bar = ProgressBar(
                total=stage.total, completed=stage.done, width=24, pulse=stage.total is None
            )
            counts = Text(stage.counts(), no_wrap=True, overflow="ellipsis")
            row = Table.grid(padding=(0, 1))
            row.add_row(Text(visible(stage.name), style="bold"), bar, counts)
            rows.append(row)

            figures = Text(
                "  " + ", ".join(stage.figures_now()),
                style="cyan",
                no_wrap=True,
                overflow="ellipsis",
            )
            rows.append(figures)
        return Group(*rows)


class NoConsole(io.StringIO):
    """A stream that discards the progress of all processes but the first.

    All processes do the same work, so one of them is enough on the console. Errors still go to
    stderr.
    """

    def write(self, s: str, /) -> int:
        return len(s)


class Stage:
    """The progress of one stage. `Progress.stage` creates it.

    Attributes:
        name: The stage's name on the console.
        total: Number of units of the whole stage; None if it is unknown.
        unit: What the units are called.
        done: Number of units that are finished.
        seen: Time of the last update, in seconds of the progress clock.
    """

    def __init__(
        self,
        progress: Progress,
        name: str,
        *,
        total: int | None,
        unit: str,
        done: int,
        live: Callable[[], Mapping[str, Figure]],
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = done
        self._progress = progress
        self._clock = progress._clock
        self._done_at_start = done
        self._live = live
        self._values: dict[str, Figure] = {}
        self._start_time = self._clock()
        self.seen = self._start_time
        # Pairs of a time and the units finished by then, for the last half minute, at least a
        # second apart.
        self._marks: deque[tuple[float, int]] = deque([(self._start_time, done)])

    def update(self, done: int, **figures: Figure) -> None:
        """Show that `done` of `total` units are finished, with figures.

        A figure is shown until a newer value replaces it. `acceptance` is a share (0 to 1), and
        `em` and `f1` are in percent. One call takes about a microsecond, so call it after every
        unit. Pass Python numbers: a device array would make the caller wait for the device.
        """
        self.done = done
        # Make a new dictionary, because the display may be reading the old one in its thread.
        self._values = self._values | figures
        self.seen = self._clock()
        if self.seen - self._marks[-1][0] >= 1.0:
            self._marks.append((self.seen, done))
            while self.seen - self._marks[0][0] > RATE_WINDOW_SECONDS and len(self._marks) > 2:
                self._marks.popleft()
        self._progress._updated(self)

    def rate(self) -> float:
        """Return units per second over the last half minute; 0 if too little time has passed."""
        mark_time, mark_done = self._marks[0]
        seconds = self.seen - mark_time
        if seconds < MIN_RATE_SECONDS:
            return 0.0
        return (self.done - mark_done) / seconds

    def counts(self) -> str:
        """Return the progress as text: `120/600 steps, 3.21 steps/s, eta 2:30, 0:37 so far`."""
        parts = [self._amount()]
        rate = self.rate()
        if rate > 0:
            parts.append(f"{_short(rate)} {self.unit}/s")
            if self.total is not None:
                min_units = min(MIN_ETA_UNITS, (self.total - self._done_at_start) / 20)
                if self.done - self._done_at_start >= min_units:
                    remaining_units = max(self.total - self.done, 0)
                    parts.append(f"eta {_duration(remaining_units / rate)}")
        parts.append(f"{_duration(self._clock() - self._start_time)} so far")
        return ", ".join(parts)

    def figures(self) -> list[str]:
        """Return the figures of the latest updates as texts."""
        return _figures(self._values)

    def figures_now(self) -> list[str]:
        """Return the figures of the latest updates and those of the current moment, as texts.

        The closing line shows only the first kind.
        """
        return [*self.figures(), *_figures(self._live())]

    def summary(self) -> str:
        """Return the closing line: `600/600 steps in 3:05 (3.24 steps/s), loss 0.312`."""
        seconds = self._clock() - self._start_time
        units = self.done - self._done_at_start
        speed = ""
        if units > 0 and seconds > 0:
            speed = f" ({_short(units / seconds)} {self.unit}/s)"
        return ", ".join([f"{self._amount()} in {_duration(seconds)}{speed}", *self.figures()])

    def _amount(self) -> str:
        if self.total is None:
            return f"{self.done} {self.unit}"
        return f"{self.done}/{self.total} {self.unit}"


def _figures(values: Mapping[str, Figure]) -> list[str]:
    return [_figure(name, value) for name, value in values.items() if value is not None]


def _figure(name: str, value: int | float | str) -> str:
    """Return a figure with its label, as in `loss 0.312`."""
    label = FIGURE_LABELS.get(name, name.replace("_", " "))
    if isinstance(value, str):
        return f"{label} {visible(value)}"
    if name == "acceptance":
        return f"{label} {100 * value:.0f}%"
    if name in ("em", "f1"):
        return f"{label} {value:.1f}"
    return f"{label} {_short(value)}"


def _short(value: int | float) -> str:
    """Return a number with three significant digits: 0.0312, 3.21, 412, 41.2k, 1.2M."""
    if math.isfinite(value) and abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if math.isfinite(value) and abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    if isinstance(value, int):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Return a time in seconds as `2:05` (minutes) or `1:02:05` (hours)."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"
