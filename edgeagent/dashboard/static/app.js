// The page: holds the rows of the fleet, filters them, and hands them to the grid.

import { CommandDialog } from "./commands.js";
import { el, morphChildren, setText } from "./dom.js";
import { CONDITIONS, count, mib, plural, time } from "./format.js";
import { Grid } from "./grid.js";
import { NodeView } from "./node.js";
import { post, Stream } from "./stream.js";

const $ = (id) => document.getElementById(id);

const rows = new Map(); // key -> row
let sorted = []; // every row, most urgent first
let fields = [];
let clockOffset = 0; // the server's clock minus ours
let readOnly = false;
let bar = null;
let link = null;
let broken = false; // the stream to the page server
const chosen = { query: "", site: "", conditions: new Set() };

const now = () => Date.now() + clockOffset;
const view = new NodeView($("node"));
const grid = new Grid($("grid"), $("cells"), { now, selected: () => view.key });
const dialog = new CommandDialog($("command"));

// -- the stream ----------------------------------------------------------------------------------

const stream = new Stream({
  hello(hello) {
    fields = hello.fields;
    readOnly = hello.readOnly;
    clockOffset = hello.now - Date.now();
    broken = false;
    drawLink();
    if (view.key) watch(view.key);
  },
  rows(update) {
    clockOffset = update.now - Date.now();
    takeRows(update);
  },
  bar(value) {
    bar = value;
    drawBar();
  },
  link(value) {
    link = value;
    drawLink();
  },
  node(value) {
    view.take(value);
    view.draw(now(), readOnly);
    dialog.take(value, now());
  },
  beat() {},
  broken() {
    broken = true;
    drawLink();
  },
  closed: showLogin,
});

function takeRows({ reset, rows: changed, gone }) {
  if (reset) rows.clear();
  let order = reset || gone.length > 0;
  for (const values of changed) {
    const before = rows.get(values[0]);
    const row = {};
    for (let i = 0; i < values.length; i++) row[fields[i]] = values[i];
    row.text ??= before?.text ?? "";
    row.hay = `${row.key} ${row.text}`;
    order ||= !before || before.rank !== row.rank || before.podsHurt !== row.podsHurt;
    if (before && !reset) announce(before, row);
    rows.set(row.key, row);
  }
  for (const key of gone) rows.delete(key);
  if (order) {
    sorted = [...rows.values()].sort((a, b) => b.rank - a.rank || b.podsHurt - a.podsHurt || (a.key < b.key ? -1 : 1));
    drawSites();
  } else for (let i = 0; i < sorted.length; i++) sorted[i] = rows.get(sorted[i].key);
  filter();
}

// -- filter --------------------------------------------------------------------------------------

function filter() {
  performance.clearMeasures("filter");
  const began = performance.now();
  const words = chosen.query.toLowerCase().split(/\s+/).filter(Boolean);
  const { site, conditions } = chosen;
  const prefix = `${site}/`;
  const found = sorted.filter((row) =>
    (conditions.size === 0 || conditions.has(row.condition)) &&
    (!site || row.key.startsWith(prefix)) &&
    words.every((word) => row.hay.includes(word)));
  grid.show(found);
  const all = sorted.length;
  const isFiltered = words.length > 0 || site || conditions.size > 0;
  setText($("count"), isFiltered ? `${count(found.length)} of ${plural(all, "node")}` : plural(all, "node"));
  $("clear").hidden = !isFiltered;
  $("empty").hidden = found.length > 0 || link?.loading;
  setText($("empty"), all === 0 ? "No node has reported to this broker yet." : "No node is like that.");
  performance.measure("filter", { start: began, end: performance.now() });
}

function drawSites() {
  const sites = [...new Set(sorted.map((row) => row.key.slice(0, row.key.indexOf("/"))))].sort();
  const select = $("site");
  if (select.options.length === sites.length + 1 && sites.every((s, i) => select.options[i + 1].value === s)) return;
  select.replaceChildren(el("option", { value: "" }, "All sites"), ...sites.map((s) => el("option", { value: s }, s)));
  select.value = sites.includes(chosen.site) ? chosen.site : (chosen.site = "");
}

