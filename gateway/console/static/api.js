// Requests to the console's APIs, and streams of events.

export const session = { csrf: null, user: null, readOnly: false, needsLogin: false, node: null };

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function answer(response) {
  let data = {};
  try {
    data = await response.json();
  } catch {
    // The body is not JSON or is incomplete, for example because a proxy in front of the console responded.
  }
  if (response.status === 401) window.dispatchEvent(new Event("login"));
  if (!response.ok) throw new Refused(response.status, data.error || `The console answered ${response.status}.`);
  return data;
}

// A console that does not answer refuses, too, so that no page goes on to show old figures without a word.
async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The console does not answer. What is shown may be old.");
  }
}

export async function get(path, parameters, signal) {
  const given = Object.entries(parameters || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = given.length ? `?${new URLSearchParams(given)}` : "";
  return answer(await ask(`/api/${path}${query}`, { signal, headers: { Accept: "application/json" } }));
}

export async function post(path, data) {
  return answer(await ask(`/api/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": session.csrf || "" },
    body: JSON.stringify(data || {}),
  }));
}

export async function refreshSession() {
  Object.assign(session, await get("session"));
}

// Opens a stream and returns a function that closes it. The stream is closed while the page is hidden, so that a hidden
// page costs nothing.
export function stream(path, parameters, handlers) {
  let source = null;
  let closed = false;
  let retry = 0;
  const open = () => {
    if (closed || document.hidden || source) return;
    source = new EventSource(`/api/live/${path}?${new URLSearchParams(parameters || {})}`);
    for (const [name, handler] of Object.entries(handlers)) {
      if (name === "open" || name === "down") continue;
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    source.onopen = () => handlers.open && handlers.open();
    source.onerror = () => {
      if (source && source.readyState === EventSource.CLOSED) {
        close();
        retry = setTimeout(again, 3000);
      }
      if (handlers.down) handlers.down();
    };
  };
  // The node refuses a stream without a session, for example after it has restarted.
  const again = async () => {
    await refreshSession().catch(() => {});
    if (session.needsLogin) window.dispatchEvent(new Event("login"));
    else open();
  };
  const close = () => {
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  };
  const turn = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", turn);
  open();
  return () => {
    closed = true;
    document.removeEventListener("visibilitychange", turn);
    close();
  };
}
