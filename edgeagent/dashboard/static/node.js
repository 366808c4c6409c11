// The view of one node: why it is in the condition it is, its GPUs, who waits, what happened.

import { el, morphChildren } from "./dom.js";
import { age, CONDITIONS, count, mib, plural, time } from "./format.js";
import { gpuCard, podName } from "./gpu.js";

const NODE_VERBS = [
  ["snapshot", "Snapshot"], ["collect-diagnostics", "Diagnostics"], ["set-log-level", "Log level"],
  ["set-sharing", "Sharing"], ["restart-agent", "Restart agent"],
];

/** Keeps the hour of readings of the open node, which comes piece by piece. */
export class NodeView {
  constructor(article) {
    this.article = article;
    this.key = null;
    this.data = null;
    this.series = {};
  }

  open(key) {
    if (this.key === key) return;
    this.key = key;
    this.data = null;
    this.series = {};
    this.article.hidden = false;
    this.article.replaceChildren(head({ key, site: key.split("/")[0], node: key.split("/")[1] }, Date.now()), el("p", { class: "muted", role: "status" }, "Loading …"));
    this.article.scrollTop = 0;
  }

  close() {
    this.key = null;
    this.data = null;
    this.article.hidden = true;
    this.article.replaceChildren();
  }

  missing() {
    this.article.replaceChildren(head({ key: this.key, site: this.key.split("/")[0], node: this.key.split("/")[1] }, Date.now()),
      el("p", { class: "muted", role: "status" }, "The broker knows no such node. It is shown here when it comes."));
  }

  take(data) {
    if (data.key !== this.key) return;
    this.data = data;
    if (data.seriesFresh) this.series = {};
    for (const [uuid, more] of Object.entries(data.series)) {
      const known = this.series[uuid];
      if (!known) this.series[uuid] = more;
      else for (const [name, values] of Object.entries(more)) (known[name] = known[name].concat(values)).splice(0, Math.max(0, known[name].length - 1000));
    }
  }

  draw(now, readOnly) {
    if (!this.data) return;
    const parts = render(this.data, this.series, now, readOnly).filter(Boolean);
    morphChildren(this.article, parts);
  }
}

function render(d, series, now, readOnly) {
  const allowed = new Set(readOnly ? [] : d.commandsAllowed ?? []);
  const can = (verb) => allowed.has(verb);
  return [
    head(d, now),
    actions(d, can),
    staleness(d, now),
    alerts(d, now),
    waiting(d, now),
    section("gpus", plural(d.gpus?.length ?? 0, "GPU"), (d.gpus ?? []).map((gpu) => gpuCard(gpu, { series: series[gpu.uuid], now, can }))),
    commandLog(d, now),
    events(d, now),
    about(d, now),
  ];
}

function section(key, title, ...content) {
  return el("section", { class: `part part-${key}`, data: { key } }, el("h3", { class: "part-title" }, title), ...content);
}

function head(d, now) {
  return el("header", { class: "node-head", data: { key: "head" } },
    el("a", { class: "close", href: "#/", "aria-label": "Close this node (Escape)" }, "×"),
    el("h2", { id: "node-title" }, d.node, " ", el("span", { class: "muted" }, d.site)),
    d.condition ? el("p", { class: "node-state" }, el("span", { class: `pill is-${d.condition}` }, CONDITIONS[d.condition]),
      d.condition !== "ready" && d.since ? ` for ${age(now - d.since)}, since ${time(d.since, now)}` : "",
      d.state === "draining" ? " · draining" : "") : null);
}

function actions(d, can) {
  const buttons = NODE_VERBS.filter(([verb]) => can(verb)).map(([verb, label]) => el("button", { type: "button", data: { verb, key: verb } }, label));
  return buttons.length ? el("div", { class: "actions", role: "group", "aria-label": "Commands to the node", data: { key: "actions" } }, buttons) : null;
}

