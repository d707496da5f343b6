// The page of one topic: its records, partitions, consumers and settings.

import { get, post, stream } from "./api.js";
import { bytes, count, h, link, notice, rate, table, when } from "./dom.js";

const MAX_TAIL = 500;

export async function show(main, parameters) {
  const name = parameters.get("name") || "";
  let topic = await get("topic", { name });
  const partitions = h("div"), consumers = h("div"), facts = h("div", { class: "facts" });
  let earlier = null;
  const draw = () => {
    const now = Date.now();
    const before = earlier && new Map(earlier.partitions.map((row) => [row.partition, row.end]));
    const rates = new Map(topic.partitions.map((row) => [row.partition, before ? Math.max(0, row.end - (before.get(row.partition) ?? row.end)) / ((now - earlier.at) / 1000) : null]));
    earlier = { at: now, partitions: topic.partitions };
    const total = (key) => topic.partitions.reduce((sum, row) => sum + (row[key] || 0), 0);
    const fact = (label, value) => h("span", null, `${label} `, h("b", null, value));
    facts.replaceChildren(fact("partitions", count(topic.partitionCount)), fact("records", count(total("end") - total("start"))), fact("size", bytes(total("bytes"))),
      fact("written", before ? `${rate([...rates.values()].reduce((a, b) => a + b, 0))} records/s` : "–"), h("span", { class: "mono" }, topic.id));
    partitions.replaceChildren(table([
      { name: "Partition", num: true, of: (row) => row.partition },
      { name: "Leader", num: true, of: (row) => (row.leader < 0 ? h("span", { class: "bad" }, "none") : row.leader) },
      { name: "Replicas", of: (row) => row.replicas.join(", ") },
      { name: "Start", num: true, of: (row) => count(row.start) },
      { name: "End", num: true, of: (row) => count(row.end) },
      { name: "Held by transactions", num: true, of: (row) => (row.stable === null || row.stable === row.end ? "–" : count(row.end - row.stable)) },
      { name: "Size", num: true, of: (row) => bytes(row.bytes) },
      { name: "Records/s", num: true, of: (row) => rate(rates.get(row.partition)) },
      { name: "Newest record", num: true, of: (row) => when(row.newest) },
    ], topic.partitions), topic.partitions.length < topic.partitionCount ? h("p", { class: "soft small" }, `Only the first ${count(topic.partitions.length)} partitions are shown and counted.`) : "");
    consumers.replaceChildren(table([
      { name: "Group", of: (row) => link("group", { id: row.id }, row.id) },
      { name: "Partitions", num: true, of: (row) => count(row.partitions) },
      { name: "Lag", num: true, of: (row) => count(row.lag) },
    ], topic.consumers, "No group has committed offsets of this topic."));
  };
  draw();
  const browser = topic.mayRead ? browse(topic) : null;
  main.append(
    h("div", { class: "stack" }, h("div", { class: "head" }, h("h1", null, name), topic.internal ? h("span", { class: "tag" }, "internal") : null), facts),
    h("section", { class: "card", "aria-label": "Records" }, h("h2", null, "Records"), browser ? browser.element : h("p", { class: "empty" }, "You may not read this topic.")),
    topic.mayProduce ? h("section", { class: "card" }, h("details", null, h("summary", null, "Produce a record"), produce(topic))) : null,
    h("section", { class: "card" }, h("h2", null, "Partitions"), partitions),
    h("section", { class: "card" }, h("h2", null, "Consumers"), consumers),
    h("section", { class: "card" }, h("details", null, h("summary", null, "Settings"), topic.settingsDenied ? h("p", { class: "empty" }, topic.settingsDenied) : settings(topic.settings))));
  for (const child of [...main.childNodes]) if (child.nodeType === Node.TEXT_NODE) child.remove();
  const timer = setInterval(async () => {
    if (document.hidden) return;
    topic = { ...topic, ...(await get("topic", { name })) };
    draw();
  }, 3000);
  if (browser) await browser.search();
  return () => { clearInterval(timer); if (browser) browser.close(); };
}

export function settings(rows) {
  const sorted = [...rows].sort((a, b) => Number(a.default) - Number(b.default) || a.name.localeCompare(b.name));
  return table([
    { name: "Setting", class: "mono", of: (row) => row.name },
    { name: "Value", class: "mono wrap", of: (row) => (row.secret ? h("span", { class: "soft" }, "hidden") : row.value === "" || row.value === null ? h("span", { class: "soft" }, "empty") : row.value) },
    { name: "Source", of: (row) => (row.default ? h("span", { class: "soft" }, row.source) : h("b", null, row.source)) },
    { name: "About", class: "soft small", of: (row) => row.about },
  ], sorted, "No settings.");
}

