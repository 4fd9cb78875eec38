// The chat: conversations on the left, one of them on the right, answers as they come.

import * as api from "/ui/api.js";
import * as conversations from "/ui/conversations.js";
import { element } from "/ui/dom.js";
import { view } from "/ui/messages.js";
import { keyDialog, requestFields, settingsDialog } from "/ui/settings.js";

const at = (id) => document.getElementById(id);
const log = at("log");
const input = at("input");
const models = at("model");

let current = conversations.begin();
/** The request under way: its conversation and what stops it. */
let running = null;
let served = [];

const key = keyDialog(() => loadModels());
const settings = settingsDialog((held) => {
  current.settings = held;
  keep(current);
});

// --- The list of conversations ---

function showList() {
  const items = conversations.list().map((each) => {
    const isCurrent = each.id === current.id;
    const open = element("button", { type: "button", class: "open", "aria-current": isCurrent ? "page" : null,
      click: () => { openConversation(each.id); } }, conversations.titleOf(each));
    const rename = element("button", { type: "button", class: "plain small", title: "Rename", "aria-label": `Rename ${conversations.titleOf(each)}`,
      click: () => { renameConversation(each.id); } }, "✎");
    const remove = element("button", { type: "button", class: "plain small", title: "Delete", "aria-label": `Delete ${conversations.titleOf(each)}`,
      click: () => { removeConversation(each.id); } }, "✕");
    return element("li", { class: isCurrent ? "current" : null }, open, rename, remove);
  });
  at("conversations").replaceChildren(...items);
}

function openConversation(id) {
  const found = running?.conversation.id === id ? running.conversation : conversations.load(id);
  if (found) {
    current = found;
    showConversation();
    closeSidebar();
    input.focus();
  }
}

function newConversation() {
  current = conversations.begin();
  showConversation();
  closeSidebar();
  input.focus();
}

function renameConversation(id) {
  const found = id === current.id ? current : conversations.load(id);
  const title = found && prompt("Name of the conversation", conversations.titleOf(found));
  if (title) {
    found.title = title.trim().slice(0, 200);
    keep(found);
  }
}

function removeConversation(id) {
  const found = conversations.load(id);
  if (!found || !confirm(`Delete “${conversations.titleOf(found)}”?`)) {
    return;
  }
  if (running?.conversation.id === id) {
    running.isDeleted = true;
    running.abort.abort();
  }
  conversations.remove(id);
  if (id === current.id) {
    newConversation();
  } else {
    showList();
  }
}

/** Keeps a conversation, and says where there is no room for it. */
function keep(conversation) {
  const isKept = conversations.save(conversation);
  tell(isKept ? "" : "This browser has no room for the conversation. Delete old ones to keep it.");
  showList();
}

// --- The conversation that is shown ---

function showConversation() {
  const shown = current.messages.map((message, index) => view(message, actions(message, index)).node);
  if (running?.conversation === current) {
    const last = view(current.messages.at(-1));
    running.view = last;
    last.update(true);
    shown.splice(-1, 1, last.node);
  }
  log.replaceChildren(...(shown.length > 0 ? shown : [element("p", { class: "empty" }, "Ask something.")]));
  const asksForResults = pendingCalls();
  if (asksForResults.length > 0) {
    log.append(resultForm(asksForResults));
  }
  showModel();
  showList();
  showState();
  document.title = `${current.messages.length > 0 ? conversations.titleOf(current) : "Chat"} - Genset`;
  log.scrollTop = log.scrollHeight;
}

function actions(message, index) {
  const button = (label, perform) => element("button", { type: "button", class: "plain small", click: perform }, label);
  if (message.role === "user") {
    return [button("Edit", () => {
      if (!running) {
        input.value = message.content;
        // Kept once it is sent: whoever thinks better of it finds the conversation as it was.
        current = { ...current, messages: current.messages.slice(0, index) };
        showConversation();
        grow();
        input.focus();
      }
    })];
  }
  if (message.role === "assistant" && index === current.messages.length - 1) {
    return [button("Try again", () => {
      if (!running) {
        current.messages.length = index;
        answer();
      }
    })];
  }
  return [];
}

/** The tool calls of the last answer, which wait for what the tools give. */
function pendingCalls() {
  return running?.conversation === current ? [] : current.messages.at(-1)?.calls ?? [];
}

function resultForm(calls) {
  const fields = calls.map((call) => element("label", { class: "field" }, `What ${call.name} gives`, element("textarea", { rows: "2", class: "code" })));
  const submit = (event) => {
    event.preventDefault();
    calls.forEach((call, index) => {
      current.messages.push({ role: "tool", content: fields[index].querySelector("textarea").value, call: call.id });
    });
    answer();
  };
  return element("form", { class: "results", submit }, ...fields, element("button", { type: "submit" }, "Send the results"));
}

// --- Asking ---

/** The conversation as the API wants it. */
function requestOf(conversation) {
  const messages = conversation.messages.map((message) => {
    if (message.role === "tool") {
      return { role: "tool", content: message.content, tool_call_id: message.call };
    }
    if (message.calls?.length > 0) {
      const calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      return { role: "assistant", content: message.content, tool_calls: calls };
    }
    return { role: message.role, content: message.content };
  });
  const { system } = conversation.settings;
  if (system) {
    messages.unshift({ role: "system", content: system });
  }
  return { model: conversation.model, messages, ...requestFields(conversation.settings) };
}

