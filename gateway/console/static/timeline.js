// The ownership timeline: one lane per partition, coloured by member, on one time axis. The user pans by dragging or
// with the arrow keys, and zooms with + and − or with Ctrl and the wheel. "live" follows the present.

import { clock, day, h, s } from "./dom.js";

const LANE = 20, GAP = 3, HEAD = 26, MARKS = 28, AXIS = 26, MIN_MS = 1000, MAX_MS = 7 * 86400000;
const SHORT = 60000;
const GLYPHS = { joined: "+", left: "−", lost: "×", fenced: "×", silent: "~", loaded: "◇", seen: "!", deleted: "∅", missing: "?" };
const STEPS = [100, 200, 500, 1000, 2000, 5000, 10000, 15000, 30000, 60000, 120000, 300000, 600000, 900000, 1800000, 3600000,
  7200000, 14400000, 21600000, 43200000, 86400000];

export class Timeline {
  constructor({ onwindow, onpick, slot }) {
    this.onwindow = onwindow;
    this.onpick = onpick;
    this.slot = slot;
    this.data = null;
    this.span = 5 * 60000;
    this.to = Date.now();
    this.live = true;
    this.skew = 0;
    this.hot = null;
    this.tip = h("div", { class: "tip", hidden: true });
    this.svg = s("svg", { tabindex: "0", role: "application", "aria-roledescription": "timeline" });
    this.element = h("div", { class: "timeline" }, this.svg, this.tip);
    this.bind();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.timer = setInterval(() => { if (this.live && !document.hidden) this.draw(); }, 500);
  }

  close() {
    clearInterval(this.timer);
    this.observer.disconnect();
  }

  get now() {
    return Date.now() + this.skew;
  }

  get window() {
    if (this.live) this.to = this.now + this.span * 0.02;
    return [this.to - this.span, this.to];
  }

  set(data) {
    this.data = data;
    this.draw();
  }

  zoom(factor, around) {
    const [from, to] = this.window;
    const span = Math.min(Math.max(this.span * factor, MIN_MS), MAX_MS);
    if (!this.live) {
      const center = around === undefined ? (from + to) / 2 : around;
      this.to = Math.min(center + ((to - center) * span) / this.span, this.now + span * 0.02);
    }
    this.span = span;
    this.changed();
  }

  pan(ms) {
    this.window;
    this.to += ms;
    this.live = this.to >= this.now;
    this.changed();
  }

  pause() {
    this.window;
    this.live = false;
    this.changed();
  }

  show(from, to) {
    this.live = false;
    this.span = Math.min(Math.max(to - from, MIN_MS), MAX_MS);
    this.to = to;
    this.changed();
  }

  follow(span) {
    if (span) this.span = span;
    this.live = true;
    this.changed();
  }

  changed() {
    this.draw();
    this.onwindow();
  }

