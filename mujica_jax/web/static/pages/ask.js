// The page that asks the agent a question and shows the episode while it is played.

import { ask, fetchJson } from "../api.js";
import { announce, duration, element, number, put } from "../dom.js";

export const title = "Ask";

export async function show(main) {
  const choices = await fetchJson("/api/ask");
  if (choices.model === null) {
    put(
      main,
      element("h1", {}, title),
      element("p", { class: "notice calm" }, "This server has no model. Start it with mujica serve RUN to ask questions."),
    );
    return undefined;
  }

  const question = element("textarea", { id: "question", rows: "2", maxlength: "4000", required: true });
  const agent = chooser("Agent", choices.agents);
  const source = chooser("Searches", choices.sources);
  const send = element("button", { type: "submit", class: "primary" }, "Ask");
  const stop = element("button", { type: "button", disabled: true }, "Stop");
  const form = element(
    "form",
    { class: "card ask" },
    element("label", { for: "question" }, "Question"),
    question,
    element("div", { class: "bar" }, agent.label, source.label, send, stop),
    examples(choices.examples, question),
  );
  const episode = element("section", { class: "card episode", "aria-label": "Episode", hidden: true });
  put(main, element("h1", {}, title), element("p", { class: "quiet" }, `Model: ${choices.model}`), form, episode);

  let running = null;
  stop.addEventListener("click", () => running?.abort());
  question.addEventListener("keydown", (event) => {
    // Enter asks, and Shift and Enter begin a new line.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running !== null) return;
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    episode.hidden = false;
    const view = new EpisodeView(episode);
    try {
      const request = { question: question.value, agent: agent.select.value, source: source.select.value };
      await ask(request, (happening) => view.add(happening), running.signal);
      view.end();
    } catch (error) {
      view.fail(error.name === "AbortError" ? "You stopped the episode." : error.message);
    } finally {
      running = null;
      send.disabled = false;
      stop.disabled = true;
    }
  });
  // Leaving the page ends the episode.
  return () => running?.abort();
}

// Return a label with a select element. With a single choice it cannot be changed.
function chooser(name, values) {
  const select = element(
    "select",
    { disabled: values.length < 2 },
    values.map((value) => element("option", { value }, value)),
  );
  return { select, label: element("label", { class: "inline" }, `${name} `, select) };
}

// Return buttons that fill in a question of the task.
function examples(texts, question) {
  if (!texts.length) return null;
  const buttons = texts.map((text) =>
    element(
      "li",
      {},
      element(
        "button",
        {
          type: "button",
          class: "example",
          onclick: () => {
            question.value = text;
            question.focus();
          },
        },
        text,
      ),
    ),
  );
  return element("details", {}, element("summary", {}, "Examples"), element("ul", { class: "examples" }, buttons));
}

// The growing tree of one episode.
class EpisodeView {
  constructor(section) {
    this.notes = element("div", {});
    this.turns = element("ol", { class: "tree" });
    this.progress = element("p", { class: "quiet", role: "status" }, "The planner thinks …");
    // The boxes of sub-questions, by the number of the turn and of the sub-question.
    this.boxes = new Map();
    // The texts that the model is writing, by the same numbers. The planner's has no second number.
    this.drafts = new Map();
    put(section, element("h2", {}, "Episode"), this.notes, this.turns, this.progress);
  }

  add(happening) {
    const write = {
      note: () => this.notes.append(element("p", { class: "notice calm" }, happening.note)),
      started: () => this.started(happening),
      text: () => this.text(happening),
      turn: () => this.turn(happening),
      search: () => this.search(happening),
      worker: () => this.worker(happening),
      finished: () => this.finished(happening),
      trajectory: () => this.trajectory(happening),
    }[happening.event];
    if (happening.event === "error") throw new Error(happening.error);
    write?.();
  }

  started({ candidates }) {
    if (candidates.length) this.notes.append(element("p", { class: "quiet" }, `Starts from: ${candidates.join(", ")}`));
  }

  // Show a part of a turn. The whole turn replaces it when it is there.
  text({ iteration, number: position, text }) {
    const key = draftKey(iteration, position);
    if (!this.drafts.has(key)) {
      const words = element("pre", { class: "text draft" });
      const box = position === null ? null : this.boxes.get(`${iteration}/${position}`);
      if (box) box.append(words);
      this.drafts.set(key, { words, place: box ? words : element("li", { class: "draft" }, words) });
      if (!box) this.turns.append(this.drafts.get(key).place);
    }
    this.drafts.get(key).words.append(text);
  }