$("query").addEventListener("input", (event) => {
  chosen.query = event.target.value;
  filter();
});
$("site").addEventListener("change", (event) => {
  chosen.site = event.target.value;
  filter();
});
$("clear").addEventListener("click", () => {
  chosen.query = $("query").value = chosen.site = $("site").value = "";
  chosen.conditions.clear();
  drawBar();
  filter();
  $("query").focus();
});
$("conditions").addEventListener("click", (event) => {
  const name = event.target.closest("button")?.dataset.key;
  if (!name) return;
  if (!chosen.conditions.delete(name)) chosen.conditions.add(name);
  drawBar();
  filter();
});

// -- the bar and the link ------------------------------------------------------------------------

function drawBar() {
  if (!bar) return;
  const c = bar.conditions;
  morphChildren($("conditions"), Object.entries(CONDITIONS)
    .filter(([name]) => c[name] || name === "ready" || chosen.conditions.has(name))
    .map(([name, label]) => el("button", {
      type: "button", class: `chip is-${name}`, "aria-pressed": chosen.conditions.has(name) ? "true" : "false", data: { key: name },
    }, el("b", {}, count(c[name] ?? 0)), ` ${label}`)));
  const share = (value) => ({ width: `${bar.usableMiB ? Math.min(100, (100 * value) / bar.usableMiB).toFixed(2) : 0}%` });
  const [site, name] = (bar.largestFreeAt ?? "/").split("/");
  morphChildren($("bar"), [
    el("div", { class: "fleetbar", role: "img", "aria-label": `GPU memory of the fleet: ${mib(bar.promisedMiB)} of ${mib(bar.usableMiB)} promised, ${mib(bar.usedMiB)} used` },
      el("i", { class: "promised", style: share(bar.promisedMiB) }), el("i", { class: "used", style: share(bar.usedMiB) })),
    el("dl", { class: "stats" },
      stat("Nodes", count(bar.nodes), c.lost || c.sick ? [c.lost ? `${count(c.lost)} lost` : "", c.sick ? `${count(c.sick)} sick` : ""].filter(Boolean).join(", ") : "", "nodes"),
      stat("GPUs", count(bar.gpus), bar.gpusSick ? `${count(bar.gpusSick)} sick` : "", "gpus"),
      stat("Promised", mib(bar.promisedMiB), `of ${mib(bar.usableMiB)}`, "promised"),
      stat("Used", mib(bar.usedMiB), bar.usedOfMiB < bar.usableMiB ? `known for ${mib(bar.usedOfMiB)}` : "", "used"),
      stat("Free", mib(bar.freeMiB), "", "free"),
      stat("Largest free block", mib(bar.largestFreeMiB), bar.largestFreeAt ? el("a", { href: `#/${site}/${name}` }, bar.largestFreeAt) : "", "largest"),
      bar.waiting ? stat("Waiting", count(bar.waiting), "containers", "waiting") : null,
      bar.podsHurt ? stat("Pods hurt", count(bar.podsHurt), `by ${plural(bar.alerts, "alert")}`, "hurt") : null),
  ]);
  const urgent = c.lost + c.sick;
  document.title = urgent ? `(${count(urgent)}) Fleet` : "Fleet";
}

const stat = (label, value, more, key) => el("div", { data: { key } }, el("dt", {}, label), el("dd", {}, el("b", {}, value), " ", more ? el("span", { class: "muted" }, more) : ""));

