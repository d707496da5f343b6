// The page of one group: the ownership timeline, the history with its causes, lag, members, offsets, settings, and the
// actions of an administrator.

import { get, session, stream } from "./api.js";
import { confirmAction } from "./dialog.js";
import { ago, clock, count, h, link, notice, owned, state, table, when } from "./dom.js";
import { durations, lagChart, Timeline } from "./timeline.js";

const MEMBERS = 10;
const MAX_SAMPLES = 20000;
const MAX_OFFSETS = 2000; // the node sends no more rows
const STRONG = new Set(["member_expired", "member_fenced", "refused", "rows_dropped"]);
const MILD = new Set(["rebalance_started", "heartbeat_gap", "observed", "member_left"]);

export async function show(main, parameters) {
  const page = new Page(parameters.get("id") || "");
  await page.begin(main, parameters);
  return () => page.close();
}

class Page {
  constructor(id) {
    this.id = id;
    this.slots = new Map();
    this.samples = [];
    this.asked = null;
    this.closed = false;
    this.timers = new Set();
  }

  slot(member) {
    if (!this.slots.has(member)) this.slots.set(member, this.slots.size % MEMBERS);
    return this.slots.get(member);
  }

  async begin(main, parameters) {
    this.group = await get("group", { id: this.id });
    this.title = h("div", { class: "head" });
    this.facts = h("div", { class: "facts" });
    this.stories = h("div", { class: "stories" });
    this.words = h("div", { class: "words", tabindex: "0", role: "group", "aria-label": "History in words" });
    this.members = h("div");
    this.offsets = h("div");
    this.settings = h("div");
    this.legend = h("div", { class: "legend" });
    this.lag = h("div");
    this.cut = h("p", { class: "soft small" });
    this.timeline = new Timeline({ slot: (member) => this.slot(member), onwindow: () => this.moved(), onpick: (mark) => this.pick(mark) });
    const given = [Number(parameters.get("from")), Number(parameters.get("to"))];
    if (given[0] && given[1] > given[0]) { this.timeline.live = false; this.timeline.to = given[1]; this.timeline.span = given[1] - given[0]; }
    this.controls = h("div", { class: "buttons" });
    this.drawControls();
    main.append(
      h("div", { class: "stack" }, this.title, this.facts),
      this.storyCard = h("section", { class: "card", "aria-label": "What happened", hidden: true }, h("h2", null, "What happened"), this.stories),
      h("div", { class: "two" },
        h("section", { class: "card", "aria-label": "Ownership" },
          h("div", { class: "head" }, h("h2", null, "Who owned which partition"), h("span", { class: "grow" }), this.controls),
          this.timeline.element, this.legend,
          h("p", { class: "key" }, h("span", null, "shaded: a rebalance"), h("span", null, "hatched: owner was silent, nobody read"), h("span", null, "dashed: waits for the previous owner"),
            h("span", null, "◇ a node took the group over"), h("span", { class: "bad" }, "◆ refused commit")),
          this.cut,
          h("h3", { class: "lag-title" }, "Lag by partition, in records"), this.lag),
        h("section", { class: "card", "aria-label": "History" }, h("h2", null, "History"), this.words)),
      h("section", { class: "card" }, h("h2", null, "Members"), this.members),
      h("section", { class: "card" }, h("h2", null, "Offsets and lag"), this.offsets),
      h("section", { class: "card" }, h("details", { ontoggle: (event) => event.target.open && this.loadSettings() }, h("summary", null, "Settings of the group"), this.settings)));
    this.drawGroup();
    await this.load();
    this.loadLag();
    this.every(10000, () => this.refresh());
    this.every(1000, () => this.timeline.live && this.drawLag());
    this.end = stream("group", { id: this.id }, {
      group: (group) => { this.group = group; this.drawGroup(); this.later(); },
      lag: (data) => this.sample(data),
      gone: (data) => { this.later(); notice(data.error); },
      failed: (data) => notice(data.error),
      down: () => this.mark("not connected; trying again"),
      open: () => this.mark(null),
    });
  }

