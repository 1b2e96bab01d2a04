// Line charts in SVG. Each chart can be read without seeing it: a focusable frame whose arrow keys
// move through the values, and a table with all numbers.

import { element, number, put, svg, table } from "./dom.js";

const HEIGHT = 230;
const MARGIN = { left: 56, right: 14, top: 12, bottom: 34 };
const COLOURS = 6;
const DASHES = 4;

// Return a figure. `chart` has `title`, `unit`, `x` (the name of the x axis), `x_labels` (names of
// the places 0, 1, ... on it, or none) and `series`: each has `name`, `points` ([x, y] pairs), and
// optionally `colour` and `dash` (numbers).
export function lineChart(chart) {
  const series = chart.series.map((entry, index) => ({
    colour: index % COLOURS,
    dash: Math.floor(index / COLOURS) % DASHES,
    ...entry,
  }));
  const label = (x) => chart.x_labels[x] ?? `${chart.x} ${number(x)}`;
  const frame = element("div", { tabindex: "0", role: "group", "aria-label": summary(chart) });
  const readout = element("p", { class: "readout quiet", "aria-live": "polite" });
  const figure = element(
    "figure",
    { class: "chart card" },
    element(
      "figcaption",
      {},
      element("h3", {}, chart.title, chart.unit ? element("span", { class: "quiet" }, `, ${chart.unit}`) : null),
      legend(series),
    ),
    frame,
    readout,
    element(
      "details",
      {},
      element("summary", {}, "Numbers"),
      numbersTable(chart, series, label),
    ),
  );

  const xValues = [...new Set(series.flatMap((entry) => entry.points.map(([x]) => x)))].sort((a, b) => a - b);
  let cursor = null;
  let drawing = null;

  const draw = () => {
    drawing = drawChart(frame.clientWidth || 480, chart, series, label);
    put(frame, drawing.node);
    if (cursor !== null) showCursor();
  };
  const showCursor = () => {
    const x = xValues[cursor];
    drawing.moveCursor(x);
    const values = series.map((entry) => {
      const point = entry.points.find(([place]) => place === x);
      return point ? `${entry.name} ${number(point[1], 4)}` : null;
    });
    readout.textContent = `${label(x)}: ${values.filter(Boolean).join(" · ")}`;
  };
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || xValues.length === 0) return;
    event.preventDefault();
    const start = cursor ?? (step > 0 ? -1 : xValues.length);
    cursor = Math.min(xValues.length - 1, Math.max(0, start + step));
    showCursor();
  });
  frame.addEventListener("pointermove", (event) => {
    if (!drawing || xValues.length === 0) return;
    const bounds = drawing.node.getBoundingClientRect();
    const x = drawing.valueAt(((event.clientX - bounds.left) / bounds.width) * drawing.width);
    cursor = nearest(xValues, x);
    showCursor();
  });

  let width = 0;
  new ResizeObserver(() => {
    if (frame.clientWidth !== width) {
      width = frame.clientWidth;
      draw();
    }
  }).observe(frame);
  draw();
  return figure;
}

function summary(chart) {
  const parts = chart.series.map((entry) => {
    const first = entry.points[0];
    const last = entry.points[entry.points.length - 1];
    return `${entry.name}: ${entry.points.length} values, from ${number(first[1], 3)} to ${number(last[1], 3)}`;
  });
  return `Chart of ${chart.title} by ${chart.x}. ${parts.join("; ")}. Arrow keys read the values.`;
}

function legend(series) {
  return element(
    "ul",
    { class: "legend" },
    series.map((entry) =>
      element(
        "li",
        {},
        svg(
          "svg",
          { class: "swatch", viewBox: "0 0 32 10", "aria-hidden": "true" },
          svg("path", { class: `line s${entry.colour} d${entry.dash}`, d: "M0 5H32" }),
        ),
        entry.name,
      ),
    ),
  );
}

