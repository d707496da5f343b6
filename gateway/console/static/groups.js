import { get } from "./api.js";
import { count, h, link, state, table, when } from "./dom.js";

export async function show(main) {
  const body = h("div");
  const search = h("input", { type: "search", placeholder: "Part of a group id", "aria-label": "Search groups", oninput: () => later() });
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(load, 250); };
  async function load() {
    const data = await get("groups", { search: search.value });
    data.groups.sort((a, b) => (b.lag || 0) - (a.lag || 0));
    body.replaceChildren(table([
      { name: "Group", of: (row) => link("group", { id: row.id }, row.id) },
      { name: "State", of: (row) => state(row.state) },
      { name: "Type", of: (row) => row.type },
      { name: "Members", num: true, of: (row) => count(row.members) },
      { name: "Lag", num: true, of: (row) => count(row.lag) },
      { name: "Last change", num: true, of: (row) => when(row.changed) },
    ], data.groups, search.value ? "No group has such an id." : "No consumer has joined a group yet.",
    (row) => { location.hash = `#/group?${new URLSearchParams({ id: row.id })}`; }),
    data.cut ? h("p", { class: "soft small" }, "Only the first 500 groups are shown. Search for the others.") : "");
  }
  await load();
  main.append(h("div", { class: "head" }, h("h1", null, "Groups"), h("span", { class: "grow" }), search), h("section", { class: "card" }, body));
  const timer = setInterval(() => document.hidden || load(), 5000);
  return () => { clearInterval(timer); clearTimeout(waiting); };
}