  every(ms, work) {
    this.timers.add(setInterval(() => document.hidden || work(), ms));
  }

  close() {
    this.closed = true;
    this.timers.forEach(clearInterval);
    clearTimeout(this.waiting);
    this.timeline.close();
    if (this.end) this.end();
    if (this.asked) this.asked.abort();
  }

  mark(text) {
    this.trouble = text;
    this.drawTitle();
  }

  // --- reading -------------------------------------------------------------------------------------------------

  later() {
    if (this.waiting) return;
    this.waiting = setTimeout(() => { this.waiting = null; this.load().catch((error) => this.mark(error.message)); }, 250);
  }

  moved() {
    this.drawControls();
    this.drawLag();
    const [from, to] = this.timeline.window;
    const data = this.timeline.data;
    if (!data || from < data.from || (to > data.to && !this.timeline.live) || this.timeline.span < (data.to - data.from) / 40) this.later();
    clearTimeout(this.lagWaiting);
    this.lagWaiting = setTimeout(() => this.closed || this.loadLag(), 400);
  }

  async load() {
    const [from, to] = this.timeline.window;
    if (this.asked) this.asked.abort();
    this.asked = new AbortController();
    const margin = this.timeline.span * 0.5;
    try {
      const data = await get("group/timeline", { id: this.id, from: Math.max(0, Math.round(from - margin)), to: Math.round(to + (this.timeline.live ? 3600000 : margin)) }, this.asked.signal);
      if (this.closed) return;
      this.data = data;
      for (const lane of data.lanes) for (const span of lane.spans) if (span.member) this.slot(span.member);
      this.timeline.set(data);
      this.drawStories();
      this.drawWords();
      this.drawLegend();
      this.drawGroup();
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  async refresh() {
    try {
      this.group = await get("group", { id: this.id });
      this.drawGroup();
    } catch (error) {
      this.mark(error.message);
    }
  }

  async loadLag() {
    const [from, to] = this.timeline.window;
    try {
      const found = await get("group/lag", { id: this.id, from: Math.max(0, Math.round(from)), to: Math.round(to) });
      this.history = found.points;
    } catch (error) {
      this.history = [];
      this.mark(error.message);
    }
    this.drawLag();
  }

  sample(data) {
    for (const row of data.offsets) this.samples.push([row.topic, row.partition, data.at, row.lag]);
    if (this.samples.length > MAX_SAMPLES) this.samples.splice(0, this.samples.length - MAX_SAMPLES);
    const owners = new Map(this.group.offsets.map((row) => [`${row.topic} ${row.partition}`, row.owner]));
    this.group.offsets = [...data.offsets.map((row) => ({ ...row, owner: owners.get(`${row.topic} ${row.partition}`) })),
      ...this.group.offsets.filter((row) => row.committed === null && !data.offsets.some((each) => each.topic === row.topic && each.partition === row.partition))];
    this.drawOffsets();
    this.drawFacts();
  }

  async loadSettings() {
    const { settings } = await get("group/settings", { id: this.id });
    const mine = settings.filter((row) => row.name.startsWith(this.group.type === "classic" ? "consumer." : `${this.group.type}.`) || row.source === "group" || row.name.startsWith("group."));
    const rest = settings.filter((row) => !mine.includes(row));
    this.settings.replaceChildren(table([
      { name: "Setting", class: "mono", of: (row) => row.name },
      { name: "Value", class: "mono wrap", of: (row) => row.value },
      { name: "Source", of: (row) => row.source },
      { name: "About", class: "soft small", of: (row) => row.about },
      { name: "", of: (row) => (session.readOnly ? null : h("button", { onclick: () => this.set(row) }, "Change")) },
    ], [...mine, ...rest], "No settings."));
  }

  // --- drawing -------------------------------------------------------------------------------------------------

  drawGroup() {
    this.drawTitle();
    this.drawFacts();
    this.drawMembers();
    this.drawOffsets();
  }

  drawTitle() {
    const act = (text, work) => h("button", { onclick: work }, text);
    this.title.replaceChildren(...[h("h1", null, this.id), state(this.group.state), this.trouble ? h("span", { class: "tag bad" }, this.trouble) : null, h("span", { class: "grow" }),
      session.readOnly ? null : h("div", { class: "buttons" }, act("Reset offsets…", () => this.reset()), act("Delete group…", () => this.act({ action: "delete" }, "Delete the group")))].filter(Boolean));
  }

  drawFacts() {
    const group = this.group;
    const lag = group.offsets.reduce((sum, row) => sum + (row.lag || 0), 0);
    const fact = (name, value) => h("span", null, `${name} `, h("b", null, value));
    this.facts.replaceChildren(fact("members", count(group.memberCount)), fact("lag", `${group.offsets.length < MAX_OFFSETS ? "" : "at least "}${count(lag)}`),
      fact(group.type === "classic" ? "generation" : "epoch", count(group.generation)), fact("type", group.type), ...(group.assignor ? [fact("assignor", group.assignor)] : []),
      fact("coordinated by node", `${group.coordinator ?? "none"}${group.isHere ? " (this one)" : ""}`), ...(group.journal ? [] : [h("span", { class: "warn" }, "the journal is off, so there is no history")]));
  }

  drawControls() {
    const line = this.timeline;
    const live = h("button", { "aria-pressed": String(line.live), onclick: () => (line.live ? line.pause() : line.follow()) }, line.live ? "● Live" : "Live");
    const step = h("span", { class: "join" }, h("button", { "aria-label": "Earlier", onclick: () => line.pan(-line.span / 3) }, "‹"), h("button", { "aria-label": "Later", onclick: () => line.pan(line.span / 3) }, "›"),
      h("button", { "aria-label": "Zoom in", onclick: () => line.zoom(0.5) }, "+"), h("button", { "aria-label": "Zoom out", onclick: () => line.zoom(2) }, "−"));
    const spans = h("span", { class: "join" }, durations.map(([name, ms]) =>
      h("button", { "aria-pressed": String(Math.abs(line.span - ms) < 2), onclick: () => { line.zoom(ms / line.span); } }, name)));
    this.controls.replaceChildren(live, step, spans);
  }

  drawLegend() {
    const present = new Set(this.group.members.map((member) => member.id));
    const used = new Set(this.data.lanes.flatMap((lane) => lane.spans.map((span) => span.member)).filter(Boolean));
    this.legend.replaceChildren(...[...used].slice(0, 60).map((member) =>
      h("span", { class: present.has(member) ? null : "gone", title: member, onmouseenter: () => this.light(member), onmouseleave: () => this.light(null) },
        h("i", { class: `swatch paint m${this.slot(member)}` }), (this.data.members[member] || { label: member }).label)));
    this.cut.replaceChildren(this.data.cut ? "This window holds more than can be drawn; its oldest part is missing. Zoom in to see all of it." : "");
  }

  light(member) {
    this.timeline.hot = member;
    this.timeline.draw();
  }

  drawStories() {
    const [from, to] = this.timeline.window;
    const told = this.data.stories.filter((story) => story.kind !== "left" || story.gap === null || story.gap > 2000).filter((story) => story.at >= from && story.heard <= to).slice(-4).reverse();
    this.storyCard.hidden = !told.length;
    this.stories.replaceChildren(...told.map((story) => h("div", { class: `story ${story.kind}` },
      h("div", { class: "head" }, h("h3", null, `${story.title} at ${when(story.at)}`), h("button", { class: "plain", onclick: () => this.focus(story) }, "Show")),
      story.gap !== null && story.gap > 0 ? h("p", null, h("span", { class: "cost" }, ago(story.gap)), h("span", { class: "soft" }, " without a reader")) : null,
      h("p", null, story.text))));
  }

  focus(story) {
    const end = story.resumed || story.at;
    const margin = Math.max((end - story.heard) * 0.4, 3000);
    this.timeline.show(story.heard - margin, end + margin);
    this.timeline.element.scrollIntoView({ block: "nearest" });
  }

  drawWords() {
    const rows = [...this.data.words].reverse();
    const latest = rows[0] ? rows[0].seq : 0;
    if (this.latest === latest && this.words.childElementCount === Math.max(rows.length, 1)) return;
    this.latest = latest;
    this.words.replaceChildren(...(rows.length ? rows.map((row) => h("div", { class: ["entry", STRONG.has(row.kind) ? "strong" : MILD.has(row.kind) ? "mild" : ""].join(" "), "data-seq": row.seq },
      h("time", { datetime: new Date(row.at).toISOString(), title: when(row.at) }, clock(row.at)), h("span", null, row.what)))
      : [h("p", { class: "empty" }, "Nothing happened in this window.")]));
  }

  pick(mark) {
    const item = this.words.querySelector(`[data-seq="${Number(mark.seq)}"]`);
    if (!item) return;
    this.words.querySelectorAll(".hot").forEach((each) => each.classList.remove("hot"));
    item.classList.add("hot");
    this.words.scrollTop = item.offsetTop - this.words.offsetTop - 60;
  }

  drawMembers() {
    const lags = new Map();
    for (const row of this.group.offsets) lags.set(row.owner, (lags.get(row.owner) || 0) + (row.lag || 0));
    const columns = [
      { name: "Member", of: (row) => h("div", { class: "record" }, h("span", { class: "wrap" }, h("i", { class: `swatch paint m${this.slot(row.id)}` }), row.client, row.leader ? h("span", { class: "soft small" }, " leader") : null),
        h("span", { class: "soft mono wrap" }, row.id)) },
      { name: "Host", class: "mono", of: (row) => row.host },
      { name: "Instance", of: (row) => row.instance || "–" },
      { name: "Protocol", of: (row) => row.protocol },
      { name: "Owns", class: "wrap", of: (row) => (row.owned.length ? owned(row.owned) : h("span", { class: "soft" }, "nothing")) },
      { name: "Lag", num: true, of: (row) => count(lags.get(row.id) || 0) },
      { name: "Heard", num: true, of: (row) => (row.heard === null ? "–" : `${ago(row.heard)} ago`) },
    ];
    if (!session.readOnly) columns.push({ name: "", num: true, of: (row) => h("button", { onclick: () => this.act({ action: "remove", member: row.id }, "Remove a member") }, "Remove…") });
    this.replace(this.members, table(columns, this.group.members, "The group has no members."));
  }

  drawOffsets() {
    const rows = this.group.offsets;
    const most = Math.max(1, ...rows.map((row) => row.lag || 0));
    const names = new Map(this.group.members.map((member) => [member.id, member.client]));
    const topics = [...new Set(rows.map((row) => row.topic))];
    const bar = (row) => { const bar = h("i", { class: "bar" }); bar.style.width = `${Math.max(1, ((row.lag || 0) / most) * 90)}px`; return bar; };
    this.replace(this.offsets, h("div", null, table([
      { name: "Partition", of: (row) => [link("topic", { name: row.topic }, row.topic), ` ${row.partition}`] },
      { name: "Owner", class: "wrap", of: (row) => (row.owner ? [h("i", { class: `swatch paint m${this.slot(row.owner)}` }), names.get(row.owner) || row.owner] : h("span", { class: "soft" }, "nobody")) },
      { name: "Committed", num: true, of: (row) => count(row.committed) },
      { name: "End", num: true, of: (row) => count(row.end) },
      { name: "Lag", num: true, of: (row) => count(row.lag) },
      { name: "", of: bar },
      { name: "Committed at", num: true, of: (row) => when(row.at) },
    ], rows, "The group has committed no offset."),
    rows.length < MAX_OFFSETS ? null : h("p", { class: "soft small" }, `Only the first ${count(MAX_OFFSETS)} partitions are shown.`),
    session.readOnly || !rows.length ? null : h("div", { class: "buttons" }, topics.map((topic) => h("button", { class: "plain", onclick: () => this.act({ action: "forget", topic }, "Delete offsets") }, `Delete offsets of ${topic}…`)))));
  }

  // Redraws a table and keeps its focus and scroll position.
  replace(holder, content) {
    const active = holder.contains(document.activeElement) ? [...holder.querySelectorAll("button, a, [tabindex]")].indexOf(document.activeElement) : -1;
    const left = holder.querySelector(".scroll")?.scrollLeft || 0;
    holder.replaceChildren(content);
    const scroll = holder.querySelector(".scroll");
    if (scroll && left) scroll.scrollLeft = left;
    if (active >= 0) holder.querySelectorAll("button, a, [tabindex]")[active]?.focus({ preventScroll: true });
  }

  drawLag() {
    const width = this.timeline.element.clientWidth;
    if (!width) return;
    const [from, to] = this.timeline.window;
    const first = this.samples.length ? this.samples[0][2] : Infinity;
    const points = [...(this.history || []).filter((point) => point[2] < first), ...this.samples];
    const owners = new Map(this.group.offsets.map((row) => [`${row.topic} ${row.partition}`, row.owner]));
    this.lag.replaceChildren(lagChart(points, from, to, width, (topic, partition) => this.slot(owners.get(`${topic} ${partition}`) || `${topic} ${partition}`)));
  }

  // --- actions -------------------------------------------------------------------------------------------------

  async act(given, title) {
    const done = await confirmAction({ group: this.id, ...given }, title);
    if (!done) return;
    notice(`Done: ${done}.`);
    if (given.action === "delete") { location.hash = "#/groups"; return; }
    await this.refresh();
    this.later();
    if (given.action === "set") this.loadSettings();
  }

  reset() {
    const to = h("select", { name: "to" }, [["earliest", "the beginning"], ["latest", "the end"], ["time", "a time"], ["offset", "an offset"], ["shift", "so many records on (or −back)"]].map(([value, text]) => h("option", { value }, text)));
    const time = h("input", { type: "datetime-local", step: "1" });
    const number = h("input", { type: "number", step: "1" });
    const topic = h("select", null, h("option", { value: "" }, "all topics"), [...new Set(this.group.offsets.map((row) => row.topic))].map((name) => h("option", { value: name }, name)));
    const value = h("span");
    const draw = () => value.replaceChildren(...(to.value === "time" ? [h("label", null, "Time", time)] : to.value === "offset" || to.value === "shift" ? [h("label", null, to.value === "offset" ? "Offset" : "Records", number)] : []));
    const form = h("div", { class: "line buttons" }, h("label", null, "Topic", topic), h("label", null, "Reset to", to), value);
    const given = () => {
      const wanted = { action: "reset", to: to.value };
      if (to.value === "time") wanted.value = new Date(time.value).getTime();
      else if (to.value === "offset" || to.value === "shift") wanted.value = number.valueAsNumber;
      if (topic.value) wanted.partitions = [{ topic: topic.value }];
      return wanted;
    };
    form.addEventListener("change", draw);
    this.act({ form, given }, "Reset offsets");
  }

  set(row) {
    const input = h("input", { value: row.source === "group" ? row.value : "", placeholder: `${row.value} (${row.source})` });
    const form = h("div", null, h("label", null, `${row.name} (empty: the node's value)`, input));
    this.act({ action: "set", form, given: () => ({ action: "set", name: row.name, value: input.value || null }) }, "Change a setting");
  }
}
