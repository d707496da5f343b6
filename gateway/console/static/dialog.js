// An action in two steps: the plan of what would happen, then the confirmation of exactly that plan.

import { post } from "./api.js";
import { count, h, table } from "./dom.js";

const NAMES = { topic: "Topic", partition: "Partition", committed: "Committed", new: "New", moved: "Moved", lag: "Lag then", setting: "Setting", before: "Before", after: "After" };
const shown = (value) => (typeof value === "number" ? count(value) : value === null || value === undefined ? "–" : String(value));

// Shows the dialog; returns what was done, or null. `given.form` and `given.given()` ask for values first.
export function confirmAction({ group, form, given, ...fixed }, title) {
  return new Promise((resolve) => {
    let done = null;
    let asked = 0;
    const body = h("div", { class: "stack", "aria-live": "polite" });
    const go = h("button", { class: "danger", disabled: true }, "Do it");
    const close = h("button", { onclick: () => dialog.close() }, "Cancel");
    const dialog = h("dialog", { "aria-label": title, onclose: () => { dialog.remove(); resolve(done); } },
      h("div", { class: "stack" }, h("h2", null, title), form || null, body, h("div", { class: "buttons" }, go, close)));
    const wanted = () => ({ group, ...fixed, ...(given ? given() : {}) });
    const fail = (error) => body.replaceChildren(h("p", { class: "blocked" }, error.message));

    async function plan() {
      const turn = ++asked;
      go.disabled = true;
      try {
        const found = await post("action/plan", wanted());
        if (turn !== asked) return;
        draw(found);
      } catch (error) {
        if (turn === asked) fail(error);
      }
    }

    function draw(found) {
      const numeric = (column) => found.rows.every((row) => typeof row[column] === "number" || row[column] === null);
      body.replaceChildren(
        h("p", null, "This will ", h("b", { class: "wrap" }, found.what), "."),
        ...(found.rows.length ? [table(found.columns.map((column) => ({ name: NAMES[column] || column, num: numeric(column), class: "wrap", of: (row) => shown(row[column]) })), found.rows.slice(0, 200))] : []),
        ...(found.warnings.length ? [h("ul", { class: "notes" }, found.warnings.map((text) => h("li", null, text)))] : []),
        ...(found.blocked ? [h("p", { class: "blocked" }, found.blocked)] : []),
        h("p", { class: "soft small" }, "The journal records who did this."));
      go.disabled = Boolean(found.blocked);
      go.onclick = async () => {
        go.disabled = true;
        try {
          done = (await post("action", { ...wanted(), digest: found.digest })).done;
          dialog.close();
        } catch (error) {
          fail(error);
        }
      };
    }

    if (form) {
      form.addEventListener("change", plan);
      form.addEventListener("input", (event) => { if (event.target.type !== "datetime-local") { clearTimeout(dialog.waiting); dialog.waiting = setTimeout(plan, 300); } });
    }
    document.body.append(dialog);
    dialog.showModal();
    plan();
  });
}
