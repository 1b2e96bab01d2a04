// The page of one trajectory, and the other attempts at its question in all runs.

import { fetchJson, fetchRuns, fetchTrajectory, trajectoryAddress } from "../api.js";
import { element, number, put, table } from "../dom.js";
import { trajectoryFacts, trajectoryViews } from "../trajectory_view.js";
import { compareAddress } from "./trajectories.js";

export const title = "Trajectory";
const MAX_ATTEMPTS = 100;

export async function show(main, parameters) {
  const place = Object.fromEntries(["run", "set", "shard", "row", "asked"].map((name) => [name, parameters.get(name) ?? ""]));
  const trajectory = await fetchTrajectory(place);
  const others = element("section", { class: "card", "aria-label": "Other attempts", hidden: Boolean(place.asked) });
  const listAddress = place.asked ? "#/ask" : `#/trajectories?${new URLSearchParams({ run: place.run, set: place.set })}`;
  put(
    main,
    element("p", { class: "links" }, element("a", { href: listAddress }, place.asked ? "Ask another question" : `All trajectories of ${trajectory.set_title}`)),
    element("h1", {}, trajectory.question ?? `Question ${trajectory.question_id}`),
    element("section", { class: "card", "aria-label": "Facts" }, trajectoryFacts(trajectory)),
    trajectoryViews([trajectory]),
    others,
  );
  // An episode of the page that asks belongs to no run.
  if (!place.asked) await showOthers(others, trajectory);
}

// List the attempts at the same question, of all runs.
async function showOthers(section, trajectory) {
  section.append(element("h2", {}, "Other attempts at this question"));
  const runs = await fetchRuns();
  const rows = [];
  for (const run of runs) {
    const titles = new Map(run.sets.map((set) => [set.id, set.title]));
    const query = new URLSearchParams({ question: trajectory.question_id, limit: MAX_ATTEMPTS });
    const data = await fetchJson(`/api/runs/${encodeURIComponent(run.name)}/trajectories`, query);
    for (const row of data.rows) {
      const place = { run: run.name, set: row.set, shard: row.shard, row: row.row };
      const isThis =
        run.name === trajectory.run && row.set === trajectory.set && row.shard === trajectory.shard && row.row === trajectory.row;
      if (isThis) continue;
      rows.push([
        element("a", { href: trajectoryAddress(place) }, `${run.name}, ${titles.get(row.set) ?? row.set}, attempt ${row.attempt}`),
        row.answer || "no answer",
        number(row.reward, 3),
        `policy ${row.policy_version}`,
        element("a", { href: compareAddress(trajectory, place), "aria-label": `Compare with ${run.name}, ${row.set}, attempt ${row.attempt}` }, "side by side"),
      ]);
    }
  }
  section.append(
    rows.length
      ? table({
          caption: "Other attempts at this question",
          hideCaption: true,
          headings: ["Attempt", "Answer", "Reward", "Policy", "Compare"],
          numeric: [2],
          rows,
        })
      : element("p", { class: "empty" }, "There are none."),
  );
}
