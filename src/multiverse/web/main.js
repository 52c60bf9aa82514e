import { store } from "./store.js";
import "./header.js";
import "./alerts.js";
import "./rates.js";
import "./hosts.js";
import "./jobs.js";
import "./details.js";

store.connect();
