import { address } from "./address.js";
import { command, h, setText } from "./dom.js";
import { count } from "./format.js";
import { store, View } from "./store.js";

const SHOWN = 4;

class Alerts extends View {
  kinds = ["alerts"];
  #all = false;
  #cards = new Map();

  build() {
    this.heading = h("h2", {});
    this.list = h("ul", { class: "alerts" });
    this.more = h("button", { type: "button", class: "more", onclick: () => ((this.#all = !this.#all), this.draw()) });
    this.news = h("p", { class: "unseen", role: "status" });
    this.section = h("section", { hidden: true, "aria-label": "Alerts" }, this.heading, this.list, this.more);
    this.append(this.section, this.news);
  }

  draw() {
    const alerts = [...store.alerts.entries()];
    const fresh = alerts.filter(([key]) => !this.#cards.has(key)).length;
    if (fresh) setText(this.news, count(fresh, "new alert"));
    for (const key of this.#cards.keys()) if (!store.alerts.has(key)) this.#cards.delete(key);
    for (const [key, alert] of alerts) if (this.#cards.get(key)?.alert !== alert) this.#cards.set(key, this.#card(alert));
    const shown = this.#all ? alerts : alerts.slice(0, SHOWN);
    const cards = shown.map(([key]) => this.#cards.get(key).card);
    if (cards.length !== this.list.children.length || cards.some((card, i) => card !== this.list.children[i]))
      this.list.replaceChildren(...cards);
    this.section.hidden = !alerts.length;
    setText(this.heading, count(alerts.length, "alert"));
    this.more.hidden = alerts.length <= SHOWN;
    setText(this.more, this.#all ? "Show fewer" : `Show all ${alerts.length}`);
  }

  #card(alert) {
    const jobs = alert.jobs.slice(0, 5).map((job) =>
      h("button", { type: "button", class: "link", onclick: () => address.select("job", job) }, `job ${job}`));
    const card = h("li", { class: "alert" },
      h("p", { class: "wrong" }, alert.message),
      h("p", { class: "remedy" }, alert.remedy, jobs.length ? h("span", { class: "affected" }, ...jobs) : null),
      alert.command ? command(alert.command) : null);
    return { alert, card };
  }
}

customElements.define("mv-alerts", Alerts);
