import { get, stream } from "./api.js";
import { ago, bytes, count, h, link, rate, state, table } from "./dom.js";

export async function show(main) {
  const body = h("div", { class: "sections" });
  const dot = h("span", { class: "soft small" });
  main.append(h("div", { class: "head" }, h("h1", null, "Overview"), h("span", { class: "grow" }), dot), body);
  draw(body, await get("overview"));
  return stream("overview", {}, {
    overview: (data) => { dot.replaceChildren("live"); draw(body, data); },
    down: () => dot.replaceChildren("not connected; trying again"),
    failed: (data) => dot.replaceChildren(data.error),
  });
}

const figure = (name, value, more) => h("div", { class: "card" }, h("p", { class: "soft small" }, name), h("p", { class: "figure" }, value), h("p", { class: "soft small" }, more));

function draw(body, data) {
  const rates = data.rates || {};
  const calm = !data.attention.length;
  body.replaceChildren(
    h("section", { class: "card", "aria-label": "Groups that need attention" },
      h("div", { class: "head" }, h("h2", null, !calm ? "Needs attention" : data.cut ? "The first 500 groups are well" : "All groups are well"),
        h("span", { class: "soft small" }, `${count(data.groups)} ${data.groups === 1 ? "group" : "groups"}${data.cut ? ", others are not examined" : ""}`)),
      calm
        ? h("p", { class: "soft" }, data.groups
          ? "No member was lost, no rebalance takes long, no commit was refused in the last ten minutes."
          : "No consumer has joined a group yet. Start one, and it appears here.")
        : data.attention.map((group) => h("div", { class: `urgent ${group.urgency >= 70 ? "high" : ""}` }, h("i"),
          h("div", null, link("group", { id: group.id }, group.id), " ", state(group.state)),
          h("span", { class: "soft small num" }, `lag ${count(group.lag || 0)}`),
          h("div", null, h("span", null, group.why), group.also.length ? h("span", { class: "soft" }, ` ${group.also.join(" ")}`) : null)))),
    h("section", { class: "grid", "aria-label": "Figures" },
      figure("Produced", `${rate(rates.produced)}`, "records per second, whole cluster"),
      figure("Consumed", `${rate(rates.consumed)}`, "records per second, by committed offsets"),
      figure("Stored", bytes(data.counts.size_bytes), data.rates ? `${bytes(Math.round(rates.bytes))} more each second` : "all topics"),
      figure("Topics", count(data.counts.topics), `${count(data.counts.partitions)} partitions with internal ones`)),
    data.nodes.length ? h("section", { class: "card" }, h("div", { class: "head" }, h("h2", null, "Nodes"), h("span", { class: "soft small" }, `cluster ${data.cluster}, Sluice ${data.version}`)), nodes(data.nodes)) : null);
}

export const name = (row) => h("span", { class: "nowrap" }, `${row.id}`, row.here ? h("span", { class: "soft" }, " this one") : null);

export function nodes(rows) {
  return table([
    { name: "Node", of: (row) => name(row) },
    { name: "Listeners", class: "mono", of: (row) => Object.entries(row.listeners).map(([name, address]) => h("div", null, `${name}://${address}`)) },
    { name: "Roles", of: (row) => row.roles.join(", ") },
    { name: "Rack", of: (row) => row.rack || "–" },
    { name: "Up", num: true, of: (row) => ago(row.up) },
    { name: "Group shards", num: true, of: (row) => count(row.leases.groups || 0) },
    { name: "Jobs", class: "wide", of: (row) => row.jobs.join(", ") || "–" },
    { name: "Catalog behind", num: true, of: (row) => count(row.behind) },
  ], rows, "No node is alive.");
}
