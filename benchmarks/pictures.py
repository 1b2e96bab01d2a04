"""Take the pictures of the pages that README and docs show, from a real run.

    python benchmarks/pictures.py RUN [--question "QUESTION"] [--out docs/images]

The program starts `mujica_jax.serve RUN`, asks a question in Debian's Chromium, and writes ask.png,
tokens.png, trajectories.png and report.png. Without --question it asks the first example of the page.
It needs the packages chromium and chromium-driver, and Selenium (extra `dev`).
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.browser import open_browser, open_page, set_screen, wait_until

WIDTH = 1200
MAX_HEIGHT = 1000
# The episode of the page that asks ends further down.
ASK_HEIGHT = 1500
PROGRAM = [sys.executable, "-m", "mujica_jax.serve"]


@contextlib.contextmanager
def served(run: str) -> Iterator[str]:
    """Serve a run, and yield its address."""
    server = subprocess.Popen([*PROGRAM, run, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        address = re.search(r"http://[^;]+", line)
        if address is None:
            raise SystemExit(f"{' '.join(PROGRAM)} {run} did not start")
        yield address[0]
    finally:
        server.terminate()
        server.wait()


def all_of(driver: Any, selector: str) -> list[Any]:
    return driver.find_elements("css selector", selector)


def save(driver: Any, file: Path, max_height: int = MAX_HEIGHT) -> None:
    """Write the page as a picture, from its top to its end or to `max_height` pixels."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    size = {"width": WIDTH, "height": min(height, max_height), "deviceScaleFactor": 1}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "mobile": False})
    driver.execute_script("window.scrollTo(0, 0)")
    driver.save_screenshot(str(file))
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def take(driver: Any, address: str, question: str, folder: Path) -> None:
    """Visit the pages, and write a picture of each."""
    set_screen(driver, WIDTH)
    open_page(driver, f"{address}/#/ask", ready="#question")
    if not question:
        all_of(driver, "summary")[0].click()
        question = all_of(driver, ".example")[0].text
        all_of(driver, "summary")[0].click()
    all_of(driver, "#question")[0].send_keys(question, "\n")
    wait_until(driver, lambda: all_of(driver, ".final"))
    save(driver, folder / "ask.png", ASK_HEIGHT)

    all_of(driver, ".episode .end a")[0].click()
    wait_until(driver, lambda: all_of(driver, "[role=tab]"))
    all_of(driver, "[role=tab]")[2].click()
    wait_until(driver, lambda: all_of(driver, ".turn.model .token"))
    save(driver, folder / "tokens.png")

    open_page(driver, f"{address}/#/trajectories", ready=".rows tbody tr")
    save(driver, folder / "trajectories.png")
    open_page(driver, f"{address}/#/report", ready=".chart svg")
    save(driver, folder / "report.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--question", default="", help="the question that is asked")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as profile,
        served(arguments.run) as address,
        open_browser(Path(profile)) as driver,
    ):
        take(driver, address, arguments.question, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
