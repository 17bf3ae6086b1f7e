"""The router's page in a browser."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.unit.router_stubs import WATCHFUL, decode, echo, prefill, prefilled, routed, run, serve

pytest.importorskip("playwright.sync_api")

from tests.integration.dashboard_browser import CHROMIUM, FAINT_TEXT, LAPTOP, PHONE, launched, sync_api

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def look(url: str, texts: list[str]) -> None:
    """Checks the page's texts and layout, on a laptop in light and on a phone in dark colours."""
    with launched() as browser:
        for size, colours in ((LAPTOP, "light"), (PHONE, "dark")):
            faults: list[Any] = []
            page = browser.new_page(viewport=size, color_scheme=colours)
            page.on("pageerror", lambda error, faults=faults: faults.append(str(error)))
            page.on("console", lambda message, faults=faults: faults.append(message.text))
            page.goto(url)
            for text in texts:
                sync_api.expect(page.locator("body")).to_contain_text(re.compile(text))
            assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
            assert not page.evaluate(FAINT_TEXT)
            assert not faults
            page.close()


def test_the_page_shows_every_instance_and_its_state() -> None:
    async def check() -> None:
        stubs = [prefill(prefilled), decode(echo), serve(echo)]
        async with routed(*stubs, health=WATCHFUL) as client:
            await client.ask()
            await client.admin("/drain", url=stubs[2].url)
            p, d, s = (re.escape(stub.url) for stub in stubs)
            texts = ["2 of 3 instances ready, 0 requests running, 0 waiting"]
            texts += [rf"{p}readyprefill", rf"{d}readydecode", rf"{s}drainingserve"]
            await asyncio.to_thread(look, client.router.admin_url + "/", texts)

    run(check)
