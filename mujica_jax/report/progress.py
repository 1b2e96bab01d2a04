"""Progress of a stage: a live display on a terminal, one plain line every few seconds anywhere
else."""

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

REFRESHES_PER_SECOND = (
    4  # a refresh costs a fraction of a millisecond: well under one percent of the time
)
SECONDS_BETWEEN_LINES = 5.0  # of plain output
MIN_RATE_SECONDS = 0.5  # before that a rate would be noise
MIN_ETA_UNITS = (
    20  # or a twentieth of what is left, if that is less: the first ones wait for compilation
)
RATE_WINDOW_SECONDS = 30.0  # a rate over all the time would carry the compilation for ever
FIGURE_LABELS = {"tokens_per_second": "tokens/s", "k": "K", "em": "EM", "f1": "F1"}


class Progress:
    """The user's console: stages with a live display on a terminal, and plain lines anywhere else.

        report = Progress()
        with report.stage("warm-up", total=600, unit="steps") as stage:
            stage.update(120, loss=0.71, tokens_per_second=41_000)

    A stage inside another one is shown below it. `stream` is stdout unless given; `live` overrides
    what the stream says of itself.
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
        self._last_line = clock()
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
        """Show a stage until the block ends, then leave one line. `done` is what an earlier run had
        finished already.

        `live` gives figures of the moment. It is asked whenever the stage is shown, on a terminal
        from the display's own thread.
        """
        stage = Stage(self, name, total=total, unit=unit, done=done, live=live)
        with self._display() if self._live and not self._open else contextlib.nullcontext():
            self._open.append(stage)
            try:
                yield stage
            except BaseException:
                self._close(stage, "stopped at ")
                raise
            self._close(stage, "")

    def line(self, text: str) -> None:
        """One line of text, above the live display where there is one."""
        text = visible(text)
        if self._live:
            self._console().print(Text(text))
        else:
            write(self._stream, text + "\n")

    def show(self, renderable: RenderableType) -> None:
        """Print a table or a tree: in colour on a terminal, as aligned plain text anywhere else."""
        if self._live:
            self._console().print(renderable)
        else:
            write(self._stream, plain(renderable, encoding=encoding_of(self._stream)))

    def _updated(self, stage: "Stage") -> None:
        """The live display redraws itself; plain output gets a line when the last one is old
        enough."""
        if self._live or stage.seen - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = stage.seen
        self.line(f"{stage.name}: {', '.join([stage.counts(), *stage.figures_now()])}")

    def _close(self, stage: "Stage", manner: str) -> None:
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
        shown = {
            "get_renderable": self._stages,
            "refresh_per_second": REFRESHES_PER_SECOND,
            "transient": True,
        }
        return Live(console=self._console(), **shown)

    def _stages(self) -> Group:
        rows: list[RenderableType] = []
        for stage in tuple(self._open):
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(
                total=stage.total, completed=stage.done, width=24, pulse=stage.total is None
            )
            counts = Text(stage.counts(), no_wrap=True, overflow="ellipsis")
            row.add_row(Text(visible(stage.name), style="bold"), bar, counts)
            figures = Text(
                "  " + ", ".join(stage.figures_now()),
                style="cyan",
                no_wrap=True,
                overflow="ellipsis",
            )
            rows += [row, figures]
        return Group(*rows)


class NoConsole(io.StringIO):
    """Where every process of a job but the first shows its progress: they all do the same, and
    errors go to stderr."""

    def write(self, s: str, /) -> int:
        return len(s)


class Stage:
    """What a stage has done so far. Made by `Progress.stage`."""

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
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self._progress, self._clock, self._first, self._live = progress, progress._clock, done, live
        self._values: dict[str, Figure] = {}
        self._began = self.seen = self._clock()
        self._marks: deque[tuple[float, int]] = deque([(self._began, done)])

    def update(self, done: int, **figures: Figure) -> None:
        """`done` of `total` units so far, and figures to show with them; a figure stays until a
        newer one replaces it.

        `acceptance` is a share (0 to 1), `em` and `f1` are percent. Costs about a microsecond: call
        it after every unit. Figures are Python numbers: a device array would wait for the device.
        """
        self.done = done
        self._values = self._values | figures  # a new one: the display reads it from its own thread
        self.seen = self._clock()
        if self.seen - self._marks[-1][0] >= 1.0:
            self._marks.append((self.seen, done))
            while self.seen - self._marks[0][0] > RATE_WINDOW_SECONDS and len(self._marks) > 2:
                self._marks.popleft()
        self._progress._updated(self)

    def rate(self) -> float:
        """Units a second over the last half minute; zero as long as there is too little to tell."""
        began, before = self._marks[0]
        seconds = self.seen - began
        return (self.done - before) / seconds if seconds >= MIN_RATE_SECONDS else 0.0

    def counts(self) -> str:
        """Units, rate and time: `120/600 steps, 3.21 steps/s, eta 2:30`."""
        parts = [self._amount()]
        rate = self.rate()
        if rate > 0:
            parts.append(f"{_short(rate)} {self.unit}/s")
            enough = min(MIN_ETA_UNITS, ((self.total or 0) - self._first) / 20)
            if self.total is not None and self.done - self._first >= enough:
                parts.append(f"eta {_duration(max(self.total - self.done, 0) / rate)}")
        return ", ".join([*parts, f"{_duration(self._clock() - self._began)} so far"])

    def figures(self) -> list[str]:
        return _figures(self._values)

    def figures_now(self) -> list[str]:
        """With those of the moment, which the closing line leaves out."""
        return [*self.figures(), *_figures(self._live())]

    def summary(self) -> str:
        """`600/600 steps in 3:05 (3.24 steps/s), loss 0.312`."""
        seconds = self._clock() - self._began
        units = self.done - self._first
        speed = f" ({_short(units / seconds)} {self.unit}/s)" if units > 0 and seconds > 0 else ""
        return ", ".join([f"{self._amount()} in {_duration(seconds)}{speed}", *self.figures()])

    def _amount(self) -> str:
        return f"{self.done}{'' if self.total is None else f'/{self.total}'} {self.unit}"


def _figures(values: Mapping[str, Figure]) -> list[str]:
    return [_figure(name, value) for name, value in values.items() if value is not None]


def _figure(name: str, value: int | float | str) -> str:
    label = FIGURE_LABELS.get(name, name.replace("_", " "))
    if isinstance(value, str):
        return f"{label} {visible(value)}"
    if name == "acceptance":
        return f"{label} {100 * value:.0f}%"
    return f"{label} {value:.1f}" if name in ("em", "f1") else f"{label} {_short(value)}"


def _short(value: int | float) -> str:
    """Three figures: 0.0312, 3.21, 412, 41.2k, 1.20M."""
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
    )


def _duration(seconds: float) -> str:
    """`2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
