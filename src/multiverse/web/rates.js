import { h, setText, svg } from "./dom.js";
import { duration } from "./format.js";
import { store, View } from "./store.js";

const CHARTS = [
  ["submitted", "submitted a minute"],
  ["started", "started a minute"],
  ["ended", "ended a minute"],
  ["failures", "failures a minute"],
];
const PARTS = [["queued", "waiting"], ["clone", "cloning"], ["join", "joining"], ["launch", "launching"]];

class Rates extends View {
  kinds = ["summary"];

  build() {
    this.charts = CHARTS.map(([series, words]) => {
      const figure = h("strong", {}, "–");
      const chart = svg("svg", { class: `spark ${series}`, viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img" });
      return { series, words, figure, chart, box: h("div", { class: "rate" }, h("div", {}, figure, h("span", {}, words)), chart) };
    });
    this.start = h("strong", {}, "–");
    this.slow = h("span", {});
    this.parts = h("div", { class: "parts" });
    this.append(h("section", { class: "rates", "aria-label": "Rates and latencies of the last quarter of an hour" },
      h("h2", { class: "unseen" }, "Rates and latencies of the last quarter of an hour"),
      h("div", { class: "rate latency" }, h("div", {}, this.start, h("span", {}, "from submission to start, median"), this.slow),
        this.parts),
      this.charts.map((one) => one.box)));
  }

  draw() {
    const { rates } = store.summary;
    for (const one of this.charts) this.#chart(one, rates.series[one.series], rates.step);
    const { start } = rates.latencies;
    setText(this.start, start.count ? duration(start.p50) : "–");
    setText(this.slow, start.count ? `95 % within ${duration(start.p95)}, of ${start.count.toLocaleString("en")}` : "no job has started lately");
    const parts = PARTS.map(([phase, word]) => [phase, word, rates.latencies[phase]]).filter(([, , one]) => one.count);
    this.parts.replaceChildren(...parts.map(([phase, word, one]) => {
      const part = h("span", { class: `part ${phase}`, title: `${word}: median ${duration(one.p50)}, 95 % within ${duration(one.p95)}` },
        h("i", {}), `${word} ${duration(one.p50)}`);
      return part;
    }));
  }

  #chart({ figure, chart, words }, counts, step) {
    const minute = Math.round(60 / step);
    const last = counts.slice(-minute - 1, -1).reduce((sum, one) => sum + one, 0);
    setText(figure, last.toLocaleString("en"));
    const most = Math.max(4, ...counts), width = 120 / counts.length;
    chart.setAttribute("aria-label", `${last} ${words}; most in ${step} s within the last quarter of an hour: ${Math.max(...counts)}`);
    chart.replaceChildren(...counts.flatMap((one, i) => one === 0 ? [] : [svg("rect", {
      x: i * width, width: width * 0.72, y: 28 - Math.max(1.5, (one / most) * 28), height: Math.max(1.5, (one / most) * 28),
    })]), svg("line", { x1: 0, x2: 120, y1: 27.6, y2: 27.6 }));
  }
}

customElements.define("mv-rates", Rates);
