import { address } from "./address.js";
import { h, setAttribute, setText } from "./dom.js";
import { age, count, lookOfHost, lookOfVm, memory } from "./format.js";
import { store, View } from "./store.js";

const MANY = 64; // CPUs of a host from which on what is free is not drawn CPU by CPU
const LEAVES = 300; // milliseconds in which a VM fades out

// Each host is a box of cells, one for each CPU. A VM takes as many cells as it has CPUs; the others are free. While it
// moves it takes them at two hosts.
class Hosts extends View {
  kinds = ["hosts", "vms", "jobs"];
  #boxes = new Map();
  #tiles = new Map();

  build() {
    this.note = h("p", { class: "hint" });
    this.list = h("ul", { class: "hosts" });
    this.append(h("section", { "aria-labelledby": "hosts-title" },
      h("h2", { id: "hosts-title" }, "Hosts"), this.note, this.list));
    this.addEventListener("keydown", (event) => this.#key(event));
    this.addEventListener("focusin", (event) => this.#current(event.target));
    address.addEventListener("change", () => this.#mark());
  }

  draw() {
    const names = [...store.hosts.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    for (const [name, box] of this.#boxes) if (!store.hosts.has(name)) box.item.remove(), this.#boxes.delete(name);
    names.forEach((name, i) => {
      const box = this.#boxes.get(name) ?? this.#box(name);
      if (this.list.children[i] !== box.item) this.list.insertBefore(box.item, this.list.children[i] ?? null);
      this.#fill(box, store.hosts.get(name));
    });
    this.#place();
    const [vms, hosts] = [store.vms.size, store.hosts.size];
    setText(this.note, hosts ? `${count(hosts, "host")}, ${count(vms, "VM")}. One cell is one CPU.` : "No host belongs to the site.");
    this.list.classList.toggle("many", vms > 150);
    this.#mark();
  }

  #box(name) {
    const box = {
      title: h("button", { type: "button", class: "name", tabindex: "-1", onclick: () => address.select("host", name) }, name),
      state: h("span", { class: "pill" }), free: h("span", { class: "free" }), why: h("p", { class: "why" }),
      cpus: h("i", {}), memory: h("i", {}), cells: h("div", { class: "cells", role: "group", "aria-label": `VMs on ${name}` }),
      spare: [], rest: h("span", { class: "rest" }),
    };
    box.item = h("li", { class: "host" },
      h("div", { class: "top" }, h("h3", {}, box.title), box.state, box.free),
      h("div", { class: "bars", "aria-hidden": "true" }, h("div", { class: "meter", title: "CPUs claimed" }, box.cpus),
        h("div", { class: "meter", title: "Memory claimed" }, box.memory)),
      box.why, box.cells);
    box.cells.append(box.rest);
    this.#boxes.set(name, box);
    return box;
  }

  #fill(box, host) {
    const freeCpus = Math.max(0, host.usable.cpus - host.claimed.cpus);
    const freeMemory = Math.max(0, host.usable.memory - host.claimed.memory);
    const unreached = host.away_since !== null;
    setText(box.state, host.state);
    setAttribute(box.state, "class", `pill ${lookOfHost(host)}`);
    box.state.hidden = host.state === "up";
    setText(box.free, unreached ? "" : `${count(freeCpus, "CPU")}, ${memory(freeMemory)} free`);
    box.cpus.style.inlineSize = share(host.claimed.cpus, host.usable.cpus);
    box.memory.style.inlineSize = share(host.claimed.memory, host.usable.memory);
    setText(box.why, [host.reason, host.why, host.todo].filter(Boolean).join("; "));
    box.why.hidden = !box.why.textContent;
    const drawn = unreached || host.usable.cpus > MANY ? 0 : freeCpus;
    while (box.spare.length > drawn) box.spare.pop().remove();
    while (box.spare.length < drawn) {
      const cell = h("span", { class: "cell", "aria-hidden": "true" });
      box.spare.push(cell);
      box.cells.append(cell);
    }
    setText(box.rest, host.usable.cpus > MANY && freeCpus && !unreached ? `${count(freeCpus, "CPU")} free` : "");
    box.rest.hidden = !box.rest.textContent;
  }

  // Put each VM into the box of its host.
  #place() {
    for (const [name, tile] of this.#tiles) {
      if (store.vms.has(name)) continue;
      this.#tiles.delete(name);
      tile.other?.remove();
      tile.element.classList.add("gone");
      tile.element.tabIndex = -1;
      setTimeout(() => tile.element.remove(), LEAVES);
    }
    for (const [name, vm] of store.vms) {
      const job = vm.attempt !== null ? store.jobs.get(String(vm.attempt)) : undefined;
      let tile = this.#tiles.get(name);
      if (tile && tile.vm === vm && tile.job === job) continue;
      if (!tile) {
        this.#tiles.set(name, (tile = { element: this.#tile(name) }));
      }
      [tile.vm, tile.job] = [vm, job];
      const look = lookOfVm(vm), moving = vm.state === "moving";
      setAttribute(tile.element, "class", `vm ${look}${vm.kind === "instant" ? "" : " booted"}${moving ? " moving" : ""}`);
      setText(tile.element.firstChild, vm.job_id || (look === "spare" ? "spare" : ""));
      this.#tell(tile, tile.element, vm.quarantined ? "quarantined" : vm.state, moving ? `to ${vm.other_host}` : "");
      this.#put(tile.element, vm.host);
      if (!vm.other_host) {
        tile.other?.remove();
        tile.other = undefined;
        continue;
      }
      tile.other ??= this.#tile(name);
      setAttribute(tile.other, "class", "vm coming");
      setText(tile.other.firstChild, vm.job_id);
      this.#tell(tile, tile.other, vm.state, moving ? `from ${vm.host}` : "");
      this.#put(tile.other, vm.other_host);
    }
  }

  #tile(name) {
    return h("button", { type: "button", tabindex: "-1", onclick: () => address.select("vm", name) }, h("span", {}));
  }

  #tell({ vm, job }, element, state, where) {
    const takes = `${count(vm.cpus, "CPU")}, ${memory(vm.memory)}`, of = `${vm.job_id} ${job?.name ?? ""}`.trim();
    element.style.setProperty("--cpus", vm.cpus);
    setAttribute(element, "aria-label", [`VM ${vm.name}`, state, where, of ? `job ${of}` : "no job", takes].filter(Boolean).join(", "));
    const lasts = [`${vm.name}: ${state} for ${age(store.now() - vm.since)}`, where].filter(Boolean).join(", ");
    element.title = [lasts, of && `job ${of}`, takes].filter(Boolean).join("\n");
  }

