// The page of the run report. While a run is under way, it asks for news every two seconds.

import { fetchJson, fetchRuns } from "../api.js";
import { announce, element, put } from "../dom.js";
import { drawReport } from "../report_view.js";

export const title = "Report";
const POLL_MILLISECONDS = 2000;

export async function show(main, parameters) {
  const runs = await fetchRuns();
  const names = runs.map((run) => run.name);
  let chosen = parameters.getAll("run").filter((name) => names.includes(name));
  if (chosen.length === 0) chosen = names.slice(0, 1);

  const content = element("div", {});
  const problem = element("p", { class: "fault", role: "alert" });
  put(main, element("h1", {}, "Report"), chooser(names, chosen), problem, content);
  const query = new URLSearchParams();
  for (const name of chosen) query.append("run", name);

  let timer = null;
  let isLeft = false;
  let shown = "";
  const refresh = async () => {
    try {
      const data = await fetchJson("/api/report", query);
      problem.textContent = "";
      const text = JSON.stringify(data);
      if (isLeft) return;
      if (text !== shown) {
        const isFirst = shown === "";
        shown = text;
        keepingPlace(content, () => drawReport(content, data));
        if (!isFirst) announce("The report has new numbers.");
      }
      if (data.runs.every((run) => run.is_finished)) return;
    } catch (error) {
      problem.textContent = error.message;
    }
    if (!isLeft) timer = setTimeout(refresh, POLL_MILLISECONDS);
  };
  await refresh();
  return () => {
    isLeft = true;
    clearTimeout(timer);
  };
}

// Draw new content without moving the page, closing what is open, or losing the focus.
function keepingPlace(content, draw) {
  const top = window.scrollY;
  const open = [...content.querySelectorAll("details")].map((node) => node.open);
  const focusable = () => [...content.querySelectorAll("[tabindex], summary, a, button")];
  const focused = focusable().indexOf(document.activeElement);
  draw();
  [...content.querySelectorAll("details")].forEach((node, index) => {
    node.open = open[index] ?? node.open;
  });
  if (focused >= 0) focusable()[focused]?.focus({ preventScroll: true });
  window.scrollTo(window.scrollX, top);
}

function chooser(names, chosen) {
  if (names.length < 2) return null;
  const change = () => {
    const boxes = [...fieldset.querySelectorAll("input:checked")];
    const parameters = new URLSearchParams();
    for (const box of boxes) parameters.append("run", box.value);
    location.hash = `#/report?${parameters}`;
  };
  const fieldset = element(
    "fieldset",
    { class: "chooser" },
    element("legend", {}, "Runs in this report"),
    names.map((name) =>
      element(
        "label",
        {},
        element("input", { type: "checkbox", value: name, checked: chosen.includes(name), onchange: change }),
        name,
      ),
    ),
  );
  return fieldset;
}
