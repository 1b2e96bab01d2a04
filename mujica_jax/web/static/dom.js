// Small helpers to build the page. Data only ever enters as text or as an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

// Return an element with attributes and children. Strings and numbers become text.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// Return an SVG element.
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

// Replace the content of a node. Children that are null or false are left out, as in `element`.
export function put(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

// Tell a screen reader what has changed.
export function announce(text) {
  const status = document.getElementById("status");
  if (status) status.textContent = text;
}

// Return a number as text with at most this many decimals, and a dash for null.
export function number(value, decimals = 2) {
  if (value === null || value === undefined) return "–";
  const text = value.toLocaleString("en", { maximumFractionDigits: decimals });
  return text === "-0" ? "0" : text;
}

// Return seconds as a text such as "1 h 5 min", "3 min 20 s" or "4.2 s".
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${number(seconds, seconds < 1 ? 2 : 1)} s`;
}

// Return a table with a caption, column headings and rows of cells. The first cell of a row is its
// heading. `numeric` lists the numbers of the columns that are aligned right.
export function table({ caption, headings, rows, numeric = [], hideCaption = false }) {
  const cell = (tag, content, column, scope) =>
    element(tag, { scope, class: numeric.includes(column) ? "number" : null }, content);
  const head = element("tr", {}, headings.map((text, column) => cell("th", text, column, "col")));
  const body = rows.map((row) =>
    element("tr", {}, row.map((content, column) =>
      column === 0 ? cell("th", content, column, "row") : cell("td", content, column, null))),
  );
  return element(
    "div",
    { class: "table-scroll", tabindex: "0", role: "region", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", { class: hideCaption ? "visually-hidden" : null }, caption),
      element("thead", {}, head),
      element("tbody", {}, body),
    ),
  );
}
