"""The dashboard page in a real browser, with a fake engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.dashboard_browser import (
    CHROMIUM,
    FAINT_TEXT,
    LAPTOP,
    PATIENCE_S,
    PHONE,
    Watched,
    launched,
)
from tests.integration.dashboard_fake import FakeEngine, FakeServer
from tests.integration.raw_http import eventually
from tests.integration.server_process import serve

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

# Pixels of a canvas that have a colour of the page's palette.
COUNT_PIXELS = """([id, name]) => {
  const canvas = document.getElementById(id);
  const probe = new OffscreenCanvas(canvas.width, canvas.height + 1).getContext("2d", { willReadFrequently: true });
  probe.drawImage(canvas, 0, 0);
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  probe.fillRect(0, canvas.height, 1, 1);
  const wanted = probe.getImageData(0, canvas.height, 1, 1).data;
  const { data } = probe.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += [0, 1, 2, 3].every((k) => Math.abs(data[i + k] - wanted[k]) < 3);
  return count;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def block_counts(page: Any) -> list[int]:
    """Returns the legend of the block map, read at one moment: free, cached, owned, loading, pinned."""
    texts = page.evaluate("[...'fcolp'].map((letter) => document.getElementById(`count-${letter}`).innerText)")
    return [int(text.replace(",", "")) for text in texts]


def check_reads_once(page: Any, server: FakeServer) -> None:
    """Asserts that the page has one connection, also after another event."""
    eventually(lambda: server.num_streams == 1, PATIENCE_S)
    page.wait_for_function("(time) => latest.time > time", arg=page.evaluate("latest.time"))
    assert server.num_streams == 1


def busy_engine() -> FakeEngine:
    """Returns an engine that is paused at a fixed step."""
    engine = FakeEngine()
    for _ in range(900):
        engine.step()
    engine.paused = True
    return engine


@pytest.fixture(scope="module")
def busy() -> Iterator[FakeServer]:
    with FakeServer(busy_engine()) as server:
        yield server


@pytest.fixture
def idle() -> Iterator[FakeServer]:
    with FakeServer(FakeEngine(idle=True)) as server:
        yield server


def test_readings_timeline_and_block_map(browser: Any, busy: FakeServer) -> None:
    watched = Watched(browser, busy.url)
    page = watched.live()
    sync_api.expect(page.locator("#health")).to_have_text("healthy")
    sync_api.expect(page.locator("#model")).to_have_text("demo")
    sync_api.expect(page.locator("#version")).to_have_text("0.1.0")
    sync_api.expect(page.locator("#itl50")).to_have_text("21ms p50")
    sync_api.expect(page.locator("#itl90")).to_have_text("49ms p90, last 10 s")
    sync_api.expect(page.locator("#e2e50")).to_have_text("3.21s p50")
    sync_api.expect(page.locator("#queue90")).to_have_text("345ms p90, last 10 s")
    sync_api.expect(page.locator("#request-rate")).to_have_text("0.7per s, last 10 s")
    sync_api.expect(page.locator("#ends")).to_contain_text("since start")
    sync_api.expect(page.locator("#drafts")).to_have_text("no drafts since start")
    for tile in ("throughput", "ttft50", "running", "usage", "hits", "preemptions"):
        assert any(character.isdigit() for character in page.inner_text(f"#{tile}")), tile
    for name in ("--queued", "--prefill", "--decode", "--preempted"):
        assert page.evaluate(COUNT_PIXELS, ["lanes-canvas", name]) > 20, name
    for name in ("--free", "--cached", "--owned", "--pinned"):
        assert page.evaluate(COUNT_PIXELS, ["pool-canvas", name]) > 20, name
    assert page.evaluate(COUNT_PIXELS, ["spark", "--accent"]) > 5
    counts = block_counts(page)
    assert sum(counts) == 960
    assert counts[4] == 6
    assert watched.complaints == []
    watched.close()


def test_configuration_and_links(browser: Any, busy: FakeServer) -> None:
    watched = Watched(browser, busy.url)
    page = watched.live()
    expected = {
        "device": "cpu",
        "kernels": "avx512, 8 threads",
        "dtype": "bfloat16",
        "context": "4,096 tokens",
        "kv-size": "1.88 GiB, 15,360 tokens",
        "uptime": "3 h 20 min",
    }
    for name, text in expected.items():
        sync_api.expect(page.locator(f"#{name}")).to_have_text(text)
    links = page.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.getAttribute('href'))")
    assert links == ["/metrics", "/docs", "/health"]
    assert page.evaluate("[5, 299, 3600, 200000].map(inWords)") == ["5 s", "4 min", "1 h 0 min", "2 d 7 h"]
    assert watched.complaints == []
    watched.close()


