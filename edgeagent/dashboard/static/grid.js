// The grid of nodes: only the cells that can be seen exist. A cell is a link to its node.

import { el, setText } from "./dom.js";
import { age, celsius, CONDITIONS, ofMib, percent, plural, shortModel } from "./format.js";

const CELL_WIDTH = 250; // at least
const CELL_HEIGHT = 92;
const GAP = 8;
const OVERSCAN = 3; // rows above and below

export class Grid {
  /** `box` scrolls with the window or by itself; `cells` is as high as all rows. */
  constructor(box, cells, { now, selected }) {
    this.box = box;
    this.cells = cells;
    this.now = now;
    this.selected = selected;
    this.rows = [];
    this.pool = new Map(); // key -> cell in the document
    this.spare = [];
    this.current = null; // key of the cell that Tab reaches
    this.columns = 1;
    box.addEventListener("scroll", () => this.#soon(), { passive: true });
    window.addEventListener("scroll", () => this.#soon(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    cells.addEventListener("keydown", (event) => this.#key(event));
    cells.addEventListener("focusin", (event) => {
      const key = event.target.closest("[data-cell]")?.dataset.cell;
      if (key) this.#setCurrent(key);
    });
  }

  show(rows) {
    this.rows = rows;
    this.index = null;
    this.draw();
  }

  #soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const width = this.cells.clientWidth;
    if (!width) return;
    const columns = Math.max(1, Math.floor((width + GAP) / (CELL_WIDTH + GAP)));
    const cellWidth = (width - GAP * (columns - 1)) / columns;
    const step = CELL_HEIGHT + GAP;
    this.columns = columns;
    const height = Math.max(0, Math.ceil(this.rows.length / columns) * step - GAP);
    this.cells.style.height = `${height}px`;

    const top = -this.cells.getBoundingClientRect().top + Math.max(0, this.box.getBoundingClientRect().top);
    const seen = Math.min(window.innerHeight, this.box.clientHeight || window.innerHeight);
    const first = Math.max(0, Math.floor(top / step) - OVERSCAN) * columns;
    const last = Math.min(this.rows.length, (Math.ceil((top + seen) / step) + OVERSCAN) * columns);

    const wanted = new Set();
    for (let i = first; i < last; i++) wanted.add(this.rows[i].key);
    for (const [key, cell] of this.pool) {
      // The focused cell stays, so that the keyboard is not lost when it is scrolled away.
      if (wanted.has(key) || (cell.contains(document.activeElement) && this.#indexOf(key) >= 0)) continue;
      this.pool.delete(key);
      cell.remove();
      this.spare.push(cell);
    }
    for (let i = first; i < last; i++) this.#place(i, cellWidth, step);
    for (const key of this.pool.keys()) if (!wanted.has(key)) this.#place(this.#indexOf(key), cellWidth, step);
    if (!this.pool.has(this.current) && this.rows.length) this.#setCurrent(this.rows[Math.max(first, 0)]?.key);
  }

  #place(i, width, step) {
    const row = this.rows[i];
    let cell = this.pool.get(row.key);
    if (!cell) {
      cell = this.spare.pop() ?? makeCell();
      this.pool.set(row.key, cell);
      this.cells.append(cell);
    }
    const x = (i % this.columns) * (width + GAP), y = Math.floor(i / this.columns) * step;
    cell.style.cssText = `transform: translate(${x}px, ${y}px); width: ${width}px`;
    cell.setAttribute("aria-setsize", this.rows.length);
    cell.setAttribute("aria-posinset", i + 1);
    fillCell(cell, row, this.now(), row.key === this.selected());
    cell.firstChild.tabIndex = row.key === this.current ? 0 : -1;
  }

  #indexOf(key) {
    this.index ??= new Map(this.rows.map((row, i) => [row.key, i]));
    return this.index.get(key) ?? -1;
  }

  #setCurrent(key) {
    const before = this.pool.get(this.current);
    if (before) before.firstChild.tabIndex = -1;
    this.current = key;
    const now = this.pool.get(key);
    if (now) now.firstChild.tabIndex = 0;
  }

  #key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns };
    const at = this.#indexOf(this.current);
    let to = at;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in moves) to = at + moves[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.rows.length - 1;
    else if (event.key === "PageDown") to = Math.min(this.rows.length - 1, at + 4 * this.columns);
    else if (event.key === "PageUp") to = Math.max(0, at - 4 * this.columns);
    else return;
    event.preventDefault();
    if (to >= 0 && to < this.rows.length) this.focus(this.rows[to].key);
  }

  focus(key) {
    const i = this.#indexOf(key);
    if (i < 0) return false;
    this.#setCurrent(key);
    const step = CELL_HEIGHT + GAP;
    if (!this.pool.has(key)) this.#place(i, this.cells.clientWidth / this.columns, step);
    const cell = this.pool.get(key);
    cell.firstChild.focus({ preventScroll: true });
    cell.scrollIntoView({ block: "nearest" });
    this.draw();
    return true;
  }
}

function makeCell() {
  const bar = el("span", { class: "minibar", "aria-hidden": "true" }, el("i", { class: "promised" }), el("i", { class: "used" }));
  const link = el("a", { class: "cell" },
    el("span", { class: "cell-head" }, el("b", { class: "name" }), el("span", { class: "state" })),
    el("span", { class: "place" }), bar, el("span", { class: "last" }, el("span"), el("span")));
  return el("div", { role: "listitem", class: "cell-box" }, link);
}

function fillCell(box, row, now, selected) {
  const link = box.firstChild;
  const [head, place, bar, last] = link.children;
  const [site, name] = row.key.split("/");
  const href = `#/${row.key}`;
  if (link.getAttribute("href") !== href) {
    link.setAttribute("href", href);
    link.dataset.cell = row.key;
  }
  const classes = `cell is-${row.condition}`;
  if (link.className !== classes) link.className = classes;
  link.toggleAttribute("aria-current", selected);
  setText(head.children[0], name);
  const since = row.condition !== "ready" && row.since ? ` ${age(now - row.since)}` : "";
  setText(head.children[1], CONDITIONS[row.condition] + since);
  setText(place, [site, row.gpus > 1 ? `${row.gpus} × ${shortModel(row.model || "GPU")}` : shortModel(row.model)].filter(Boolean).join(" · "));
  const scale = (value) => `${row.usableMiB ? Math.min(100, (100 * (value ?? 0)) / row.usableMiB) : 0}%`;
  bar.children[0].style.width = scale(row.promisedMiB);
  bar.children[1].style.width = scale(row.usedMiB);
  // Who is in trouble says why; who is not says how much.
  const live = [row.temperatureC === null ? "" : celsius(row.temperatureC), row.utilPct === null ? "" : percent(row.utilPct)];
  setText(last.children[0], row.headline || `${ofMib(row.promisedMiB, row.usableMiB)} · ${plural(row.containers, "pod")}`);
  setText(last.children[1], row.headline ? "" : live.filter(Boolean).join("  "));
}
