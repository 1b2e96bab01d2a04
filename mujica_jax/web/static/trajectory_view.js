// One or two trajectories as tree, transcript and tokens. Questions, passages and model text enter
// as text nodes alone, so nothing in them can act as a page.

import { duration, element, number, put } from "./dom.js";

// The lowest probability of each colour, from likely to unlikely. Below the last it is p4.
const PROBABILITY_STEPS = [0.9, 0.5, 0.2, 0.05];
const VIEWS = [
  ["Tree", tree],
  ["Transcript", transcript],
  ["Tokens", tokens],
];
let nextId = 0;

// Return the facts of a trajectory: answer, reward with its parts, and how it ended.
export function trajectoryFacts(trajectory) {
  const isAnswered = trajectory.stop_reason === "answered";
  const parts = Object.entries(trajectory.rewards_by_part);
  // An episode of the page that asks has no gold answer, and so no reward.
  const isAsked = trajectory.set === "asked";
  const facts = [
    ["Answer", isAnswered ? trajectory.answer : element("span", { class: "quiet" }, "no answer"), "wide"],
    ["Gold answers", isAsked ? null : trajectory.answers.length ? trajectory.answers.join(" | ") : "not recorded", "wide"],
    ["Reward", isAsked ? null : trajectory.reward === null ? "none: a search or the judge failed" : number(trajectory.reward, 4)],
    ...parts.map(([name, value]) => [`Reward: ${name}`, number(value, 4)]),
    ["Kept for training", isAsked ? null : keptText(trajectory)],
    ["Threshold K", trajectory.threshold === null ? null : number(trajectory.threshold, 4)],
    ["Ended by", isAnswered ? "answered" : element("span", { class: "tag bad" }, trajectory.stop_reason)],
    ["Kind", trajectory.kind],
    ["Policy", trajectory.policy_version],
    ["Attempt", trajectory.attempt],
    ["Duration", duration(trajectory.seconds)],
    ["Seed", trajectory.seed],
    ["Question id", element("code", {}, trajectory.question_id)],
    ...Object.entries(trajectory.counts).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
  ];
  return element(
    "dl",
    { class: "facts" },
    facts
      .filter(([, value]) => value !== null && value !== "" && value !== undefined)
      .map(([name, value, className]) => element("div", { class: className }, element("dt", {}, name), element("dd", {}, value))),
  );
}

// Training keeps nothing of an evaluation, so there the answer is left out.
function keptText(trajectory) {
  if (trajectory.set.startsWith("eval-")) return null;
  return { true: "yes", false: "no" }[String(trajectory.kept)] ?? "not recorded";
}

// Return tabs with the views. Several trajectories stand side by side in each view.
export function trajectoryViews(trajectories) {
  const panel = element("div", { role: "tabpanel", tabindex: "0", id: newId("panel") });
  const list = element("div", { role: "tablist", class: "tabs", "aria-label": "View" });
  const buttons = VIEWS.map(([name], index) =>
    element(
      "button",
      {
        type: "button",
        role: "tab",
        id: newId("tab"),
        "aria-controls": panel.id,
        onclick: () => select(index),
        onkeydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (step === undefined) return;
          event.preventDefault();
          const next = (index + step + VIEWS.length) % VIEWS.length;
          select(next);
          buttons[next].focus();
        },
      },
      name,
    ),
  );
  const select = (chosen) => {
    buttons.forEach((button, index) => {
      button.setAttribute("aria-selected", String(index === chosen));
      button.setAttribute("tabindex", index === chosen ? "0" : "-1");
    });
    panel.setAttribute("aria-labelledby", buttons[chosen].id);
    const parts = trajectories.map(VIEWS[chosen][1]);
    put(panel, parts.length > 1 ? element("div", { class: "side-by-side" }, parts.map((part) => element("div", {}, part))) : parts[0]);
  };
  list.append(...buttons);
  select(0);
  return element("section", { "aria-label": "Trajectory" }, list, panel);
}

function newId(name) {
  nextId += 1;
  return `${name}-${nextId}`;
}

// The tree: the planner's turns, and below each its sub-questions side by side.
function tree(trajectory) {
  const items = trajectory.iterations.map((iteration) =>
    element(
      "li",
      {},
      element("h3", {}, `Turn ${iteration.number}`),
      iteration.turn === null ? null : element("pre", { class: "text" }, iteration.turn),
      iteration.searches.length ? element("div", { class: "searches" }, iteration.searches.map(searchCard)) : null,
    ),
  );
  const isAnswered = trajectory.stop_reason === "answered";
  items.push(
    element(
      "li",
      { class: isAnswered ? "end" : "end without" },
      element("h3", {}, isAnswered ? "Answer" : "No answer"),
      element("p", {}, isAnswered ? trajectory.answer : `The episode ended by ${trajectory.stop_reason}.`),
    ),
  );
  const gold = trajectory.gold_passages;
  return element(
    "div",
    {},
    element("ol", { class: "tree" }, items),
    gold.length
      ? element(
          "details",
          { class: "card" },
          element("summary", {}, `Gold passages (${gold.length})`),
          element("ul", { class: "materials" }, gold.map((passage) => element("li", {}, [passage.title, passage.text].filter(Boolean).join(": ")))),
        )
      : null,
  );
}

function searchCard(search) {
  const materials = search.materials.map((material) =>
    element(
      "li",
      { class: material.selected ? "selected" : null },
      material.selected ? element("span", { class: "tag good" }, "✓ selected") : null,
      material.selected ? " " : null,
      material.gold ? element("span", { class: "tag gold" }, "★ gold") : null,
      material.gold ? " " : null,
      material.text,
    ),
  );
  return element(
    "article",
    { class: "search" },
    element("h4", {}, search.entity ? element("span", { class: "quiet" }, `${search.entity}: `) : null, search.query),
    materials.length
      ? element("ol", { class: "materials", "aria-label": "Search results" }, materials)
      : element("p", { class: "empty" }, "Nothing was found."),
    workerReply(search),
  );
}

