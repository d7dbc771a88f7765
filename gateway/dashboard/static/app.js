"use strict";

const STAGES = [
  "rules", "tokenize", "queue", "prefill_wait", "prefill_compute", "kv_transfer",
  "decode_wait", "decode_steps", "detokenize", "write", "network",
];
const POLL_MS = 1000;
const MAX_ROWS = 300;

const byId = (id) => document.getElementById(id);
let requests = [];
let lastNumber = 0;
let openId = null;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

const percent = (value) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toFixed(digits);
const words = (stage) => stage.replaceAll("_", " ");
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);

async function fetchJson(path) {
  const response = await fetch(`/dashboard/api/${path}`, { cache: "no-store" });
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return response.json();
}

// The last minute, in tiles.

function tile(id, title, value, note, series) {
  let made = byId(id);
  if (made === null) {
    made = element("div", { class: "tile", id }, element("h3"), element("strong"), element("small"));
    byId("tiles").append(made);
  }
  const [heading, strong, small] = made.children;
  heading.textContent = title;
  strong.textContent = value;
  small.textContent = note;
  if (series) {
    const old = made.querySelector("svg");
    const line = sparkline(series);
    if (old === null) made.append(line);
    else old.replaceWith(line);
  }
}

function sparkline(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const width = Math.max(values.length - 1, 1);
  const top = Math.max(...values, 1);
  svg.setAttribute("viewBox", `0 -1 ${width} 22`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  const points = values.map((value, index) => `${index},${20 - (20 * value) / top}`);
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

const spread = (percentiles) =>
  percentiles === null ? "" : `p90 ${ms(percentiles.p90)} · p99 ${ms(percentiles.p99)}`;

function drawTiles(live) {
  const workers = live.workers;
  const decoding = workers.filter((worker) => worker.role === "decode");
  const blocks = workers.reduce((sum, worker) => sum + worker.blocks, 0);
  const free = workers.reduce((sum, worker) => sum + worker.free_blocks, 0);
  // The running second is not over.
  const tokens = live.series.tokens.slice(0, -1);
  const moved = mean(live.series.kv_transfer_bytes.slice(-61, -1)) / 1e9;
  tile("ttft", "TTFT p50", ms(live.ttft_ms && live.ttft_ms.p50), spread(live.ttft_ms));
  tile("tpot", "TPOT p50", ms(live.tpot_ms && live.tpot_ms.p50), spread(live.tpot_ms));
  tile("tokens", "Tokens/s", number(mean(tokens.slice(-5)), 1), "last two minutes", tokens);
  tile("streams", "Streams", number(live.streams), `${live.queued} queued for a placement`);
  tile("batch", "Running batch", number(decoding.reduce((sum, one) => sum + one.running, 0)),
    `${workers.reduce((sum, one) => sum + one.waiting, 0)} wait in workers`);
  tile("kv", "KV use", percent(blocks ? 1 - free / blocks : null), `${free} of ${blocks} blocks free`);
  tile("hits", "Cache hit rate", percent(live.cache_hit_rate), "prompt tokens, last minute");
  tile("transfer", "Transfer", `${number(live.kv_transfer_gb_per_s, 2)} GB/s`,
    `${number(moved, 4)} GB/s on average`);
  tile("finished", "Requests", number(live.num_requests),
    `${live.num_failed} failed, last minute`, live.series.finished.slice(0, -1));
}

function drawStatus(live) {
  const status = byId("status");
  const isWell = live.problems.length === 0;
  status.className = isWell ? "" : "bad";
  status.textContent = isWell ? `${live.workers.length} workers, all well` : live.problems.join("; ");
}

// Stages.

function stageBar(stages, total, bar = element("div", { class: "bar" })) {
  bar.replaceChildren(...STAGES.filter((stage) => stages[stage] > 0).map((stage) => {
    const part = element("span", { title: `${words(stage)} ${ms(stages[stage])}` });
    part.style.width = `${(100 * stages[stage]) / total}%`;
    part.style.background = `var(--${stage})`;
    return part;
  }));
  return bar;
}

function drawBreakdown(stages) {
  const total = Object.values(stages).reduce((sum, value) => sum + value, 0);
  stageBar(stages, total || 1, byId("breakdown"));
  byId("legend").replaceChildren(...STAGES.filter((stage) => stage in stages).map((stage) => {
    const mark = element("i");
    mark.style.background = `var(--${stage})`;
    return element("li", {}, mark, `${words(stage)} ${ms(stages[stage])}`);
  }));
}

// Workers.

function drawWorkers(workers) {
  byId("workers").tBodies[0].replaceChildren(...workers.map((worker) => {
    const use = element("div", { class: "bar", title: percent(worker.kv_cache_usage) }, element("span", { class: "fill" }));
    use.firstChild.style.width = `${100 * worker.kv_cache_usage}%`;
    const cells = [
      worker.worker_id, number(worker.running), number(worker.waiting),
      number(worker.batch_size && worker.batch_size.p50, 1), use,
      percent(worker.prefix_cache_hit_rate), ms(worker.tpot_ms && worker.tpot_ms.p50),
      number(worker.tokens_per_s, 1),
      worker.kv_transfer_gb_per_s === null ? "–" : `${number(worker.kv_transfer_gb_per_s, 2)} GB/s`,
      number(worker.leases), number(worker.preemptions),
    ];
    return element("tr", {}, ...cells.map((cell, index) =>
      element("td", index === 0 || index === 4 ? {} : { class: "n" }, cell)));
  }));
}

// Requests.

function shownRequests() {
  const filter = byId("filter").value;
  const find = byId("find").value.trim();
  let shown = requests;
  if (filter === "failed") shown = shown.filter((request) => request.error);
  if (filter === "slow") shown = [...shown].sort((a, b) => b.total_ms - a.total_ms);
  if (find) {
    shown = shown.filter((request) =>
      [request.request_id, request.client_request_id].some((id) => id.includes(find)));
  }
  return shown.slice(0, MAX_ROWS);
}

function drawRequests() {
  const shown = shownRequests();
  const body = byId("requests").tBodies[0];
  const known = new Map([...body.children].map((row) => [row.dataset.id, row]));
  const rows = shown.flatMap((request) => {
    const row = known.get(request.request_id) || requestRow(request);
    row.classList.toggle("open", request.request_id === openId);
    const detail = known.get(`detail ${request.request_id}`);
    return request.request_id === openId && detail ? [row, detail] : [row];
  });
  body.replaceChildren(...rows);
  byId("empty").hidden = shown.length > 0;
}

function requestRow(request) {
  const button = element("button", { type: "button", "aria-expanded": "false" }, request.request_id.slice(0, 12));
  const cells = [
    element("td", {}, new Date(request.started_at * 1000).toLocaleTimeString()),
    element("td", {}, button),
    element("td", { class: request.error ? "n bad" : "n" }, request.error || String(request.status)),
    element("td", { class: "n" }, `${request.prompt_tokens} + ${request.completion_tokens}`),
    element("td", { class: "n" }, ms(request.ttft_ms)),
    element("td", { class: "n" }, ms(request.tpot_ms)),
    element("td", { class: "n" }, ms(request.total_ms)),
    element("td", {}, stageBar(request.stages_ms, request.total_ms || 1)),
  ];
  const row = element("tr", { class: "request", "data-id": request.request_id }, ...cells);
  row.addEventListener("click", () => toggle(request.request_id));
  return row;
}

async function toggle(id) {
  openId = openId === id ? null : id;
  const row = document.querySelector(`tr[data-id="${CSS.escape(id)}"]`);
  for (const button of document.querySelectorAll("#requests button")) button.setAttribute("aria-expanded", "false");
  drawRequests();
  if (openId === null || row === null) return;
  row.querySelector("button").setAttribute("aria-expanded", "true");
  const cell = element("td", { colspan: "8" });
  try {
    cell.append(details(await fetchJson(`requests/${encodeURIComponent(id)}`)));
  } catch (error) {
    cell.append(`no longer known (${error.message})`);
  }
  if (openId === id) row.after(element("tr", { "data-id": `detail ${id}` }, cell));
}

function details(request) {
  const facts = {
    request: request.request_id, "client's id": request.client_request_id, trace: request.trace_id,
    model: request.model, mode: request.mode, prefill: request.prefill_worker_id,
    decode: request.decode_worker_id, attempts: request.attempts, ended: request.finish_reason,
    "cached tokens": request.cached_tokens, batch: request.batch_size,
    "KV use": percent(request.kv_cache_usage), "KV moved": `${((request.kv_transfer_bytes || 0) / 1e6).toFixed(1)} MB`,
    preemptions: request.preemptions,
  };
  const list = element("dl", {}, ...Object.entries(facts)
    .filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  return element("div", { class: "details" }, list, waterfall(request));
}

// A lane for each stage, in the order in which the request came to them.
function waterfall(request) {
  const chart = element("div", { class: "waterfall" });
  const lanes = new Map();
  for (const segment of request.segments) {
    const title = `${ms(segment.ms)} from ${ms(segment.start_ms)}`;
    const piece = element("span", { title });
    piece.style.left = `${(100 * segment.start_ms) / request.total_ms}%`;
    piece.style.width = `${(100 * segment.ms) / request.total_ms}%`;
    piece.style.background = `var(--${segment.name})`;
    if (!lanes.has(segment.name)) lanes.set(segment.name, element("div", { class: "lane" }));
    lanes.get(segment.name).append(piece);
  }
  for (const [name, lane] of lanes) {
    const total = element("span", { class: "n" }, ms(request.stages_ms[name]));
    chart.append(element("span", {}, words(name)), lane, total);
  }
  return chart;
}

// Once a second, while somebody looks.

async function poll() {
  if (document.hidden) return;
  try {
    const [live, added] = await Promise.all([
      fetchJson("live"), fetchJson(`requests?limit=${MAX_ROWS}&after=${lastNumber}`),
    ]);
    drawStatus(live);
    drawTiles(live);
    drawBreakdown(live.mean_stages_ms);
    drawWorkers(live.workers);
    // A gateway that was started again counts from the beginning.
    if (added.last_number < lastNumber) requests = [];
    lastNumber = added.last_number;
    if (added.requests.length > 0) requests = [...added.requests, ...requests].slice(0, MAX_ROWS);
    drawRequests();
  } catch (error) {
    byId("status").className = "bad";
    byId("status").textContent = `no answer: ${error.message}`;
  }
}

for (const id of ["filter", "find"]) byId(id).addEventListener("input", drawRequests);
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL_MS);
poll();
