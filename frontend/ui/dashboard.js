// The dashboard: the public metrics and the workers' load, every two seconds, as numbers, charts and tables. The page stores nothing.

import * as api from "/ui/api.js";
import { chart } from "/ui/charts.js";
import { element } from "/ui/dom.js";
import { parse, quantile, rate, sum } from "/ui/metrics.js";

const EVERY_MS = 2000;
const SPAN_MS = 5 * 60_000;
/** Rates and quantiles cover this time. */
const WINDOW_MS = 20_000;
/** The most models whose details are read. */
const MOST_MODELS = 50;

const at = (id) => document.getElementById(id);

const whole = (value) => (value >= 10_000 ? `${shortened(value / 1000)}k` : shortened(value));
const shortened = (value) => (value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2).replace(/0+$/, "").replace(/\.$/, ""));
const duration = (seconds) => (seconds >= 1 ? `${shortened(seconds)} s` : `${shortened(seconds * 1000)} ms`);
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value > 0 ? Math.min(Math.floor(Math.log2(value) / 10), units.length - 1) : 0;
  return `${shortened(value / 1024 ** power)} ${units[power]}`;
};

const history = [];
const readings = [];
let isPaused = false;

const line = (name, key) => ({ name, value: (point) => point[key] });
const charts = [
  { title: "Requests", format: whole, series: [line("in flight", "inFlight"), line("waiting for a first token", "queued")] },
  { title: "Tokens a second", format: whole, series: [line("completion", "completion"), line("prompt", "prompt")] },
  { title: "Time to first token", format: duration, series: [line("p50", "ttft50"), line("p95", "ttft95")] },
  { title: "Time between tokens", format: duration, series: [line("p50", "itl50"), line("p95", "itl95")] },
  { title: "Answered requests a second", format: whole, series: [line("well", "good"), line("refused (4xx)", "refused"), line("failed (5xx)", "failed")] },
  { title: "Requests at the workers", format: whole, series: [line("running", "atWorkers"), line("waiting", "waitingAtWorkers")] },
  { title: "KV cache in use", format: percent, max: 1, series: [line("all workers seen", "kv"), line("the fullest", "kvMost")] },
  { title: "Time to first token at the workers", format: duration, series: [line("the fastest", "workerTtftLeast"), line("the slowest", "workerTtftMost")] },
  { title: "Memory of requests", format: bytes, series: [line("in use", "memory")] },
].map((each) => chart({ ...each, spanMs: SPAN_MS }));

const TILES = [
  ["Models", (point) => whole(point.models)],
  ["In flight", (point) => whole(point.inFlight ?? 0)],
  ["Tokens a second", (point) => (point.completion === null ? "–" : whole(point.completion))],
  ["Time to first token", (point) => (point.ttft50 === null ? "–" : duration(point.ttft50))],
  ["Prompt tokens cached", (point) => (point.cached === null ? "–" : percent(point.cached))],
  ["Requests so far", (point) => whole(point.requests)],
];

/** The share of a worker's KV cache that is in use; null if it has none. */
const kvShare = (load) => (load.kv_total_blocks > 0 ? Math.min(load.kv_used_blocks / load.kv_total_blocks, 1) : null);
/** The median time to the first token of a worker's recent requests, in seconds; null before the first. */
const workerTtft = (load) => (load.recent_ttft_us === undefined ? null : load.recent_ttft_us / 1e6);

/** What the charts show of the workers that answered. */
function fleetOf(models) {
  const loads = models.flatMap((model) => model.genset?.loads ?? []).map(({ load }) => load).filter((load) => load !== null);
  const total = (name) => (loads.length > 0 ? loads.reduce((sum, load) => sum + load[name], 0) : null);
  const all = (of) => loads.map(of).filter((value) => value !== null);
  const chosen = (choose, values) => (values.length > 0 ? choose(...values) : null);
  const blocks = total("kv_total_blocks");
  return {
    atWorkers: total("running_requests"),
    waitingAtWorkers: total("waiting_requests"),
    kv: blocks > 0 ? total("kv_used_blocks") / blocks : null,
    kvMost: chosen(Math.max, all(kvShare)),
    workerTtftLeast: chosen(Math.min, all(workerTtft)),
    workerTtftMost: chosen(Math.max, all(workerTtft)),
  };
}

/** What the charts show of a reading. */
function pointOf(now, names, models) {
  const before = readings.find((each) => now.at - each.at <= WINDOW_MS) ?? now;
  const value = (name, isMeant) => sum(now.reading, name, isMeant);
  const per = (name, isMeant) => rate(before, now, name, isMeant);
  const half = (name) => quantile(before, now, name, 0.5);
  const most = (name) => quantile(before, now, name, 0.95);
  const status = (from, to) => per("genset_http_requests_total", ({ status: given }) => Number(given) >= from && Number(given) < to) ?? 0;
  const prompt = value("genset_http_prompt_tokens_total") ?? 0;
  const fleet = fleetOf(models);
  return {
    at: now.at,
    models: names.length,
    ...fleet,
    // The metrics have the KV cache of a worker in the server's process, even if the server does not show its workers.
    kv: fleet.kv ?? value("genset_model_server_kv_cache_utilization"),
    inFlight: value("genset_http_requests_in_flight"),
    queued: value("genset_http_answers_queued"),
    requests: value("genset_http_requests_total") ?? 0,
    completion: per("genset_http_completion_tokens_total"),
    prompt: per("genset_http_prompt_tokens_total"),
    cached: prompt > 0 ? Math.min((value("genset_http_cached_tokens_total") ?? 0) / prompt, 1) : null,
    ttft50: half("genset_http_time_to_first_token_seconds"),
    ttft95: most("genset_http_time_to_first_token_seconds"),
    itl50: half("genset_http_inter_token_latency_seconds"),
    itl95: most("genset_http_inter_token_latency_seconds"),
    good: status(200, 400),
    refused: status(400, 500),
    failed: status(500, 600),
    memory: value("genset_http_memory_used_bytes"),
  };
}

