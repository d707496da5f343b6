// Transactions, share groups, nodes, access, settings.

import { get } from "./api.js";
import { ago, count, h, link, table } from "./dom.js";
import { nodes } from "./overview.js";
import { settings } from "./topic.js";

const card = (title, ...content) => h("section", { class: "card" }, title ? h("h2", null, title) : null, ...content);

const PAGES = {
  transactions: ["Open transactions", 3000, async () => {
    const data = await get("transactions");
    return [card(null, h("p", { class: "soft" }, "A consumer with isolation.level=read_committed waits at the first record of an open transaction. The oldest one is first."),
      table([
        { name: "Transactional id", class: "wrap", of: (row) => row.id },
        { name: "Open for", num: true, of: (row) => h("span", { class: row.age > row.timeout * 0.8 ? "bad" : row.age > 10000 ? "warn" : null }, ago(row.age)) },
        { name: "Aborted after", num: true, of: (row) => ago(row.timeout) },
        { name: "Producer", num: true, of: (row) => `${row.producer} / ${row.epoch}` },
        { name: "Holds up readers of", class: "wrap", of: (row) => row.partitions.map((each) => h("div", null, link("topic", { name: each.topic }, each.topic), `[${each.partition}]`,
          each.held === null ? h("span", { class: "soft" }, " nothing written yet") : ` from ${count(each.first)}, ${count(each.held)} records wait`)) },
        { name: "Offsets of groups", class: "wrap", of: (row) => row.groups.map((id) => h("div", null, link("group", { id }, id))) },
      ], data.transactions, "No transaction is open."))];
  }],
  share: ["Share groups", 3000, async () => {
    const data = await get("share");
    if (!data.groups.length) return [card(null, h("p", { class: "empty" }, "No share group has read anything yet."))];
    return data.groups.map((group) => h("section", { class: "card" }, h("h2", null, link("group", { id: group.id }, group.id)), table([
      { name: "Partition", of: (row) => [link("topic", { name: row.topic }, row.topic), ` ${row.partition}`] },
      { name: "Settled up to", num: true, of: (row) => count(row.start) },
      { name: "End", num: true, of: (row) => count(row.end) },
      { name: "Not settled", num: true, of: (row) => count(row.lag) },
    ], group.partitions)));
  }],
  nodes: ["Nodes", 3000, async () => {
    const data = await get("nodes");
    const here = data.nodes.find((row) => row.here);
    return [card(null, nodes(data.nodes)), ...(here ? health(here.id, data.health) : [])];
  }],
  access: ["Access", 0, async () => Promise.all([acls(), users(), quotas()])],
  settings: ["Settings of this node", 0, async () => {
    const data = await get("settings");
    const body = h("div");
    const search = h("input", { type: "search", placeholder: "Part of a name", "aria-label": "Search settings", oninput: () => draw() });
    const changed = h("input", { type: "checkbox", onchange: () => draw() });
    const draw = () => body.replaceChildren(settings(data.settings.filter((row) => row.name.includes(search.value.trim().toLowerCase()) && (!changed.checked || !row.default))));
    draw();
    return [h("section", { class: "card" }, h("div", { class: "head" }, h("h2", null, `Node ${data.node}`), h("span", { class: "grow" }), h("label", { class: "row" }, changed, "only those set"), search), body)];
  }],
};

// The figures of the node that serves this page. Each node counts for itself since it began.
function health(node, figures) {
  const of = (name, label = "") => (figures[name] || {})[label] || 0;
  const failed = Object.values(figures.storage_errors || {}).reduce((sum, value) => sum + value, 0);
  const fact = (label, value, bad) => h("span", null, `${label} `, h("b", { class: bad ? "bad" : null }, count(value)));
  const passes = Object.entries(figures.background_last_success_age_seconds || {}).map(([name, age]) => ({ name, age, failures: of("background_failures", name) }));
  return [
    card(`Node ${node} since it began`, h("div", { class: "facts" },
      fact("leases of groups moved", of("leases_moved", "groups")), fact("leases of jobs moved", of("leases_moved", "jobs")),
      fact("wake-ups sent", of("wakeups_sent")), fact("heard", of("wakeups_heard")), fact("missed", of("wakeups_missed")), fact("late", of("wakeups_late")))),
    card("Stores", h("div", { class: "facts" },
      fact("damaged chunks", of("damaged_chunks"), of("damaged_chunks") > 0), fact("requests that storage could not serve", failed, failed > 0))),
    card("Background work", h("p", { class: "soft small" }, "Retention, compaction and the other passes of this node. A pass that one node does for all waits on the others."), table([
      { name: "Pass", of: (row) => row.name },
      { name: "Last success", num: true, of: (row) => ago(Math.round(row.age * 1000)) },
      { name: "Failures", num: true, of: (row) => h("span", { class: row.failures ? "bad" : null }, count(row.failures)) },
    ], passes.sort((a, b) => b.failures - a.failures || a.name.localeCompare(b.name)), "No pass runs.")),
  ];
}

export async function show(main, parameters, page) {
  const [title, every, load] = PAGES[page];
  const body = h("div", { class: "sections" });
  const draw = async () => body.replaceChildren(...await load());
  await draw();
  main.append(h("h1", null, title), body);
  if (!every) return null;
  const timer = setInterval(() => document.hidden || draw(), every);
  return () => clearInterval(timer);
}

// What the viewer may not see is said, and does not hide the rest.
async function part(title, load) {
  try {
    return card(title, await load());
  } catch (error) {
    return card(title, h("p", { class: "empty" }, error.message));
  }
}

const acls = () => part("ACLs", async () => {
  const data = await get("acls");
  if (!data.authorizer) return h("p", { class: "soft" }, "No authorizer is set (authorizer.class.name), so every client may do everything.");
  return table([
    { name: "Principal", class: "wrap", of: (row) => row.principal },
    { name: "", of: (row) => h("span", { class: `tag ${row.permission === "DENY" ? "bad" : ""}` }, row.permission.toLowerCase()) },
    { name: "Operation", of: (row) => row.operation.toLowerCase().replaceAll("_", " ") },
    { name: "Resource", class: "wrap", of: (row) => [h("span", { class: "soft" }, `${row.resource.toLowerCase().replaceAll("_", " ")} `), row.name, row.pattern === "PREFIXED" ? h("span", { class: "soft" }, " and longer") : null] },
    { name: "Host", class: "mono", of: (row) => row.host },
  ], data.acls, "There are no ACLs.");
});

const users = () => part("Users", async () => table([
  { name: "User", class: "wrap", of: (row) => row.user },
  { name: "Credentials", of: (row) => row.credentials.map((each) => h("div", null, each.mechanism, h("span", { class: "soft" }, `, ${count(each.iterations)} iterations`))) },
], (await get("users")).users, "No SCRAM user exists. Add one with: sluice users add NAME"));

const quotas = () => part("Quotas", async () => table([
  { name: "Client", class: "wrap", of: (row) => row.entity.map((each) => h("div", null, h("span", { class: "soft" }, `${each.type} `), each.name === null ? "any other" : each.name)) },
  { name: "Limits", class: "mono", of: (row) => Object.entries(row.values).map(([name, value]) => h("div", null, `${name} = ${count(value)}`)) },
], (await get("quotas")).quotas, "No quota is set."));
