// The first page: all runs, with their rounds and evaluations.

import { fetchRuns } from "../api.js";
import { element, put, table } from "../dom.js";

export const title = "Runs";

export async function show(main) {
  const runs = await fetchRuns();
  put(
    main,
    element("h1", {}, "Runs"),
    runs.length > 1
      ? element("p", {}, element("a", { href: reportAddress(runs) }, "Compare the reports of all runs"))
      : null,
    runs.map(runSection),
  );
}

function reportAddress(runs) {
  const parameters = new URLSearchParams();
  for (const run of runs) parameters.append("run", run.name);
  return `#/report?${parameters}`;
}

function runSection(run) {
  const setLink = (set) => {
    const parameters = new URLSearchParams({ run: run.name, set: set.id });
    return element("a", { href: `#/trajectories?${parameters}` }, set.title);
  };
  const rows = run.sets.map((set) => [
    setLink(set),
    set.kind,
    set.threshold === null ? "–" : set.threshold.toFixed(3),
    set.fault ? element("span", { class: "fault" }, "damaged: ", set.fault) : "ready",
  ]);
  for (const round of run.open_rounds) {
    rows.push([round.title, "round", "–", `being sampled: ${round.shards} shards so far`]);
  }
  const facts = [run.method, run.task, run.agent].filter(Boolean).join(" · ");
  return element(
    "section",
    { class: "card" },
    element("h2", {}, run.name, " ", element("span", { class: "tag" }, run.is_finished ? "finished" : "under way")),
    element("p", { class: "quiet" }, facts, facts ? " · " : "", element("code", {}, run.directory)),
    element(
      "p",
      { class: "links" },
      element("a", { href: reportAddress([run]) }, "Report"),
      element("a", { href: `#/trajectories?${new URLSearchParams({ run: run.name })}` }, "All trajectories"),
    ),
    rows.length
      ? table({
          caption: `Rounds and evaluations of ${run.name}`,
          hideCaption: true,
          headings: ["Trajectories", "Kind", "Threshold K", "State"],
          rows,
          numeric: [2],
        })
      : element("p", { class: "empty" }, "No round is sampled yet and no evaluation is finished."),
  );
}
