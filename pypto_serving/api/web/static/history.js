// The samples that the server has sent, and what follows from them.

/** Keeps the latest samples and finished requests, newest last. */
export class History {
  constructor() {
    this.columns = {};
    this.finished = [];
    this.seen = { samples: 0, finished: 0 };
  }

  /** Take in an answer of the server. One that has seen less than us was started anew. */
  take({ samples, finished, seen, max_samples: most, max_finished: mostFinished }) {
    if (seen.samples < this.seen.samples || seen.finished < this.seen.finished) Object.assign(this, new History());
    for (const [name, values] of Object.entries(samples)) this.columns[name] = [...(this.columns[name] ?? []), ...values].slice(-most);
    this.finished = [...this.finished, ...finished].slice(-mostFinished);
    this.seen = seen;
  }

  /** Times of all samples but the first, which only ends the differences. */
  get times() {
    return (this.columns.at_s ?? []).slice(1);
  }

  /** The values of a column, at `times`. */
  values(name) {
    return (this.columns[name] ?? []).slice(1);
  }

  /** How much a total grew in the `seconds` before each of `times`; `part` picks a number of a list. */
  growth(name, seconds, part) {
    const pick = (value) => (part === undefined ? value : (value[part] ?? 0));
    const totals = this.columns[name] ?? [];
    return this.#windows(seconds).map(([start, end]) => Math.max(0, pick(totals[end]) - pick(totals[start])));
  }

  /** How much a total grew per second. */
  rate(name, seconds) {
    const at = this.columns.at_s ?? [];
    const grown = this.growth(name, seconds);
    return this.#windows(seconds).map(([start, end], i) => grown[i] / (at[end] - at[start]));
  }

  /** The quantile of what a histogram counted in the `seconds` before each of `times`; null where that is nothing. */
  quantile(name, bounds, q, seconds) {
    const counts = this.columns[name] ?? [];
    return this.#windows(seconds).map(([start, end]) => quantile(sum(counts.slice(start + 1, end + 1)), bounds, q));
  }

  /** For each of `times`, the indices of the samples at both ends of the window before it. */
  #windows(seconds) {
    const at = this.columns.at_s ?? [];
    let start = 0;
    return at.slice(1).map((now, i) => {
      while (start < i && at[start] < now - seconds) start += 1;
      return [start, i + 1];
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
