import { address } from "./address.js";
import { h, setAttribute, setText } from "./dom.js";
import { count, memory, STAGES } from "./format.js";
import { store, View } from "./store.js";

class Header extends View {
  kinds = ["summary", "hosts", "alerts"];

  build() {
    this.site = h("span", { class: "site" });
    this.live = h("span", { class: "live", role: "status" }, "connecting");
    this.search = h("input", {
      type: "search", name: "q", placeholder: "Filter: job, user, host, reason", "aria-label": "Filter jobs and VMs",
      autocomplete: "off", spellcheck: "false",
    });
    this.search.addEventListener("input", () => address.set({ q: this.search.value }, { step: false }));
    this.theme = h("button", { type: "button", class: "theme", onclick: () => this.#switch() });
    this.stages = Object.entries(STAGES).map(([stage, word]) => {
      const figure = h("strong", {}, "–");
      const button = h("button", { type: "button", class: `stage ${stage}`, "aria-pressed": "false",
        onclick: () => address.set({ stage: address.stage === stage ? "" : stage }) }, figure, h("span", {}, word));
      return { stage, figure, button };
    });
    this.meters = [this.#meter("CPUs"), this.#meter("Memory")];
    this.append(
      h("header", {},
        h("div", { class: "bar" },
          h("span", { class: "brand" }, h("span", { class: "mark", "aria-hidden": "true" }), "Multiverse", this.site),
          this.live, h("search", {}, this.search), this.theme),
        h("div", { class: "overview" },
          h("div", { class: "stages", role: "group", "aria-label": "Show jobs of one stage only" },
            this.stages.map((one) => one.button)),
          this.meters.map((one) => one.box)),
      ));
    store.addEventListener("connection", () => this.#connection());
    address.addEventListener("change", () => this.#follow());
    setInterval(() => this.#connection(), 5000);
    this.#follow();
  }

  #meter(name) {
    const [free, text] = [h("strong", {}, "–"), h("span", { class: "used" })];
    const bar = h("div", { class: "meter", role: "img", "aria-label": name }, h("i", {}));
    return { name, free, text, bar, box: h("div", { class: "capacity" },
      h("div", { class: "figures" }, free, h("span", {}, `${name} free`), text), bar) };
  }

  #follow() {
    if (this.search.value !== address.q) this.search.value = address.q;
    for (const { stage, button } of this.stages) setAttribute(button, "aria-pressed", String(address.stage === stage));
    if (address.theme) document.documentElement.dataset.theme = address.theme;
    else delete document.documentElement.dataset.theme;
    const dark = this.#dark();
    setText(this.theme, dark ? "☀" : "☾");
    setAttribute(this.theme, "aria-label", dark ? "Use the light theme" : "Use the dark theme");
  }

  #dark() {
    return address.theme ? address.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  #switch() {
    address.set({ theme: this.#dark() ? "light" : "dark" }, { step: false });
  }

  #connection() {
    const lost = store.isSilent;
    setText(this.live, store.connection === "connecting" ? "connecting" : lost ? "not connected: figures are old" : "live");
    this.live.classList.toggle("lost", lost && store.connection !== "connecting");
  }

  draw() {
    const { summary } = store;
    setText(this.site, summary.site);
    document.title = `${count(summary.jobs.running, "job")} running · ${summary.site} · Multiverse`;
    for (const { stage, figure } of this.stages) setText(figure, summary.jobs[stage].toLocaleString("en"));
    const total = { cpus: 0, memory: 0 }, used = { cpus: 0, memory: 0 };
    for (const host of store.hosts.values()) {
      if (host.away_since !== null) continue;
      for (const of of ["cpus", "memory"]) [total[of], used[of]] = [total[of] + host.usable[of], used[of] + host.claimed[of]];
    }
    this.#fill(this.meters[0], used.cpus, total.cpus, (n) => n.toLocaleString("en"));
    this.#fill(this.meters[1], used.memory, total.memory, memory);
    this.#connection();
  }

  #fill(meter, used, total, words) {
    setText(meter.free, words(Math.max(0, total - used)));
    setText(meter.text, `${words(used)} of ${words(total)} claimed`);
    meter.bar.firstChild.style.inlineSize = `${total ? Math.min(100, (used / total) * 100) : 0}%`;
    setAttribute(meter.bar, "aria-label", `${meter.name}: ${words(used)} of ${words(total)} claimed`);
  }
}

customElements.define("mv-header", Header);
