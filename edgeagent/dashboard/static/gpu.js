// The card of one GPU: who was promised what of it, what is used, how far the limits hold.

import { el } from "./dom.js";
import { age, celsius, count, mib, percent, watts } from "./format.js";
import { plot } from "./plot.js";

const COLOURS = 8;
const LEVELS = {
  hard: "the driver or the hardware refuses",
  cooperative: "a library in the container refuses; a hostile pod can get round it",
  weighted: "a share under contention, not a cap",
  reactive: "seen and acted on afterwards",
  none: "nothing enforces it",
};

export function gpuCard(gpu, { series, now, can }) {
  const name = `GPU ${gpu.index ?? "?"}`;
  return el("section", { class: `gpu ${gpu.health === "sick" ? "ill" : ""}`, "aria-label": `${name} ${gpu.model ?? ""}`, data: { key: gpu.uuid } },
    el("header", { class: "gpu-head" },
      el("h3", {}, name, " ", el("span", { class: "muted" }, gpu.model ?? "")),
      el("span", { class: "tags" },
        gpu.health && gpu.health !== "ok" ? el("span", { class: `tag is-${gpu.health}` }, gpu.health) : null,
        gpu.present === false ? el("span", { class: "tag is-lost" }, "missing") : null,
        gpu.cordoned ? el("span", { class: "tag is-waiting" }, "cordoned") : null,
        gpu.fault ? el("span", { class: "tag is-sick" }, gpu.fault) : null,
        el("span", { class: "tag" }, gpu.mode ?? "unknown"),
        (gpu.reading?.throttle ?? []).map((t) => el("span", { class: "tag is-degraded" }, `throttled: ${t}`))),
      el("span", { class: "actions" },
        can("cordon-gpu") && !gpu.cordoned ? action("cordon-gpu", "Cordon", gpu) : null,
        can("uncordon-gpu") && gpu.cordoned ? action("uncordon-gpu", "Uncordon", gpu) : null,
        can("drain-gpu") ? action("drain-gpu", "Drain", gpu) : null)),
    memoryBar(gpu),
    summary(gpu),
    gpu.containers?.length ? containers(gpu, now) : el("p", { class: "muted none" }, "No container holds a share."),
    el("div", { class: "plots" },
      plot({ label: "Utilisation", series, field: "utilPct", format: percent, now, high: 100 }),
      plot({ label: "Temperature", series, field: "temperatureC", format: celsius, now, low: 20, high: (gpu.slowdownC ?? 80) + 5, limit: gpu.slowdownC, limitName: "slows down at" }),
      plot({ label: "Power", series, field: "powerW", format: watts, now, high: gpu.powerLimitW ?? 10, limit: gpu.powerLimitW, limitName: "limit" })),
    isolation(gpu),
    el("p", { class: "fine" }, [gpu.uuid, gpu.pci, gpu.driver && `driver ${gpu.driver}`, gpu.cuda && `CUDA ${gpu.cuda}`, gpu.capability && `compute ${gpu.capability}`,
      ...(gpu.migInstances ?? []).map((m) => `MIG ${m.profile}`)].filter(Boolean).join(" · ")));
}

const action = (verb, label, gpu) =>
  el("button", { type: "button", data: { verb, gpu: gpu.uuid, key: verb } }, label);

export const podName = (c) => (c.pod ? `${c.namespace ? `${c.namespace}/` : ""}${c.pod}` : `pod ${(c.podUid ?? "?").slice(0, 8)}`);

// -- the stacked bar -----------------------------------------------------------------------------

/** Each container is an outline as wide as its limit, filled as far as it uses it. */
function memoryBar(gpu) {
  const list = gpu.containers ?? [];
  const reserved = gpu.reservedMiB ?? Math.max(0, (gpu.memoryTotalMiB ?? 0) - (gpu.usableMiB ?? 0));
  const notPods = gpu.reading?.hostUsedMiB ?? 0;
  const unknown = gpu.reading?.unattributedMiB ?? 0;
  const width = (c) => c.memoryMiB ?? c.usedMiB ?? 0;
  const sum = reserved + notPods + unknown + list.reduce((total, c) => total + width(c), 0);
  const total = Math.max(gpu.memoryTotalMiB ?? 0, sum, 1);
  const share = (value) => ({ width: `${((100 * value) / total).toFixed(3)}%` });
  const segments = [];
  if (reserved > 0) segments.push(el("div", { class: "seg reserved", style: share(reserved), title: `reserved: ${mib(reserved)}`, data: { key: "reserved" } }));
  list.forEach((c, i) => {
    const used = c.memoryMiB ? Math.min(100, (100 * (c.usedMiB ?? 0)) / c.memoryMiB) : 100;
    segments.push(el("div", {
      class: `seg pod pod-${i % COLOURS} ${c.overLimit ? "over" : ""}`, style: share(width(c)), data: { key: `c${i}` },
      title: `${podName(c)} ${c.container}: ${c.usedMiB === undefined ? "use not known" : mib(c.usedMiB)} of ${mib(c.memoryMiB)}`,
    }, el("i", { style: { width: `${used.toFixed(2)}%` } })));
  });
  if (notPods > 0) segments.push(el("div", { class: "seg notpods", style: share(notPods), title: `not pods: ${mib(notPods)}`, data: { key: "notpods" } }));
  if (unknown > 0) segments.push(el("div", { class: "seg notpods", style: share(unknown), title: `not attributed: ${mib(unknown)}`, data: { key: "unknown" } }));
  const label = `Memory of ${mib(gpu.memoryTotalMiB)}: ${mib(gpu.promisedMiB)} promised to ${list.length} containers, `
    + `${mib(gpu.reading?.memoryUsedMiB)} used, ${mib(gpu.freeMiB)} free for new pods`;
  return el("div", { class: "membar", role: "img", "aria-label": label }, segments);
}

