"""A browser for the tests of the dashboard's page."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium")
CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
PATIENCE_S = 60  # timeout that suffices on a loaded machine

# Returns every text whose contrast with its background is below 4.5, the minimum of WCAG AA.
FAINT_TEXT = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.tagName === "SCRIPT") continue;
    const levels = [parse(getComputedStyle(element).color), behind(element)].map(luminance).sort((a, b) => b - a);
    const contrast = (levels[0] + 0.05) / (levels[1] + 0.05);
    if (contrast < 4.5) faint.push([walker.currentNode.data, contrast]);
  }
  return faint;
}"""


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Starts a browser; assertions wait long enough for a loaded machine."""
    sync_api.expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


class Watched:
    """A page, with the hosts that it contacted and the messages and errors on its console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport=options.pop("viewport", LAPTOP), **options)
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.hosts: set[str] = set()
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(f"{url}/dashboard")

    def live(self) -> Any:
        self.page.wait_for_selector("body[data-link=live]")
        return self.page

    def close(self) -> None:
        """Closes the page, which must have contacted only its own server (a `data:` address has no host)."""
        self.page.close()
        assert self.hosts <= {urlsplit(self.url).netloc, ""}
