"""The router's page, which requests `GET /instances` once a second. Its colours are those of the engines' dashboard."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Penstock router</title>
<style>
  :root {
    color-scheme: light dark; --ground: #eef2f4; --panel: #ffffff; --line: #d5dee3; --ink: #15222c; --muted: #52636f;
    --good: #0a6149; --warn: #7d4400; --bad: #a01c2c;
  }
  @media (prefers-color-scheme: dark) {
    :root {
      --ground: #0c1318; --panel: #131c23; --line: #26343e; --ink: #e4ecf0; --muted: #96a8b3;
      --good: #7fdcb6; --warn: #f5c069; --bad: #ff9aa2;
    }
  }
  body {
    font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
    max-width: 76rem; padding: 0 1rem;
  }
  h1 { font-size: 1.35rem; margin: 0 0 .25rem; }
  #prompts { color: var(--muted); margin: 1rem 0; }
  #summary { color: var(--muted); margin: 0 0 1rem; }
  .panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; white-space: nowrap; }
  th, td { text-align: left; padding: .5rem .9rem; }
  th { color: var(--muted); font-size: .8rem; font-weight: 600; }
  tbody td { border-top: 1px solid var(--line); }
  td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
  td.reason { color: var(--muted); white-space: normal; min-width: 10rem; }
  td.state::before { content: "\\25cf\\00a0"; }
  .ready { color: var(--good); } .starting, .draining { color: var(--warn); } .unhealthy, .dead { color: var(--bad); }
</style>
<h1>Penstock router</h1>
<p id="summary">Loading.</p>
<div class="panel">
<table>
  <thead><tr><th>Instance</th><th>State</th><th>Role</th>
  <th class="n" title="Requests that the instance has">Running</th>
  <th class="n" title="Prompt tokens to compute, and 256 for each request">Load, tokens</th>
  <th class="n" title="Requests that the instance has been given">Requests</th>
  <th class="n" title="KV blocks that the instance holds, by its KV events">Blocks</th>
  <th class="n" title="Prompt tokens that the instance had cached or loaded, by the usage of its answers">Hit rate</th>
  <th class="n" title="Prompts, measured in tokens per second">Prefill</th>
  <th class="n" title="KV loaded from another instance, measured in tokens per second">Load</th>
  <th>Reason</th></tr></thead>
  <tbody id="rows"></tbody>
</table>
</div>
<p id="prompts"></p>
<script>
  "use strict";
  const NONE = "\u2013";
  const cell = (value, name) => {
    const made = document.createElement("td");
    made.textContent = typeof value === "number" ? value.toLocaleString("en") : value ?? NONE;
    made.className = name || "";
    return made;
  };
  const rate = (value) => value === null ? null : Math.round(value);
  const COMPUTING = {
    prefill: "by prefill instances", decode: "by decode instances, because that is sooner",
    fallback: "by decode instances, for want of a prefill instance", whole: "where they are answered",
    sibling: "after a load from another instance",
  };
  const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  const show = async () => {
    const summary = document.getElementById("summary");
    try {
      const state = await (await fetch("/instances")).json();
      const ready = state.instances.filter((each) => each.state === "ready").length;
      summary.textContent = `${ready} of ${count(state.instances.length, "instance", "instances")} ready, ` +
        `${count(state.running, "request", "requests")} running, ${state.queued.toLocaleString("en")} waiting`;
      const where = Object.entries(COMPUTING).filter(([name]) => state.prompts[name]);
      document.getElementById("prompts").textContent = where.length ? "Prompts computed: " +
        where.map(([name, words]) => `${state.prompts[name].toLocaleString("en")} ${words}`).join("; ") : "";
      document.getElementById("rows").replaceChildren(...state.instances.map((each) => {
        const row = document.createElement("tr");
        row.append(
          cell(each.url), cell(each.leaving ? `${each.state}, leaving` : each.state, `state ${each.state}`),
          cell(each.role),
          cell(each.outstanding, "n"), cell(each.load, "n"), cell(each.requests, "n"), cell(each.blocks, "n"),
          cell(each.hit_rate === null ? null : `${Math.round(100 * each.hit_rate)} %`, "n"),
          cell(rate(each.prefill_rate), "n"), cell(rate(each.load_rate), "n"),
          cell(each.reason, "reason"));
        return row;
      }));
    } catch (error) {
      summary.textContent = `The router does not answer: ${error}`;
    }
    setTimeout(show, 1000);
  };
  show();
</script>
</html>
"""
