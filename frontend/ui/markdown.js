// Markdown to elements. What a model writes is never read as HTML: every piece of it becomes text, and every element is made
// here. Links go to http, https and mailto alone; an image is a link, for fetching it would tell its server who reads this.

import { copyButton, element } from "/ui/dom.js";

/** Shows `source` in `container`. Blocks that stayed as they were keep their elements, so that a growing text costs little. */
export function show(container, source) {
  const blocks = split(source.replace(/\r\n?/g, "\n").split("\n"));
  const shown = container.shownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].key) {
    same += 1;
  }
  while (container.childNodes.length > same) {
    container.lastChild.remove();
  }
  for (const block of blocks.slice(same)) {
    container.append(block.make());
  }
  container.shownBlocks = blocks.map((block) => block.key);
}

// Parts that take the same signs follow each other only where the last takes all there is: else every way to share a line of
// thousands of such signs would be tried, and the page would freeze.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+([^]*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_LINE = /^[ :|-]+$/;

/** How deep quotes and lists may lie in each other; deeper ones are text. */
const MAX_DEPTH = 8;

function split(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (line.trim() === "") {
      at += 1;
      continue;
    }
    const { end, make } = block(lines, at, depth);
    blocks.push({ key: lines.slice(at, end).join("\n") + (end < lines.length ? "\n" : ""), make });
    at = end;
  }
  return blocks;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) {
    return fenced(lines, at, fence);
  }
  const heading = line.match(HEADING);
  if (heading) {
    // The page has its own first two levels.
    const level = Math.min(heading[1].length + 2, 6);
    return { end: at + 1, make: () => element(`h${level}`, {}, ...inline(title(heading[2]))) };
  }
  if (RULE.test(line)) {
    return { end: at + 1, make: () => element("hr") };
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    return quote(lines, at, depth);
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) {
    return list(lines, at, depth);
  }
  if (line.includes("|") && isTableLine(lines[at + 1] ?? "")) {
    return table(lines, at);
  }
  return paragraph(lines, at, depth);
}

/** A heading's text, without the signs that close it. */
function title(text) {
  let end = text.trimEnd().length;
  while (text[end - 1] === "#") {
    end -= 1;
  }
  return text.slice(0, end).trimEnd();
}

/** Whether a line parts a table's head from its rows. */
function isTableLine(line) {
  return TABLE_LINE.test(line) && line.includes("-") && line.includes("|");
}

function fenced(lines, at, [, mark, language]) {
  let end = at + 1;
  const isEnd = (line) => line.trim().startsWith(mark) && line.trim().replaceAll(mark[0], "") === "";
  while (end < lines.length && !isEnd(lines[end])) {
    end += 1;
  }
  const code = lines.slice(at + 1, end).join("\n");
  const name = language.trim();
  const make = () => element("figure", { class: "code" },
    element("figcaption", {}, element("span", {}, name), copyButton(() => code, "Copy the code")),
    element("pre", { tabindex: "0" }, element("code", {}, code)));
  return { end: Math.min(end + 1, lines.length), make };
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) {
    end += 1;
  }
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => element("blockquote", {}, ...split(inner, depth + 1).map((each) => each.make())) };
}

function list(lines, at, depth) {
  const first = lines[at].match(ITEM);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = line.match(ITEM);
    if (item && item[1].length <= indent && !RULE.test(line)) {
      if (item[1].length < indent || /\d/.test(item[2]) !== isOrdered) {
        break;
      }
      items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    } else if (line.trim() === "") {
      const next = lines[end + 1] ?? "";
      const goesOn = next.startsWith(" ".repeat(indent + 2)) || (ITEM.test(next) && !RULE.test(next));
      if (!goesOn) {
        break;
      }
      items.at(-1).lines.push("");
    } else if (line.startsWith(" ".repeat(indent + 2)) || lines[end - 1].trim() !== "") {
      if (!line.startsWith(" ") && (FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line))) {
        break;
      }
      const { width } = items.at(-1);
      const given = line.length - line.trimStart().length;
      items.at(-1).lines.push(line.slice(Math.min(width, given)));
    } else {
      break;
    }
    end += 1;
  }
  const make = () => {
    const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
    const attributes = isOrdered && start !== 1 ? { start } : {};
    return element(isOrdered ? "ol" : "ul", attributes, ...items.map((item) => listItem(item.lines, depth)));
  };
  return { end, make };
}

function listItem(lines, depth) {
  const task = lines[0].match(/^\[([ xX])\]\s+/);
  if (task) {
    lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  }
  const children = split(lines, depth + 1).map((each) => each.make());
  // A paragraph alone, or in front of a list, is the item's text.
  if (children[0]?.tagName === "P") {
    children.splice(0, 1, ...children[0].childNodes);
  }
  const box = task ? element("span", { role: "img", "aria-label": task[1] === " " ? "open" : "done" }, task[1] === " " ? "☐ " : "☑ ") : null;
  return element("li", {}, box, ...children);
}