  bind() {
    const svg = this.svg;
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: () => this.pan(-this.span / 6), ArrowRight: () => this.pan(this.span / 6), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
        "-": () => this.zoom(2), End: () => this.follow(), l: () => this.follow() };
      if (moves[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        moves[event.key]();
      }
    });
    svg.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan((event.deltaX / this.inner) * this.span);
      }
    }, { passive: false });
    let held = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      held = { x: event.clientX, to: this.window[1], moved: false };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (held) {
        const dx = event.clientX - held.x;
        if (Math.abs(dx) > 3) {
          held.moved = true;
          svg.classList.add("drag");
          this.to = Math.min(held.to - (dx / this.inner) * this.span, this.now + this.span * 0.02);
          this.live = this.to >= this.now;
          this.draw();
        }
      }
      this.point(event);
    });
    const release = (event) => {
      if (held && !held.moved) this.pick(event);
      else if (held) this.onwindow();
      held = null;
      svg.classList.remove("drag");
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("pointerleave", () => { this.tip.hidden = true; this.cross && this.cross.setAttribute("visibility", "hidden"); });
    svg.addEventListener("dblclick", (event) => this.zoom(0.4, this.at(event)));
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    const [from] = this.window;
    return from + ((event.clientX - box.left - this.gutter) / this.inner) * this.span;
  }

  pick(event) {
    const mark = this.nearest(event);
    if (mark) this.onpick(mark);
  }

  nearest(event) {
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, distance = 12;
    for (const each of this.hits || []) {
      const d = Math.hypot(each.x - x, each.y - y);
      if (d < distance) { best = each.mark; distance = d; }
    }
    return best;
  }

  point(event) {
    if (!this.data) return;
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const at = this.at(event);
    if (x < this.gutter || x > this.gutter + this.inner) { this.tip.hidden = true; return; }
    this.cross.setAttribute("transform", `translate(${x} 0)`);
    this.cross.setAttribute("visibility", "visible");
    const mark = this.nearest(event);
    const lane = (this.rows || []).find((row) => y >= row.y && y < row.y + LANE + GAP);
    const said = mark ? [mark.what, h("br"), clock(mark.at, true)] : lane ? this.told(lane.lane, at) : [clock(at, this.span < SHORT)];
    this.tip.replaceChildren(...said);
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(Math.max(x + 14, 0), box.width - wide - 4)}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  told(lane, at) {
    const owners = lane.spans.filter((span) => span.from <= at && (span.to === null || span.to > at));
    const names = owners.map((span) => (span.member ? this.name(span.member) : `${span.merged} short spans`));
    const waiting = lane.waits.find((wait) => wait.from <= at && (wait.to === null || wait.to > at));
    const quiet = owners.length && this.quiet(owners[0].member, at);
    return [`${lane.topic}[${lane.partition}]: ${names.join(" and ") || "no owner"}${quiet ? ", silent" : ""}`,
      ...(waiting ? [h("br"), `${this.name(waiting.target)} waits for ${this.name(waiting.source)}`] : []), h("br"), clock(at, this.span < SHORT)];
  }

  quiet(member, at) {
    return this.data.marks.some((mark) => mark.kind === "lost" && mark.member === member && mark.silent && at > mark.at - mark.silent && at < mark.at);
  }

  name(member) {
    const known = this.data.members[member];
    return known ? known.label : member;
  }

  // --- drawing -----------------------------------------------------------------------------------------------

  draw() {
    const width = this.element.clientWidth;
    if (!this.data || !width) return;
    const narrow = width < 520;
    this.gutter = narrow ? 34 : 46;
    this.inner = Math.max(width - this.gutter - 8, 50);
    const [from, to] = this.window;
    const x = (ms) => this.gutter + Math.min(Math.max((ms - from) / this.span, 0), 1) * this.inner;
    const sees = (a, b) => a <= to && (b === null || b >= from);
    const parts = [];
    this.rows = [];
    this.hits = [];
    let y = MARKS + AXIS;
    let topic = null;
    for (const lane of this.data.lanes) {
      if (lane.topic !== topic) {
        topic = lane.topic;
        y += topic === this.data.lanes[0].topic ? 0 : 6;
        parts.push(s("text", { class: "tl-name", x: 2, y: y + 17 }, topic.length > 60 ? `${topic.slice(0, 59)}…` : topic));
        y += HEAD;
      }
      this.rows.push({ lane, y });
      y += LANE + GAP;
    }
    const height = y + 6;
    const bands = this.data.rebalances.filter((each) => sees(each.from, each.to ?? to)).map((each) => {
      const left = x(each.from), right = x(each.to ?? Math.min(this.now, to));
      return [s("rect", { class: "tl-band", x: left, y: AXIS, width: Math.max(right - left, 1), height: height - AXIS }),
        s("line", { class: "tl-band-edge", x1: left, x2: left, y1: AXIS, y2: height })];
    });
    for (const { lane, y: top } of this.rows) this.lane(parts, lane, top, x, sees, to);
    const svg = this.svg;
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", this.summary(from, to));
    this.cross = s("line", { class: "tl-cross", y1: AXIS, y2: height, visibility: "hidden" });
    svg.replaceChildren(...[hatch(), axis(from, to, x, this.inner, height), bands, parts, this.marks(x, sees),
      this.now < to ? s("line", { class: "tl-now", x1: x(this.now), x2: x(this.now), y1: AXIS, y2: height }) : null, this.cross].flat(Infinity).filter(Boolean));
  }

  lane(parts, lane, top, x, sees, to) {
    parts.push(s("text", { class: "tl-part", x: this.gutter - 8, y: top + 14 }, lane.partition));
    parts.push(s("line", { class: "tl-base", x1: this.gutter, x2: this.gutter + this.inner, y1: top + LANE / 2, y2: top + LANE / 2 }));
    for (const span of lane.spans) {
      if (!sees(span.from, span.to)) continue;
      const left = span.earlier ? x(this.data.from) : x(span.from);
      const right = x(span.to ?? Math.min(this.now, to));
      const width = Math.max(right - left, 1.5);
      const kind = span.member === null ? "tl-many" : `tl-span fill m${this.slot(span.member)}`;
      parts.push(s("rect", { class: `${kind}${this.hot === span.member && span.member ? " tl-hot" : ""}`, x: left, y: top, width, height: LANE, rx: width > 8 ? 3 : 0 }));
      if (span.member && width > 58) {
        const start = Math.max(left, this.gutter) + 7;
        const room = Math.floor((right - start - 6) / 6.3);
        const name = this.name(span.member);
        if (room > 4) parts.push(s("text", { class: "tl-label", x: start, y: top + 14 }, name.length > room ? `${name.slice(0, room - 1)}…` : name));
      }
    }
    for (const mark of this.data.marks) {
      if (mark.kind !== "lost" || !mark.silent) continue;
      const span = lane.spans.find((each) => each.member === mark.member && each.from < mark.at && (each.to === null || each.to >= mark.at));
      const from = span && Math.max(mark.at - mark.silent, span.from);
      if (!span || !sees(from, mark.at)) continue;
      parts.push(s("rect", { class: "tl-silent", x: x(from), y: top, width: Math.max(x(mark.at) - x(from), 1), height: LANE }));
    }
    for (const wait of lane.waits) {
      if (!sees(wait.from, wait.to)) continue;
      const left = x(wait.from), right = x(wait.to ?? Math.min(this.now, to));
      parts.push(s("rect", { class: `tl-wait stroke m${this.slot(wait.target)}`, x: left, y: top + 2, width: Math.max(right - left, 2), height: LANE - 4, rx: 2 }));
    }
    for (const mark of this.data.marks) {
      if (mark.kind !== "refused" || mark.topic !== lane.topic || mark.partition !== lane.partition || !sees(mark.at, mark.at)) continue;
      const at = x(mark.at), middle = top + LANE / 2;
      parts.push(s("path", { class: "tl-refused", d: `M${at} ${middle - 6}l6 6l-6 6l-6 -6z` }));
      this.hits.push({ x: at, y: middle, mark });
    }
  }

  // Marks that would overlap share one place. Only the most important one is drawn, and its text gives the number of
  // the others.
  marks(x, sees) {
    const order = ["lost", "fenced", "missing", "deleted", "seen", "silent", "left", "joined", "loaded"];
    const shown = [];
    for (const mark of this.data.marks) {
      if (!(mark.kind in GLYPHS) || !sees(mark.at, mark.at)) continue;
      const at = x(mark.at), last = shown[shown.length - 1];
      if (last && at - last.x < 17) {
        last.all.push(mark);
        if (order.indexOf(mark.kind) < order.indexOf(last.mark.kind)) last.mark = mark;
      } else shown.push({ x: at, mark, all: [mark] });
    }
    return shown.map(({ x: at, mark, all }) => {
      const said = all.length > 1 ? { ...mark, what: `${mark.what}, and ${all.length - 1} more` } : mark;
      this.hits.push({ x: at, y: AXIS + 13, mark: said });
      return s("g", { class: `tl-mark ${mark.kind}`, transform: `translate(${at} ${AXIS + 13})` },
        s("circle", { r: 8 }), s("text", { y: 0.5 }, all.length > 1 && mark.kind === "joined" ? String(all.length) : GLYPHS[mark.kind]));
    });
  }

  summary(from, to) {
    const members = new Set(this.data.lanes.flatMap((lane) => lane.spans.map((span) => span.member)));
    const lost = this.data.marks.filter((mark) => mark.kind === "lost").length;
    return `Who owned which partition from ${day(from)} ${clock(from)} to ${clock(to)}: ${this.data.lanes.length} partitions, ${members.size} members, `
      + `${this.data.rebalances.length} rebalances, ${lost} lost members. Arrow keys move, plus and minus zoom, End follows the present. The history in words follows.`;
  }
}