function numbersTable(chart, series, label) {
  const xValues = [...new Set(series.flatMap((entry) => entry.points.map(([x]) => x)))].sort((a, b) => a - b);
  const values = series.map((entry) => new Map(entry.points));
  return table({
    caption: `${chart.title} by ${chart.x}`,
    headings: [chart.x, ...series.map((entry) => entry.name)],
    numeric: series.map((_, index) => index + 1),
    rows: xValues.map((x) => [label(x), ...values.map((points) => number(points.get(x) ?? null, 4))]),
  });
}

function drawChart(width, chart, series, label) {
  const points = series.flatMap((entry) => entry.points);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const xRange = spread(Math.min(...xs), Math.max(...xs));
  const ticks = niceTicks(Math.min(...ys), Math.max(...ys), 5);
  const yRange = [ticks[0], ticks[ticks.length - 1]];
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const toX = (x) => MARGIN.left + ((x - xRange[0]) / (xRange[1] - xRange[0])) * inner.width;
  const toY = (y) => MARGIN.top + (1 - (y - yRange[0]) / (yRange[1] - yRange[0])) * inner.height;

  const node = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  for (const tick of ticks) {
    node.append(
      svg("path", { class: "grid", d: `M${MARGIN.left} ${toY(tick)}H${width - MARGIN.right}` }),
      svg("text", { x: MARGIN.left - 8, y: toY(tick) + 4, "text-anchor": "end" }, shortNumber(tick)),
    );
  }
  const bottom = MARGIN.top + inner.height;
  node.append(svg("path", { class: "axis", d: `M${MARGIN.left} ${bottom}H${width - MARGIN.right}` }));
  const room = Math.max(2, Math.floor(inner.width / 80));
  for (const x of xTicks(chart, xs, xRange, room)) {
    const text = chart.x_labels[x] ?? number(x);
    const isAtEnd = toX(x) > width - MARGIN.right - 30;
    node.append(svg("text", { x: toX(x), y: bottom + 18, "text-anchor": isAtEnd ? "end" : "middle" }, text));
  }
  for (const entry of series) {
    const d = entry.points.map(([x, y], index) => `${index ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
    node.append(svg("path", { class: `line s${entry.colour} d${entry.dash}`, d }));
    if (entry.points.length <= 30) {
      for (const [x, y] of entry.points) {
        node.append(svg("circle", { class: `s${entry.colour}`, cx: toX(x), cy: toY(y), r: 3 }));
      }
    }
  }
  const cursor = svg("path", { class: "cursor", d: "" });
  node.append(cursor);
  return {
    node,
    width,
    valueAt: (place) => xRange[0] + ((place - MARGIN.left) / inner.width) * (xRange[1] - xRange[0]),
    moveCursor: (x) => cursor.setAttribute("d", `M${toX(x)} ${MARGIN.top}V${bottom}`),
  };
}

function spread(low, high) {
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function xTicks(chart, xs, range, room) {
  if (chart.x !== "step") {
    const places = [...new Set(xs)].sort((a, b) => a - b);
    const stride = Math.ceil(places.length / room);
    return places.filter((_, index) => index % stride === 0);
  }
  return niceTicks(range[0], range[1], room).filter((tick) => tick >= range[0] && tick <= range[1]);
}

// Return about `count` round numbers that cover the range.
function niceTicks(low, high, count) {
  if (low === high) {
    const margin = Math.abs(low) * 0.1 || 1;
    return niceTicks(low - margin, high + margin, count);
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  for (let index = first; index <= last; index += 1) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6)}M`;
  if (size >= 1e4) return `${number(value / 1e3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return number(value, 4);
}

function nearest(sorted, value) {
  let best = 0;
  for (let index = 1; index < sorted.length; index += 1) {
    if (Math.abs(sorted[index] - value) < Math.abs(sorted[best] - value)) best = index;
  }
  return best;
}
