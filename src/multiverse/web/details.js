import { address } from "./address.js";
import { command, h, setText } from "./dom.js";
import { age, count, duration, lookOfHost, lookOfVm, memory, size, STAGES } from "./format.js";
import { where } from "./jobs.js";
import { store, View } from "./store.js";

// Of one job, VM or host: what is known of it. A job's timeline is asked for when it is shown and when it has changed.
class Details extends View {
  kinds = ["jobs", "vms", "hosts"];
  #shown = ""; // what the body was made of
  #timeline = null;

  build() {
    this.heading = h("h2", { tabindex: "-1" });
    this.pill = h("span", { class: "pill" });
    this.body = h("div", { class: "body" });
    this.panel = h("aside", { hidden: true, "aria-label": "Details" },
      h("div", { class: "title" }, this.heading, this.pill,
        h("button", { type: "button", class: "close", "aria-label": "Close the details", onclick: () => address.select(null) }, "✕")),
      this.body);
    this.append(this.panel);
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && address.select(null));
    address.addEventListener("change", () => this.draw());
    setInterval(() => this.#ages(), 1000);
  }

  draw() {
    const selected = address.selected;
    document.body.classList.toggle("has-details", Boolean(selected));
    if (!selected) {
      this.panel.hidden = true;
      this.#shown = "";
      return;
    }
    const opened = this.panel.hidden;
    this.panel.hidden = false;
    const [kind, name] = selected;
    if (kind === "job") this.#job(name);
    else if (kind === "vm") this.#vm(name);
    else this.#host(name);
    this.#ages();
    if (opened && store.summary && matchMedia("(max-width: 1399px)").matches) this.heading.focus({ preventScroll: true });
  }

