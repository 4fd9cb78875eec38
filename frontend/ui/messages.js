// A message as elements: reasoning and tool calls folded, text as Markdown, and what an answer took.

import { copyButton, element } from "/ui/dom.js";
import { show } from "/ui/markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

/** The view of a message. `update` shows what it has become; `actions` are buttons below it. */
export function view(message, actions = []) {
  const reasoning = element("div", { class: "text" });
  const summary = element("summary", {}, "Reasoning");
  const fold = element("details", { class: "reasoning", hidden: true }, summary, reasoning);
  const text = element("div", { class: "text" });
  const calls = element("div", { class: "calls" });
  const problem = element("p", { class: "problem" });
  const stats = element("span", { class: "stats" });
  const node = element("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] },
    element("h2", { class: "unseen" }, NAMES[message.role]),
    fold, text, calls, problem,
    element("footer", {}, stats, element("span", { class: "grow" }), copyButton(() => message.content, "Copy the message"), ...actions));
  const update = (isRunning = false) => {
    node.classList.toggle("running", isRunning);
    fold.hidden = !message.reasoning;
    summary.textContent = isRunning && !message.content ? "Reasoning …" : "Reasoning";
    if (message.reasoning) {
      show(reasoning, message.reasoning);
    }
    if (message.role === "assistant") {
      show(text, message.content);
    } else {
      // What somebody typed, or a tool gave, stays as it is.
      text.textContent = message.content;
      text.classList.add("plain");
    }
    showCalls(calls, message.calls ?? []);
    problem.textContent = message.error ?? "";
    problem.hidden = !message.error;
    stats.textContent = statsOf(message);
  };
  update();
  return { node, update };
}

function showCalls(container, calls) {
  while (container.childNodes.length > calls.length) {
    container.lastChild.remove();
  }
  calls.forEach((call, index) => {
    let fold = container.childNodes[index];
    if (!fold) {
      fold = element("details", { class: "call" }, element("summary", {}), element("pre", { tabindex: "0" }));
      container.append(fold);
    }
    fold.firstChild.textContent = `Tool call: ${call.name}`;
    fold.lastChild.textContent = indented(call.arguments);
  });
}

/** JSON with line breaks; anything else, such as JSON that is not whole yet, as it is. */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

const FINISH = { length: "cut at its limit", content_filter: "cut by a filter" };

function statsOf(message) {
  const { stats } = message;
  const parts = [];
  if (stats?.tokensPerSecond) {
    parts.push(`${stats.isEstimate ? "about " : ""}${stats.tokensPerSecond.toFixed(1)} tokens/s`);
  }
  if (stats?.tokens) {
    parts.push(`${stats.isEstimate ? "about " : ""}${stats.tokens} tokens`);
  }
  if (stats?.reasoningTokens) {
    parts.push(`${stats.reasoningTokens} of them reasoning`);
  }
  if (stats?.firstMs !== undefined) {
    parts.push(`first after ${stats.firstMs < 1000 ? `${Math.round(stats.firstMs)} ms` : `${(stats.firstMs / 1000).toFixed(1)} s`}`);
  }
  if (message.stopped) {
    parts.push("stopped");
  } else if (FINISH[message.finish]) {
    parts.push(FINISH[message.finish]);
  }
  return parts.join(" · ");
}
