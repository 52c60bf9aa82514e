import { address } from "./address.js";
import { h, setText, svg } from "./dom.js";
import { age, count, memory } from "./format.js";
import { store, View } from "./store.js";

const SHOWN = 4;
const HOUR = 3600;
const WAYS = [["move", "moves in the last hour"], ["save", "saves in the last hour"]];
const CAUSES = [["drain", "off drained hosts"], ["preemption", "for urgent jobs"], ["lease", "off leases that end"], ["packing", "to give leases back"], ["operator", "by operators"]];

// Running jobs that leave their hosts: how many lately and why, which leave now, and which a limit holds back. Where
// nothing of that happens, nothing is shown.
class Evictions extends View {
  kinds = ["summary", "jobs", "vms", "evictions"];
  #all = false;
  #shown = ""; // what the list was made of

  build() {
    this.ways = WAYS.map(([way, words]) => {
      const one = { way, words, figure: h("strong", {}, "–"), failed: h("span", { class: "failed" }), causes: h("div", { class: "parts" }),
                    chart: svg("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img" }) };
      one.box = h("div", { class: "rate" }, h("div", {}, one.figure, h("span", {}, words), one.failed), one.chart, one.causes);
      return one;
    });
    this.note = h("span", { class: "hint", role: "status" });
    this.list = h("ul", { class: "leaving" });
    this.more = h("button", { type: "button", class: "more", onclick: () => ((this.#all = !this.#all), this.draw()) });
    this.section = h("section", { hidden: true, "aria-labelledby": "evictions-title" },
      h("div", { class: "title" }, h("h2", { id: "evictions-title" }, "Evictions"), this.note, this.more),
      h("div", { class: "evictions" }, this.ways.map((one) => one.box), this.list));
    this.append(this.section);
    setInterval(() => this.#ages(), 1000);
  }

  draw() {
    const counts = store.summary.evictions, now = [...underWay(), ...heldBack()];
    this.section.hidden = !counts.length && !now.length;
    for (const one of this.ways) this.#chart(one, counts.filter(({ way }) => way === one.way));
    const held = now.filter((one) => one.look === "waiting").length;
    setText(this.note, now.length ? `${count(now.length - held, "job")} leaving, ${held} held back by a limit` : "");
    this.more.hidden = now.length <= SHOWN;
    setText(this.more, this.#all ? "Show fewer" : `Show all ${now.length}`);
    const shown = this.#all ? now : now.slice(0, SHOWN), key = JSON.stringify(shown);
    if (key !== this.#shown) {
      this.#shown = key;
      this.list.replaceChildren(...shown.map(item));
    }
    this.list.hidden = !now.length;
    this.#ages();
  }

  #ages() {
    for (const one of this.list.querySelectorAll("[data-since]")) setText(one, age(store.now() - Number(one.dataset.since)));
  }

  #chart({ figure, failed, causes, chart, words }, counts) {
    const known = CAUSES.map(([cause, label]) => ({ cause, label, ...counts.find((one) => one.cause === cause) })).filter((one) => one.begun);
    const lately = (one) => one.begun.slice(-Math.round(HOUR / one.step)).reduce((sum, n) => sum + n, 0);
    const total = known.reduce((sum, one) => sum + lately(one), 0), lost = known.reduce((sum, one) => sum + one.failed, 0);
    setText(figure, total.toLocaleString("en"));
    setText(failed, lost ? `${lost.toLocaleString("en")} failed in six hours` : "");
    causes.replaceChildren(...known.map((one) => h("span", { class: `part ${one.cause}` }, h("i", {}), `${one.label} ${lately(one)}`)));
    const entries = known[0]?.begun.length ?? 1, sums = Array.from({ length: entries }, (_, i) => known.reduce((sum, one) => sum + one.begun[i], 0));
    const most = Math.max(4, ...sums), width = 120 / entries, tops = sums.map(() => 28);
    chart.setAttribute("aria-label", `${total} ${words}; ${sums.reduce((sum, n) => sum + n, 0)} in the last six hours`);
    chart.replaceChildren(...known.flatMap((one) => one.begun.flatMap((n, i) => {
      if (!n) return [];
      const height = (n / most) * 28;
      tops[i] -= height;
      return [svg("rect", { class: one.cause, x: i * width, width: width * 0.72, y: tops[i], height })];
    })), svg("line", { x1: 0, x2: 120, y1: 27.6, y2: 27.6 }));
  }
}

function underWay() {
  return [...store.jobs.values()].filter((job) => job.evictions.at(-1)?.under_way && job.stage !== "waiting").map((job) => {
    const { way, at, host, memory: mib, reason } = job.evictions.at(-1);
    const target = way === "move" ? job.vms.map((name) => store.vms.get(name)?.other_host).find(Boolean) : "";
    return { word: { move: "Moving", save: "Saving" }[way] ?? "Ending", look: way === "move" ? "running" : "ending", job: job.job_id,
             where: target ? `${host} → ${target}` : host, mib, since: at, reason };
  });
}

function heldBack() {
  return [...store.evictions.values()].map((one) => ({
    word: "Held back", look: "waiting", job: one.job_id, where: one.target ? `${one.host} → ${one.target}` : `${one.host}, to be ${one.ends ? "ended" : "saved"}`,
    mib: one.memory, since: one.held_since, reason: one.reason, limit: one.held,
  }));
}

function item({ word, look, job, where, mib, since, reason, limit }) {
  return h("li", {}, h("div", { class: "line" }, h("span", { class: `pill ${look}` }, word),
    h("button", { type: "button", class: "link", onclick: () => address.select("job", job) }, `job ${job}`), h("span", { class: "name" }, where),
    h("span", { class: "what" }, memory(mib)), h("span", { class: "since", "data-since": String(since) })),
  h("p", { class: "hint" }, limit ? `${reason}; ${limit}` : reason));
}

customElements.define("mv-evictions", Evictions);
