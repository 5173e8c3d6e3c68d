// Numbers as people read them.

/** Three digits and a unit's prefix: 12.3k. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)}G`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 1e4) return `${digits(value / 1e3)}k`;
  return digits(value);
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(Number.isInteger(value) || size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** A time in the unit that suits it. */
export function time(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Bytes in binary units. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${digits(count)} ${units[unit]}`;
}

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %` : "–");

/** The time of day by our clock, from seconds since 1970. */
export function clock(seconds, withSeconds) {
  return new Date(seconds * 1000).toTimeString().slice(0, withSeconds ? 8 : 5);
}

/** How long ago, roughly. */
export function ago(then, now = Date.now()) {
  const minutes = Math.round((now - then) / 60000);
  if (minutes < 1) return "now";
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 24 * 60) return `${Math.round(minutes / 60)} h`;
  return new Date(then).toLocaleDateString();
}
