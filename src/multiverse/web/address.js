// The address is the state of the page: what is selected, the filter, the stage and the theme. A link shows the same.

const NAMES = ["q", "stage", "job", "vm", "host", "theme"];

class Address extends EventTarget {
  constructor() {
    super();
    this.#read();
    addEventListener("popstate", () => {
      this.#read();
      this.dispatchEvent(new Event("change"));
    });
  }

  #read() {
    const given = new URLSearchParams(location.search);
    for (const name of NAMES) this[name] = given.get(name) ?? "";
  }

  // Change some of it. Each selection is a step that the browser's "back" undoes; typing is none.
  set(changes, { step = true } = {}) {
    const before = this.toString();
    Object.assign(this, changes);
    const now = this.toString();
    if (now === before) return;
    history[step ? "pushState" : "replaceState"](null, "", now);
    this.dispatchEvent(new Event("change"));
  }

  select(kind, name) {
    this.set({ job: "", vm: "", host: "", ...(kind ? { [kind]: name } : {}) });
  }

  // What is selected, as [kind, name]; null if nothing is.
  get selected() {
    const kind = ["job", "vm", "host"].find((one) => this[one]);
    return kind ? [kind, this[kind]] : null;
  }

  toString() {
    const given = new URLSearchParams(NAMES.filter((name) => this[name]).map((name) => [name, this[name]]));
    return given.size ? `?${given}` : location.pathname;
  }
}

export const address = new Address();

// Whether a job is one of those that the filter asks for: every word of it occurs somewhere.
export function matches(job, hostsOf) {
  if (address.stage && job.stage !== address.stage) return false;
  const words = address.q.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [job.job_id, job.name, job.user, job.state, job.stage, job.image, job.kind, job.waiting, job.reason, ...job.vms,
                ...hostsOf(job)].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}
