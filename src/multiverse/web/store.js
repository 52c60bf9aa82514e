// What is known, as the controller last told it: one snapshot, and then what changes in it.

const KINDS = { hosts: (one) => one.name, vms: (one) => one.name, jobs: (one) => String(one.attempt),
                alerts: (one) => `${one.kind} ${one.name}`, evictions: (one) => `${one.method} ${one.vm}` };
const SILENT_AFTER = 25; // seconds: the controller says something every ten

class Store extends EventTarget {
  hosts = new Map();
  vms = new Map();
  jobs = new Map();
  alerts = new Map();
  evictions = new Map(); // that a limit holds back
  summary = null;
  connection = "connecting";
  #source = null;
  #heard = 0;
  #offset = 0; // of the controller's clock to this one, in seconds

  connect() {
    this.disconnect(); // whoever waited to connect again may come late
    const source = (this.#source = new EventSource("events"));
    source.addEventListener("snapshot", (event) => this.#take(JSON.parse(event.data), true));
    source.addEventListener("delta", (event) => this.#take(JSON.parse(event.data), false));
    source.addEventListener("open", () => this.#connected("live"));
    source.addEventListener("error", () => {
      this.#connected("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), 3000 + Math.random() * 4000);
    });
  }

  disconnect() {
    this.#source?.close();
  }

  // The present time at the controller, in Unix seconds.
  now() {
    return Date.now() / 1000 + this.#offset;
  }

  // The latest attempt of a job.
  job(id) {
    let found;
    for (const job of this.jobs.values()) if (job.job_id === id && !(found?.attempt > job.attempt)) found = job;
    return found;
  }

  #connected(word) {
    if (this.connection === word) return;
    this.connection = word;
    this.dispatchEvent(new Event("connection"));
  }

  #take(document, whole) {
    const changed = {};
    for (const [kind, key] of Object.entries(KINDS)) {
      const map = this[kind];
      if (whole) map.clear();
      const gone = document.gone?.[kind] ?? [];
      for (const one of gone) map.delete(one);
      for (const one of document[kind]) map.set(key(one), one);
      changed[kind] = whole || gone.length + document[kind].length > 0;
    }
    if (document.summary) {
      this.summary = document.summary;
      this.#offset = document.summary.wall - Date.now() / 1000;
      changed.summary = true;
    }
    this.#heard = Date.now();
    this.#connected("live");
    this.dispatchEvent(new CustomEvent("change", { detail: changed }));
  }

  // Whether what is shown may be old.
  get isSilent() {
    const heardAgo = this.#heard ? (Date.now() - this.#heard) / 1000 : 0;
    return this.connection !== "live" || heardAgo > SILENT_AFTER;
  }
}

export const store = new Store();

// An element of the page that draws itself anew when what it shows has changed. `kinds`: what it shows.
export class View extends HTMLElement {
  kinds = [];

  connectedCallback() {
    this.build();
    store.addEventListener("change", (event) => {
      if (this.kinds.some((kind) => event.detail[kind])) this.draw();
    });
  }
}
