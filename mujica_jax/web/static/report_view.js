// The content of the run report, drawn from the data of /api/report. The page and the file that
// `mujica report` writes share it.

import { lineChart } from "./charts.js";
import { duration, element, number, put, table } from "./dom.js";

// Draw the report into `place`. `data` has `runs` and `differences`.
export function drawReport(place, data) {
  const { runs } = data;
  put(
    place,
    ...runs.map(stateLine),
    ...runs.filter((run) => run.warnings.length > 0).map(warningList),
    element("section", { "aria-label": "Scores" }, element("h2", {}, "Scores"), runs.map(scoreTable)),
    element("section", { "aria-label": "Curves" }, element("h2", {}, "Curves"), chartGrid(runs)),
    element("section", { "aria-label": "Time" }, element("h2", {}, "Where the time went"), runs.map(timeTable)),
    element("section", { "aria-label": "Settings" }, element("h2", {}, "Settings"), settings(data)),
  );
}

function stateLine(run) {
  const last = run.last_line;
  const state = run.is_finished ? "finished" : "under way";
  return element(
    "p",
    {},
    element("strong", {}, run.name),
    " ",
    element("span", { class: run.is_finished ? "tag good" : "tag" }, state),
    last ? ` at ${last.phase}, step ${number(last.step)}` : " no metrics yet",
    last?.time ? `, ${new Date(last.time * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "",
  );
}

function warningList(run) {
  return element(
    "div",
    { class: "notice" },
    element("strong", {}, `Warnings of ${run.name}`),
    element("ul", {}, run.warnings.map((sentence) => element("li", {}, sentence))),
  );
}

function scoreTable(run) {
  if (run.phases.length === 0) return element("p", { class: "empty" }, `${run.name} has no scores yet.`);
  const rows = run.phases.map((phase) => [
    phase.name,
    number(phase.em, 1),
    number(phase.f1, 1),
    number(phase.em_sampled, 1),
    number(phase.f1_sampled, 1),
    phase.trajectories ? number(phase.trajectories) : "–",
    phase.trajectories ? number(phase.accepted) : "–",
    number(phase.searches),
    duration(phase.seconds),
  ]);
  return table({
    caption: `${run.name}: scores in percent on ${number(run.phases[0].questions)} held-out questions`,
    headings: ["Phase", "EM", "F1", "EM sampled", "F1 sampled", "Trajectories", "Accepted", "Searches", "Time"],
    numeric: [1, 2, 3, 4, 5, 6, 7, 8],
    rows,
  });
}

// Charts with one title are one chart. With several runs, a colour is a run and a dash is a series.
function chartGrid(runs) {
  const charts = new Map();
  runs.forEach((run, runNumber) => {
    for (const chart of run.charts) {
      const key = `${chart.title}/${chart.unit}/${chart.x}`;
      const merged = charts.get(key) ?? { ...chart, series: [] };
      if (chart.x_labels.length > merged.x_labels.length) merged.x_labels = chart.x_labels;
      chart.series.forEach((series, seriesNumber) => {
        const isAlone = runs.length === 1;
        merged.series.push(
          isAlone
            ? series
            : { ...series, name: `${run.name}: ${series.name}`, colour: runNumber % 6, dash: seriesNumber % 4 },
        );
      });
      charts.set(key, merged);
    }
  });
  if (charts.size === 0) return element("p", { class: "empty" }, "There are no metrics yet.");
  return element("div", { class: "charts" }, [...charts.values()].map(lineChart));
}

function timeTable(run) {
  if (run.times.length === 0) return element("p", { class: "empty" }, `${run.name} has finished no phase yet.`);
  const totals = new Map();
  for (const row of run.times) {
    for (const [stage, seconds] of Object.entries(row.stages)) totals.set(stage, (totals.get(stage) ?? 0) + seconds);
  }
  const stages = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
  const rows = run.times.map((row) => [
    row.name,
    ...stages.map((stage) => duration(row.stages[stage] ?? 0)),
    duration(row.total),
  ]);
  const sum = run.times.reduce((seconds, row) => seconds + row.total, 0);
  rows.push(["all", ...stages.map((stage) => `${duration(totals.get(stage))} (${share(totals.get(stage), sum)})`), duration(sum)]);
  return table({
    caption: `${run.name}: time by stage`,
    headings: ["Phase", ...stages.map((stage) => stage.replaceAll("_", " ")), "total"],
    numeric: [...stages, "total"].map((_, index) => index + 1),
    rows,
  });
}

function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)}%` : "–";
}

function settings({ runs, differences }) {
  const parts = [];
  if (runs.length > 1) {
    parts.push(
      differences.length
        ? table({
            caption: "Settings in which the runs differ",
            headings: ["Setting", ...runs.map((run) => run.name)],
            rows: differences.map((row) => [element("code", {}, row.setting), ...row.values.map(settingText)]),
          })
        : element("p", {}, "The runs have the same settings."),
    );
  }
  for (const run of runs) {
    parts.push(
      element(
        "details",
        { class: "card" },
        element("summary", {}, `All settings of ${run.name}`),
        element("p", { class: "quiet" }, `revision ${run.git_revision ?? "unknown"}, `, element("code", {}, run.directory)),
        element("pre", { class: "text", tabindex: "0" }, JSON.stringify(run.settings, null, 2)),
      ),
    );
  }
  return parts;
}

function settingText(value) {
  return element("code", {}, typeof value === "string" ? value : JSON.stringify(value));
}