function staleness(d, now) {
  if (["ready", "degraded", "sick", "waiting", "draining"].includes(d.condition)) return null;
  const heard = d.heardMs ? `Last heard ${age(now - d.heardMs)} ago. ` : "";
  const why = { lost: `${sentence(d.headline)} `, silent: `${sentence(d.headline)} `, offline: "The agent was stopped. " }[d.condition] ?? "";
  return el("p", { class: "stale", data: { key: "stale" } }, `${why}${heard}Below is what the node said last.`);
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1).replace(/\.$/, "")}.` : "");

function alerts(d, now) {
  const known = new Set((d.alerts ?? []).map((a) => a.message));
  const reasons = (d.reasons ?? []).filter((r) => !known.has(r));
  if (!d.alerts?.length && !reasons.length) return null;
  return section("alerts", "What is wrong",
    el("ul", { class: "alerts" },
      (d.alerts ?? []).map((a) => el("li", { class: `alert is-${a.severity}`, data: { key: a.id } },
        el("p", { class: "alert-head" }, el("b", {}, words(a.type)), el("span", { class: "muted" }, ` ${a.severity}`),
          a.gpu ? el("span", { class: "muted" }, ` · GPU ${a.gpuIndex ?? "?"}${a.gpuModel ? ` ${a.gpuModel}` : ""}`) : null,
          a.since ? el("span", { class: "muted" }, ` · for ${age(now - a.since)}, since ${time(a.since, now)}`) : null),
        el("p", {}, a.message),
        a.makesUnhealthy ? el("p", { class: "muted" }, "Shares of this GPU are withdrawn while it holds.") : null,
        a.podsHurt?.length ? el("p", { class: "hurt" }, "Hurts ", a.podsHurt.map((pod, i) => [i ? ", " : "", el("span", { class: "pod-name" }, pod)])) : null)),
      reasons.map((r) => el("li", { class: "alert is-warning", data: { key: `reason ${r}` } }, el("p", {}, r)))));
}

const words = (type) => type.replace(/([a-z])([A-Z])/g, "$1 $2");

function waiting(d, now) {
  if (!d.waiting?.length) return null;
  return section("waiting", `${plural(d.waiting.length, "container")} waiting`,
    el("ul", { class: "waiting" }, d.waiting.map((w) => el("li", { data: { key: `${w.podUid}/${w.container}` } },
      el("p", {}, el("span", { class: "pod-name" }, podName(w)), el("span", { class: "muted" }, ` ${w.container}`),
        ` wants ${count(w.memoryMiB ?? 0)} MiB${w.coresPct === undefined ? "" : ` and ${w.coresPct} % of cores`}`,
        w.since ? el("span", { class: "muted" }, ` · waits ${age(now - w.since)}`) : null,
        w.permanent ? el("span", { class: "tag is-sick" }, "can never fit here") : null),
      w.reason ? el("p", { class: "muted" }, w.reason) : null))));
}

function commandLog(d, now) {
  if (!d.commands?.length) return null;
  return section("commands", "Commands from this page",
    el("ul", { class: "log" }, d.commands.map((c) => el("li", { data: { key: c.id } },
      el("time", {}, time(c.sentMs, now)), el("b", {}, c.verb + (c.dryRun ? " (check)" : "")),
      el("span", {}, el("span", { class: `answer is-${c.state}` }, c.state), c.code ? ` ${c.code}` : "", c.message ? `: ${c.message}` : "")))));
}

function events(d, now) {
  const list = d.events ?? [];
  return section("events", "Events",
    list.length ? el("ul", { class: "log" }, list.map((e, i) => el("li", { class: `is-${e.severity}`, data: { key: e.id ?? `event ${i}` } },
      el("time", {}, time(e.atMs, now)), el("b", {}, words(e.type ?? e.kind)),
      el("span", {}, e.message, e.pod ? el("span", { class: "muted" }, ` ${e.pod}`) : null,
        e.suppressed ? el("span", { class: "muted" }, ` (and ${count(e.suppressed)} more of this kind)`) : null,
        e.late ? el("span", { class: "muted" }, " (recorded while the link was down)") : null)))) :
      el("p", { class: "muted none" }, "None since this page server started."));
}

function about(d, now) {
  const h = d.host ?? {};
  const outbox = d.outbox ?? {};
  const dropped = Object.entries(outbox.dropped ?? {}).map(([k, v]) => `${count(v)} ${k}`).join(", ");
  const rows = [
    ["Host", [h.hostname, h.os, h.machine, h.cpuCount && `${h.cpuCount} CPUs`, h.memoryTotalMiB && mib(h.memoryTotalMiB)]],
    ["Kernel", [h.kernel]], ["K3s", [h.k3sVersion, h.kubeletVersion && `kubelet ${h.kubeletVersion}`]],
    ["Hardware", Object.entries(h.facts ?? {}).map(([k, v]) => `${k} ${v}`)],
    ["Agent", [d.agent, d.startedMs && `up ${age(now - d.startedMs)}`, d.kubelet === false ? "not registered with the kubelet" : null, d.binding && `${d.binding} binding`, d.memoryUnitMiB > 1 && `units of ${d.memoryUnitMiB} MiB`]],
    ["Configuration", [d.configHash, d.desired && (d.desired.applied ? "as desired" : "not as desired"), ...(d.desired?.refused ?? []).map((r) => `${r.key} refused: ${r.reason}`)]],
    ["Uplink", [d.link, d.telemetryS && `a sample every ${d.telemetryS} s`, outbox.queued ? `${count(outbox.queued)} messages kept` : null, dropped && `dropped ${dropped}`, outbox.quarantined ? `${outbox.quarantined} set aside` : null]],
    ["Last sample", [d.sampleMs && `${age(now - d.sampleMs)} ago`]],
    ["Resources", (d.resources ?? []).map((r) => `${r.name} ${r.problem ? `not offered: ${r.problem}` : `${count(r.allocated ?? 0)} of ${count(r.total ?? 0)}`}`)],
    ["Found by", d.evidence ?? []],
    ["Cut from messages", Object.entries(d.truncated ?? {}).map(([k, v]) => `${v} of ${k}`)],
  ].map(([name, values]) => [name, values.filter(Boolean).join(" · ")]).filter(([, text]) => text);
  return el("details", { class: "part about", data: { key: "about" } }, el("summary", {}, "About this node"),
    el("dl", {}, rows.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
}
