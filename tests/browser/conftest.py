"""A real browser. Without Chromium these tests are skipped, or fail if RAVNEST_NEEDS_FAULTS is set.

Pages may not have scripts evaluated (their Content-Security-Policy), so tests wait for what is to be seen.
"""

import os
import shutil

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 240_000.0  # milliseconds: against what hangs, a PC may have a load of 15

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")  # no longer: while Playwright is open, nobody else may run an event loop
def chromium():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing = "the page is looked at with chromium, which this PC lacks"
        if os.environ.get("RAVNEST_NEEDS_FAULTS"):
            pytest.fail(f"{missing}; RAVNEST_NEEDS_FAULTS is set, so this is not skipped", pytrace=False)
        pytest.skip(missing)
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags, timeout=PATIENCE)
        yield browser
        browser.close()


class Watched:
    """A page, and what went wrong in it."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.faults: list[str] = []

    def open(self, link: str) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda asked: self.faults.append(f"a dialog: {asked.message}"))
        page.goto(link)
        return page


@pytest.fixture
def watched(chromium: Browser):
    """Open pages of a browser that knows nothing yet; whatever they complain of fails the test."""
    context = chromium.new_context(viewport={"width": 1360, "height": 850}, reduced_motion="reduce")
    found = Watched(context)
    yield found
    context.close()
    assert found.faults == []
