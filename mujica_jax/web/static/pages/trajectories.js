// The list of trajectories: filters, sorting and pages. The server does all three. The address
// holds the whole query, so a list can be kept as a bookmark.

import { fetchJson, fetchRuns, trajectoryAddress } from "../api.js";
import { announce, element, number, put } from "../dom.js";

export const title = "Trajectories";
const PAGE_ROWS = 50;
const TYPING_MILLISECONDS = 250;
const FILTER_NAMES = [
  "text", "kept", "stop_reason", "kind", "reward_min", "reward_max", "searches_min", "searches_max", "question",
];
// Columns: the name for sorting, the heading, the kind of the cell.
const COLUMNS = [
  ["question", "Question"],
  ["answer", "Answer"],
  ["reward", "Reward"],
  ["kept", "Kept"],
  ["stop_reason", "Ended by"],
  ["search_count", "Searches"],
  ["seconds", "Seconds"],
  ["attempt", "Attempt"],
  ["set", "Set"],
  ["kind", "Kind"],
];
const NUMERIC = new Set(["reward", "search_count", "seconds", "attempt"]);

export async function show(main, parameters) {
  const runs = await fetchRuns();
  const run = runs.find((entry) => entry.name === parameters.get("run")) ?? runs[0];
  return new TrajectoryList(main, runs, run, parameters).start();
}

class TrajectoryList {
  constructor(main, runs, run, parameters) {
    this.main = main;
    this.runs = runs;
    this.run = run;
    this.query = new URLSearchParams(parameters);
    this.query.set("run", run.name);
    this.titles = new Map(run.sets.map((set) => [set.id, set.title]));
    // The chosen rows, by their address, for the comparison of two.
    this.chosen = new Map();
    this.request = null;
    this.typing = null;
  }

