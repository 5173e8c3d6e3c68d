// Line charts of values over time. The pointer, or the arrow keys, read values off.

import { h, s, say } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 130;
const GRID = [0.25, 0.5, 0.75];
const LEAST_S = 30;

/** A chart of `names`, one line or one layer for each. `format` writes values; `top` is the least height of the axis. */
export class Chart {
  constructor(title, names, { format, top = 0, stacked = false }) {
    Object.assign(this, { title, names, format, top, stacked });
    this.marks = names.map((_, i) => s("path", { class: `${stacked ? "layer" : "line"} series-${i + 1}` }));
    this.cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT });
    const grid = GRID.map((share) => s("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }));
    this.plot = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "img" }, ...grid, ...this.marks, this.cursor);
    this.readings = names.map(() => h("output", { class: "figures" }));
    this.when = h("span", { class: "muted figures when" });
    this.axis = h("span", { class: "axis figures", "aria-hidden": "true" });
    const legend = names.map((name, i) => h("li", {}, h("span", { class: `key series-${i + 1}` }), name, this.readings[i]));
    this.element = h("figure", { class: "card" }, h("figcaption", {}, h("h2", {}, title), this.when), h("ul", { class: "legend" }, legend), h("div", { class: "plot" }, this.axis, this.plot));
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.point((event.clientX - box.left) / box.width);
    });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.at = null;
  }

  /** Show `rows`, one list of values for each name, at `times`, in the last `span` seconds, or as many as there are; null is a gap. */
  show(times, rows, span) {
    const end = times.at(-1) ?? 0;
    span = Math.max(LEAST_S, Math.min(span, end - (times[0] ?? end)));
    const from = times.findIndex((time) => time >= end - span);
    this.times = times.slice(Math.max(0, from));
    this.rows = rows.map((row) => row.slice(Math.max(0, from)));
    this.place = (time) => WIDTH * (1 - (end - time) / span);
    const heights = this.stacked ? stack(this.rows) : this.rows;
    const most = niceAbove(Math.max(this.top, ...heights.flat().filter((value) => value !== null)));
    const points = heights.map((row) => row.map((value, i) => (value === null ? null : [this.place(this.times[i]), HEIGHT * (1 - value / most)])));
    points.forEach((row, i) => this.marks[i].setAttribute("d", this.stacked ? area(row, points[i - 1]) : line(row)));
    this.axis.textContent = this.format(most);
    this.plot.setAttribute("aria-label", `${this.title}: ${this.names.map((name, i) => `${name} ${this.value(i, this.times.length - 1)}`).join(", ")}`);
    this.read();
  }

  /** Read off at a share of the width, or the newest values again. */
  point(share) {
    const x = share * WIDTH;
    const distance = (time) => Math.abs(this.place(time) - x);
    this.at = share === null || !this.times.length ? null : this.times.reduce((best, time) => (distance(time) < distance(best) ? time : best));
    this.read();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.times.length) return;
    event.preventDefault();
    const last = this.times.length - 1;
    const now = this.at === null ? last : this.index();
    this.at = this.times[Math.max(0, Math.min(last, now + by))];
    this.read();
    say(`${this.when.textContent}: ${this.names.map((name, i) => `${name} ${this.value(i, this.index())}`).join(", ")}`);
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
    this.when.textContent = this.at === null ? "" : `${Math.round(this.times.at(-1) - this.times[index])} s ago`;
    this.cursor.classList.toggle("shown", this.at !== null);
    if (this.at !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.place(this.times[index]));
  }

  value(row, index) {
    const value = this.rows[row][index];
    return value === null || value === undefined ? "–" : this.format(value);
  }
}

const line = (points) => points.map((point, i) => (point ? `${i && points[i - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : "")).join("");

/** The path between a row and the one below it. */
function area(above, below) {
  const known = above.flatMap((point, i) => (point ? [[point, below?.[i] ?? [point[0], HEIGHT]]] : []));
  if (!known.length) return "";
  return `${line(known.map(([point]) => point))}${line(known.map(([, point]) => point).reverse()).replace("M", "L")}Z`;
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