function summary(gpu) {
  const cores = gpu.promisedCoresPct === undefined ? null : `${count(gpu.promisedCoresPct)} % of cores promised`;
  const notPods = gpu.reading?.hostUsedMiB ? `${mib(gpu.reading.hostUsedMiB)} used by no pod` : null;
  return el("p", { class: "summary" },
    el("span", {}, el("b", {}, mib(gpu.promisedMiB)), ` of ${mib(gpu.usableMiB)} promised`),
    el("span", {}, el("b", {}, mib(gpu.reading?.memoryUsedMiB)), " used"),
    el("span", {}, el("b", {}, mib(gpu.freeMiB)), " free for new pods"),
    cores ? el("span", {}, cores) : null,
    notPods ? el("span", {}, notPods) : null);
}

// -- containers ----------------------------------------------------------------------------------

function containers(gpu, now) {
  return el("table", { class: "containers" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Container"), el("th", { scope: "col", class: "num" }, "Memory, MiB"),
      el("th", { scope: "col", class: "num" }, "Cores"), el("th", { scope: "col" }, "Isolation"), el("th", { scope: "col", class: "num" }, "Age"))),
    el("tbody", {}, gpu.containers.map((c, i) => el("tr", { data: { key: `${c.podUid}/${c.container}` } },
      el("td", {}, el("i", { class: `swatch pod-${i % COLOURS}`, "aria-hidden": "true" }),
        el("span", { class: "pod-name" }, podName(c)), el("span", { class: "muted" }, ` ${c.container}`),
        c.overLimit ? el("span", { class: "tag is-sick" }, "over its limit") : null,
        c.running === false ? el("span", { class: "tag" }, "not running") : null,
        c.leftoverMiB ? el("span", { class: "tag" }, `+${mib(c.leftoverMiB)} held by the kubelet`) : null),
      el("td", { class: "num", data: { label: "Memory" } }, `${c.usedMiB === undefined ? "–" : count(c.usedMiB)} / ${c.memoryMiB === undefined ? "no limit" : count(c.memoryMiB)}`),
      el("td", { class: "num", data: { label: "Cores" } }, `${c.utilPct === undefined ? "–" : Math.round(c.utilPct)} / ${c.coresPct === undefined ? "no cap" : `${c.coresPct} %`}`),
      el("td", { data: { label: "Isolation" } }, levelShort(c.levels)),
      el("td", { class: "num", data: { label: "Age" } }, c.since ? age(now - c.since) : "–"))),
    gpu.more ? el("tr", {}, el("td", { colspan: 5, class: "muted" }, `and ${gpu.more} more`)) : null));
}

function levelShort(levels) {
  const memory = levels?.memory?.level ?? "none", compute = levels?.compute?.level ?? "none";
  return el("span", { class: "levels", title: `memory: ${LEVELS[memory]}; compute: ${LEVELS[compute]}` },
    el("span", { class: `level is-${memory}` }, memory), memory === compute ? null : [" / ", el("span", { class: `level is-${compute}` }, compute)]);
}

function isolation(gpu) {
  if (!gpu.levels) return null;
  const axis = (label, a) => {
    const level = a?.level ?? "none";
    return [el("dt", {}, label), el("dd", {}, el("span", { class: `level is-${level}` }, level), a?.mechanism && a.mechanism !== "none" ? ` by ${a.mechanism}` : "",
      el("span", { class: "muted" }, `: ${LEVELS[level]}`),
      a?.evidence ? el("span", { class: "evidence" }, `Evidence: ${a.evidence}`) : null,
      a?.reason ? el("span", { class: "evidence" }, `Not higher because: ${a.reason.replaceAll("_", " ")}`) : null)];
  };
  return el("dl", { class: "isolation" }, axis("Memory limits", gpu.levels.memory), axis("Compute limits", gpu.levels.compute));
}
