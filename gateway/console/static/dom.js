// Functions that make elements from values. All text becomes text nodes, so a name that a client chose cannot become
// markup.

const SVG = "http://www.w3.org/2000/svg";

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const h = (tag, attributes, ...children) =>
  put(document.createElement(tag), tag === "button" ? { type: "button", ...attributes } : attributes, children);
export const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

export function table(columns, rows, empty, onrow) {
  if (!rows.length) return h("p", { class: "empty" }, empty || "Nothing to show.");
  const head = columns.map((column) => (column.name ? h("th", { scope: "col", class: column.num ? "num" : null }, column.name) : h("td")));
  const body = rows.map((row) =>
    h("tr", onrow ? { class: "click", onclick: (event) => event.target.closest("a, button") || onrow(row) } : null,
      columns.map((column) => h("td", { class: [column.num && "num", column.class].filter(Boolean).join(" ") || null }, column.of(row)))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

export const link = (page, parameters, text) =>
  h("a", { href: `#/${page}${parameters ? `?${new URLSearchParams(parameters)}` : ""}`, class: "wrap" }, text);

export function notice(text) {
  const box = h("div", null, text);
  document.getElementById("notice").append(box);
  setTimeout(() => box.remove(), 7000);
}

// --- figures -----------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(Math.round(value));
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 ? value.toFixed(1) : count(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toFixed(value < 10 ? 1 : 0) : value} ${units[at]}`;
}

export function ago(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000), minutes = Math.round(ms / 60000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(ms / 86400000)} days`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(ms, withMillis) {
  const at = new Date(ms);
  const text = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withMillis ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

export function day(ms) {
  return new Date(ms).toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" });
}

export function when(ms) {
  if (!ms || ms < 0) return "–";
  const today = new Date().toDateString() === new Date(ms).toDateString();
  return today ? clock(ms) : `${day(ms)} ${clock(ms)}`;
}

export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const runs = [];
  for (const number of sorted) {
    const last = runs[runs.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

export function owned(partitions) {
  const topics = new Map();
  for (const each of partitions) topics.set(each.topic, [...(topics.get(each.topic) || []), each.partition]);
  return [...topics].map(([topic, numbers]) => `${topic} ${ranges(numbers)}`).join("; ");
}

const STATES = { Stable: "good", Empty: "", Dead: "", PreparingRebalance: "warn", CompletingRebalance: "warn", Assigning: "warn", Reconciling: "warn" };
const SAID = { PreparingRebalance: "rebalancing: waiting for members", CompletingRebalance: "rebalancing: waiting for the assignment",
  Assigning: "assigning", Reconciling: "reconciling", Stable: "stable", Empty: "empty", Dead: "deleted" };
export const state = (name) => h("span", { class: `tag ${STATES[name] || ""}` }, SAID[name] || name);
