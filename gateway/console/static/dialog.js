// A dialog for an action in two steps: it shows the plan of the changes, then the user confirms exactly this plan.

import { post } from "./api.js";
import { count, h, table } from "./dom.js";

const NAMES = { topic: "Topic", partition: "Partition", committed: "Committed", new: "New", moved: "Moved", lag: "Lag then", setting: "Setting", before: "Before", after: "After" };
const shown = (value) => (typeof value === "number" ? count(value) : value === null || value === undefined ? "–" : String(value));

// Shows the dialog. Resolves to a description of the completed action, or to null if there was none. If the action
// needs values, `form` asks for them and `given()` returns them.
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
          if (error.status !== 409) return fail(error);
          await plan();
          body.prepend(h("p", { class: "blocked" }, error.message));
        }
        return undefined;
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
