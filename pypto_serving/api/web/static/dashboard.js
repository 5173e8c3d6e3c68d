// The dashboard: ask the server once a second while somebody looks, and show what it says.

import { ask } from "./api.js";
import { Chart } from "./chart.js";
import { furnish } from "./chrome.js";
import { h } from "./dom.js";
import { percent, short, time } from "./format.js";
import { History, quotients } from "./history.js";
import * as panels from "./panels.js";

const SMOOTH_S = 5;
const RECENT_S = 30;
const RETRY_MS = 2000;
const at = (id) => document.getElementById(id);
let history = new History();
const speed = (value) => `${short(value)}/s`;

let charts = null;
let shape = "";
let latest = null;
let looking = false;
let paused = false;
let timer = 0;

/** Charts by what they show; the names of groups and tiers come from the server. */
function makeCharts({ groups, used_tiers: tiers, step_parts: parts }) {
  const quantiles = ["p50", "p90", "p99"];
  const found = {
    tokens: new Chart("Tokens per second", ["output", "prompt"], { format: speed }),
    requests: new Chart("Requests", ["running", "waiting"], { format: short, top: 4 }),
    first: new Chart("Time to first token", quantiles, { format: time }),
    next: new Chart("Time between tokens", quantiles, { format: time }),
    steps: new Chart("Time of a step", parts, { format: time, stacked: true }),
    kv: new Chart("KV blocks in use", groups.map(({ name }) => name), { format: percent, top: 1 }),
    hits: new Chart("Prompt tokens from the cache", tiers, { format: percent, top: 1, stacked: true }),
    preemptions: new Chart("Preemptions", ["per second"], { format: short, top: 1 }),
  };
  at("charts").replaceChildren(...Object.values(found).map((chart) => chart.element));
  return found;
}

function showCharts(stats) {
  const span = Number(at("span").value);
  const show = (name, ...rows) => charts[name].show(history, rows, span);
  const quantiles = (name, bounds) => [0.5, 0.9, 0.99].map((q) => history.quantile(name, bounds, q, RECENT_S));
  const steps = history.growth("steps", SMOOTH_S);
  const queried = history.growth("prefix_queries", RECENT_S);
  show("tokens", history.rate("generation_tokens", SMOOTH_S), history.rate("prompt_tokens", SMOOTH_S));
  show("requests", history.values("running"), history.values("waiting"));
  show("first", ...quantiles("first_token", stats.first_token_bounds_s));
  show("next", ...quantiles("next_token", stats.next_token_bounds_s));
  show("steps", ...stats.step_parts.map((_, i) => quotients(history.growth("step_s", SMOOTH_S, i), steps)));
  show("kv", ...stats.groups.map((_, i) => history.values("kv_usage").map((usage) => usage[i] ?? null)));
  const hits = (tier) => history.growth("hit_tokens", RECENT_S, stats.tiers.indexOf(tier));
  show("hits", ...stats.used_tiers.map((tier) => quotients(hits(tier), queried)));
  show("preemptions", history.rate("preemptions", SMOOTH_S));
}

function showTiles({ first_token_bounds_s: first, next_token_bounds_s: next, tiers }) {
  const last = (values) => values.at(-1) ?? null;
  const value = (found, format) => (found === null || Number.isNaN(found) ? "–" : format(found));
  const quantile = (name, bounds, q) => value(last(history.quantile(name, bounds, q, RECENT_S)), time);
  const queried = last(history.growth("prefix_queries", RECENT_S));
  const hits = tiers.reduce((total, _, i) => total + (last(history.growth("hit_tokens", RECENT_S, i)) ?? 0), 0);
  const tiles = [
    ["Running", value(last(history.values("running")), short), `${value(last(history.values("waiting")), short)} waiting`],
    ["Output", value(last(history.rate("generation_tokens", SMOOTH_S)), speed), "tokens"],
    ["Prompts", value(last(history.rate("prompt_tokens", SMOOTH_S)), speed), "tokens"],
    ["First token", quantile("first_token", first, 0.5), `p99 ${quantile("first_token", first, 0.99)}`],
    ["Between tokens", quantile("next_token", next, 0.5), `p99 ${quantile("next_token", next, 0.99)}`],
    ["KV in use", value(Math.max(0, ...(last(history.values("kv_usage")) ?? [])), percent), "fullest group"],
    ["Cache hits", queried ? percent(hits / queried) : "–", "of prompt tokens"],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, figure, note]) => h("dl", { class: "tile" }, h("dt", {}, name), h("dd", { class: "figures" }, figure), h("dd", { class: "muted figures" }, note))));
}

function showPanels(stats) {
  const now = (name) => history.columns[name].at(-1);
  const found = [
    panels.requests(history.finished),
    panels.workers(stats.replicas, stats.ranks),
    panels.memory(stats.memory, stats.groups),
    panels.drafts(now("draft_rounds"), now("drafts"), now("accepted_at")),
    panels.tiers(stats.replicas),
  ];
  const focus = document.activeElement?.getAttribute("aria-label");
  const scrolled = new Map([...document.querySelectorAll("#panels .scrolled")].map((each) => [each.ariaLabel, each.scrollLeft]));
  at("panels").replaceChildren(...found.filter(Boolean));
  for (const each of document.querySelectorAll("#panels .scrolled")) {
    each.scrollLeft = scrolled.get(each.ariaLabel) ?? 0;
    if (each.ariaLabel === focus) each.focus({ preventScroll: true });
  }
}

function showState(status, text) {
  const state = at("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = `state badge ${status}`;
}

async function look() {
  const { life, seen } = history;
  const stats = await (await ask(`dashboard/stats?life=${life}&samples=${seen.samples}&finished=${seen.finished}`, {}, { quiet: true })).json();
  const { groups, used_tiers, tiers, step_parts, first_token_bounds_s, next_token_bounds_s } = stats;
  const found = JSON.stringify([groups.map(({ name }) => name), used_tiers, tiers, step_parts, first_token_bounds_s, next_token_bounds_s]);
  if (found !== shape) {
    [shape, charts] = [found, makeCharts(stats)];
    if (life) history = new History();
  }
  history.take(stats);
  at("model").textContent = stats.model;
  at("server").textContent = `pypto-serving ${stats.version}, ${stats.backend}`;
  showState(stats.status, stats.detail ? `${stats.status}: ${stats.detail}` : stats.status);
  latest = stats;
  showCharts(stats);
  showTiles(stats);
  showPanels(stats);
  return stats.interval_s * 1000;
}

/** Look again and again, unless the page is paused or hidden; once at a time, since each asks for what is new. */
async function watch() {
  clearTimeout(timer);
  if (paused || document.hidden || looking) return;
  let wait = RETRY_MS;
  looking = true;
  try {
    wait = await look();
  } catch (error) {
    showState("lost", `No answer: ${error.message}`);
  }
  looking = false;
  timer = setTimeout(watch, wait);
}

furnish();
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").textContent = paused ? "Resume" : "Pause";
  at("pause").setAttribute("aria-pressed", String(paused));
  watch();
});
at("span").addEventListener("change", () => latest && showCharts(latest));
document.addEventListener("visibilitychange", watch);
watch();
