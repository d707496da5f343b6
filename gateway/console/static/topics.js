import { get } from "./api.js";
import { bytes, count, h, link, table, when } from "./dom.js";

export async function show(main) {
  const body = h("div");
  const search = h("input", { type: "search", placeholder: "Part of a name", "aria-label": "Search topics", oninput: () => later() });
  const internal = h("input", { type: "checkbox", onchange: () => load() });
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(load, 250); };
  async function load() {
    const data = await get("topics", { search: search.value });
    const rows = data.topics.filter((row) => internal.checked || !row.internal);
    body.replaceChildren(table([
      { name: "Topic", of: (row) => link("topic", { name: row.name }, row.name) },
      { name: "Partitions", num: true, of: (row) => count(row.partitions) },
      { name: "Records", num: true, of: (row) => count(row.records) },
      { name: "Size", num: true, of: (row) => bytes(row.bytes) },
      { name: "Newest record", num: true, of: (row) => when(row.newest) },
    ], rows, search.value ? "No topic has such a name." : "There is no topic yet.",
    (row) => { location.hash = `#/topic?${new URLSearchParams({ name: row.name })}`; }),
    data.cut ? h("p", { class: "soft small" }, "Only the first 500 topics are shown. Search for the others.") : "");
  }
  await load();
  main.append(h("div", { class: "head" }, h("h1", null, "Topics"), h("span", { class: "grow" }), h("label", { class: "row" }, internal, "internal topics"), search), h("section", { class: "card" }, body));
  const timer = setInterval(() => document.hidden || load(), 5000);
  return () => { clearInterval(timer); clearTimeout(waiting); };
}
