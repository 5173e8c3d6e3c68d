// The details below the charts: requests, memory, workers, tiers, drafts.

import { h } from "./dom.js";
import { bytes, percent, short, time } from "./format.js";

const SHOWN_REQUESTS = 24;

/** A card with a heading. */
function card(title, note, ...content) {
  return h("section", { class: "card" }, h("div", { class: "row" }, h("h2", {}, title), note ? h("span", { class: "muted" }, note) : null), content);
}

function table(caption, head, rows) {
  const cells = (row) => row.map((cell, i) => (i ? h("td", { class: "figures" }, cell) : h("th", { scope: "row" }, cell)));
  const columns = head.map((name) => h("th", { scope: "col", class: name === "Timeline" ? "left" : null }, name));
  return h("div", { class: "scrolled", tabindex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, columns)), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))));
}

/** A piece of a bar, `share` of its length long. */
function piece(name, start, share, title) {
  const element = h("span", { class: `piece ${name}`, title });
  element.style.insetInlineStart = `min(${100 * start}%, 100% - 2px)`;
  element.style.inlineSize = `max(2px, ${100 * share}%)`;
  return element;
}

/** Timelines on one axis from 0, without the time in which there was no request. */
export function withoutIdle(timelines) {
  const moved = new Map();
  let idle = 0;
  let end = 0;
  for (const timeline of [...timelines].sort((a, b) => a[0] - b[0])) {
    idle += Math.max(0, timeline[0] - end);
    end = Math.max(end, timeline[3]);
    moved.set(timeline, timeline.map((at) => at - idle));
  }
  return timelines.map((timeline) => moved.get(timeline));
}

/** The latest requests, each as its time in the queue, in prefill and in decode, on one axis. */
export function requests(finished) {
  const shown = finished.slice(-SHOWN_REQUESTS).reverse();
  const timelines = withoutIdle(shown.map(({ timeline }) => timeline));
  const span = Math.max(...timelines.map((timeline) => timeline[3])) || 1;
  const legend = h("ul", { class: "legend" }, ["queue", "prefill", "decode"].map((part) => h("li", {}, h("span", { class: `key ${part}` }), part)));
  const rows = shown.map(({ id, reason, prompt_tokens: prompt, output_tokens: output, cached_tokens: cached }, row) => {
    const timeline = timelines[row];
    const parts = ["queue", "prefill", "decode"].map((name, i) => ({ name, start: timeline[i], long: Math.max(0, timeline[i + 1] - timeline[i]) }));
    const bar = h("div", { class: "track" }, parts.filter(({ long }) => long > 0).map(({ name, start: from, long }) => piece(name, from / span, long / span, `${name} ${time(long)}`)));
    return [h("code", { title: id }, id.slice(0, 16)), bar, short(prompt), short(cached), short(output), ...parts.map(({ long }) => time(long)), reason];
  });
  const head = ["Request", "Timeline", "Prompt", "Cached", "Output", "Queue", "Prefill", "Decode", "End"];
  const content = shown.length ? [legend, table("Recent requests", head, rows)] : [h("p", { class: "muted" }, "No request has ended yet.")];
  return card("Recent requests", shown.length ? `${time(span)} with requests` : "", content);
}

/** What a replica's memory is for, tier by tier. */
export function memory(parts, groups) {
  const tiers = [...new Set(parts.map(({ tier }) => tier))];
  const bars = tiers.map((tier) => {
    const own = parts.filter((part) => part.tier === tier);
    const all = own.reduce((total, part) => total + part.num_bytes, 0);
    let start = 0;
    const pieces = own.map(({ name, num_bytes: size }, i) => {
      const made = piece(name === "free" ? "free" : `series-${(i % 6) + 1}`, start, size / all, `${name}: ${bytes(size)}`);
      start += size / all;
      return made;
    });
    const legend = own.map(({ name, num_bytes: size }, i) => h("li", {}, h("span", { class: `key ${name === "free" ? "free" : `series-${(i % 6) + 1}`}` }), name, h("output", { class: "figures" }, bytes(size))));
    return h("div", { class: "plan" }, h("h3", {}, `${tier}, ${bytes(all)}`), h("div", { class: "track" }, pieces), h("ul", { class: "legend" }, legend));
  });
  const rows = groups.map((group) => [group.name, group.kind, short(group.blocks), `${group.block_tokens}`, bytes(group.block_bytes), bytes(group.blocks * group.block_bytes)]);
  return card("Memory plan", "of each replica", bars, table("KV groups", ["KV group", "Kind", "Blocks", "Tokens each", "Bytes each", "All"], rows));
}

/** The replicas: what they do, and how often their processes were started. */
export function workers(replicas, ranks) {
  const rows = replicas.map((replica, i) => [
    `${i}`,
    h("span", { class: `badge ${replica.status}`, title: replica.detail }, replica.status),
    ranks.join(" + "),
    `${replica.epoch}`,
    `${replica.core_respawns + 1}`,
    `${replica.running} + ${replica.waiting}`,
    `${replica.step_rows} of ${replica.max_step_rows}`,
    short(replica.steps),
    time(replica.last_step_age_s),
  ]);
  return card("Workers", "", table("Workers", ["Replica", "State", "Ranks", "Worker life", "Core life", "Requests", "Last batch", "Steps", "Last step"], rows));
}

/** The tiers below the device, of all replicas; null if there are none. */
export function tiers(replicas) {
  const rows = replicas.flatMap((replica, i) =>
    replica.tiers.map((tier) => [
      replicas.length > 1 ? `${tier.tier} of ${i}` : tier.tier,
      `${short(tier.held_blocks)} of ${short(tier.num_blocks)}`,
      short(tier.hit_tokens),
      bytes(tier.loaded_bytes),
      tier.load_s ? `${bytes(tier.loaded_bytes / tier.load_s)}/s` : "–",
      bytes(tier.stored_bytes),
      short(tier.evicted_blocks),
      `${short(tier.failed_blocks)} / ${short(tier.lost_blocks)}`,
      time(Math.max(0, tier.saved_s)),
    ]),
  );
  if (!rows.length) return null;
  return card("Tiers", "", table("Tiers", ["Tier", "Blocks", "Hit tokens", "Loaded", "Speed", "Stored", "Evicted", "Failed / lost", "Saved"], rows));
}

/** How often drafts were accepted, by position; null where there are none. */
export function drafts(rounds, drafted, accepted) {
  if (!rounds) return null;
  const all = accepted.reduce((total, count) => total + count, 0);
  const bars = accepted.map((count, i) => h("li", {}, h("span", { class: "muted" }, `${i + 1}`), h("div", { class: "track" }, piece("series-1", 0, count / rounds, percent(count / rounds))), h("span", { class: "figures" }, percent(count / rounds))));
  return card("Drafts", `${percent(all / drafted)} accepted, ${(1 + all / rounds).toFixed(2)} tokens a step`, h("ol", { class: "bars", "aria-label": "Accepted by position" }, bars));
}
