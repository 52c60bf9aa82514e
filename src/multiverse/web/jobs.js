import { address, matches } from "./address.js";
import { h, setAttribute, setText } from "./dom.js";
import { age, count, size, STAGES } from "./format.js";
import { store, View } from "./store.js";

const ROW_REM = 3.625; // the height of a row, as in page.css
let rowHeight = 54; // the same in pixels
const BEYOND = 8; // rows that are drawn above and below what is visible
const RANK = { provisioning: 0, waiting: 1, running: 2, ending: 3 };

// The list of jobs. Only the rows in sight are elements.
class Jobs extends View {
  kinds = ["jobs", "vms"];
  #jobs = [];
  #rows = new Map(); // attempt -> element
  #active = "";

  build() {
    this.count = h("span", { class: "hint", role: "status" });
    this.clear = h("button", { type: "button", class: "link", hidden: true, onclick: () => address.set({ q: "", stage: "" }) }, "Show all");
    this.space = h("div", { class: "space" });
    this.list = h("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Jobs" }, this.space);
    this.none = h("p", { class: "none", hidden: true });
    this.append(h("section", { "aria-labelledby": "jobs-title" },
      h("div", { class: "title" }, h("h2", { id: "jobs-title" }, "Jobs"), this.count, this.clear), this.none, this.list));
    this.list.addEventListener("scroll", () => this.#paint(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.list);
    address.addEventListener("change", () => this.draw());
    setInterval(() => this.#ages(), 1000);
  }

  draw() {
    rowHeight = parseFloat(getComputedStyle(document.documentElement).fontSize) * ROW_REM;
    const hostsOf = (job) => job.vms.flatMap((name) => [store.vms.get(name)?.host ?? "", store.vms.get(name)?.other_host ?? ""]);
    this.#jobs = [...store.jobs.values()].filter((job) => matches(job, hostsOf)).sort((a, b) =>
      RANK[a.stage] - RANK[b.stage] || (a.stage === "running" ? b.since - a.since : a.order - b.order) || a.attempt - b.attempt);
    const [shown, all] = [this.#jobs.length, store.jobs.size];
    setText(this.count, shown === all ? count(all, "job") : `${shown.toLocaleString("en")} of ${count(all, "job")}`);
    this.clear.hidden = !address.q && !address.stage;
    this.list.hidden = !shown;
    this.none.hidden = shown > 0;
    setText(this.none, all ? "No job matches the filter." : "No job waits or runs. sbatch to a VM partition, and it appears here.");
    this.space.style.blockSize = `${shown * rowHeight}px`;
    this.#paint();
  }

  #paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / rowHeight) - BEYOND);
    const last = Math.min(this.#jobs.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / rowHeight) + BEYOND);
    const wanted = new Map();
    for (let i = first; i < last; i++) wanted.set(this.#jobs[i].attempt, i);
    const active = this.#jobs.findIndex((job) => job.job_id === this.#active);
    if (active >= 0) wanted.set(this.#jobs[active].attempt, active);
    for (const [attempt, row] of this.#rows) if (!wanted.has(attempt)) row.element.remove(), this.#rows.delete(attempt);
    for (const [attempt, i] of wanted) this.#row(attempt, i);
    const current = active >= 0 ? this.#rows.get(this.#jobs[active].attempt).element.id : "";
    if (current) setAttribute(this.list, "aria-activedescendant", current);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #row(attempt, i) {
    const job = this.#jobs[i];
    let row = this.#rows.get(attempt);
    if (!row) {
      row = { id: h("b", {}), name: h("span", { class: "name" }), who: h("span", { class: "who" }), what: h("span", { class: "what" }),
              why: h("span", { class: "reason" }), pill: h("span", { class: "pill" }), since: h("span", { class: "since" }) };
      row.element = h("div", { class: "job", role: "option", id: `job-${attempt}`, onclick: () => this.#choose(row.job.job_id) },
        h("div", { class: "line" }, row.pill, row.id, row.name, row.who, row.since),
        h("div", { class: "line" }, row.why, row.what));
      this.space.append(row.element);
      this.#rows.set(attempt, row);
    }
    if (row.top !== i * rowHeight) row.element.style.transform = `translateY(${(row.top = i * rowHeight)}px)`;
    setAttribute(row.element, "aria-posinset", String(i + 1));
    setAttribute(row.element, "aria-setsize", String(this.#jobs.length));
    setAttribute(row.element, "aria-selected", String(address.job === job.job_id));
    row.element.classList.toggle("active", job.job_id === this.#active);
    if (row.job !== job) {
      row.job = job;
      setText(row.pill, job.quarantined ? "Quarantined" : STAGES[job.stage]);
      setAttribute(row.pill, "class", `pill ${job.quarantined ? "fault" : job.stage}`);
      setText(row.id, job.job_id);
      setText(row.name, job.name);
      setText(row.who, job.user);
      setText(row.what, size(job));
    }
    setText(row.why, job.quarantined || job.waiting || job.reason || where(job));
    setText(row.since, age(store.now() - job.since));
  }

  #ages() {
    for (const row of this.#rows.values()) if (row.job) setText(row.since, age(store.now() - row.job.since));
  }

  #choose(id) {
    this.#active = id;
    address.select("job", id);
  }

  #key(event) {
    const at = this.#jobs.findIndex((job) => job.job_id === this.#active);
    const page = Math.max(1, Math.floor(this.list.clientHeight / rowHeight) - 1);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.#jobs.length - 1 };
    if (event.key === "Enter" || event.key === " ") {
      if (at >= 0) this.#choose(this.#active);
    } else if (event.key === "Escape") address.select(null);
    else if (event.key in moves) {
      const to = Math.min(this.#jobs.length - 1, Math.max(0, moves[event.key]));
      this.#active = this.#jobs[to]?.job_id ?? "";
      if (to * rowHeight < this.list.scrollTop) this.list.scrollTop = to * rowHeight;
      if ((to + 1) * rowHeight > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = (to + 1) * rowHeight - this.list.clientHeight;
      this.#paint();
    } else return;
    event.preventDefault();
  }
}

export function where(job) {
  const vms = job.vms.map((name) => store.vms.get(name)).filter(Boolean);
  const hosts = [...new Set(vms.map((vm) => (vm.state === "moving" ? `${vm.host} → ${vm.other_host}` : vm.host)))];
  return hosts.length ? `on ${hosts.slice(0, 4).join(", ")}${hosts.length > 4 ? ` and ${hosts.length - 4} more` : ""}` : job.state;
}

customElements.define("mv-jobs", Jobs);