// What the worker answered. Agents without workers read the results themselves.
function workerReply({ found: isFound, sentence }) {
  if (isFound && !sentence) return null;
  return element(
    "p",
    { class: "reply" },
    element("span", { class: "quiet" }, isFound ? "Worker: " : "Worker, nothing found: "),
    sentence,
  );
}

// The transcript: each conversation with its turns as text.
function transcript(trajectory) {
  return element("div", {}, trajectory.conversations.map((conversation, index) =>
    element(
      "section",
      { "aria-label": conversationTitle(trajectory, conversation, index) },
      element("h2", {}, conversationTitle(trajectory, conversation, index)),
      conversation.turns.map((turn) =>
        element("article", { class: `turn ${turn.role}` }, turnHeader(turn), element("pre", {}, turn.text)),
      ),
    ),
  ));
}

function conversationTitle(trajectory, conversation, index) {
  const same = trajectory.conversations.filter((entry) => entry.role === conversation.role);
  if (same.length === 1) return conversation.role;
  return `${conversation.role} ${same.indexOf(conversation) + 1} of ${same.length}`;
}

function turnHeader(turn) {
  return element(
    "header",
    {},
    element("strong", {}, turn.role === "model" ? "Model" : "Context"),
    element("span", {}, `${number(turn.ids.length)} tokens`),
    turn.trained ? element("span", { class: "tag good" }, "carries loss") : null,
    turn.cut ? element("span", { class: "tag bad" }, "cut by a length limit") : null,
    turn.logprobs ? element("span", {}, `mean log-probability ${number(mean(turn.logprobs), 3)}`) : null,
  );
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// The token view: each token with its loss mask, log-probability and id.
function tokens(trajectory) {
  const line = element("p", { class: "token-line", "aria-live": "polite" }, "Point at a token, or move to one with Tab and the arrow keys.");
  return element(
    "div",
    {},
    trajectory.has_tokenizer
      ? null
      : element("p", { class: "notice calm" }, "The run directory has no tokenizer, so tokens are shown by their ids."),
    legend(),
    trajectory.conversations.map((conversation, index) =>
      element(
        "section",
        {},
        element("h2", {}, conversationTitle(trajectory, conversation, index)),
        conversation.turns.map((turn, place) =>
          element(
            "article",
            { class: `turn ${turn.role}` },
            turnHeader(turn),
            tokenFlow(turn, `${conversationTitle(trajectory, conversation, index)}, turn ${place + 1}`, line),
          ),
        ),
      ),
    ),
    line,
  );
}

function legend() {
  const names = ["p ≥ 0.9", "0.5 to 0.9", "0.2 to 0.5", "0.05 to 0.2", "below 0.05"];
  return element(
    "ul",
    { class: "legend", "aria-label": "Legend" },
    names.map((name, step) => element("li", {}, element("span", { class: `token p${step}` }, name))),
    element("li", {}, element("span", { class: "token p0 trained" }, "underlined"), " carries loss when the trajectory is learnt"),
    element("li", {}, element("span", { class: "token special" }, "boxed"), " special token"),
    element("li", {}, element("span", { class: "token context" }, "grey"), " context, never trained"),
  );
}

// Return the tokens of a turn. One of them can be reached with Tab, the others with arrow keys.
function tokenFlow(turn, name, line) {
  const flow = element("div", { class: "tokens", role: "group", "aria-label": `Tokens of ${name}. Arrow keys move.` });
  const nodes = turn.ids.map((id, index) => {
    const text = turn.texts ? turn.texts[index] : ` ${id}`;
    const classes = ["token"];
    if (turn.role !== "model") classes.push("context");
    if (turn.logprobs) classes.push(`p${probabilityStep(turn.logprobs[index])}`);
    if (turn.trained) classes.push("trained");
    if (turn.special?.[index]) classes.push("special");
    return element("span", { class: classes.join(" "), "data-index": index, tabindex: index === 0 ? "0" : "-1" }, visibleText(text));
  });
  flow.append(...nodes);
  const describe = (index) => {
    line.textContent = tokenText(turn, index);
  };
  flow.addEventListener("pointerover", (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) describe(Number(index));
  });
  flow.addEventListener("focusin", (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) describe(Number(index));
  });
  flow.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const current = Number(event.target.dataset.index);
    const next = Math.min(nodes.length - 1, Math.max(0, current + step));
    nodes[current].setAttribute("tabindex", "-1");
    nodes[next].setAttribute("tabindex", "0");
    nodes[next].focus();
  });
  return flow;
}

// Return which colour a log-probability has.
function probabilityStep(logprob) {
  const step = PROBABILITY_STEPS.findIndex((lowest) => Math.exp(logprob) >= lowest);
  return step === -1 ? PROBABILITY_STEPS.length : step;
}

// Line breaks are shown and still break the line. A token without text gets a dot.
function visibleText(text) {
  return text === "" ? "·" : text.replaceAll("\n", "↵\n");
}

function tokenText(turn, index) {
  const parts = [`token ${index + 1} of ${turn.ids.length}`, `id ${turn.ids[index]}`];
  if (turn.texts) parts.push(JSON.stringify(turn.texts[index]));
  if (turn.logprobs) {
    const logprob = turn.logprobs[index];
    parts.push(`log-probability ${logprob.toFixed(4)} (p ${Math.exp(logprob).toFixed(3)})`);
  }
  if (turn.special?.[index]) parts.push("special token");
  parts.push(turn.trained ? "trained: carries loss" : "not trained");
  return parts.join(" · ");
}