  #put(element, host) {
    const box = this.#boxes.get(host);
    if (box && element.parentNode !== box.cells) box.cells.insertBefore(element, box.rest);
  }

  // Show what is selected, and what the filter leaves out.
  #mark() {
    const [kind, name] = address.selected ?? [];
    const words = address.q.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [vmName, { element, other, vm, job }] of this.#tiles) {
      const chosen = (kind === "vm" && name === vmName) || (kind === "job" && name === vm.job_id);
      const text = `${vm.name} ${vm.job_id} ${vm.host} ${vm.other_host} ${vm.state} ${vm.image} ${vm.reason} ${job?.name ?? ""} ${job?.user ?? ""} ${job?.stage ?? ""}`.toLowerCase();
      const out = !words.every((word) => text.includes(word)) || (address.stage && job?.stage !== address.stage);
      for (const [tile, host] of [[element, vm.host], [other, vm.other_host]]) {
        tile?.classList.toggle("chosen", chosen || (kind === "host" && name === host));
        tile?.classList.toggle("dim", Boolean(out));
      }
    }
    for (const [hostName, { item }] of this.#boxes) item.classList.toggle("chosen", kind === "host" && name === hostName);
    if (!this.querySelector('button[tabindex="0"]')) this.querySelector("button")?.setAttribute("tabindex", "0");
  }

  // One stop of the Tab key; arrow keys go on from there.
  #current(target) {
    if (!target.matches("button")) return;
    for (const other of this.querySelectorAll('button[tabindex="0"]')) if (other !== target) other.tabIndex = -1;
    target.tabIndex = 0;
  }

  #key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const all = [...this.querySelectorAll("button:not(.gone)")];
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    let to;
    if (event.key in steps) to = all[at + steps[event.key]];
    else if (event.key === "ArrowDown") to = all.slice(at + 1).find((one) => one.matches(".name"));
    else if (event.key === "ArrowUp") to = all.slice(0, at).findLast((one) => one.matches(".name"));
    else if (event.key === "Home") to = all[0];
    else if (event.key === "End") to = all.at(-1);
    else if (event.key === "Escape") return address.select(null);
    else return;
    event.preventDefault();
    to?.focus();
  }
}

function share(part, whole) {
  return `${whole ? Math.min(100, (part / whole) * 100) : 0}%`;
}

customElements.define("mv-hosts", Hosts);
