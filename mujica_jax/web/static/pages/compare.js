// Two trajectories side by side: two attempts at a question, or two policies on it.

import { fetchTrajectory, trajectoryAddress } from "../api.js";
import { element, put } from "../dom.js";
import { trajectoryFacts, trajectoryViews } from "../trajectory_view.js";

export const title = "Compare";

export async function show(main, parameters) {
  const places = ["left", "right"].map((side) => {
    const [run, set, shard, row] = parameters.getAll(side);
    if (row === undefined) {
      throw new Error("Choose two trajectories in the list, or one and then “side by side” on its page.");
    }
    return { run, set, shard, row };
  });
  const trajectories = await Promise.all(places.map(fetchTrajectory));
  const [left, right] = trajectories;
  const isSameQuestion = left.question_id === right.question_id;
  put(
    main,
    element("h1", {}, isSameQuestion ? left.question ?? `Question ${left.question_id}` : "Two trajectories"),
    element("p", { class: "notice calm", hidden: isSameQuestion }, "These trajectories belong to different questions."),
    element(
      "div",
      { class: "side-by-side" },
      trajectories.map((trajectory, side) =>
        element(
          "section",
          { class: "card", "aria-label": side === 0 ? "Left" : "Right" },
          element("h2", {}, element("a", { href: trajectoryAddress(trajectory) }, heading(trajectory))),
          isSameQuestion ? null : element("p", {}, trajectory.question ?? trajectory.question_id),
          trajectoryFacts(trajectory),
        ),
      ),
    ),
    trajectoryViews(trajectories),
  );
}

function heading(trajectory) {
  return `${trajectory.run}, ${trajectory.set_title}, attempt ${trajectory.attempt}`;
}