  #ages() {
    for (const one of this.body.querySelectorAll("[data-since]")) setText(one, age(store.now() - Number(one.dataset.since)));
  }

  #head(text, word, look) {
    setText(this.heading, text);
    setText(this.pill, word);
    this.pill.className = `pill ${look}`;
    this.pill.hidden = !word;
  }

  // Make the body anew only if what it is made of has changed, so that a selection of text stays.
  #put(key, parts) {
    if (key === this.#shown) return;
    this.#shown = key;
    const open = this.body.querySelector("details")?.open;
    this.body.replaceChildren(...parts().filter(Boolean));
    if (open) this.body.querySelector("details")?.setAttribute("open", "");
  }

  #job(id) {
    const job = store.job(id);
    this.#head(`Job ${id}`, job ? (job.quarantined ? "Quarantined" : STAGES[job.stage]) : "", job?.quarantined ? "fault" : job?.stage ?? "");
    this.#fetch(id, job);
    const found = this.#timeline?.id === id ? this.#timeline : null;
    this.#put(`job ${id} ${job?.attempt} ${job && JSON.stringify(job)} ${found?.at}`, () => [
      ...(job ? [
        h("p", { class: "says" }, job.quarantined || found?.explained?.text || job.waiting || job.reason || says(job)),
        found?.explained?.todo ? h("p", { class: "says" }, found.explained.todo) : null,
        facts([["Name", job.name], ["User", job.user], ["Size", size(job)], ["Image", `${job.image}, ${job.kind} clone`],
          ["State", lasting(job)], ["Restarts", job.restarts ? String(job.restarts) : ""],
          ["VMs", job.vms.length ? links("vm", job.vms) : ""]]),
        evicted(job.evictions),
        considered(found?.explained),
      ] : [h("p", { class: "says" }, found?.explained?.text || found?.error || (found ? "the job has ended" : ""))]),
      ...(found?.views ?? []).toReversed().map((view, i) => timeline(view, i === 0)),
      command(`multiverse timeline ${id} --events`),
    ]);
  }

  // Ask for the timeline and the explanation when they may have changed: a job that waits is explained anew now and then.
  async #fetch(id, job) {
    const places = (job?.vms ?? []).map((name) => store.vms.get(name)).map((vm) => vm?.other_host ? `${vm.host} ${vm.other_host} ${vm.state}` : vm?.host);
    const key = `${id} ${job?.attempt} ${job?.state} ${places} ${job?.stage === "waiting" ? Math.floor(store.now() / AGAIN) : ""}`;
    if (this.#timeline?.key === key) return;
    this.#timeline = { ...(this.#timeline?.id === id ? this.#timeline : { id, at: 0, views: [] }), key };
    const [views, explained] = await Promise.all([ask(`timeline/${encodeURIComponent(id)}`), ask(`explain/${encodeURIComponent(id)}`)]);
    if (this.#timeline.key !== key) return; // something else is shown by now
    const error = views.error ?? "";
    this.#timeline = { id, key, at: Date.now(), views: views.found ?? [], explained: explained.found?.jobs[0], error };
    this.draw();
  }

  #vm(name) {
    const vm = store.vms.get(name);
    this.#head(`VM ${name}`, vm ? vm.state : "", vm ? lookOfVm(vm) : "");
    this.#put(`vm ${name} ${vm && JSON.stringify(vm)}`, () => vm ? [
      ...(vm.quarantined || vm.reason ? [h("p", { class: "says" }, vm.quarantined || vm.reason)] : []),
      facts([["Job", vm.job_id ? links("job", [vm.job_id]) : "none: a spare"], ["Host", links("host", [vm.host])],
        [vm.state === "moving" ? "Moves to" : "Still on", vm.other_host ? links("host", [vm.other_host]) : ""],
        ["Size", `${count(vm.cpus, "CPU")}, ${memory(vm.memory)}`], ["Memory of its own", memory(vm.private)],
        ["Image", `${vm.image}, ${vm.kind} clone`], ["Address", vm.address], ["State", lasting(vm)]]),
    ] : [h("p", { class: "says" }, "This VM is gone.")]);
  }

  #host(name) {
    const host = store.hosts.get(name);
    this.#head(`Host ${name}`, host ? host.state : "", host ? lookOfHost(host) : "");
    const vms = [...store.vms.values()].filter((vm) => vm.host === name), coming = [...store.vms.values()].filter((vm) => vm.other_host === name);
    this.#put(`host ${name} ${host && JSON.stringify(host)} ${vms.map((vm) => vm.name)} ${coming.map((vm) => vm.name)}`, () => host ? [
      ...[host.reason, host.why, host.todo].filter(Boolean).map((text) => h("p", { class: "says" }, text)),
      facts([["CPUs", `${host.claimed.cpus} of ${host.usable.cpus} claimed`],
        ["Memory", `${memory(host.claimed.memory)} of ${memory(host.usable.memory)} claimed`],
        ["Disk", `${memory(host.claimed.disk)} of ${memory(host.usable.disk)} claimed`],
        ["Machine has left", host.available ? memory(host.available) : "unknown"],
        ["Guests run on", host.accelerator], ["Images", Object.keys(host.images).join(", ")], ["Features", host.features.join(", ")],
        ["Away for", host.away_since === null ? "" : since(host.away_since)],
        ["VMs", vms.length ? links("vm", vms.map((vm) => vm.name)) : "none"],
        ["Room kept for", coming.length ? links("vm", coming.map((vm) => vm.name)) : ""]]),
      command(host.state === "up" ? `multiverse hosts drain ${name} --reason "…"` : "multiverse hosts"),
    ] : [h("p", { class: "says" }, "This host does not belong to the site.")]);
  }
}

function says(job) {
  const place = where(job);
  return { waiting: "waits for its turn", provisioning: `its VMs are being made ${place}`, running: `runs ${place}`,
           ending: "its VMs are being removed" }[job.stage];
}

const AGAIN = 15; // seconds until a job that waits is explained anew

async function ask(address) {
  try {
    const answer = await fetch(address);
    if (answer.ok) return { found: await answer.json() };
    return { error: answer.status === 404 ? "no attempt of this job is known" : "this cannot be shown now" };
  } catch {
    return { error: "the controller does not answer" };
  }
}