function table(lines, at) {
  const cells = (line) => {
    const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
    return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  };
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() !== "" && lines[end].includes("|")) {
    end += 1;
  }
  const row = (line, name) => {
    const given = cells(line);
    return element("tr", {}, ...sides.map((side, index) => element(name, { class: side }, ...inline(given[index] ?? ""))));
  };
  const make = () => element("div", { class: "scroll", tabindex: "0" }, element("table", {},
    element("thead", {}, row(lines[at], "th")),
    element("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")))));
  return { end, make };
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const isOther = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line)
    || (depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line)));
  while (end < lines.length && lines[end].trim() !== "" && !isOther(lines[end])) {
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return { end, make: () => element("p", {}, ...inline(text)) };
}

// In the order in which they are tried at each place.
const PIECES = [
  { find: /^\\([!-/:-@[-`{-~])/, make: ([, sign]) => sign },
  { find: /^(`+)(?!`)([^]*?[^`])\1(?!`)/, make: ([, , code]) => element("code", {}, code.replace(/^ (.*\S.*) $/s, "$1").replaceAll("\n", " ")) },
  { find: /^!\[([^\]]*)\]\(\s*<?([^\s<>)]+)>?(?:\s+"[^"]*")?\s*\)/, make: ([all, name, url]) => link(url, [`image: ${name || url}`], all) },
  { find: /^\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*<?((?:[^\s<>()]|\([^\s<>()]*\))+)>?(?:\s+"[^"]*")?\s*\)/, make: ([all, name, url], depth) => link(url, inline(name, depth), all) },
  { find: /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/, make: ([all, url]) => link(url, [url], all) },
  // Brackets are part of an address in pairs: the one that closes a remark around it is not.
  { find: /^https?:\/\/(?:[^\s<>"'`*()]|\([^\s<>"'`*()]*\))*(?:[^\s<>"'`*.,:;!?()\]}_~]|\([^\s<>"'`*()]*\))/, make: ([url]) => link(url, [url], url) },
  { find: /^\*\*(?=\S)([^]*?\S)\*\*(?!\*)/, make: ([, text], depth) => element("strong", {}, ...inline(text, depth)) },
  { find: /^__(?=\S)([^]*?\S)__(?!\w)/, make: ([, text], depth) => element("strong", {}, ...inline(text, depth)), isWord: true },
  { find: /^\*(?=[^\s*])([^]*?[^\s*])\*(?!\*)/, make: ([, text], depth) => element("em", {}, ...inline(text, depth)) },
  { find: /^_(?=[^\s_])([^]*?[^\s_])_(?!\w)/, make: ([, text], depth) => element("em", {}, ...inline(text, depth)), isWord: true },
  { find: /^~~(?=\S)([^]*?\S)~~/, make: ([, text], depth) => element("del", {}, ...inline(text, depth)) },
  { find: /^(?: {2,})?\n/, make: () => element("br") },
];

/** Where a piece can begin. */
const STARTS = /[\\`!\[<*_~\n]|https?:\/\/|(?<! ) {2,}\n/g;

/** So much of a paragraph is looked through for the end of a piece: a text full of beginnings must not take a square of its length. */
const MAX_PIECE = 2000;

/** What stands within a line, as nodes and strings. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) {
    return [text];
  }
  const nodes = [];
  let plain = "";
  let at = 0;
  STARTS.lastIndex = 0;
  while (at < text.length) {
    STARTS.lastIndex = at;
    const next = STARTS.exec(text);
    const start = next ? next.index : text.length;
    plain += text.slice(at, start);
    if (!next) {
      break;
    }
    const window = text.slice(start, start + MAX_PIECE);
    const isInWord = /\w/.test(text[start - 1] ?? "");
    const found = firstPiece(window, isInWord);
    if (!found) {
      plain += text[start];
      at = start + 1;
      continue;
    }
    const node = found.piece.make(found.match, depth + 1);
    if (typeof node === "string") {
      plain += node;
    } else {
      if (plain) {
        nodes.push(plain);
        plain = "";
      }
      nodes.push(node);
    }
    at = start + found.match[0].length;
  }
  if (plain) {
    nodes.push(plain);
  }
  return nodes;
}

function firstPiece(window, isInWord) {
  for (const piece of PIECES) {
    const match = piece.isWord && isInWord ? null : window.match(piece.find);
    if (match) {
      return { piece, match };
    }
  }
  return null;
}

/** A link where the address is one to follow; else the text as it was written. */
function link(url, children, written) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return written;
  }
  if (!["http:", "https:", "mailto:"].includes(parsed.protocol)) {
    return written;
  }
  return element("a", { href: parsed.href, target: "_blank", rel: "noopener noreferrer nofollow", title: parsed.href }, ...children);
}