function hatch() {
  return s("defs", null, s("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { width: 7, height: 7, class: "hatch-paper" }), s("rect", { width: 3, height: 7, class: "hatch-line" })));
}

export function axis(from, to, x, inner, height) {
  const step = STEPS.find((each) => ((to - from) / each) * 78 < inner) || 86400000;
  const offset = new Date(from).getTimezoneOffset() * 60000;
  const parts = [];
  let last = null;
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) {
    const px = x(at);
    const date = day(at);
    const text = step >= 86400000 ? date : step >= 60000 ? clock(at).slice(0, 5) : step >= 1000 ? clock(at) : clock(at, true);
    parts.push(s("line", { class: "tl-tick", x1: px, x2: px, y1: AXIS - 6, y2: height }));
    const atEdge = px > x(to) - 28; // a label around the last tick would be cut off
    parts.push(s("text", { class: "tl-axis", x: atEdge ? x(to) : px, y: 14, "text-anchor": atEdge ? "end" : "middle" }, last !== null && last !== date && step < 86400000 ? date : text));
    last = date;
  }
  return parts;
}

// --- lag -----------------------------------------------------------------------------------------------------

// A chart of each partition's lag in the timeline's window: one line per partition, in the colour of its current owner.
export function lagChart(points, from, to, width, colour) {
  const height = 120, gutter = width < 520 ? 34 : 46, inner = Math.max(width - gutter - 8, 50);
  const lines = new Map();
  let most = 1;
  for (const [topic, partition, at, lag] of points) {
    if (at < from || at > to) continue;
    const key = `${topic} ${partition}`;
    if (!lines.has(key)) lines.set(key, { topic, partition, dots: [] });
    lines.get(key).dots.push([at, lag]);
    most = Math.max(most, lag);
  }
  const x = (ms) => gutter + ((ms - from) / (to - from)) * inner;
  const y = (lag) => height - 8 - (lag / most) * (height - 22);
  const label = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : String(Math.round(value)));
  const parts = [0, most / 2, most].filter((each, index) => index !== 1 || most > 3).map((each) => [
    s("line", { class: "tl-tick", x1: gutter, x2: gutter + inner, y1: y(each), y2: y(each) }),
    s("text", { class: "tl-part", x: gutter - 8, y: y(each) + 4 }, label(each))]);
  for (const { topic, partition, dots } of lines.values()) {
    const d = dots.map(([at, lag], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(lag).toFixed(1)}`).join("");
    parts.push(s("path", { class: `stroke m${colour(topic, partition)}`, d: dots.length > 1 ? d : `${d}h2` }, s("title", null, `${topic}[${partition}]`)));
  }
  return s("svg", { class: "lag", width: "100%", height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Lag of ${lines.size} partitions, at most ${Math.round(most)} records` }, parts);
}

export const durations = [["10 s", 10000], ["1 min", 60000], ["5 min", 300000], ["1 h", 3600000], ["1 day", 86400000], ["1 week", 7 * 86400000]];
