// The samples that the server has sent, and what follows from them.

const LONGEST_STEP = 3;

/** Keeps the latest samples, of several lives of a server, and the finished requests of the newest life; newest last.
 *
 * `restarts` are the times at which the server or one of its processes began anew, with what did. Samples of two lives,
 * or far apart, are not joined: `starts` tells for each sample whether it has nothing to do with the one before.
 */
export class History {
  constructor() {
    this.columns = { at_s: [], life: [] };
    this.starts = [];
    this.restarts = [];
    this.finished = [];
    this.life = "";
    this.seen = { samples: 0, finished: 0 };
  }

  /** Take in an answer of the server, which came at `clock` by our clock, in seconds. */
  take({ life, now_s: now, samples, finished, seen, ...limits }, clock = Date.now() / 1000) {
    const offset = clock - now;
    if (life !== this.life || Math.abs(offset - this.offset) > limits.interval_s) this.offset = offset;
    const at = samples.at_s.map((time) => time + this.offset);
    if (life !== this.life) {
      this.#forgetSince(at[0] ?? clock);
      this.finished = [];
    }
    for (const [name, values] of Object.entries({ ...samples, at_s: at, life: at.map(() => life) })) {
      this.columns[name] = [...(this.columns[name] ?? []), ...values].slice(-limits.max_samples);
    }
    this.finished = [...this.finished, ...finished].slice(-limits.max_finished);
    this.life = life;
    this.seen = seen;
    this.#findStarts(LONGEST_STEP * limits.interval_s);
  }

  /** Two lives may overlap, as when one server takes over from another: the newer one counts. */
  #forgetSince(start) {
    const kept = this.times.filter((time) => time < start).length;
    for (const [name, values] of Object.entries(this.columns)) this.columns[name] = values.slice(0, kept);
  }

  #findStarts(longest) {
    const { life, respawns = [] } = this.columns;
    const anew = this.times.map((_, i) => i > 0 && life[i] !== life[i - 1]);
    this.starts = this.times.map((time, i) => !i || anew[i] || time - this.times[i - 1] > longest);
    this.restarts = this.times.flatMap((time, i) => (anew[i] ? [{ time, what: "server" }] : respawns[i] > respawns[i - 1] ? [{ time, what: "worker" }] : []));
  }

  /** When each sample was taken, in seconds by our clock. */
  get times() {
    return this.columns.at_s;
  }

  /** The values of a column, at `times`. */
  values(name) {
    return this.columns[name] ?? [];
  }

  /** How much a total grew in the `seconds` before each of `times`; `part` picks a number of a list. */
  growth(name, seconds, part) {
    const pick = (value) => (part === undefined ? value : (value[part] ?? 0));
    const totals = this.values(name);
    return this.#windows(seconds).map(([start, end]) => (start < end ? Math.max(0, pick(totals[end]) - pick(totals[start])) : null));
  }

  /** How much a total grew per second. */
  rate(name, seconds) {
    const grown = this.growth(name, seconds);
    return this.#windows(seconds).map(([start, end], i) => (start < end ? grown[i] / (this.times[end] - this.times[start]) : null));
  }

  /** The quantile of what a histogram counted in the `seconds` before each of `times`; null where that is nothing. */
  quantile(name, bounds, q, seconds) {
    const counts = this.values(name);
    return this.#windows(seconds).map(([start, end]) => quantile(sum(counts.slice(start + 1, end + 1)), bounds, q));
  }

  /** For each of `times`, the indices of the samples at both ends of the window before it, which are joined. */
  #windows(seconds) {
    let start = 0;
    return this.times.map((now, i) => {
      if (this.starts[i]) start = i;
      while (start < i - 1 && this.times[start] < now - seconds) start += 1;
      return [start, i];
    });
  }
}

const sum = (rows) => (rows.length ? rows[0].map((_, i) => rows.reduce((total, row) => total + row[i], 0)) : []);

/** The quantile of counted values, as if those of a bucket lay evenly in it. */
export function quantile(counts, bounds, q) {
  const all = counts.reduce((total, count) => total + count, 0);
  if (!all) return null;
  let below = 0;
  for (const [i, count] of counts.entries()) {
    if (count && below + count >= q * all) {
      const low = i ? bounds[i - 1] : 0;
      const high = bounds[i] ?? low;
      return low + ((high - low) * (q * all - below)) / count;
    }
    below += count;
  }
  return bounds.at(-1);
}

/** Quotients, null where there is nothing to divide by. */
export const quotients = (parts, wholes) => parts.map((part, i) => (wholes[i] ? part / wholes[i] : null));
