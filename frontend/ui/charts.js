// A line chart of the last minutes, in SVG, with the values under the pointer and as text for those who do not see it.

import { element, svg } from "/ui/dom.js";

const HEIGHT = 150;
const LEFT = 52;
/** Room for the dot at the end of a line. */
const RIGHT = 4;
const BOTTOM = 20;
const TOP = 8;

/** A chart of `series` (each a name and a function of a point to a number or null) over the last `spanMs`. */
export function chart({ title, series, format, spanMs, max }) {
  const lines = svg("g", { class: "lines" });
  const grid = svg("g", { class: "grid" });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const picture = svg("svg", { height: HEIGHT, role: "img" }, grid, lines, cursor);
  const legend = element("ul", { class: "legend" });
  const values = series.map(({ name }, index) => {
    const value = element("b", {}, "–");
    legend.append(element("li", { class: `series-${index}` }, element("span", { class: "mark", "aria-hidden": "true" }), `${name} `, value));
    return value;
  });
  const age = element("span", { class: "age" });
  const node = element("figure", { class: "chart" }, element("figcaption", {}, element("h3", {}, title), age), picture, legend);

  let points = [];
  let hovered = null;
  let width = 480;

  const x = (at, now) => LEFT + (1 - (now - at) / spanMs) * (width - LEFT - RIGHT);

  function draw(history) {
    points = history;
    // As wide as it is shown, so that its words are as large as the page's.
    width = picture.clientWidth || width;
    const now = points.at(-1)?.at ?? 0;
    const shown = points.filter((point) => now - point.at <= spanMs);
    const all = shown.flatMap((point) => series.map(({ value }) => value(point) ?? 0));
    const ticks = ticksTo(max ?? Math.max(...all, 0));
    const top = ticks.at(-1);
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    grid.replaceChildren(
      ...ticks.flatMap((tick) => [
        svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
      ]),
      svg("text", { x: LEFT, y: HEIGHT - 4 }, `${Math.round(spanMs / 60_000)} min ago`),
      svg("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    lines.replaceChildren(...series.flatMap(({ value }, index) => {
      let path = "";
      let isOpen = false;
      for (const point of shown) {
        const here = value(point);
        if (here === null) {
          isOpen = false;
          continue;
        }
        // A point between gaps is a dot: a line without length, with round ends.
        path += `${isOpen ? "L" : `M${x(point.at, now).toFixed(1)} ${y(here).toFixed(1)}L`}${x(point.at, now).toFixed(1)} ${y(here).toFixed(1)}`;
        isOpen = true;
      }
      const last = shown.length > 0 ? value(shown.at(-1)) : null;
      const dot = last === null ? [] : [svg("circle", { class: `series-${index}`, cx: x(now, now), cy: y(last), r: 3 })];
      return [svg("path", { class: `series-${index}`, d: path }), ...dot];
    }));
    label();
  }

  /** The values under the pointer, or the latest. */
  function label() {
    const latest = points.at(-1);
    const point = hovered === null || !latest ? latest : nearest(points, latest.at - hovered * spanMs);
    if (!point) {
      return;
    }
    const said = series.map(({ name, value }, index) => {
      const here = value(point);
      const text = here === null ? "–" : format(here);
      values[index].textContent = text;
      return `${name} ${here === null ? "nothing" : text}`;
    });
    picture.setAttribute("aria-label", `${title}: ${said.join(", ")}`);
    age.textContent = hovered === null ? "" : `${Math.round((latest.at - point.at) / 1000)} s ago`;
    cursor.setAttribute("visibility", hovered === null ? "hidden" : "visible");
    const place = x(point.at, latest.at);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    hovered = 1 - Math.max(0, Math.min(1, (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)));
    label();
  });
  picture.addEventListener("pointerleave", () => {
    hovered = null;
    label();
  });
  new ResizeObserver(() => draw(points)).observe(node);
  return { node, draw };
}

function nearest(points, at) {
  return points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
}

/** Three or four round numbers from 0 to what covers `top`. */
function ticksTo(top) {
  if (!(top > 0)) {
    return [0, 1];
  }
  const size = 10 ** Math.floor(Math.log10(top / 2));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => top / each <= 4) ?? top;
  const count = Math.ceil(top / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, index) => index * step);
}