  async start() {
    this.form = element("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
    this.notices = element("div", {});
    this.count = element("p", { class: "grow", role: "status" });
    this.compareLink = element("span", {});
    this.rows = element("div", { class: "rows table-scroll", tabindex: "0", role: "region", "aria-label": "Trajectories" });
    this.pager = element("nav", { class: "bar", "aria-label": "Pages of the list" });
    put(
      this.main,
      element("h1", {}, "Trajectories"),
      element("section", { class: "card", "aria-label": "Choose trajectories" }, this.form),
      this.notices,
      element("div", { class: "bar" }, this.count, this.compareLink),
      this.rows,
      this.pager,
    );
    await this.load();
    return () => {
      this.request?.abort();
      clearTimeout(this.typing);
    };
  }

  // Change the query, and load the list. A new filter starts at the first page.
  change(name, value, { keepPage = false } = {}) {
    if (value === "" || value === null) this.query.delete(name);
    else this.query.set(name, value);
    if (!keepPage) this.query.delete("offset");
    history.replaceState(null, "", `#/trajectories?${this.query}`);
    return this.load();
  }

  async load() {
    this.request?.abort();
    this.request = new AbortController();
    const { signal } = this.request;
    const query = new URLSearchParams(this.query);
    query.delete("run");
    query.set("limit", PAGE_ROWS);
    this.rows.classList.add("busy");
    let data;
    try {
      data = await fetchJson(`/api/runs/${encodeURIComponent(this.run.name)}/trajectories`, query, { signal });
    } catch (error) {
      if (error.name === "AbortError") return;
      this.rows.classList.remove("busy");
      put(this.notices, element("p", { class: "notice", role: "alert" }, error.message));
      if (!this.form.hasChildNodes()) this.drawFilters({ stop_reasons: [], kinds: [], kept: [], reward: [], search_count: [] });
      return;
    }
    this.rows.classList.remove("busy");
    if (!this.form.hasChildNodes()) this.drawFilters(data.choices);
    else this.updateChoices(data.choices);
    this.drawNotices(data);
    this.drawRows(data);
    this.drawPager(data);
  }

  drawFilters(choices) {
    const select = (name, options) =>
      element(
        "select",
        { name, onchange: (event) => this.change(name, event.target.value) },
        options.map(([value, text]) => element("option", { value, selected: (this.query.get(name) ?? "") === value }, text)),
      );
    const input = (name, attributes) =>
      element("input", {
        name,
        value: this.query.get(name) ?? "",
        oninput: (event) => this.typed(name, event.target),
        ...attributes,
      });
    const range = (label, name, attributes) =>
      element(
        "fieldset",
        {},
        element("legend", {}, label),
        element(
          "div",
          { class: "range" },
          input(`${name}_min`, { type: "number", "aria-label": `${label}, at least`, placeholder: "min", ...attributes }),
          "to",
          input(`${name}_max`, { type: "number", "aria-label": `${label}, at most`, placeholder: "max", ...attributes }),
        ),
      );
    const runSelect = element(
      "select",
      { name: "run", onchange: (event) => { location.hash = `#/trajectories?${new URLSearchParams({ run: event.target.value })}`; } },
      this.runs.map((run) => element("option", { value: run.name, selected: run === this.run }, run.name)),
    );
    const sets = [["", "all of the run"], ...this.run.sets.map((set) => [set.id, set.title])];
    const sorts = [["", "as sampled"], ...COLUMNS.map(([name, heading]) => [name, heading])];
    put(
      this.form,
      element("label", {}, "Run", runSelect),
      element("label", {}, "Round or evaluation", select("set", sets)),
      element("label", { class: "wide" }, "Text in question or answer", input("text", { type: "search", maxlength: "1000" })),
      element("label", {}, "Kept for training", select("kept", [["", "any"], ["true", "kept"], ["false", "not kept"]])),
      element("label", {}, "Ended by", select("stop_reason", withCounts(choices.stop_reasons))),
      element("label", {}, "Kind of question", select("kind", withCounts(choices.kinds))),
      range("Reward", "reward", { step: "any" }),
      range("Searches", "searches", { step: "1", min: "0" }),
      element("label", {}, "Sort by", select("sort", sorts)),
      element(
        "label",
        {},
        "Order",
        select("descending", [["", "ascending"], ["true", "descending"]]),
      ),
      element("button", { type: "button", onclick: () => this.reset() }, "Clear the filters"),
    );
    this.updateChoices(choices);
  }

  // Offer what the chosen set has.
  updateChoices(choices) {
    for (const [name, values] of [["stop_reason", choices.stop_reasons], ["kind", choices.kinds]]) {
      const select = this.form.elements[name];
      const current = this.query.get(name) ?? "";
      const options = withCounts(values);
      if (!options.some(([value]) => value === current)) options.push([current, `${current} (0)`]);
      put(
        select,
        ...options.map(([value, text]) => element("option", { value, selected: value === current }, text)),
      );
      select.disabled = values.length === 0 && current === "";
    }
    this.form.elements.kept.disabled = choices.kept.length === 0 && !this.query.has("kept");
    for (const [name, bounds] of [["reward", choices.reward], ["searches", choices.search_count]]) {
      this.form.elements[`${name}_min`].placeholder = bounds[0] === null ? "min" : number(bounds[0]);
      this.form.elements[`${name}_max`].placeholder = bounds[1] === null ? "max" : number(bounds[1]);
    }
  }

  typed(name, input) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      if (input.checkValidity()) this.change(name, input.value);
    }, TYPING_MILLISECONDS);
  }

  reset() {
    for (const name of FILTER_NAMES) {
      this.query.delete(name);
      if (this.form.elements[name]) this.form.elements[name].value = "";
    }
    this.change("offset", null);
  }

  drawNotices(data) {
    put(this.notices);
    if (data.damaged.length > 0) {
      this.notices.append(
        element(
          "div",
          { class: "notice", role: "alert" },
          element("strong", {}, `${data.damaged.length} damaged ${data.damaged.length === 1 ? "file is" : "files are"} left out of this list`),
          element("ul", {}, data.damaged.map((damage) => element("li", {}, `${damage.name}: ${damage.reason}`))),
        ),
      );
    }
    for (const round of data.open_rounds) {
      this.notices.append(
        element("p", { class: "notice calm" }, `${round.title} is being sampled: ${round.shards} shards so far. It is shown when the run has listed them.`),
      );
    }
  }

  drawRows(data) {
    const sort = this.query.get("sort") ?? "";
    const isDescending = this.query.get("descending") === "true";
    const headings = COLUMNS.map(([name, heading]) => {
      const isSorted = sort === name;
      const arrow = isSorted ? (isDescending ? " ↓" : " ↑") : "";
      const button = element(
        "button",
        { type: "button", class: "sort", "data-sort": name, onclick: () => this.sortBy(name) },
        heading,
        element("span", { "aria-hidden": "true" }, arrow),
      );
      const state = isSorted ? (isDescending ? "descending" : "ascending") : null;
      return element("th", { scope: "col", class: NUMERIC.has(name) ? "number" : null, "aria-sort": state }, button);
    });
    const body = data.rows.map((row) => this.row(row));
    put(
      this.rows,
      element(
        "table",
        {},
        element("caption", { class: "visually-hidden" }, `Trajectories of ${this.run.name}`),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, element("span", { class: "visually-hidden" }, "Compare")), headings)),
        element("tbody", {}, body),
      ),
    );
    if (data.rows.length === 0) {
      const reason = data.all === 0 ? "There are no trajectories yet." : "No trajectory fits these filters.";
      put(this.rows, element("p", { class: "empty card" }, reason));
    }
    const last = data.offset + data.rows.length;
    const range = data.rows.length ? `${number(data.offset + 1)} to ${number(last)} of ` : "";
    this.count.textContent = `${range}${number(data.matching)} trajectories`;
    if (data.matching !== data.all) this.count.textContent += ` that fit, out of ${number(data.all)}`;
  }

  row(row) {
    const place = { run: this.run.name, set: row.set, shard: row.shard, row: row.row };
    const address = trajectoryAddress(place);
    const name = row.question ?? row.question_id;
    const box = element("input", {
      type: "checkbox",
      checked: this.chosen.has(address),
      "aria-label": `Compare attempt ${row.attempt} at ${name}`,
      onchange: (event) => this.choose(address, place, event.target),
    });
    const cell = (column, content, className = null) => {
      const heading = COLUMNS.find(([key]) => key === column)[1];
      return element("td", { "data-label": heading, class: NUMERIC.has(column) ? "number" : className }, content);
    };
    const kept = { true: "kept", false: "no" }[String(row.kept)] ?? "–";
    return element(
      "tr",
      {},
      element("td", {}, box),
      element("th", { scope: "row", class: "question" }, element("a", { href: address }, name)),
      cell("answer", row.answer || element("span", { class: "quiet" }, "no answer"), "answer"),
      cell("reward", number(row.reward, 3)),
      cell("kept", row.kept ? element("span", { class: "tag good" }, kept) : kept),
      cell("stop_reason", row.stop_reason === "answered" ? row.stop_reason : element("span", { class: "tag bad" }, row.stop_reason)),
      cell("search_count", number(row.search_count)),
      cell("seconds", number(row.seconds, 1)),
      cell("attempt", number(row.attempt)),
      cell("set", this.titles.get(row.set) ?? row.set, "set"),
      cell("kind", row.kind ?? "–"),
    );
  }

  choose(address, place, box) {
    if (box.checked) this.chosen.set(address, place);
    else this.chosen.delete(address);
    put(this.compareLink);
    if (this.chosen.size !== 2) {
      if (this.chosen.size > 0) this.compareLink.append(element("span", { class: "quiet" }, `${this.chosen.size} chosen; choose two to compare`));
      return;
    }
    const [left, right] = [...this.chosen.values()];
    this.compareLink.append(element("a", { class: "button", href: compareAddress(left, right) }, "Compare the two"));
    announce("Two trajectories are chosen. A link to compare them is above the list.");
  }

  sortBy(name) {
    const isSame = this.query.get("sort") === name;
    const isDescending = this.query.get("descending") === "true";
    if (isSame && !isDescending) this.query.set("descending", "true");
    else this.query.delete("descending");
    this.form.elements.sort.value = name;
    this.form.elements.descending.value = this.query.get("descending") ?? "";
    this.change("sort", name).then(() => {
      this.rows.querySelector(`[data-sort="${name}"]`)?.focus();
    });
  }

  drawPager(data) {
    const offset = data.offset;
    const turn = (text, start, isDisabled) =>
      element("button", { type: "button", disabled: isDisabled, onclick: () => this.turnTo(start, text) }, text);
    const pages = Math.max(1, Math.ceil(data.matching / PAGE_ROWS));
    const page = Math.floor(offset / PAGE_ROWS) + 1;
    const lastStart = (pages - 1) * PAGE_ROWS;
    put(
      this.pager,
      turn("First", 0, offset === 0),
      turn("Previous", Math.max(0, offset - PAGE_ROWS), offset === 0),
      element("span", {}, `Page ${number(page)} of ${number(pages)}`),
      turn("Next", offset + PAGE_ROWS, offset + PAGE_ROWS >= data.matching),
      turn("Last", lastStart, offset >= lastStart),
    );
  }

  async turnTo(start, text) {
    await this.change("offset", start === 0 ? null : String(start), { keepPage: true });
    const same = [...this.pager.querySelectorAll("button")].find((button) => button.textContent === text);
    if (same && !same.disabled) same.focus();
    else this.rows.focus();
  }
}

function withCounts(values) {
  return [["", "any"], ...values.map((entry) => [entry.value, `${entry.value} (${number(entry.count)})`])];
}

// Return the address of the page that shows two trajectories side by side.
export function compareAddress(left, right) {
  const parameters = new URLSearchParams();
  for (const [side, place] of [["left", left], ["right", right]]) {
    for (const part of [place.run, place.set, place.shard, place.row]) parameters.append(side, part);
  }
  return `#/compare?${parameters}`;
}