/** Asks for the answer to the conversation as it stands. */
async function answer() {
  const conversation = current;
  const request = requestOf(conversation);
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  const abort = new AbortController();
  running = { conversation, abort, view: null, isDeleted: false };
  log.setAttribute("aria-busy", "true");
  say("The answer begins");
  showConversation();
  const clock = { asked: performance.now(), first: null, last: null, chunks: 0, usage: null };
  try {
    for await (const chunk of api.chat(request, abort.signal)) {
      take(message, chunk, clock);
      draw(message, clock);
    }
    say("The answer is complete");
  } catch (error) {
    failed(message, error);
  }
  message.stats = statsOf(clock);
  const { isDeleted } = running;
  running = null;
  log.setAttribute("aria-busy", "false");
  if (!isDeleted) {
    keep(conversation);
  }
  if (conversation === current) {
    const isAtEnd = isScrolledDown();
    const place = log.scrollTop;
    showConversation();
    if (!isAtEnd) {
      log.scrollTop = place;
    }
  } else {
    showState();
  }
}

function take(message, chunk, clock) {
  if (chunk.usage) {
    clock.usage = chunk.usage;
  }
  const choice = chunk.choices?.[0];
  if (!choice) {
    return;
  }
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls) {
    clock.last = performance.now();
    clock.first ??= clock.last;
    clock.chunks += 1;
  }
  message.content += content ?? "";
  if (reasoning) {
    message.reasoning = (message.reasoning ?? "") + reasoning;
  }
  for (const call of calls ?? []) {
    message.calls ??= [];
    message.calls[call.index] ??= { id: "", name: "", arguments: "" };
    const known = message.calls[call.index];
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  message.finish = choice.finish_reason ?? message.finish;
}

/** What the answer took: by the server's count at its end, by pieces before. */
function statsOf(clock) {
  if (clock.first === null) {
    return undefined;
  }
  const tokens = clock.usage?.completion_tokens ?? clock.chunks;
  const seconds = (clock.last - clock.first) / 1000;
  return {
    isEstimate: !clock.usage,
    tokens,
    reasoningTokens: clock.usage?.completion_tokens_details?.reasoning_tokens || undefined,
    tokensPerSecond: tokens > 1 && seconds > 0.05 ? (tokens - 1) / seconds : undefined,
    firstMs: clock.first - clock.asked,
  };
}

let isDrawPlanned = false;

/** Shows what has come, at most once a frame. */
function draw(message, clock) {
  if (isDrawPlanned) {
    return;
  }
  isDrawPlanned = true;
  requestAnimationFrame(() => {
    isDrawPlanned = false;
    if (running?.conversation !== current || !running.view) {
      return;
    }
    const isAtEnd = isScrolledDown();
    message.stats = statsOf(clock);
    running.view.update(true);
    if (isAtEnd) {
      log.scrollTop = log.scrollHeight;
    }
  });
}

function failed(message, error) {
  if (error.name === "AbortError") {
    message.stopped = true;
    say("Stopped");
    return;
  }
  message.error = error.message;
  say(`Failed: ${error.message}`);
  if (error.status === 401) {
    key.open();
  }
}

function isScrolledDown() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

// --- Models ---

async function loadModels() {
  try {
    served = (await api.models()).map((each) => each.id);
    tell(served.length > 0 ? "" : "No model is served yet.");
    if (served.length === 0) {
      setTimeout(loadModels, 3000);
    }
  } catch (error) {
    served = [];
    if (error.status === 401) {
      tell(api.key() ? "The server does not know this key." : "This server asks for an API key.");
      key.open();
    } else {
      tell(error.message);
      setTimeout(loadModels, 3000);
    }
  }
  showModel();
  showState();
}

function showModel() {
  if (!served.includes(current.model)) {
    // A model that is gone stays the conversation's while there is no other.
    current.model = served[0] ?? current.model;
  }
  const names = served.length > 0 ? served : [current.model];
  models.replaceChildren(...names.map((name) => element("option", { value: name }, name || "no model")));
  models.value = current.model;
}

// --- The page ---

function tell(text) {
  at("notice").textContent = text;
  at("notice").hidden = text === "";
}

/** Tells those who do not see the page. */
function say(text) {
  at("status").textContent = text;
}

function showState() {
  const isRunning = running !== null;
  at("stop").hidden = !isRunning;
  at("send").hidden = isRunning;
  at("send").disabled = input.value.trim() === "" || served.length === 0;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, window.innerHeight * 0.4)}px`;
  showState();
}

function send() {
  const text = input.value.trim();
  if (text === "" || running || served.length === 0) {
    return;
  }
  current.messages.push({ role: "user", content: text });
  input.value = "";
  grow();
  keep(current);
  answer();
}

function openSidebar() {
  document.body.classList.add("with-sidebar");
  at("open-sidebar").setAttribute("aria-expanded", "true");
  at("close-sidebar").focus();
}

function closeSidebar() {
  document.body.classList.remove("with-sidebar");
  at("open-sidebar").setAttribute("aria-expanded", "false");
}

function begin() {
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  at("stop").addEventListener("click", () => running?.abort.abort());
  at("new-chat").addEventListener("click", newConversation);
  at("open-settings").addEventListener("click", () => settings.open(current.settings));
  at("open-key").addEventListener("click", () => key.open());
  at("open-sidebar").addEventListener("click", openSidebar);
  at("close-sidebar").addEventListener("click", () => {
    closeSidebar();
    at("open-sidebar").focus();
  });
  models.addEventListener("change", () => {
    current.model = models.value;
    keep(current);
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, textarea, select");
    if (document.querySelector("dialog[open]")) {
      return;
    }
    if (event.key === "Escape") {
      running?.abort.abort();
      closeSidebar();
    } else if (event.key === "/" && !isTyping) {
      event.preventDefault();
      input.focus();
    } else if (event.altKey && event.code === "KeyN") {
      event.preventDefault();
      newConversation();
    }
  });
  addEventListener("storage", (event) => {
    if (conversations.isAbout(event)) {
      showList();
    }
  });
  showConversation();
  loadModels();
  input.focus();
}

begin();
