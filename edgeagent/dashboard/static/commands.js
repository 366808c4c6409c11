// Asking a node to do something: what it will do, a confirmation, and the answer as it comes.

import { el, morphChildren } from "./dom.js";
import { time } from "./format.js";
import { podName } from "./gpu.js";
import { post } from "./stream.js";

const gpuName = (gpu) => `GPU ${gpu?.index ?? "?"} ${gpu?.model ?? ""}`.trim();

/** What each verb does, in the operator's words, and what it needs to know. */
const VERBS = {
  snapshot: { title: () => "Snapshot", label: "Ask", text: () => "The node says all it knows right now. Changes nothing." },
  "collect-diagnostics": { title: () => "Diagnostics", label: "Collect", text: () => "Writes a redacted bundle to the node's own disk and says where. It is not sent over the broker." },
  "set-log-level": {
    title: () => "Log level", label: "Set", text: () => "Changes how much the agent logs until it restarts.",
    fields: [{ name: "level", label: "Level", options: ["info", "debug", "warning", "error"] }],
  },
  "restart-agent": { title: () => "Restart the agent", label: "Restart", danger: true, text: () => "Running pods keep their shares; new containers wait until the agent is back, a few seconds." },
  "cordon-gpu": { title: (g) => `Cordon ${gpuName(g)}`, label: "Cordon", text: () => "No new container gets a share of this GPU. Running ones keep theirs." },
  "uncordon-gpu": { title: (g) => `Uncordon ${gpuName(g)}`, label: "Uncordon", text: () => "New containers may get shares of this GPU again." },
  "drain-gpu": {
    title: (g) => `Drain ${gpuName(g)}`, label: "Drain", danger: true,
    text: (g) => `Cordons this GPU, then evicts the pods on it after the grace period${g?.containers?.length ? ":" : ". There are none now."}`,
    list: (g) => [...new Set((g?.containers ?? []).map(podName))],
    fields: [{ name: "graceS", label: "Grace, seconds", number: true, value: "30", min: 0, max: 3600 }],
  },
  "set-sharing": {
    title: () => "Sharing", label: "Apply", danger: true,
    text: () => "Replaces settings below `sharing`. The agent restarts with them and goes back by itself if it is not ready within a minute.",
    fields: [{ name: "sharing", label: "Settings, as JSON", json: true, value: '{"placement": "binpack"}' }],
    more: (d) => ({ expectConfigHash: d.configHash ?? "" }),
  },
};

export class CommandDialog {
  constructor(dialog) {
    this.dialog = dialog;
    this.ident = null;
    dialog.addEventListener("close", () => {
      this.ident = null;
      this.opener?.isConnected && this.opener.focus();
    });
    dialog.addEventListener("submit", (event) => this.#submit(event));
    dialog.addEventListener("click", (event) => event.target.dataset.close !== undefined && dialog.close());
  }

  /** `data` is the node as it is shown now. */
  open(verb, data, uuid, opener) {
    const about = VERBS[verb];
    if (!about || this.dialog.open) return;
    Object.assign(this, { verb, about, node: data.key, opener, ident: null });
    this.gpu = uuid ? data.gpus?.find((g) => g.uuid === uuid) : undefined;
    this.more = about.more?.(data) ?? {};
    const pods = about.list?.(this.gpu) ?? [];
    this.dialog.replaceChildren(el("form", {},
      el("h2", { id: "command-title" }, about.title(this.gpu)),
      el("p", { class: "muted" }, data.key),
      el("p", {}, about.text(this.gpu)),
      pods.length ? el("ul", { class: "podlist" }, pods.map((pod) => el("li", { class: "pod-name" }, pod))) : null,
      (about.fields ?? []).map(field),
      el("p", { class: "error", role: "alert", id: "command-error" }),
      el("div", { class: "buttons" },
        el("button", { type: "button", data: { close: "" }, class: "quiet" }, "Cancel"),
        el("button", { type: "submit", value: "check", title: "The node says what it would do, and does nothing" }, "Check only"),
        el("button", { type: "submit", value: "do", class: about.danger ? "danger" : "primary" }, about.label)),
      el("div", { id: "command-answer", role: "status" })));
    this.dialog.showModal();
  }

  async #submit(event) {
    event.preventDefault();
    const form = event.target, dryRun = event.submitter?.value === "check";
    const error = form.querySelector("#command-error");
    error.textContent = "";
    try {
      const args = { ...this.more, ...(this.gpu ? { gpu: this.gpu.uuid } : {}), ...readFields(form, this.about.fields ?? []) };
      this.#busy(true);
      const { id } = await post("/api/command", { node: this.node, verb: this.verb, args, dryRun });
      this.ident = id;
      morphChildren(form.querySelector("#command-answer"), [el("p", {}, "Sent …")]);
    } catch (problem) {
      error.textContent = problem.message;
      this.#busy(false);
    }
  }

  #busy(on) {
    for (const button of this.dialog.querySelectorAll("button[type=submit]")) button.disabled = on;
  }

  /** The node as it came in: the answer may be in it. */
  take(data, now) {
    const command = this.ident && data.commands?.find((c) => c.id === this.ident);
    const place = this.dialog.querySelector("#command-answer");
    if (!command || !place) return;
    const sentence = { sent: "Sent …", accepted: "The node took it …", running: "It runs …", unanswered: "No answer came. The node may be away, or busy." }[command.state];
    morphChildren(place, [
      el("p", {}, el("span", { class: `answer is-${command.state}` }, command.state), " ", sentence ?? "",
        command.code ? ` ${command.code}` : "", command.message ? ` ${command.message}` : "",
        el("span", { class: "muted" }, ` ${time(command.changedMs ?? command.sentMs, now)}`)),
      ...(command.result ? [el("pre", { class: "result", tabindex: 0, "aria-label": "Result" }, command.result)] : []),
    ]);
    if (command.over) {
      this.#busy(false);
      this.dialog.querySelector("[data-close]").textContent = "Close";
    }
  }
}

function field(f) {
  const id = `field-${f.name}`;
  const input = f.options
    ? el("select", { id, name: f.name }, f.options.map((o) => el("option", {}, o)))
    : f.json
      ? el("textarea", { id, name: f.name, rows: 6, spellcheck: "false" }, f.value)
      : el("input", { id, name: f.name, type: f.number ? "number" : "text", value: f.value, min: f.min, max: f.max, required: true });
  return el("label", { class: "field", for: id }, el("span", {}, f.label), input);
}

function readFields(form, fields) {
  const out = {};
  for (const f of fields) {
    const text = form.elements[f.name].value;
    if (f.json) {
      try {
        out[f.name] = JSON.parse(text);
      } catch (problem) {
        throw new Error(`${f.label}: ${problem.message}`);
      }
    } else out[f.name] = f.number ? Number(text) : text;
  }
  return out;
}