async function read() {
  const [text, ready] = await Promise.all([api.text("/metrics"), readiness()]);
  const now = { at: performance.now(), reading: parse(text) };
  const models = await Promise.all(ready.models.slice(0, MOST_MODELS).map(detailOf));
  readings.push(now);
  while (now.at - readings[0].at > 2 * WINDOW_MS) {
    readings.shift();
  }
  history.push(pointOf(now, ready.models, models));
  while (now.at - history[0].at > SPAN_MS + WINDOW_MS) {
    history.shift();
  }
  at("state").textContent = ready.status;
  at("state").className = ready.status === "ready" ? "good" : "bad";
  show();
  showModels(models, now.reading);
  showWorkers(models);
}

/** Which models there are, and whether the server takes requests: also of one that is not ready. */
async function readiness() {
  const response = await fetch("/ready", { cache: "no-store" });
  return response.json();
}

function show() {
  const point = history.at(-1);
  at("tiles").replaceChildren(...TILES.map(([name, value]) => element("div", { class: "tile" },
    element("span", { class: "quiet" }, name), element("b", {}, value(point)))));
  for (const each of charts) {
    each.draw(history);
  }
}

/** The server's details of a model. */
async function detailOf(name) {
  try {
    return await api.model(name);
  } catch {
    // The server may require a key that this page does not have.
    return { id: name };
  }
}

function showModels(models, reading) {
  const of = (metric, name) => sum(reading, metric, ({ model }) => model === name);
  const rows = models.map((model) => [
    model.id,
    model.genset?.endpoint ?? "–",
    model.max_model_len === undefined ? "–" : whole(model.max_model_len),
    whole(of("genset_frontend_model_running_requests", model.id) ?? 0),
    whole(of("genset_frontend_model_waiting_requests", model.id) ?? 0),
    model.genset ? String(model.genset.workers.length) : "–",
    whole(of("genset_frontend_left_out_workers", model.id) ?? 0),
  ]);
  fill(at("models"), ["Model", "Endpoint", "Context, tokens", "Running", "Waiting", "Workers", "Left out"], rows, "No model is served yet.");
}

const NO_LOAD = ["–", "–", "–", "–", "–"];

/** The cells of a worker's load. */
function loadCells(load) {
  const share = kvShare(load);
  const ttft = workerTtft(load);
  const prompts = load.recent_prompt_tokens ?? 0;
  return [
    whole(load.running_requests),
    whole(load.waiting_requests),
    share === null ? "none" : `${percent(share)} of ${whole(load.kv_total_blocks)} blocks`,
    prompts > 0 ? percent((load.recent_cached_tokens ?? 0) / prompts) : "–",
    ttft === null ? "–" : duration(ttft),
  ];
}

function showWorkers(models) {
  const rows = models.flatMap(({ id, genset }) => [
    ...(genset?.loads ?? []).map(({ worker, role, load, error }) => (load === null
      ? [worker, id, role, ...NO_LOAD, `gave no answer: ${error.message}`]
      : [worker, id, role, ...loadCells(load), "serves"])),
    ...(genset?.left_out_workers ?? []).map(({ instance, differences }) => [instance, id, "–", ...NO_LOAD, `left out: ${differences.join(", ")}`]),
  ]);
  fill(at("workers"), ["Worker", "Model", "Role", "Running", "Waiting", "KV cache", "Hits", "TTFT", "State"], rows, "None is shown.");
  const isShown = models.some((model) => model.genset);
  at("workers-note").textContent = isShown || models.length === 0 ? "" : "The server shows its workers and their load only on loopback without API keys.";
}

function fill(table, heads, rows, none) {
  const cells = (row, name) => row.map((cell) => element(name, {}, cell));
  const body = rows.length > 0 ? rows.map((row) => element("tr", {}, ...cells(row, "td"))) : [element("tr", {}, element("td", { colspan: heads.length, class: "quiet" }, none))];
  table.replaceChildren(element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...body));
}

async function follow() {
  if (!isPaused) {
    try {
      await read();
    } catch {
      at("state").textContent = "the server cannot be reached";
      at("state").className = "bad";
    }
  }
  setTimeout(follow, EVERY_MS);
}

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("pause").textContent = isPaused ? "Go on" : "Pause";
});
at("charts").append(...charts.map((each) => each.node));
follow();
