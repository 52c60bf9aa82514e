import { store } from "./store.js";
import "./header.js";
import "./alerts.js";
import "./rates.js";
import "./evictions.js";
import "./hosts.js";
import "./jobs.js";
import "./details.js";

store.connect();

// A browser keeps pages that were left, with their connections, and has six of these for a site: the next page would
// wait until one is dropped.
addEventListener("pagehide", () => store.disconnect());
addEventListener("pageshow", (event) => event.persisted && store.connect());