// --- records -------------------------------------------------------------------------------------------------

function browse(topic) {
  let end = null, next = null, asked = 0;
  const list = h("div", { class: "tall" }), said = h("p", { class: "soft small", role: "status" });
  const option = ([value, text]) => h("option", { value }, text);
  const begin = h("select", null, [["latest", "the newest records"], ["earliest", "the beginning"], ["offset", "an offset"], ["time", "a time"]].map(option));
  const offset = h("input", { type: "number", min: "0", step: "1", value: "0" });
  const time = h("input", { type: "datetime-local", step: "1" });
  const place = h("span");
  const partition = h("select", null, option(["", "all"]), topic.partitions.slice(0, 500).map((row) => option([row.partition, row.partition])));
  const text = h("input", { type: "search", placeholder: "text in key, value, headers" });
  const path = h("input", { type: "search", placeholder: "user.name=Ana" });
  const key = h("input", { type: "search", placeholder: "whole key" });
  const form = h("select", null, [["auto", "automatic"], ["text", "text"], ["json", "JSON"], ["avro", "Avro"], ["protobuf", "Protobuf"], ["hex", "hex"]].map(option));
  const schema = h("textarea", { rows: 4, placeholder: "Avro schema as JSON", "aria-label": "Avro schema" });
  const limit = h("select", null, ["50", "200", "500"].map((value) => option([value, value])));
  const control = h("input", { type: "checkbox" });
  const more = h("button", { hidden: true, onclick: () => search(true) }, "Continue");
  const live = h("button", { "aria-pressed": "false", onclick: () => (end ? stop() : tail()) }, "Follow");
  const extra = h("div", { hidden: true }, schema);
  const ask = h("form", { class: "line", onsubmit: (event) => { event.preventDefault(); stop(); search(); } },
    h("label", null, "From", begin), place, h("label", null, "Partition", partition), h("label", null, "Contains", text), h("label", null, "JSON path", path), h("label", null, "Key", key),
    h("label", null, "Show values as", form), h("label", null, "At most", limit), h("label", { class: "row" }, control, "markers and aborted"),
    h("div", { class: "buttons" }, h("button", { class: "main", type: "submit" }, "Search"), live));
  const turn = () => {
    place.replaceChildren(...(begin.value === "offset" ? [h("label", null, "Offset", offset)] : begin.value === "time" ? [h("label", null, "Time", time)] : []));
    extra.hidden = form.value !== "avro";
  };
  begin.addEventListener("change", turn);
  form.addEventListener("change", turn);

  const given = () => ({
    topic: topic.name, begin: begin.value, partitions: partition.value, text: text.value, path: path.value, key: key.value, form: form.value,
    schema: form.value === "avro" ? schema.value : "", limit: limit.value, control: control.checked ? "1" : "",
    value: begin.value === "offset" ? offset.value : begin.value === "time" && time.value ? new Date(time.value).getTime() : "",
  });

  async function search(goOn) {
    const turnOf = ++asked;
    said.replaceChildren("Searching…");
    try {
      const found = await get("topic/records", { ...given(), next: goOn && next ? Object.entries(next).map(([index, at]) => `${index}:${at}`).join(",") : "" });
      if (turnOf !== asked) return;
      next = found.next;
      more.hidden = found.done;
      said.replaceChildren(`${count(found.records.length)} found, ${count(found.scanned)} looked at${found.done ? "" : "; there are more"}`);
      draw(found.records);
    } catch (error) {
      if (turnOf === asked) said.replaceChildren(h("span", { class: "bad" }, error.message));
    }
  }

  function tail() {
    let kept = [], failed = false, begun = false, gap = "";
    const tell = () => failed || said.replaceChildren((kept.length ? `following; ${count(kept.length)} shown` : "Waiting for new records…") + gap);
    live.setAttribute("aria-pressed", "true");
    live.replaceChildren("● Following");
    more.hidden = true;
    asked += 1;
    tell();
    draw(kept);
    end = stream("records", Object.fromEntries(Object.entries(given()).filter(([, value]) => value !== "")), {
      records: (found) => {
        kept = [...found.records.reverse(), ...kept].slice(0, MAX_TAIL);
        failed = false;
        tell();
        draw(kept);
      },
      failed: (data) => { failed = true; said.replaceChildren(h("span", { class: "bad" }, data.error)); },
      ping: () => { failed = false; tell(); },
      open: () => {
        if (begun) gap = " Records that came while the page was not connected are missing; search for them.";
        begun = true;
        tell();
      },
      down: () => failed || said.replaceChildren("not connected; trying again"),
    });
  }

  function stop() {
    if (end) end();
    end = null;
    live.setAttribute("aria-pressed", "false");
    live.replaceChildren("Follow");
  }

  function draw(records) {
    list.replaceChildren(table([
      { name: "Partition", num: true, of: (row) => row.partition },
      { name: "Offset", num: true, of: (row) => h("button", { class: "plain", onclick: () => whole(row) }, count(row.offset)) },
      { name: "Time", of: (row) => when(row.timestamp) },
      { name: "Key", class: "wrap", of: (row) => part(row.key) },
      { name: "Value", class: "value", of: (row) => [row.state ? h("span", { class: `tag ${row.state === "aborted" ? "bad" : row.state === "open" ? "warn" : ""}` }, row.state) : null, row.broken ? h("span", { class: "bad" }, row.broken) : part(row.value)] },
      { name: "Headers", of: (row) => h("div", { class: "chips" }, (row.headers || []).map((header) => h("span", { class: "tag mono" }, `${header.name}: ${header.value.text ?? "null"}`)),
        row.headerCount > (row.headers || []).length ? h("span", { class: "soft small" }, `and ${row.headerCount - row.headers.length} more`) : null) },
    ], records, end ? "Nothing new yet." : "No record matches."));
  }

  async function whole(row) {
    const found = await get("topic/record", { topic: topic.name, partition: row.partition, offset: row.offset, form: form.value, schema: form.value === "avro" ? schema.value : "" });
    const piece = (title, value, dump) => h("div", { class: "stack" }, h("h3", null, `${title} `, h("span", { class: "soft small" }, value.text === null ? "null" : `${bytes(value.size)}, ${value.form}${value.cut ? ", cut" : ""}`)),
      value.text === null ? null : h("pre", null, value.text), value.text === null ? null : h("details", null, h("summary", null, "Hex"), h("pre", null, dump)));
    const close = h("button", { onclick: () => dialog.close() }, "Close");
    const dialog = h("dialog", { "aria-label": "Record", onclose: () => dialog.remove() }, h("div", { class: "stack" },
      h("h2", null, `${topic.name}[${row.partition}] at ${count(row.offset)}`), h("p", { class: "soft" }, when(found.timestamp)),
      piece("Key", found.key, found.keyHex), piece("Value", found.value, found.valueHex),
      h("h3", null, `Headers (${count(found.headerCount)})`), table([{ name: "Name", class: "mono wrap", of: (each) => each.name }, { name: "Value", class: "wrap", of: (each) => part(each.value) }], found.headers, "No headers."), close));
    document.body.append(dialog);
    dialog.showModal();
  }

  turn();
  return { element: h("div", { class: "stack" }, ask, extra, said, list, more), search, close: stop };
}