  endDraft(iteration, position) {
    const key = draftKey(iteration, position);
    this.drafts.get(key)?.place.remove();
    this.drafts.delete(key);
  }

  turn({ role, iteration, text, sub_questions: subQuestions, seconds, generated_tokens: tokens }) {
    this.endDraft(iteration, null);
    const row = element("div", { class: "searches" });
    subQuestions.forEach((subQuestion, index) => row.append(this.box(iteration, index, subQuestion)));
    this.turns.append(
      element(
        "li",
        { "data-turn": iteration },
        element("h3", {}, `Turn ${iteration + 1}`, role ? ` of the ${role} ` : " ", cost(seconds, tokens)),
        element("pre", { class: "text" }, text),
        row,
      ),
    );
    this.say(subQuestions.length ? "Searching …" : "The model writes …");
  }

  // Return the box of a sub-question, made when it is first mentioned.
  box(iteration, index, { query, entity, refusal }) {
    const box = element(
      "div",
      { class: "search" },
      element("h4", {}, query),
      entity ? element("p", { class: "quiet" }, `in the facts of ${entity}`) : null,
      refusal ? element("p", { class: "fault" }, refusal) : null,
    );
    this.boxes.set(`${iteration}/${index}`, box);
    return box;
  }

  boxOf(happening) {
    const known = this.boxes.get(`${happening.iteration}/${happening.number}`);
    if (known) return known;
    // Agents without sub-questions search too.
    const box = this.box(happening.iteration, happening.number, happening);
    const turn = this.turns.querySelector(`[data-turn="${Number(happening.iteration)}"] .searches`);
    (turn ?? this.turns).append(box);
    return box;
  }

  search(happening) {
    const materials = happening.materials.map((text) => element("li", {}, text));
    this.boxOf(happening).append(
      element("p", { class: "quiet" }, `${number(materials.length)} results in ${duration(happening.seconds)}`),
      materials.length ? element("ul", { class: "materials" }, materials) : element("p", { class: "empty" }, "Nothing was found."),
    );
    this.say("Reading …");
  }

  worker(happening) {
    this.endDraft(happening.iteration, happening.number);
    const box = this.boxOf(happening);
    for (const item of box.querySelectorAll(".materials li")) {
      if (!happening.selected.includes(item.textContent)) continue;
      item.classList.add("selected");
      item.prepend(element("span", { class: "tag good" }, "selected"), " ");
    }
    box.append(
      element("p", { class: "reply" }, happening.sentence || "no answer", " ", cost(happening.seconds, happening.generated_tokens)),
    );
    this.say("The planner thinks …");
  }

  finished({ answer, stop_reason: stopReason, searches, generated_tokens: tokens, at_seconds: seconds }) {
    const isAnswered = stopReason === "answered";
    this.turns.append(
      element(
        "li",
        { class: isAnswered ? "end" : "end without" },
        element("h3", {}, isAnswered ? "Answer" : "No answer"),
        element("p", { class: "final" }, isAnswered ? answer : `The episode ended by ${stopReason}.`),
        element("p", { class: "quiet" }, `${number(searches)} searches, ${number(tokens)} tokens, ${duration(seconds)}`),
      ),
    );
    announce(isAnswered ? `Answer: ${answer}` : "No answer");
  }

  trajectory({ id }) {
    const address = `#/trajectory?${new URLSearchParams({ asked: id })}`;
    this.turns.append(element("li", { class: "end" }, element("a", { href: address }, "Transcript and tokens of this episode")));
  }

  say(text) {
    this.progress.textContent = text;
  }

  end() {
    this.progress.remove();
  }

  fail(sentence) {
    this.progress.replaceWith(element("p", { class: "notice", role: "alert" }, sentence));
  }
}

function draftKey(iteration, position) {
  return `${iteration}/${position === null ? "" : position}`;
}

function cost(seconds, tokens) {
  return element("small", { class: "quiet" }, `${number(tokens)} tokens, ${duration(seconds)}`);
}
