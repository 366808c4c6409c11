// The stream of server-sent events: opened anew when it breaks, closed while nobody looks.

const SILENT_MS = 45_000; // the server says something every 15 s
const HIDDEN_MS = 60_000; // browsers allow six streams to one server, over all tabs

export class Stream {
  /** `handlers`: one function for each event; `closed` when the server does not know us any more. */
  constructor(handlers) {
    this.handlers = handlers;
    this.source = null;
    this.client = null;
    this.since = "";
    this.heard = 0;
    this.retry = 0;
    document.addEventListener("visibilitychange", () => this.#visible());
    setInterval(() => this.#watch(), 5000);
  }

  open() {
    this.close();
    this.heard = Date.now();
    const source = new EventSource(`/events?since=${encodeURIComponent(this.since)}`);
    this.source = source;
    for (const [name, handle] of Object.entries(this.handlers)) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heard = Date.now();
        this.retry = 0;
        if (event.lastEventId) this.since = event.lastEventId;
        const value = JSON.parse(event.data);
        if (name === "hello") this.client = value.client;
        handle(value);
      });
    }
    source.addEventListener("error", () => {
      if (source !== this.source) return;
      this.handlers.broken();
      if (source.readyState === EventSource.CLOSED) this.#again();
    });
  }

  close() {
    this.source?.close();
    this.source = null;
    this.client = null;
  }

  /** The server refused: it is full, or it does not know our session. */
  async #again() {
    this.close();
    let status = 0;
    try {
      status = (await fetch("/api/session")).status;
    } catch {
      // no server: try again like any other failure
    }
    if (status === 401) return this.handlers.closed();
    this.retry = Math.min(this.retry + 1, 5);
    setTimeout(() => this.source === null && !document.hidden && this.open(), 1000 * 2 ** this.retry);
  }

  #watch() {
    if (this.source && Date.now() - this.heard > SILENT_MS) {
      this.handlers.broken();
      this.open();
    }
  }

  #visible() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.close(), HIDDEN_MS);
    else if (this.source === null && this.since) this.open();
  }
}

/** POSTs JSON; throws an Error with the server's sentence. */
export async function post(path, body) {
  const response = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = new Error(answer.error ?? `the server answered ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return answer;
}
