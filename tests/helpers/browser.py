"""Debian's Chromium for tests of pages, driven by Selenium.

Install it with `apt-get install chromium chromium-driver`. The flags keep it from calling home.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import HANG_SECONDS

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"
# Faults of these grades fail a test.
GRAVE = ("serious", "critical")


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Yield a driver of a new browser. Skip the test if there is no browser or no Selenium.

    `profile` is a folder for the files of the browser.
    """
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def set_screen(driver: Any, width: int, *, dark: bool = False) -> None:
    """Give the page a width in pixels, and light or dark colours."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def open_page(driver: Any, address: str, *, ready: str) -> None:
    """Open an address, and wait until an element fits the selector `ready`."""
    driver.get("about:blank")
    driver.get(address)
    wait_until(driver, lambda: driver.find_elements("css selector", ready))


def wait_until(driver: Any, condition: Callable[[], Any]) -> Any:
    """Wait until the condition returns something true, and return that."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(
        driver,
        HANG_SECONDS,
        poll_frequency=0.05,
        ignored_exceptions=[StaleElementReferenceException],
    )
    return wait.until(lambda _: condition())


def grave_faults(driver: Any) -> list[str]:
    """Return the serious and critical faults of accessibility that axe sees on the page."""
    driver.execute_script(AXE.read_text(encoding="utf-8"))
    violations = driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document).then((results) => done(results.violations));"
    )
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]
