// Line charts of values over time. The pointer, or the arrow keys, read values off.

import { h, s, say } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600;
const HEIGHT = 130;
const GRID = [0.25, 0.5, 0.75];
const LEAST_S = 30;
const TICKS_S = [10, 20, 30, 60, 120];
const MOST_TICKS = 5;
const EDGE = 0.09;
const LABEL = 0.18;

/** A chart of `names`, one line or one layer for each. `format` writes values; `top` is the least height of the axis. */
export class Chart {
  constructor(title, names, { format, top = 0, stacked = false }) {
    Object.assign(this, { title, names, format, top, stacked });
    this.marks = names.map((_, i) => s("path", { class: `${stacked ? "layer" : "line"} series-${i + 1}` }));
    this.cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT });
    this.gaps = s("path", { class: "gap" });
    this.lives = s("path", { class: "restart" });
    this.ticks = s("path", { class: "grid" });
    const grid = GRID.map((share) => s("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }));
    this.plot = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "img" }, this.gaps, ...grid, this.ticks, ...this.marks, this.lives, this.cursor);
    this.readings = names.map(() => h("output", { class: "figures" }));
    this.when = h("span", { class: "muted figures when" });
    this.axis = h("span", { class: "axis figures", "aria-hidden": "true" });
    this.labels = h("div", { class: "labels", "aria-hidden": "true" });
    this.timeAxis = h("div", { class: "times figures", "aria-hidden": "true" });
    const legend = names.map((name, i) => h("li", {}, h("span", { class: `key series-${i + 1}` }), name, this.readings[i]));
    this.element = h("figure", { class: "card" }, h("figcaption", {}, h("h2", {}, title), this.when), h("ul", { class: "legend" }, legend), h("div", { class: "plot" }, this.axis, this.labels, this.plot), this.timeAxis);
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.point((event.clientX - box.left) / box.width);
    });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.at = null;
  }

  /** Show `rows`, one list of values for each name, in the last `span` seconds of `history`, or as many as there are; null is a gap. */
  show({ times, starts, restarts }, rows, span) {
    const end = times.at(-1) ?? 0;
    span = Math.max(LEAST_S, Math.min(span, end - (times[0] ?? end)));
    const from = Math.max(0, times.findIndex((time) => time >= end - span));
    this.times = times.slice(from);
    this.rows = rows.map((row) => row.slice(from));
    this.restarts = restarts.filter(({ time }) => time >= end - span);
    this.share = (time) => 1 - (end - time) / span;
    this.place = (time) => WIDTH * this.share(time);
    const heights = this.stacked ? stack(this.rows) : this.rows;
    const most = niceAbove(Math.max(this.top, ...heights.flat().filter((value) => value !== null)));
    const points = heights.map((row) => row.map((value, i) => (value === null ? null : [this.place(this.times[i]), HEIGHT * (1 - value / most)])));
    const anew = starts.slice(from);
    points.forEach((row, i) => {
      const path = this.stacked ? (run) => area(run, row, points[i - 1]) : (run) => line(run.map((j) => row[j]));
      this.marks[i].setAttribute("d", runs(row, anew).map(path).join(""));
    });
    this.axis.textContent = this.format(most);
    this.showTimes(end - span, end, anew);
    this.plot.setAttribute("aria-label", `${this.title}: ${this.say(this.times.length - 1)}`);
    this.read();
  }

  /** Draw the axis of the time, where there are no samples, and where something was started anew. */
  showTimes(start, end, anew) {
    const step = TICKS_S.find((each) => (end - start) / each < MOST_TICKS) ?? TICKS_S.at(-1);
    const shift = new Date(end * 1000).getTimezoneOffset() * 60;
    const first = Math.ceil((start - shift) / step) * step + shift;
    const ticks = Array.from({ length: MOST_TICKS + 1 }, (_, i) => first + i * step).filter((time) => time < end);
    const gaps = this.times.flatMap((time, i) => (anew[i] && i ? [[this.times[i - 1], time].map(this.place)] : []));
    const upright = (time) => `M${this.place(time).toFixed(1)} 0V${HEIGHT}`;
    this.gaps.setAttribute("d", gaps.map(([from, to]) => `M${from.toFixed(1)} 0H${to.toFixed(1)}V${HEIGHT}H${from.toFixed(1)}Z`).join(""));
    this.ticks.setAttribute("d", ticks.map(upright).join(""));
    this.lives.setAttribute("d", this.restarts.map(({ time }) => upright(time)).join(""));
    const label = (time, name, text) => {
      const element = h("span", { class: name }, text);
      element.style.insetInlineStart = `${(100 * this.share(time)).toFixed(2)}%`;
      return element;
    };
    const readable = ticks.filter((time) => Math.abs(this.share(time) - 0.5) < 0.5 - EDGE);
    this.timeAxis.replaceChildren(...readable.map((time) => label(time, "tick", clock(time, step < 60))));
    this.labels.replaceChildren();
    let free = 0;
    for (const { time } of this.restarts) {
      const share = this.share(time);
      const from = share < 2 * LABEL ? share : share - LABEL;
      if (from < free || from + LABEL > 1) continue;
      this.labels.append(label(time, from < share ? "before" : "after", "restart"));
      free = from + LABEL;
    }
  }

  /** Read off at a share of the width, or the newest values again. */
  point(share) {
    const x = share * WIDTH;
    const distance = (time) => Math.abs(this.place(time) - x);
    this.at = share === null || !this.times.length ? null : this.times.reduce((best, time) => (distance(time) < distance(best) ? time : best));
    this.read();
  }

  step(event) {
    const last = this.times.length - 1;
    const now = this.at === null ? last : this.index();
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    this.at = this.times[Math.max(0, Math.min(last, next))];
    this.read();
    say(`${this.when.textContent}: ${this.say(this.index())}`);
  }

  index() {
    const found = this.times.findIndex((time) => time >= this.at);
    return found < 0 ? this.times.length - 1 : found;
  }

  read() {
    const index = this.at === null ? this.times.length - 1 : this.index();
    this.readings.forEach((reading, i) => {
      reading.textContent = this.value(i, index);
    });
    this.when.textContent = this.at === null ? "" : this.describe(this.times[index]);
    this.cursor.classList.toggle("shown", this.at !== null);
    if (this.at !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.place(this.times[index]));
  }

  /** A time in words, with what was started anew then. */
  describe(at) {
    const restarted = this.restarts.find(({ time }) => time === at);
    return `${clock(at, true)}, ${Math.round(this.times.at(-1) - at)} s ago${restarted ? `, ${restarted.what} restarted` : ""}`;
  }

  say(index) {
    return this.names.map((name, i) => `${name} ${this.value(i, index)}`).join(", ");
  }

  value(row, index) {
    const value = this.rows[row][index];
    return value === null || value === undefined ? "–" : this.format(value);
  }
}

/** The indices of neighbouring points that belong together, run by run. */
function runs(points, anew) {
  const found = [];
  points.forEach((point, i) => {
    if (!point) return;
    if (anew[i] || !points[i - 1]) found.push([]);
    found.at(-1).push(i);
  });
  return found;
}

/** The path through points; a single one is a dot. */
const line = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}${points.length > 1 ? "" : "h0"}`;

/** The path between a run of a row and the row below it; a single point is as wide as a dot. */
function area(run, above, below) {
  const floor = run.map((i) => below?.[i] ?? [above[i][0], HEIGHT]).reverse();
  const around = [...run.map((i) => above[i]), ...floor];
  return `${line(run.length > 1 ? around : [-1, 1, 1, -1].map((by, i) => [around[0][0] + by, around[i >> 1][1]]))}Z`;
}

/** Each row on top of those before it. */
function stack(rows) {
  const heights = [];
  for (const row of rows) {
    const below = heights.at(-1);
    heights.push(row.map((value, i) => (value === null ? null : value + (below?.[i] ?? 0))));
  }
  return heights;
}

/** The next larger of 1, 2, 5, 10, 20, ... */
function niceAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
