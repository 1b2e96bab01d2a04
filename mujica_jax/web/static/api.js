// Requests to the server. An answer with an error becomes an Error with the server's sentence.

const KEY = "mujica-api-key";

export async function fetchJson(path, parameters = new URLSearchParams(), options = {}) {
  const query = parameters.toString();
  const response = await fetchAnswer(query ? `${path}?${query}` : path, options);
  if (response.status === 304) return null;
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error ?? `The server answered with status ${response.status}.`);
  return content;
}

// Return the answer of the server. If it needs an API key, the user is asked for it.
async function fetchAnswer(path, options) {
  let response;
  try {
    response = await fetch(path, withKey(options));
    if (response.status === 401 && askForKey()) response = await fetch(path, withKey(options));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is the program still running?");
  }
  return response;
}

function withKey(options) {
  const key = sessionStorage.getItem(KEY);
  if (key === null) return options;
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}

// Ask for the API key, keep it until the tab is closed, and return whether there is one.
function askForKey() {
  const key = window.prompt("This server needs an API key:");
  if (!key) return false;
  sessionStorage.setItem(KEY, key.trim());
  return true;
}

// Ask the agent, and call `onEvent` with everything that happens in the episode.
export async function ask(request, onEvent, signal) {
  const response = await fetchAnswer("/api/ask", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) {
    const content = await response.json().catch(() => ({}));
    throw new Error(content.error ?? `The server answered with status ${response.status}.`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    // An event ends with an empty line.
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) onEvent(JSON.parse(event.replace(/^data: /, "")));
  }
}

// Return the runs that the server shows.
export async function fetchRuns() {
  return (await fetchJson("/api/runs")).runs;
}

// Return one trajectory. `place` is a row of the list, or the parts of an address. `asked` is the id
// of an episode of the page that asks.
export function fetchTrajectory({ run, set, shard, row, asked }) {
  if (asked) return fetchJson(`/api/ask/${encodeURIComponent(asked)}`);
  const path = [run, "trajectories", set, shard, row].map(encodeURIComponent).join("/");
  return fetchJson(`/api/runs/${path}`);
}

// Return the address of the page of one trajectory.
export function trajectoryAddress({ run, set, shard, row }) {
  return `#/trajectory?${new URLSearchParams({ run, set, shard, row })}`;
}
