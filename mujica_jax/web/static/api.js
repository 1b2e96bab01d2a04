// Requests to the server. An answer with an error becomes an Error with the server's sentence.

export async function fetchJson(path, parameters = new URLSearchParams(), options = {}) {
  const query = parameters.toString();
  let response;
  try {
    response = await fetch(query ? `${path}?${query}` : path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `mujica view` still running?");
  }
  if (response.status === 304) return null;
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error ?? `The server answered with status ${response.status}.`);
  return content;
}

// Return the runs that the server shows.
export async function fetchRuns() {
  return (await fetchJson("/api/runs")).runs;
}

// Return one trajectory. `place` is a row of the list, or the parts of an address.
export function fetchTrajectory({ run, set, shard, row }) {
  const path = [run, "trajectories", set, shard, row].map(encodeURIComponent).join("/");
  return fetchJson(`/api/runs/${path}`);
}

// Return the address of the page of one trajectory.
export function trajectoryAddress({ run, set, shard, row }) {
  return `#/trajectory?${new URLSearchParams({ run, set, shard, row })}`;
}
