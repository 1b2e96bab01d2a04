// The page: a hash router, the navigation, and one module for each page.
//
// An address is #/PAGE?name=value. A page is a module with `title` and `show(main, parameters)`.
// `show` fills `main` and may return a function that is called when the page is left. To add a
// page, write its module and add a line to PAGES.

import { announce, element, put } from "./dom.js";
import * as ask from "./pages/ask.js";
import * as compare from "./pages/compare.js";
import * as report from "./pages/report.js";
import * as runs from "./pages/runs.js";
import * as trajectories from "./pages/trajectories.js";
import * as trajectory from "./pages/trajectory.js";

// `navigation` is the text in the navigation; pages without it are reached from others.
const PAGES = {
  ask: { module: ask, navigation: "Ask" },
  runs: { module: runs, navigation: "Runs" },
  trajectories: { module: trajectories, navigation: "Trajectories" },
  report: { module: report, navigation: "Report" },
  trajectory: { module: trajectory },
  compare: { module: compare },
};
const FIRST_PAGE = "runs";

let leave = () => {};
// Counts the pages that were opened. A page that arrives late is dropped if another one was opened.
let visit = 0;

function currentAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path || FIRST_PAGE, parameters: new URLSearchParams(query) };
}

async function showPage() {
  const { name, parameters } = currentAddress();
  // Links such as #main move the focus and open no page.
  if (location.hash && !location.hash.startsWith("#/")) return;
  const page = Object.hasOwn(PAGES, name) ? PAGES[name] : null;
  visit += 1;
  const thisVisit = visit;
  leave();
  leave = () => {};
  drawNavigation(name);

  const main = document.getElementById("main");
  const content = element("div", { class: "page" }, element("p", { class: "quiet" }, "Loading …"));
  put(main, content);
  if (page === null) {
    put(
      content,
      element("h1", {}, "No such page"),
      element("p", {}, `There is no page “${name}”. `, element("a", { href: "#/runs" }, "See the runs")),
    );
    return;
  }
  document.title = `${page.module.title} · mujica_jax`;
  try {
    const left = await page.module.show(content, parameters);
    if (thisVisit === visit) leave = left ?? (() => {});
    else left?.();
  } catch (error) {
    put(
      content,
      element("h1", {}, page.module.title),
      element("p", { class: "fault", role: "alert" }, error.message),
    );
  }
  if (thisVisit === visit) announce(document.title);
}

function drawNavigation(current) {
  const list = element("ul", {});
  for (const [name, page] of Object.entries(PAGES)) {
    if (!page.navigation) continue;
    const link = element("a", { href: `#/${name}` }, page.navigation);
    const isCurrent = name === current || (name === "trajectories" && !PAGES[current]?.navigation);
    if (isCurrent) link.setAttribute("aria-current", "page");
    list.append(element("li", {}, link));
  }
  put(document.getElementById("navigation"), list);
}

window.addEventListener("hashchange", showPage);
showPage();