def test_drafts_and_tiers(browser: Any, idle: FakeServer) -> None:
    idle.engine.speculation = {"num_drafts": 50, "num_draft_tokens": 150, "num_accepted_per_position": [45, 20, 10]}
    counts = {"num_chunks": 512, "num_free": 128, "num_loads": 7, "num_evicted": 3, "num_corrupted": 0}
    disk = {"STORAGE.num_chunks": 2048, "STORAGE.num_loaded": 9, "STORAGE.num_evicted": 4, "STORAGE.num_corrupted": 1}
    idle.engine.connector = {**counts, **disk}
    watched = Watched(browser, idle.url)
    page = watched.live()
    sync_api.expect(page.locator("#accepted")).to_have_text("50.0%")
    sync_api.expect(page.locator("#drafts")).to_have_text("75of 150 since start")
    tiers = page.locator("#tiers")
    sync_api.expect(tiers).to_contain_text("host memory384 of 512 chunks · 7 loaded · 3 evicted · 0 corrupted")
    sync_api.expect(tiers).to_contain_text("storage2,048 chunks · 9 loaded · 4 evicted · 1 corrupted, since start")
    idle.engine.connector = {}
    sync_api.expect(tiers).to_be_hidden()
    assert watched.complaints == []
    watched.close()


def test_states_of_recurrent_layers(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    sync_api.expect(page.locator("#kv-size")).to_have_text("1.88 GiB, 15,360 tokens")
    idle.engine.states = {"held": 7, "checkpoints": 60}
    wanted = "1.88 GiB, 15,360 tokens; states 3.00 GiB: 7.0% held, 60.0% checkpoints"
    sync_api.expect(page.locator("#kv-size")).to_have_text(wanted)
    assert watched.complaints == []
    watched.close()


def test_loads_of_experts_before_and_now(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url, viewport=PHONE)
    page = watched.live()
    sync_api.expect(page.locator("#experts")).to_be_hidden()
    before = {"cells": ["aiay", "iiii"], "peaks": [1.5, 1.0]}
    now = {"cells": ["iaay", "iiii"], "peaks": [1.1, 1.0]}
    idle.engine.experts = {"layers": ["one", "two"], "num_ranks": 2, "before": before, "now": now}
    sync_api.expect(page.locator("#experts-note")).to_have_text("2 layers, 4 slots on 2 ranks, a row for each layer")
    sync_api.expect(page.locator("#peak-before")).to_have_text("the busiest rank has 1.25 times the mean load")
    sync_api.expect(page.locator("#peak-now")).to_have_text("the busiest rank has 1.05 times the mean load")
    # The hottest slot, and those without load.
    assert page.evaluate(COUNT_PIXELS, ["experts-now", "--bad"]) > 20
    free = page.evaluate(COUNT_PIXELS, ["experts-before", "--free"])
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    idle.engine.experts = {**idle.engine.experts, "before": {**before, "cells": ["iiay", "iiii"]}}
    eventually(lambda: page.evaluate(COUNT_PIXELS, ["experts-before", "--free"]) < 0.75 * free, PATIENCE_S)
    assert page.evaluate(FAINT_TEXT) == []
    idle.engine.experts = {}
    sync_api.expect(page.locator("#experts")).to_be_hidden()
    assert watched.complaints == []
    watched.close()


def test_a_large_pool_shows_exact_counts_and_its_map_when_it_fills(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    show = """(used) => {
      connection.abort();
      const cells = "o".repeat(used) + "f".repeat(2000 - used);
      const counts = { f: 86000 - used, c: 0, o: used, l: 0, p: 0 };
      latest = { ...latest, blocks: { num_blocks: 86000, block_size: 16, blocks_per_cell: 43, cells, counts } };
      showPool();
      return [$("count-o").textContent, $("pool-canvas").hidden, $("pool-bar").childElementCount,
              $("pool-bar").firstElementChild.getBoundingClientRect().width, $("pool-note").textContent];
    }"""
    page.evaluate("poolShown = ''; $('pool-canvas').hidden = true")
    count, is_hidden, num_parts, width, note = page.evaluate(show, 5)
    assert (count, is_hidden, num_parts) == ("5", True, 2)
    assert width >= 3, "a small share can be seen too"
    assert note == "86,000 blocks of 16 tokens"
    count, is_hidden, _, _, note = page.evaluate(show, 100)
    assert (count, is_hidden, note) == ("100", False, "86,000 blocks of 16 tokens, 43 to a cell of the map")
    assert page.evaluate(show, 5)[1] is False, "a map that was shown stays"
    watched.close()


def test_each_of_many_lanes_shows_its_own_name(browser: Any, busy: FakeServer) -> None:
    watched = Watched(browser, busy.url)
    page = watched.live()
    page.wait_for_selector("#lanes-canvas[aria-label]")
    labels, step, scroll, axis, height = page.evaluate("""() => {
      connection.abort();
      const events = [["queued", latest.time - 5], ["decode", latest.time - 4]];
      const like = { ...latest.requests[0], state: "decode", finish_reason: null, events };
      const requests = Array.from({ length: 120 }, (_, i) => ({ ...like, id: `many-${String(i).padStart(6, "0")}` }));
      latest = { ...latest, requests };
      lanes.clear();
      assignLanes();
      drawTimeline();
      $("lanes").scrollTop = 500;
      const labels = [];
      const draw = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (/^\\d{6}$/.test(text)) labels.push([Number(text), y]);
        draw.call(this, text, x, y);
      };
      drawTimeline();
      CanvasRenderingContext2D.prototype.fillText = draw;
      return [labels, rowHeight(), $("lanes").scrollTop, AXIS, $("lanes").clientHeight];
    }""")
    assert scroll > 0
    assert step >= 12, "a name fits"
    assert len(labels) >= (height - axis) // step
    for row, y in labels:
        assert abs(y - (axis + (row + 0.5) * step - scroll)) <= 1, (row, y)
    watched.close()


def test_the_chat_can_be_folded(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    before = page.locator("#timeline").bounding_box()
    page.click("#fold")
    sync_api.expect(page.locator("#ask")).to_be_hidden()
    assert page.locator("#timeline").bounding_box()["width"] > before["width"] + 200
    assert page.get_attribute("#fold", "aria-expanded") == "false"
    page.reload()
    page = watched.live()
    sync_api.expect(page.locator("#ask")).to_be_hidden()
    # The button that leads to the chat box unfolds it.
    page.click("#vacant button")
    sync_api.expect(page.locator("#ask")).to_be_visible()
    assert page.evaluate("[document.activeElement.id, localStorage.length]") == ["prompt", 0]
    assert watched.complaints == []
    watched.close()


def test_request_details_by_pointer_and_by_keyboard(browser: Any, busy: FakeServer) -> None:
    watched = Watched(browser, busy.url)
    page = watched.live()
    page.wait_for_selector("#lanes-canvas[aria-label]")
    page.focus("#lanes")
    page.keyboard.press("ArrowDown")
    detail = page.locator("#detail")
    sync_api.expect(detail).to_contain_text("cmpl-")
    sync_api.expect(page.locator("#said")).to_contain_text("output")
    page.keyboard.press("Escape")
    sync_api.expect(detail).to_be_hidden()
    place = page.locator("#lanes").bounding_box()
    offset = page.evaluate("AXIS + (Math.min(...lanes.values()) + 0.5) * rowHeight()")
    page.mouse.move(place["x"] + 200, place["y"] + offset)
    sync_api.expect(detail).to_contain_text("total")
    page.mouse.move(5, 5)
    sync_api.expect(detail).to_be_hidden()
    assert watched.complaints == []
    watched.close()


@pytest.mark.spread(2)
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE, {"width": 820, "height": 1180}], ids=["laptop", "phone", "tablet"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_is_readable(browser: Any, busy: FakeServer, viewport: dict[str, int], scheme: str) -> None:
    watched = Watched(browser, busy.url, viewport=viewport, color_scheme=scheme)
    page = watched.live()
    page.fill("#prompt", "hello " + "x" * 200)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures")
    page.evaluate("Promise.all(document.getAnimations().map((animation) => animation.finished))")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(FAINT_TEXT) == []
    assert watched.complaints == []
    watched.close()


def test_empty_state_leads_to_the_chat(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url, reduced_motion="reduce")
    page = watched.live()
    sync_api.expect(page.locator("#vacant")).to_contain_text("No requests yet: try the chat box")
    page.click("#vacant button")
    assert page.evaluate("document.activeElement.id") == "prompt"
    idle.engine.health = {"status": "unhealthy", "reason": "a step took 9 s"}
    sync_api.expect(page.locator("#health")).to_have_text("unhealthy: a step took 9 s")
    assert watched.complaints == []
    watched.close()


def test_chat_streams_and_remembers(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    page.fill("#max-tokens", "99")
    for text in ("one two three four", "<img src=x onerror=alert(1)> <script>alert(2)</script> & so on"):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        answer = page.locator(".turn[data-role=assistant]").last
        sync_api.expect(answer.locator(".text")).to_have_text(text)
        sync_api.expect(answer.locator(".figures")).to_contain_text("tokens · stop")
    assert page.locator("#log img, #log script").count() == 0
    sent = idle.chats[-1]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("demo", 99, 0.7)
    assert sent["stream_options"] == {"include_usage": True}
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert watched.complaints == []
    watched.close()


def test_chat_stops(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    page.fill("#prompt", "endless")
    page.click("#send")
    sync_api.expect(page.locator(".turn").last.locator(".text")).to_contain_text("on and on on and on")
    page.click("#stop")
    sync_api.expect(page.locator(".figures")).to_contain_text("stopped")
    sync_api.expect(page.locator("#send")).to_be_visible()
    eventually(lambda: idle.num_chats_left == 1, PATIENCE_S)
    assert watched.complaints == []
    watched.close()


def test_chat_shows_the_servers_error(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    page.fill("#prompt", "fail")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator(".fault")).to_have_text("This model's maximum context length is 512 tokens.")
    page.fill("#prompt", "again")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator(".figures")).to_be_visible()
    assert idle.chats[-1]["messages"] == [{"role": "user", "content": "again"}]
    page.fill("#prompt", "break off")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator(".turn").last.locator(".fault")).to_have_text(
        "The connection ended before the answer was complete."
    )
    watched.close()


def test_the_page_asks_for_the_key(browser: Any) -> None:
    with FakeServer(FakeEngine(idle=True), api_key="sesame") as server:
        watched = Watched(browser, server.url)
        page = watched.page
        sync_api.expect(page.locator("#key-field")).to_be_focused()
        sync_api.expect(page.locator("#board")).to_be_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#key-fault")).to_have_text("The server did not accept that key.")
        page.fill("#key-field", "sesame")
        page.keyboard.press("Enter")
        watched.live()
        sync_api.expect(page.locator("#board")).to_be_visible()
        # A link sends no key.
        sync_api.expect(page.locator("#to-metrics")).to_be_hidden()
        sync_api.expect(page.locator("#to-health")).to_be_visible()
        page.fill("#prompt", "open up")
        page.press("#prompt", "Enter")
        sync_api.expect(page.locator(".figures")).to_be_visible()
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        assert "sesame" not in page.url
        page.reload()
        watched.live()
        watched.close()


def test_a_disconnection_is_shown_and_repaired(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    idle.cut = True
    sync_api.expect(page.locator("#link")).to_have_text("disconnected, retrying")
    sync_api.expect(page.locator("#health")).to_have_text("healthy")
    sync_api.expect(page.locator("#tiles")).to_have_css("opacity", "0.5")
    idle.cut = False
    watched.live()
    sync_api.expect(page.locator("#link")).to_be_hidden()
    check_reads_once(page, idle)
    watched.close()


def test_a_hidden_page_stops_reading(browser: Any, idle: FakeServer) -> None:
    watched = Watched(browser, idle.url)
    page = watched.live()
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_function("!following")
    eventually(lambda: idle.num_streams == 0, PATIENCE_S)
    page.evaluate(hide, False)
    watched.live()
    check_reads_once(page, idle)
    assert watched.complaints == []
    watched.close()


def test_hours_of_events_do_not_accumulate(browser: Any, busy: FakeServer) -> None:
    """After an hour of events, given to it at once, the page stores no more than after a minute."""
    watched = Watched(browser, busy.url)
    page = watched.live()
    sizes = page.evaluate("""() => {
      connection.abort();
      const start = latest;
      for (let i = 1; i <= 14400; i += 1) {
        const requests = start.requests.map((r) => ({ ...r, id: r.id + Math.floor(i / 40) }));
        latest = { ...start, time: start.time + i / 4, requests };
        if (i % 20 === 0) { assignLanes(); drawTimeline(); }
        if (i > 13000) showReadings();
      }
      return [lanes.size === latest.requests.length, Math.max(...lanes.values()) < 200, history.length,
              document.querySelectorAll("*").length];
    }""")
    assert sizes[:2] == [True, True]
    assert sizes[2] <= 241
    assert sizes[3] < 250
    assert watched.complaints == []
    watched.close()


# ---- With a real engine ----


@pytest.mark.long
def test_a_conversation_with_the_real_engine(browser: Any) -> None:
    with serve("--num-gpu-blocks-override", "200") as server:
        watched = Watched(browser, server.url)
        page = watched.live()
        sync_api.expect(page.locator("#health")).to_have_text("healthy")
        sync_api.expect(page.locator("#vacant")).to_be_visible()
        page.fill("#prompt", "What are you?")
        page.fill("#temperature", "0")
        page.fill("#max-tokens", "12")
        page.press("#prompt", "Enter")
        sync_api.expect(page.locator("#log")).to_contain_text("I am Penstock's small built-in demonstration model")
        sync_api.expect(page.locator(".figures")).to_contain_text("12 tokens")
        page.wait_for_selector("#lanes-canvas[aria-label*='1']")
        sync_api.expect(page.locator("#count-c")).not_to_have_text("0")
        # It is drawn with the next frame or the one after.
        page.wait_for_function(f"({COUNT_PIXELS})(['lanes-canvas', '--decode']) > 0")
        assert sum(block_counts(page)) == 199
        assert watched.complaints == []
        os.kill(server.core_pid, signal.SIGKILL)
        sync_api.expect(page.locator("#health")).to_contain_text("dead")
        watched.close()


@pytest.mark.long
def test_the_key_gives_access_to_the_real_server(browser: Any) -> None:
    with serve("--api-key", "open-sesame") as server:
        watched = Watched(browser, server.url)
        page = watched.page
        page.fill("#key-field", "wrong")
        page.press("#key-field", "Enter")
        sync_api.expect(page.locator("#key-fault")).not_to_be_empty()
        page.fill("#key-field", "open-sesame")
        page.press("#key-field", "Enter")
        page = watched.live()
        page.fill("#prompt", "What are you?")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".figures")
        watched.close()
