"use strict";
// Draws, sorts and folds what content.py says. Text from the model is set as text; what plotly shows goes through `plain`.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const at = (id) => document.getElementById(id);
  const MEMORY = [
    ["outside", "outside: parameters, inputs, ...", "#a9b8a3"], ["kept", "kept activations", "#4c78a8"],
    ["in_flight", "activations in flight", "#f2a24e"], ["rest", "working memory, gradients", "#c9d3df"],
  ];
  const KINDS = ["layer", "forward", "backward", "recompute", "stall", "D2H", "H2D"];
  const HEADS = ["module", "tensor", "shape", "type", "size", "decision", "why", "copies run during"];
  const SIZE = 4, DECISION = 6, CELLS = [0, 1, 2, 3, 5, 6, 7, 8]; // of a row; the size is sorted by its bytes and shown as text
  const state = { graph: 0, stop: content.graphs[0].start, sort: null, down: false, grouped: true, open: new Set(), words: "" };
  const graph = () => content.graphs[state.graph];
  const stop = () => graph().stops[state.stop];

  function made(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "onclick") element.addEventListener("click", value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // plotly reads some tags in text, and "%{...}" in templates: names are neither.
  function plain(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function wrapped(line) {
    const parts = [];
    for (let rest = String(line); rest; rest = rest.slice(90)) parts.push(plain(rest.slice(0, 90)));
    return parts.join("<br>  ");
  }

  const AXIS = { gridcolor: "#e8ecf0", linecolor: "#b8c2cc", zeroline: false, fixedrange: false };
  const MARGIN = { l: 110, r: 24, t: 46, b: 40 };
  const LEGEND = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemwidth: 30 };
  const BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]; // none that sends anything away
  const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [BUTTONS] };
  const FONT = { family: 'system-ui, "Segoe UI", "DejaVu Sans", Arial, sans-serif', size: 12, color: "#1c2733" };

  function layout(more) {
    return {
      font: FONT, margin: MARGIN, legend: LEGEND, paper_bgcolor: "#fff", plot_bgcolor: "#fff", dragmode: "zoom",
      hoverlabel: { align: "left", font: { size: 12 }, namelength: -1 }, ...more,
    };
  }

  function range() {
    return [0, Math.max(...graph().stops.map((each) => each.end_ms))];
  }

  const LANES = { D2H: "D2H, to host", H2D: "H2D, back" };

  // "layers.3", or "3" where that does not fit.
  function fitting(span) {
    const room = ((at("lanes").clientWidth || 1200) - MARGIN.l - MARGIN.r) * (span[3] / range()[1]), last = span[5].split(".").pop();
    return room < 7 * span[5].length && /^\d+$/.test(last) ? last : span[5];
  }

  function halves(each, labelled) {
    if (each.half_ms === null) return { shapes: [], annotations: [] };
    const line = { type: "line", xref: "x", yref: "paper", x0: each.half_ms, x1: each.half_ms, y0: 0, y1: 1,
      line: { color: "#444", width: 1, dash: "dot" } };
    const word = (text, xanchor) => ({ text, x: each.half_ms, xref: "x", y: 0, yref: "paper", yanchor: "bottom", xanchor,
      showarrow: false, xshift: xanchor === "left" ? 4 : -4, font: { size: 11, color: "#444" }, bgcolor: "rgba(255,255,255,.8)" });
    return { shapes: [line], annotations: labelled ? [word("forward", "right"), word("backward", "left")] : [] };
  }

  function drawLanes(each) {
    const traces = [];
    for (const kind of KINDS) {
      const spans = each.spans.filter((span) => span[1] === kind);
      if (!spans.length) continue;
      const layer = kind === "layer", named = layer || kind === "D2H" || kind === "H2D";
      traces.push({
        type: "bar", orientation: "h", name: content.kinds[kind], base: spans.map((s) => s[2]), x: spans.map((s) => s[3]),
        y: spans.map((s) => s[0]), width: 0.78, hoverinfo: "text", hovertext: spans.map((s) => s[4].map(wrapped).join("<br>")),
        text: spans.map((s) => (named ? plain(layer ? fitting(s) : s[5]) : "")), textposition: named ? "inside" : "none", textangle: 0,
        insidetextanchor: "middle", constraintext: "inside", insidetextfont: { color: layer ? "#333" : "#fff", size: 11 },
        showlegend: !layer,
        marker: { color: layer ? spans.map((_, n) => (n % 2 ? "#eef1f5" : content.colours.layer)) : content.colours[kind],
          line: { width: named ? 0.5 : 0, color: "#fff" } },
      });
    }
    const more = { barmode: "overlay", hovermode: "closest", uniformtext: { mode: "hide", minsize: 11 },
      xaxis: { ...AXIS, range: range(), ticksuffix: " ms", side: "bottom" },
      yaxis: { ...AXIS, type: "category", categoryorder: "array", categoryarray: [...each.lanes].reverse(),
        range: [-0.5, each.lanes.length - 0.5], tickvals: each.lanes, ticktext: each.lanes.map((lane) => LANES[lane] || plain(lane)),
        fixedrange: true, showgrid: false }, ...halves(each, false) };
    return Plotly.react("lanes", traces, layout(more), CONFIG);
  }

  function drawMemory(each) {
    const memory = each.memory, unit = memory.unit, traces = [];
    const text = (name) => plain(name).replace(/%/g, "&#37;") + ": %{y:.2f} " + unit + "<extra></extra>";
    const stacked = Object.keys(memory.parts).length > 1;
    for (const [key, label, colour] of MEMORY) {
      const column = memory.parts[key];
      if (!column || !memory.ms.length) continue;
      const name = memory.complete || key !== "rest" ? label : stacked ? "activations, working memory, gradients" : "the plan";
      traces.push({ type: "scatter", mode: "lines", x: memory.ms, y: column, stackgroup: "plan", name, fillcolor: colour,
        line: { shape: "hv", width: 0, color: colour }, hovertemplate: text(name) });
    }
    if (memory.ms.length) {
      const name = "plan, peak " + memory.peak_text;
      traces.push({ type: "scatter", mode: "lines", x: memory.ms, y: memory.total, name,
        line: { shape: "hv", width: 1.6, color: "#1f3f66" }, hovertemplate: text("plan, together") });
    }
    if (memory.keep_ms.length) {
      traces.push({ type: "scatter", mode: "lines", x: memory.keep_ms, y: memory.keep, name: "keep-all, peak " + memory.keep_peak_text,
        line: { shape: "hv", width: 1.6, color: "#8a8a8a" }, fill: "tozeroy", fillcolor: "rgba(138,138,138,.10)",
        hovertemplate: text("keep-all") });
      traces.unshift(traces.pop()); // behind
    }
    if (memory.budget_text) {
      const ends = range();
      traces.push({ type: "scatter", mode: "lines", x: ends, y: memory.budget === null ? [null, null] : [memory.budget, memory.budget],
        name: memory.budget_text, line: { width: 1.6, color: "#d62728", dash: "dash" }, hoverinfo: "skip" });
    }
    const most = Math.max(...graph().stops.map((other) => Math.max(other.memory.most, other.memory.budget || 0)));
    const more = { hovermode: "x unified", xaxis: { ...AXIS, range: range(), ticksuffix: " ms", hoverformat: ".2f" },
      yaxis: { ...AXIS, range: [0, most * 1.05 || 1], ticksuffix: " " + unit, fixedrange: true }, ...halves(each, true) };
    return Plotly.react("memory", traces, layout(more), CONFIG);
  }

  function linked(from, to) {
    at(from).on("plotly_relayout", (change) => {
      const set = ["xaxis.range[0]", "xaxis.range[1]"].map((name) => change[name]);
      const target = change["xaxis.autorange"] ? range() : set[0] === undefined ? change["xaxis.range"] : set;
      if (!target) return;
      const shown = at(to).layout.xaxis.range;
      if (Math.abs(shown[0] - target[0]) + Math.abs(shown[1] - target[1]) > 1e-9) Plotly.relayout(to, { "xaxis.range": [...target] });
      if (change["xaxis.autorange"]) Plotly.relayout(from, { "xaxis.range": [...target] });
    });
  }

  function drawCards(each) {
    at("cards").replaceChildren(...each.cards.map(([name, value, note]) =>
      made("div", { class: "card" }, made("span", { class: "name" }, name), made("b", {}, value), made("span", { class: "note" }, note))));
    at("subtitle").textContent = each.title;
    const lines = each.summary.filter(Boolean);
    at("summary").hidden = !lines.length;
    at("summary").replaceChildren(...lines.map((line) => made("p", {}, line)));
    const notes = [...each.notes, ...content.notes];
    at("notes").hidden = !notes.length;
    at("notes").querySelector("ul").replaceChildren(...notes.map((note) => made("li", {}, note)));
  }

  let drawn = false;
  function draw() {
    const each = stop();
    drawCards(each);
    at("no-timeline").hidden = !each.why_empty;
    at("no-timeline").textContent = each.why_empty;
    at("charts").hidden = Boolean(each.why_empty);
    at("help").hidden = Boolean(each.why_empty);
    if (!each.why_empty) {
      at("lanes").style.height = 120 + 34 * each.lanes.length + "px";
      const done = [drawLanes(each), drawMemory(each)];
      if (!drawn) {
        drawn = true;
        Promise.all(done).then(() => { linked("lanes", "memory"); linked("memory", "lanes"); });
      }
    }
    drawTable();
    drawChoice();
  }

  function drawChoice() {
    const stops = graph().stops, several = content.graphs.length > 1;
    at("choice").hidden = !several && stops.length < 2;
    at("graph-choice").hidden = !several;
    at("budget-choice").hidden = stops.length < 2;
    at("graph").replaceChildren(...content.graphs.map((each, n) => made("option", { value: n }, each.name)));
    at("graph").value = state.graph;
    at("budget").max = stops.length - 1;
    at("budget").value = state.stop;
    at("budget-value").textContent = stop().label;
    at("budget").setAttribute("aria-valuetext", stop().label);
    at("budget-ticks").replaceChildren(...stops.map((_, n) => made("option", { value: n })));
    const head = ["budget", ...stops[0].cards.map((card) => card[0])];
    const rows = stops.map((each, n) => made("tr", { "aria-current": n === state.stop, onclick: () => { state.stop = n; draw(); } },
      ...[each.label, ...each.cards.map((card) => (card[0] === "step time" ? card[1] + ", " + card[2].split(",")[0] : card[1]))]
        .map((text) => made("td", {}, text))));
    at("budgets").replaceChildren(made("thead", {}, made("tr", {}, ...head.map((text) => made("th", {}, text)))), made("tbody", {}, ...rows));
  }

  const order = new Intl.Collator("en", { numeric: true });
  function compared(one, other, column) {
    return column === SIZE ? one[SIZE] - other[SIZE] : order.compare(one[CELLS[column]], other[CELLS[column]]);
  }

  function sorted(rows) {
    if (state.sort === null) return rows;
    return [...rows].sort((one, other) => compared(one, other, state.sort) * (state.down ? -1 : 1));
  }

  function sortedGroups(groups) {
    if (state.sort === null) return groups;
    const sign = state.down ? -1 : 1;
    if (state.sort === SIZE) return [...groups].sort((one, other) => sign * (one.group.bytes - other.group.bytes));
    if (state.sort === 0) return [...groups].sort((one, other) => sign * order.compare(one.group.name, other.group.name));
    return [...groups].sort((one, other) => sign * order.compare(one.rows[0][CELLS[state.sort]], other.rows[0][CELLS[state.sort]]));
  }

  // Long names break after dots and underscores.
  function broken(text) {
    return text.split(/(?<=[._,])/).flatMap((part, n) => (n ? [made("wbr"), part] : [part]));
  }

  function rowOf(row) {
    const cells = CELLS.map((place, column) => {
      const inside = place === DECISION ? [made("span", { class: row[place] }, row[place])] : broken(row[place]);
      return made("td", { class: column === SIZE ? "number" : column === 2 || column === 3 || place === DECISION ? "short" : "" }, ...inside);
    });
    return made("tr", { class: "row" }, ...cells);
  }

  function groupRow(group, rows, open) {
    const button = made("button", { type: "button", "aria-expanded": open, onclick: () => {
      if (!state.open.delete(group.name)) state.open.add(group.name);
      drawTable();
    } }, group.name);
    const all = group.rows.length, count = rows.length === all ? all : rows.length + " of " + all;
    const amounts = group.amounts.map(([action, size]) => made("span", { class: action }, action + " " + size));
    return made("tr", { class: "group" }, made("td", { colspan: 2 }, button), made("td", { colspan: 2 }, count + (all === 1 ? " tensor" : " tensors")),
      made("td", { class: "number" }, group.size), made("td", { colspan: 3 }, ...amounts));
  }

  function drawTable() {
    at("table").tHead.replaceChildren(made("tr", {}, ...HEADS.map((name, column) => {
      const up = state.sort === column ? (state.down ? "descending" : "ascending") : "none";
      return made("th", { "aria-sort": up, class: column === SIZE ? "number" : "" }, made("button", { type: "button", onclick: () => {
        if (state.sort === column) state.down = !state.down;
        else { state.sort = column; state.down = column === SIZE; }
        drawTable();
      } }, name));
    })));
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => words.every((word) => CELLS.some((place) => String(row[place]).toLowerCase().includes(word)));
    const found = stop().groups.map((group) => ({ group, rows: sorted(group.rows.filter(matches)) })).filter((each) => each.rows.length);
    const rows = [];
    if (state.grouped) {
      for (const { group, rows: inside } of sortedGroups(found)) {
        const open = state.open.has(group.name) || (words.length > 0 && inside.length < group.rows.length);
        rows.push(groupRow(group, inside, open), ...(open ? inside.map(rowOf) : []));
      }
    } else rows.push(...sorted(found.flatMap((each) => each.rows)).map(rowOf));
    at("table").tBodies[0].replaceChildren(...rows);
    const count = found.reduce((sum, each) => sum + each.rows.length, 0);
    at("count").textContent = count + (count === 1 ? " tensor" : " tensors") + (state.grouped ? " in " + found.length + " groups" : "");
  }

  function unfolded() {
    state.open = new Set(stop().groups.map((group) => group.name));
  }

  at("graph").addEventListener("change", (event) => {
    state.graph = Number(event.target.value);
    state.stop = graph().start;
    draw();
  });
  at("budget").addEventListener("input", (event) => { state.stop = Number(event.target.value); draw(); });
  at("filter").addEventListener("input", (event) => { state.words = event.target.value; drawTable(); });
  at("grouped").addEventListener("change", (event) => { state.grouped = event.target.checked; drawTable(); });
  at("unfold").addEventListener("click", () => { unfolded(); drawTable(); });
  at("fold").addEventListener("click", () => { state.open.clear(); drawTable(); });
  if (stop().groups.reduce((sum, group) => sum + group.rows.length, 0) <= 24) unfolded();
  at("text").hidden = !content.text;
  at("text").querySelector("pre").textContent = content.text;
  draw();
})();