function drawLink() {
  const notices = [];
  if (broken) notices.push(["bad", "This browser has no connection to the page server. It tries again; what you see is old."]);
  else if (link && !link.connected) {
    notices.push(["bad", `This page has no link to the broker since ${time(link.since, now())}: ${link.problem ?? "unknown"}. It tries again; what you see is from before.`]);
  }
  for (const text of link?.shortfalls ?? []) notices.push(["warn", `${text[0].toUpperCase()}${text.slice(1)}.`]);
  morphChildren($("notices"), notices.map(([kind, text]) => el("p", { class: `notice is-${kind}` }, text)));
  const state = broken || !link?.connected ? "down" : link.loading ? "loading" : "up";
  $("link").className = `link is-${state}`;
  setText($("link"), { down: "no link", loading: "loading …", up: `live from ${host(link?.broker)}` }[state]);
  $("page").classList.toggle("is-stale", state === "down");
}

const host = (url) => (url ?? "").replace(/^[a-z]+:\/\//, "").replace(/\/.*$/, "");

// -- one node ------------------------------------------------------------------------------------

function route() {
  const match = /^#\/([a-z0-9-]+\/[a-z0-9-]+)$/.exec(location.hash);
  const before = view.key;
  if (match) {
    view.open(match[1]);
    document.body.classList.add("has-node");
    watch(match[1]);
    if (before !== match[1]) $("node").focus({ preventScroll: true });
  } else {
    view.close();
    document.body.classList.remove("has-node");
    if (before) {
      watch(null);
      if (!grid.focus(before)) $("grid-title").focus();
    }
  }
  grid.draw();
}

async function watch(key) {
  if (!stream.client) return;
  try {
    const { known } = await post("/api/watch", { client: stream.client, node: key });
    if (!known && key && key === view.key && !view.data) view.missing();
  } catch {
    // the stream says hello again when it is back, and then it is asked for anew
  }
}

window.addEventListener("hashchange", route);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && view.key && !$("command").open && !event.defaultPrevented) location.hash = "#/";
  if (event.key === "/" && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName) && !$("command").open) {
    event.preventDefault();
    $("query").focus();
  }
});
$("node").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-verb]");
  if (button && view.data) dialog.open(button.dataset.verb, view.data, button.dataset.gpu, button);
});

// Ages grow by themselves.
setInterval(() => {
  if (document.hidden) return;
  grid.draw();
  view.draw(now(), readOnly);
}, 10_000);

// -- what changed, for those who do not see it -----------------------------------------------------

const news = [];
let newsTimer = null;

function announce(before, row) {
  if (before.condition === row.condition) return;
  const worse = ["lost", "sick", "silent", "degraded"].includes(row.condition);
  if (!worse && row.condition !== "ready") return;
  news.push(`${row.key} is ${CONDITIONS[row.condition].toLowerCase()}${worse && row.headline ? `: ${row.headline}` : ""}.`);
  newsTimer ??= setTimeout(() => {
    newsTimer = null;
    const more = news.length > 3 ? ` And ${news.length - 3} more.` : "";
    $("live").textContent = news.splice(0, 3).join(" ") + more;
    news.length = 0;
  }, 2000);
}

// -- log in --------------------------------------------------------------------------------------

function showLogin() {
  stream.close();
  $("page").hidden = true;
  $("login").hidden = false;
  $("secret").focus();
}

async function login(secret) {
  await post("/api/login", { secret });
  $("secret").value = "";
  start();
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("login-error").textContent = "";
  try {
    await login($("secret").value);
  } catch (problem) {
    $("login-error").textContent = problem.message;
    $("secret").select();
  }
});
$("logout").addEventListener("click", async () => {
  await post("/api/logout", {}).catch(() => {});
  location.reload();
});

function start() {
  $("login").hidden = true;
  $("page").hidden = false;
  route();
  stream.open();
}

async function begin() {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (token) {
    // Out of the address bar and the history at once.
    history.replaceState(null, "", location.pathname);
    return login(decodeURIComponent(token)).catch(showLogin);
  }
  const { status } = await fetch("/api/session");
  return status === 200 ? start() : showLogin();
}

begin();