function part(value) {
  if (!value || value.text === null) return h("span", { class: "soft" }, "null");
  const more = [value.schemaId !== undefined ? `schema ${value.schemaId}` : "", value.cut ? `first part of ${bytes(value.size)}` : "", value.why || ""].filter(Boolean).join(", ");
  return h("div", { class: "record" }, value.form === "text" && value.text.length < 60 ? h("span", { class: "wrap" }, value.text) : h("pre", null, value.text), more ? h("span", { class: "soft small" }, more) : null);
}

// --- produce -------------------------------------------------------------------------------------------------

function produce(topic) {
  const partition = h("input", { type: "number", min: "0", max: topic.partitionCount - 1, value: "0", required: true });
  const key = h("input", { placeholder: "empty: null" });
  const value = h("textarea", { rows: 4, "aria-label": "Value" });
  const headers = h("textarea", { rows: 2, placeholder: "name: value, one a line", "aria-label": "Headers" });
  const said = h("p", { class: "bad small", role: "alert" });
  return h("form", { class: "stack", onsubmit: async (event) => {
    event.preventDefault();
    said.replaceChildren();
    const pairs = headers.value.split("\n").filter((line) => line.trim()).map((line) => { const at = line.indexOf(":"); return { name: (at < 0 ? line : line.slice(0, at)).trim(), value: at < 0 ? null : line.slice(at + 1).trim() }; });
    try {
      const done = await post("produce", { topic: topic.name, partition: Number(partition.value), key: key.value || null, value: value.value, headers: pairs });
      notice(`Written to ${topic.name}[${done.partition}] at ${count(done.offset)}.`);
    } catch (error) {
      said.replaceChildren(error.message);
    }
  } }, h("div", { class: "line buttons" }, h("label", null, "Partition", partition), h("label", null, "Key", key)), h("label", null, "Value", value), h("label", null, "Headers", headers), said,
  h("div", null, h("button", { class: "main", type: "submit" }, "Produce")));
}
