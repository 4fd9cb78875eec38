// Elements made of text alone: nothing here, nor in its callers, reads a string as HTML.

/** An element with attributes and children; a child that is a string becomes text, one that is null nothing. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      node.addEventListener(key, value);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(key, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A button that copies what `text` gives at that time. */
export function copyButton(text, label) {
  const button = element("button", { type: "button", class: "plain small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    let told = "Copied";
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // Without HTTPS, on another machine, a browser lends no clipboard.
      told = "Not allowed";
    }
    button.textContent = told;
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
