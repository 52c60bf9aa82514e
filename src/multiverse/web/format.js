// Figures as people read them, with the same words as the command line.

export function duration(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// How long something has lasted: whole seconds, so that it does not flicker.
export function age(seconds) {
  return seconds < 10 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds);
}

export function memory(mib) {
  if (mib < 1024) return `${Math.round(mib)} MiB`;
  const gib = mib / 1024;
  return gib < 100 ? `${trimmed(gib)} GiB` : gib < 1024 ? `${Math.round(gib)} GiB` : `${trimmed(gib / 1024)} TiB`;
}

function trimmed(value) {
  return value.toFixed(1).replace(/\.0$/, "");
}

export function count(number, singular, plural = `${singular}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? singular : plural}`;
}

export function size(job) {
  const nodes = job.nodes > 1 ? `${job.nodes} × ` : "";
  return `${nodes}${count(job.cpus, "CPU")}, ${memory(job.memory)}`;
}

// What a user knows of a job's or a VM's state.
export const STAGES = { waiting: "Waiting", provisioning: "Preparing", running: "Running", ending: "Ending" };

const OF_VMS = {
  planned: "provisioning", parked: "spare", starting: "provisioning", joined: "spare", serving: "running",
  moving: "running", settling: "running",
  retiring: "ending", orphan: "fault", dead: "fault", lost: "fault", ending: "ending", removing: "ending",
  releasing: "ending", deleting: "ending",
};

export function lookOfVm(vm) {
  if (vm.quarantined) return "fault";
  if (vm.state === "joined" && vm.attempt !== null) return "provisioning";
  return OF_VMS[vm.state] ?? "spare";
}

export function lookOfHost(host) {
  if (["away", "silent", "fencing", "fenced"].includes(host.state)) return "fault";
  return host.state === "up" ? "good" : "waiting";
}
