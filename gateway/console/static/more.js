// The pages for transactions, share groups, nodes, access and settings.

import { get } from "./api.js";
import { ago, count, h, link, table } from "./dom.js";
import { name, nodes } from "./overview.js";
import { settings } from "./topic.js";

const card = (title, ...content) => h("section", { class: "card" }, title ? h("h2", null, title) : null, ...content);
const cut = (data, text) => (data.cut ? h("p", { class: "soft small" }, `Only the ${text} are shown.`) : null);

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
      ], data.transactions, "No transaction is open."), cut(data, "200 oldest transactions"))];
  }],
  share: ["Share groups", 3000, async () => {
    const data = await get("share");
    if (!data.groups.length) return [card(null, h("p", { class: "empty" }, "No share group has read anything yet."))];
    return [cut(data, "first 2,000 partitions"), ...data.groups.map((group) => h("section", { class: "card" }, h("h2", null, link("group", { id: group.id }, group.id)), table([
      { name: "Partition", of: (row) => [link("topic", { name: row.topic }, row.topic), ` ${row.partition}`] },
      { name: "Settled up to", num: true, of: (row) => count(row.start) },
      { name: "End", num: true, of: (row) => count(row.end) },
      { name: "Not settled", num: true, of: (row) => count(row.lag) },
    ], group.partitions)))].filter(Boolean);
  }],
  nodes: ["Nodes", 3000, async () => {
    const data = await get("nodes");
    return [card(null, nodes(data.nodes)), ...figures(data.nodes, data.figures)];
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

const PASSES = {
  "check of the history": "notices a database that has lost commits, such as one after a failover",
  clock: "compares this machine's clock with Postgres'",
  "compacted tails": "removes compacted records from the memory of this node",
  compaction: "removes records that a newer one with the same key replaces",
  deletion: "removes the records of deleted topics",
  "event loop lag": "measures how late this process does its work",
  forwarding: "ends connections to nodes that are gone",
  functions: "removes Postgres functions of earlier releases",
  jobs: "takes and keeps the work that one node does for all",
  journal: "makes and drops the days of the journal",
  "journal of SQL commits": "notes offsets that SQL transactions committed",
  leases: "takes and keeps the groups that this node coordinates",
  "memory of the history": "notes this node's last commits, so that its next run notices a restored database",
  "offset expiry": "removes offsets of groups that are long empty",
  "producer expiry": "removes the state of producers that are long silent",
  reconciliation: "follows changes of topics, settings and permissions",
  retention: "deletes records past retention.ms or retention.bytes",
  roll: "moves records from Postgres to the log store",
  "secrets in files": "reads certificates and passwords again when their files change",
  sweep: "removes files and objects that no record needs",
  "token expiry": "removes expired delegation tokens",
  "transaction timeouts": "aborts transactions that stay open too long",
  "transactional id expiry": "removes transactional ids that are long unused",
};

// Tables of the figures that each node counts since its start. A node of an earlier release sends no figures.
function figures(rows, known) {
  const of = (row, name, label = "") => ((known[row.id] || {})[name] || {})[label] || 0;
  const failed = (row) => Object.values((known[row.id] || {}).storage_errors || {}).reduce((sum, value) => sum + value, 0);
  const bad = (value) => h("span", { class: value ? "bad" : null }, count(value));
  const answered = rows.filter((row) => known[row.id]);
  const silent = rows.filter((row) => !known[row.id]);
  const ages = (row) => known[row.id].background_last_success_age_seconds || {};
  const passes = [...new Set(answered.flatMap((row) => Object.keys(ages(row))))].sort();
  const failures = (row, name) => of(row, "background_failures", name);
  return [
    card("Since each node began", table([
      { name: "Node", of: (row) => name(row) },
      { name: "Version", class: "nowrap", of: (row) => Object.keys((known[row.id] || {}).build_info || {})[0] || "–" },
      { name: "Groups handed over", num: true, of: (row) => count(of(row, "leases_moved", "groups")) },
      { name: "Jobs handed over", num: true, of: (row) => count(of(row, "leases_moved", "jobs")) },
      { name: "Wake-ups sent", num: true, of: (row) => count(of(row, "wakeups_sent")) },
      { name: "heard", num: true, of: (row) => count(of(row, "wakeups_heard")) },
      { name: "missed", num: true, of: (row) => count(of(row, "wakeups_missed")) },
      { name: "late", num: true, of: (row) => count(of(row, "wakeups_late")) },
      { name: "Damaged chunks", num: true, of: (row) => bad(of(row, "damaged_chunks")) },
      { name: "Failed storage requests", num: true, of: (row) => bad(failed(row)) },
    ], answered, "No node has sent its figures."),
    silent.length ? h("p", { class: "soft small" }, `No figures came from node ${silent.map((row) => row.id).join(", ")}: an earlier release, or the node does not answer.`) : null),
    card("Background work", h("p", { class: "soft small" }, "Time since each pass last succeeded. A pass that one node does for all stands still on the others."), table([
      { name: "Pass", of: (pass) => [h("div", null, pass), h("div", { class: "soft small" }, PASSES[pass])] },
      ...answered.map((row) => ({ name: `Node ${row.id}`, num: true, of: (pass) => [
        pass in ages(row) ? `${ago(Math.round(ages(row)[pass] * 1000))} ago` : "–",
        failures(row, pass) ? h("div", { class: "bad small" }, `${count(failures(row, pass))} failed`) : null] })),
    ], passes, "No pass runs.")),
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

// Shows the error in place of a part that the viewer may not see or that fails to load, so that the other parts still
// appear.
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
  return [table([
    { name: "Principal", class: "wrap", of: (row) => row.principal },
    { name: "", of: (row) => h("span", { class: `tag ${row.permission === "DENY" ? "bad" : ""}` }, row.permission.toLowerCase()) },
    { name: "Operation", of: (row) => row.operation.toLowerCase().replaceAll("_", " ") },
    { name: "Resource", class: "wrap", of: (row) => [h("span", { class: "soft" }, `${row.resource.toLowerCase().replaceAll("_", " ")} `), row.name, row.pattern === "PREFIXED" ? h("span", { class: "soft" }, " and longer") : null] },
    { name: "Host", class: "mono", of: (row) => row.host },
  ], data.acls, "There are no ACLs."), cut(data, "first 2,000 ACLs")];
});

const users = () => part("Users", async () => {
  const data = await get("users");
  return [table([
    { name: "User", class: "wrap", of: (row) => row.user },
    { name: "Credentials", of: (row) => row.credentials.map((each) => h("div", null, each.mechanism, h("span", { class: "soft" }, `, ${count(each.iterations)} iterations`))) },
  ], data.users, "No SCRAM user exists. Add one with: sluice users add NAME"), cut(data, "first 2,000 users")];
});

const quotas = () => part("Quotas", async () => {
  const data = await get("quotas");
  return [table([
    { name: "Client", class: "wrap", of: (row) => row.entity.map((each) => h("div", null, h("span", { class: "soft" }, `${each.type} `), each.name === null ? "any other" : each.name)) },
    { name: "Limits", class: "mono", of: (row) => Object.entries(row.values).map(([name, value]) => h("div", null, `${name} = ${value.toLocaleString("en")}`)) },
  ], data.quotas, "No quota is set."), cut(data, "first 2,000 quotas")];
});
