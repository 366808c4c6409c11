// One hour of one value as a small line.

import { el } from "./dom.js";

const WIDTH = 240, HEIGHT = 48;
const HOUR_S = 3600;

/** `limit`: drawn as a dashed line where it is in sight. */
export function plot({ label, series, field, format, now, low, high, limit, limitName }) {
  const nowS = now / 1000, startS = nowS - HOUR_S;
  const times = series?.t ?? [], values = series?.[field] ?? [];
  const known = values.filter((v) => v !== null);
  const last = values.length ? values[values.length - 1] : null;
  const least = Math.min(...known), most = Math.max(...known);
  const top = Math.max(high ?? 0, known.length ? most * 1.1 : 0, 1), bottom = Math.min(low ?? 0, known.length ? least : 0);
  const x = (t) => ((t - startS) / HOUR_S) * WIDTH, y = (v) => HEIGHT - 1 - ((v - bottom) / (top - bottom)) * (HEIGHT - 2);

  const gap = 3.5 * typicalGap(times);
  let line = "", area = "", before = null;
  for (let i = 0; i < times.length; i++) {
    const v = values[i];
    if (v === null || times[i] < startS) continue;
    const point = `${x(times[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    if (before === null || times[i] - before > gap) {
      if (before !== null) area += `L${x(before).toFixed(1)} ${HEIGHT}Z`;
      line += `M${point}`;
      area += `M${x(times[i]).toFixed(1)} ${HEIGHT}L${point}`;
    } else {
      line += `L${point}`;
      area += `L${point}`;
    }
    before = times[i];
  }
  if (before !== null) area += `L${x(before).toFixed(1)} ${HEIGHT}Z`;

  const range = known.length ? `${format(least)} to ${format(most)}` : "no readings";
  const shown = limit !== undefined && limit !== null && limit <= top;
  return el("figure", { class: "plot", data: { key: `plot-${field}` } },
    el("figcaption", {}, el("span", { class: "plot-label" }, label), el("b", {}, format(last)),
      el("span", { class: "plot-range" }, known.length ? range : "")),
    el("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${label} in the last hour: now ${format(last)}, ${range}`,
    },
    el("line", { class: "half", x1: WIDTH / 2, x2: WIDTH / 2, y1: 0, y2: HEIGHT }),
    shown ? el("line", { class: "limit", x1: 0, x2: WIDTH, y1: y(limit), y2: y(limit) }, el("title", {}, `${limitName} ${format(limit)}`)) : null,
    el("path", { class: "area", d: area || "M0 0" }),
    el("path", { class: "stroke", d: line || "M0 0" })),
    el("span", { class: "axis", "aria-hidden": "true" }, el("span", {}, "1 h ago"), el("span", {}, "now")));
}

function typicalGap(times) {
  if (times.length < 3) return 60;
  const gaps = [];
  for (let i = Math.max(1, times.length - 40); i < times.length; i++) gaps.push(times[i] - times[i - 1]);
  return Math.max(10, gaps.sort((a, b) => a - b)[gaps.length >> 1]);
}
