"""The dashboard's card of transfers between engines in a real browser, with made-up counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.dashboard_browser import CHROMIUM, FAINT_TEXT, LAPTOP, PHONE, Watched, launched
from tests.integration.dashboard_fake import FakeEngine, FakeServer, FakeTransfers

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

HOSTILE = 'x.p2p_to/<img src=x onerror="hit=1"><script>hit=1</script>\u202e.num_chunks/tokens\n' + "z" * 60

# Stops the page's connection and gives it a state `seconds` later with another value of one count.
LATER = """([seconds, name, value]) => {
  connection.abort();
  const connector = { ...latest.stats.connector, [name]: value };
  latest = { ...latest, time: latest.time + seconds, stats: { ...latest.stats, connector } };
  showTransfers();
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def idle() -> Iterator[FakeServer]:
    with FakeServer(FakeEngine(idle=True)) as server:
        yield server


def rows(page: Any) -> list[list[str]]:
    """Returns the table as a screen reader finds it, without its headings."""
    found = [row.locator("[role=rowheader], [role=cell]").all() for row in page.get_by_role("row").all()]
    return [[cell.inner_text() for cell in cells] for cells in found if cells]


def facts(page: Any) -> dict[str, int]:
    """Returns the visible counts below the table, by their role and name."""
    return page.evaluate("""() => {
      const shown = [...document.querySelectorAll("#transfer-counts dd")].filter((dd) => dd.checkVisibility());
      const name = (dd) => dd.previousSibling.firstChild.data;
      const role = (dd) => dd.closest("dl").previousSibling.textContent;
      return Object.fromEntries(shown.map((dd) => [`${role(dd)}: ${name(dd)}`, Number(dd.textContent)]));
    }""")


def played() -> FakeTransfers:
    transfers = FakeTransfers()
    transfers.on_moved("from", "prefill-0", 1000, 131_072_000, 0.2)
    transfers.on_moved("from", "prefill-0", 500, 65_536_000, 0.1)
    transfers.on_failed("prefill-0")
    transfers.on_moved("to", "decode-0", 8_250, 1_081_344_000, 1.5)
    return transfers


def test_a_row_for_each_peer_and_direction(browser: Any, idle: FakeServer) -> None:
    idle.engine.connector = played().counters()
    watched = Watched(browser, idle.url)
    page = watched.live()
    sync_api.expect(page.locator("#transfers")).to_be_visible()
    headings = page.get_by_role("columnheader").all_inner_texts()
    assert headings == [
        "engine", "direction", "transfers", "tokens", "amount", "tokens/s", "amount/s", "mean time", "failed"
    ]  # fmt: skip
    sync_api.expect(page.locator("#peers tbody td").nth(4)).to_have_text("0")
    assert rows(page) == [
        ["prefill-0", "prefilled there → here", "2", "1,500", "196.6 MB", "0", "0 B/s", "150 ms", "1"],
        ["decode-0", "prefilled here → there", "1", "8,250", "1.1 GB", "0", "0 B/s", "1.50 s", "–"],
    ]
    assert all(title for title in page.evaluate("[...document.querySelectorAll('#peers th')].map((th) => th.title)"))
    idle.engine.connector = {}
    sync_api.expect(page.locator("#transfers")).to_be_hidden()
    assert watched.complaints == []
    watched.close()


def test_rates_cover_the_last_seconds(browser: Any, idle: FakeServer) -> None:
    idle.engine.connector = played().counters()
    watched = Watched(browser, idle.url)
    page = watched.live()
    # The engine's own reports must not interfere.
    page.route("**/dashboard/events*", lambda route: route.abort())
    page.evaluate("moved = []")
    rates = page.locator("#peers tbody tr").first.locator("td")
    seen = []
    for seconds, name, value in [
        (0, "p2p_from/prefill-0/tokens", 1500),  # the first report: no rate yet
        (4, "p2p_from/prefill-0/tokens", 1900),
        (4, "p2p_from/prefill-0/bytes", 212_536_000),
        (30, "p2p_from/prefill-0/bytes", 212_536_000),  # the previous report is too old
        (2, "p2p_from/prefill-0/tokens", 3900),
        (2, "p2p_from/prefill-0/tokens", 7),  # the engine has restarted
        (2, "p2p_from/prefill-0/tokens", 9),
    ]:
        page.evaluate(LATER, [seconds, name, value])
        seen.append((rates.nth(4).inner_text(), rates.nth(5).inner_text()))
    assert seen[0] == ("–", "–")
    assert seen[1] == ("100", "0 B/s")
    assert seen[2][0] == "50"
    assert seen[2][1] == "2 MB/s"
    assert seen[3] == ("–", "–")
    assert seen[4] == ("1,000", "0 B/s")
    assert seen[5] == ("–", "–")
    assert seen[6] == ("1", "0 B/s")
    watched.close()


def test_counts_of_both_roles_are_explained(browser: Any, idle: FakeServer) -> None:
    transfers = FakeTransfers()
    idle.engine.connector = transfers.counters()
    watched = Watched(browser, idle.url)
    page = watched.live()
    sync_api.expect(page.locator("#transfers-note")).to_have_text("no transfers yet")
    assert (rows(page), facts(page)) == ([], {})
    transfers.num_held = 3
    transfers.producer.num_granted, transfers.producer.num_expired = 40, 2
    idle.engine.connector = transfers.counters()
    sync_api.expect(page.locator("#transfer-counts")).to_be_visible()
    expected = {
        "For other engines: held for readers now": 3,
        "For other engines: granted": 40,
        "For other engines: not needed": 0,
        "For other engines: refused": 0,
        "For other engines: expired": 2,
    }
    assert facts(page) == expected
    assert page.locator("#transfer-counts .amiss").all_inner_texts() == ["2"]
    consumer = transfers.consumer
    consumer.num_loads, consumer.num_not_needed, consumer.num_refused = 70, 6, 5
    consumer.num_unconfirmed, consumer.num_cancelled, consumer.num_bad_ranges = 4, 3, 1
    # As a child of a MultiConnector.
    idle.engine.connector = {f"peers.{name}": value for name, value in transfers.counters().items()}
    page.wait_for_function("() => document.querySelectorAll('#transfer-counts .amiss').length === 5")
    assert facts(page) == expected | {
        "From other engines: asked for": 70,
        "From other engines: not needed": 6,
        "From other engines: refused": 5,
        "From other engines: unconfirmed": 4,
        "From other engines: cancelled": 3,
        "From other engines: parts not usable": 1,
    }
    # For the pointer, and for screen readers.
    entries = page.locator("#transfer-counts dl > div")
    for entry in entries.all():
        assert entry.get_attribute("title") in entry.locator("dt").text_content()
    assert len({entry.get_attribute("title") for entry in entries.all()}) == 11
    assert watched.complaints == []
    watched.close()


@pytest.mark.parametrize("child", ["", "fast."], ids=["alone", "child"])
def test_engine_ids_are_always_shown_as_text(browser: Any, idle: FakeServer, child: str) -> None:
    transfers = FakeTransfers()
    for engine_id in (HOSTILE, "10.0.0.7", ""):
        transfers.on_moved("from", engine_id, 77, 7_700, 0.01)
    idle.engine.connector = {f"{child}{name}": value for name, value in transfers.counters().items()}
    watched = Watched(browser, idle.url)
    page = watched.live()
    names = page.locator("#peers bdi")
    sync_api.expect(names).to_have_count(3)
    assert [name.text_content() for name in names.all()] == [HOSTILE, "10.0.0.7", ""]
    assert page.locator("#peers tbody th").first.get_attribute("title") == HOSTILE
    assert names.first.evaluate("(name) => name.scrollWidth > name.clientWidth"), "it is truncated"
    assert names.first.bounding_box()["height"] == names.nth(1).bounding_box()["height"]
    assert [row[3] for row in rows(page)] == ["77", "77", "77"]
    assert page.locator("#transfers :is(img, script)").count() == 0
    assert page.evaluate("window.hit") is None
    sync_api.expect(page.locator("#tiers")).to_be_hidden()
    assert watched.complaints == []
    watched.close()


@pytest.mark.long
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE, {"width": 820, "height": 1180}], ids=["laptop", "phone", "tablet"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_card_fits_and_is_readable(browser: Any, idle: FakeServer, viewport: dict[str, int], scheme: str) -> None:
    """Shows the largest number of peers that an engine distinguishes."""
    transfers = played()
    for number in range(64):
        transfers.on_moved("from", f"{number:032x}", 123_456_789, 123_456_789_012, 4e9)
    transfers.num_held = transfers.consumer.num_loads = transfers.consumer.num_refused = 1_234_567
    idle.engine.connector = transfers.counters()
    watched = Watched(browser, idle.url, viewport=viewport, color_scheme=scheme)
    page = watched.live()
    sync_api.expect(page.locator("#peers tbody tr")).to_have_count(66)
    assert len(rows(page)) == 66, "the styles of a small screen hide no row from a screen reader"
    for wide in ("document.documentElement", "$('peers')", "$('transfer-counts')"):
        assert page.evaluate(f"{wide}.scrollWidth <= {wide}.clientWidth"), wide
    # The table scrolls, also with the keyboard.
    page.focus("#peers")
    page.keyboard.press("End")
    page.wait_for_function("() => $('peers').scrollTop > 100")
    assert page.locator("#transfers").bounding_box()["height"] < 600
    assert page.locator("#lanes").bounding_box()["height"] > 80, "the timeline keeps its height"
    assert page.evaluate(FAINT_TEXT) == []
    assert watched.complaints == []
    watched.close()


@pytest.mark.long
def test_hours_of_events_do_not_accumulate(browser: Any, idle: FakeServer) -> None:
    idle.engine.connector = played().counters()
    watched = Watched(browser, idle.url)
    page = watched.live()
    sizes = page.evaluate("""() => {
      connection.abort();
      const start = latest;
      const count = () => document.querySelectorAll("*").length;
      showTransfers();
      const before = count();
      const first = $("peers").querySelector("td");
      for (let i = 1; i <= 14400; i += 1) {
        latest = { ...start, time: start.time + i / 4 };
        showTransfers();
      }
      return [moved.length, peerRows.size, count() - before, first.isConnected];
    }""")
    assert sizes == [41, 2, 0, True]
    watched.close()