const ENDED = { requeue: "queued again", cancel: "cancelled" }; // evictions by which the run of the job ended

// When the job left a host, or was to, and why.
function evicted(evictions) {
  if (!evictions.length) return null;
  return h("details", {}, h("summary", {}, `Evicted ${evictions.length === 1 ? "once" : `${evictions.length} times`}`),
    h("ul", { class: "events considered" }, evictions.toReversed().map((one) => {
      const went = one.took !== null ? `in ${duration(one.took)}` : one.under_way ? "and has yet to go on" : one.way in ENDED ? "and has ended" : "but stayed";
      return h("li", {}, h("time", {}, new Date(one.at * 1000).toLocaleString()),
        h("span", {}, `${ENDED[one.way] ?? { move: "moved", save: "saved" }[one.way]} from ${one.host} ${went}, ${memory(one.memory)}`), h("small", {}, one.reason));
    })));
}

// The hosts that were considered for a job that waits, and why each was passed over.
function considered(explained) {
  if (!explained?.hosts.length) return null;
  return h("details", {}, h("summary", {}, "Hosts considered"), h("ul", { class: "events considered" },
    explained.hosts.map((group) => h("li", {}, h("b", {}, group.hosts || count(group.count, "host")), h("span", {}, group.why)))));
}

function since(moment) {
  return h("span", { "data-since": String(moment) });
}

function lasting(one) {
  return h("span", {}, `${one.state} for `, since(one.since));
}

function facts(pairs) {
  return h("dl", {}, pairs.filter(([, value]) => value !== "" && value !== undefined).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

const MOST_LINKS = 30;

function links(kind, names) {
  const shown = names.slice(0, MOST_LINKS).map((name) =>
    h("button", { type: "button", class: "link", onclick: () => address.select(kind, name) }, name));
  return h("span", { class: "links" }, ...shown, names.length > MOST_LINKS ? `and ${names.length - MOST_LINKS} more` : null);
}

const PHASES = { queued: "waiting", clone: "cloning", join: "joining", launch: "launching", run: "running", reclaim: "reclaiming" };

function timeline(view, latest) {
  const total = view.phases.reduce((sum, phase) => sum + phase.seconds, 0) || 1;
  const bar = h("div", { class: "phases", role: "img", "aria-label": "How the time was spent: " +
    view.phases.map((phase) => `${PHASES[phase.name] ?? phase.name} ${duration(phase.seconds)}`).join(", ") });
  for (const phase of view.phases) {
    const part = h("i", { class: phase.name, title: `${PHASES[phase.name] ?? phase.name}: ${duration(phase.seconds)}` });
    part.style.flexGrow = String(Math.max(phase.seconds / total, 0.012));
    bar.append(part);
  }
  const began = new Date(view.wall * 1000).toLocaleString();
  return h("section", { class: "timeline" },
    h("h3", {}, latest ? `Attempt ${view.attempt}: ${view.state}` : `Earlier attempt ${view.attempt}: ${view.state}`),
    h("p", { class: "hint" }, `since ${began}`), bar,
    h("ol", { class: "legend" }, view.phases.map((phase) => h("li", { class: phase.name },
      h("span", {}, PHASES[phase.name] ?? phase.name), h("b", {}, duration(phase.seconds)),
      phase.stages.length ? h("small", {}, phase.stages.map(([name, seconds]) => `${name} ${Math.round(seconds * 1000)} ms`).join(" · ")) : null))),
    latest ? h("details", {}, h("summary", {}, `All ${view.entries.length} events`),
      h("ol", { class: "events" }, view.entries.map((entry) => h("li", {},
        h("time", {}, `+${entry.at.toFixed(2)} s`), h("span", {}, `${entry.subject}: ${entry.event}`, entry.state ? ` → ${entry.state}` : ""),
        entry.reason ? h("small", {}, entry.reason) : null)))) : null);
}

customElements.define("mv-details", Details);
