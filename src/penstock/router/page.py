"""The router's page, which asks `GET /instances` once a second."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Penstock router</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #8884; }
  td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
  .ready { color: #1a7f37; } .starting, .draining { color: #9a6700; } .unhealthy, .dead { color: #cf222e; }
</style>
<h1>Penstock router</h1>
<p id="summary">Loading.</p>
<table>
  <thead><tr><th>Instance</th><th>Role</th><th>State</th><th class="n">Outstanding</th><th class="n">Load</th>
  <th class="n">Requests</th><th class="n">Blocks</th><th class="n">Hit rate</th><th>Reason</th></tr></thead>
  <tbody id="rows"></tbody>
</table>
<script>
  "use strict";
  const cell = (text, name) => {
    const made = document.createElement("td");
    made.textContent = text;
    made.className = name || "";
    return made;
  };
  const show = async () => {
    const summary = document.getElementById("summary");
    try {
      const state = await (await fetch("/instances")).json();
      summary.textContent = `${state.running} requests are running, ${state.queued} wait for an instance.`;
      document.getElementById("rows").replaceChildren(...state.instances.map((each) => {
        const row = document.createElement("tr");
        row.append(
          cell(each.url), cell(each.role), cell(each.leaving ? `${each.state}, leaving` : each.state, each.state),
          cell(each.outstanding, "n"), cell(each.load, "n"), cell(each.requests, "n"), cell(each.blocks ?? "", "n"),
          cell(each.hit_rate === null ? "" : `${Math.round(100 * each.hit_rate)} %`, "n"), cell(each.reason));
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
