"""Pages that stay open, in a process of their own: `python -m benchmarks.open_pages LINK COUNT [--browser]`.

Streams are read as a browser reads them; with --browser Chromium shows the pages and draws each update. A dot
goes to stdout when all of them show the run; then they stay until stdin is closed.
"""

import argparse
import http.client
import shutil
import sys
import threading
from urllib.parse import urlsplit


def read_stream(link: str, has_begun: threading.Event) -> None:
    """Read updates to the end of the stream."""
    url = urlsplit(link)
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    connection.request(
        "GET", "/api/v1/stream", headers={"Authorization": f"Bearer {url.query.partition('=')[2]}"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    while line := answer.readline():
        if line.startswith(b"data: "):
            has_begun.set()


def follow_streams(link: str, count: int) -> None:
    began = [threading.Event() for _ in range(count)]
    for each in began:
        threading.Thread(target=read_stream, args=(link, each), daemon=True).start()
    for each in began:
        assert each.wait(60), "a stream is silent"
    _wait_for_end()


def show_in_browser(link: str, count: int) -> None:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program is not None, "this PC has no Chromium; leave --browser out"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for place in ("swarm", "training", "nodes")[:count]:
            page = browser.new_page()
            page.goto(f"{link}#/{place}")
            page.wait_for_selector("body[data-updates]", timeout=60_000)
        _wait_for_end()


def _wait_for_end() -> None:
    sys.stdout.write(".")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("link")
    parser.add_argument("count", type=int)
    parser.add_argument("--browser", action="store_true")
    given = parser.parse_args()
    (show_in_browser if given.browser else follow_streams)(given.link, given.count)
