// The frame of the console: it shows the page that the URL's fragment names, the login form, and the light or dark
// theme.

import { post, refreshSession, Refused, session } from "./api.js";
import { h, notice } from "./dom.js";

const PAGES = {
  "": ["Overview", () => import("./overview.js")],
  groups: ["Groups", () => import("./groups.js")],
  topics: ["Topics", () => import("./topics.js")],
  transactions: ["Transactions", () => import("./more.js")],
  share: ["Share groups", () => import("./more.js")],
  nodes: ["Nodes", () => import("./more.js")],
  access: ["Access", () => import("./more.js")],
  settings: ["Settings", () => import("./more.js")],
  group: [null, () => import("./group.js")],
  topic: [null, () => import("./topic.js")],
};
const PARENT = { group: "groups", topic: "topics" };

let leave = null;
let shown = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path in PAGES ? path : "", parameters: new URLSearchParams(query || "") };
}

async function show() {
  const turn = ++shown;
  const main = document.getElementById("main");
  if (leave) leave();
  leave = null;
  if (session.needsLogin) return login(main);
  const { page, parameters } = route();
  navigation(PARENT[page] || page);
  const holder = h("div", { class: "stack" });
  try {
    const module = await PAGES[page][1]();
    const done = await module.show(holder, parameters, page);
    if (turn !== shown) return done && done();
    leave = done;
  } catch (error) {
    if (turn !== shown) return undefined;
    holder.replaceChildren(h("h1", null, error.status === 404 ? "Not found" : error.status === 403 ? "Not permitted" : "That did not work"),
      h("p", { class: "soft" }, error instanceof Refused ? error.message : `${error}`));
    if (!(error instanceof Refused)) console.error(error);
  }
  main.replaceChildren(...holder.childNodes);
  if (turn > 1) main.focus({ preventScroll: true });
  scrollTo(0, 0);
  return undefined;
}

function navigation(current) {
  const links = Object.entries(PAGES).filter(([, [name]]) => name).map(([page, [name]]) =>
    h("a", { href: `#/${page}`, "aria-current": page === current ? "page" : null }, name));
  document.getElementById("nav").replaceChildren(...links);
  const name = PAGES[current][0];
  document.title = current ? `${name} · Sluice` : "Sluice";
  const out = session.user && h("button", { class: "plain", onclick: async () => { await post("logout"); location.reload(); } }, "Log out");
  document.getElementById("who").replaceChildren(...[
    session.readOnly && h("span", { class: "tag" }, "read-only"),
    session.user && h("span", { class: "wrap" }, session.user.replace(/^User:/, "")),
    out,
    h("button", { class: "plain", onclick: theme, title: "Light or dark", "aria-label": "Switch between light and dark" }, "◐"),
  ].filter(Boolean));
}

function login(main) {
  document.getElementById("nav").replaceChildren();
  const said = h("p", { class: "bad small", role: "alert" });
  const ended = LOGIN_ENDS[route().parameters.get("login")];
  const user = h("input", { name: "user", autocomplete: "username", required: true });
  const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
  const form = h("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      said.replaceChildren();
      try {
        Object.assign(session, await post("login", { user: user.value, password: password.value }));
        show();
      } catch (error) {
        said.replaceChildren(error.message);
        password.value = "";
      }
    },
  }, h("label", null, "User", user), h("label", null, "Password", password), said, h("button", { class: "main", type: "submit" }, "Log in"));
  main.replaceChildren(h("div", { class: "login card stack" }, h("h1", null, "Log in"),
    session.provider && byProvider(ended),
    h("p", { class: "soft small" }, `${session.provider ? "Or use" : "Use"} the name and password with which your clients log in (SCRAM).`), form, session.takesTokens ? byToken() : null));
  (main.querySelector("a.button") || user).focus();
}

const LOGIN_ENDS = {
  away: "The provider does not answer. Try again, or use a name and a password.",
  denied: "The provider refused the login.",
  late: "The login took longer than ten minutes. Try again.",
  often: "Too many logins failed. Wait a minute, then try again.",
  provider: "The provider's answer cannot be used. The gateway's log says why.",
  state: "This login was not begun in this window of the browser. Try again.",
  token: "The provider's token is refused. The gateway's log says why.",
};
const PLACE = "sluice-place";

function byProvider(ended) {
  const remember = () => sessionStorage.setItem(PLACE, location.hash.startsWith("#/?") ? "" : location.hash);
  return h("div", { class: "stack" }, ended && h("p", { class: "bad small", role: "alert" }, ended),
    h("a", { class: "button", href: "/api/oidc/login", onclick: remember }, `Log in at ${session.provider}`));
}

// The provider sends the browser to the overview. Go back to the page on which the login began.
function returnFromProvider() {
  if (session.needsLogin || !route().parameters.has("login")) return;
  const place = sessionStorage.getItem(PLACE) || "";
  sessionStorage.removeItem(PLACE);
  history.replaceState(null, "", place.startsWith("#/") ? place : "#/");
}

// A form for clusters whose users belong to an identity provider. It takes the access token with which a client would
// log in.
function byToken() {
  const said = h("p", { class: "bad small", role: "alert" });
  const token = h("textarea", { rows: 4, autocomplete: "off", spellcheck: "false", required: true });
  return h("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      said.replaceChildren();
      try {
        Object.assign(session, await post("login", { token: token.value.trim() }));
        show();
      } catch (error) {
        said.replaceChildren(error.message);
      }
      token.value = "";
    },
  }, h("label", null, "Or an access token (OAUTHBEARER)", token), said, h("button", { type: "submit" }, "Log in by token"));
}

function theme() {
  const dark = document.documentElement.dataset.theme !== "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  localStorage.setItem("theme", dark ? "dark" : "light");
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => { document.documentElement.dataset.theme = localStorage.getItem("theme") || (dark.matches ? "dark" : "light"); };
follow();
dark.addEventListener("change", follow);
addEventListener("hashchange", (event) => { if (event.newURL.includes("#main")) return; show(); });
addEventListener("login", async () => {
  await refreshSession();
  if (session.needsLogin) show();
  else notice("The session was over. A new one has begun; try again.");
});
addEventListener("unhandledrejection", (event) => { if (event.reason instanceof Refused) { notice(event.reason.message); event.preventDefault(); } });

await refreshSession();
returnFromProvider();
await show();
