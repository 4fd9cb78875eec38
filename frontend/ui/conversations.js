// The conversations of this browser: each is an entry of its own in its local storage, so that two windows do not overwrite
// each other's.

const PREFIX = "genset.chat.";
const LAST = "genset.settings";

/** All of them, the latest first; what cannot be read is left out. */
export function list() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    const conversation = name.startsWith(PREFIX) ? read(name) : null;
    if (conversation && Array.isArray(conversation.messages)) {
      found.push(conversation);
    }
  }
  return found.sort((one, other) => other.updated - one.updated);
}

/** One of them; null where it has been deleted. */
export function load(id) {
  return read(PREFIX + id);
}

/** A new one with the settings that were last used. Nothing is kept before its first message. */
export function begin() {
  const last = read(LAST) ?? {};
  // Not crypto.randomUUID: it is there on HTTPS and on this machine alone.
  const id = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), model: last.model ?? "", settings: last.settings ?? {}, messages: [] };
}

/** Keeps it. It says whether there was room. */
export function save(conversation) {
  conversation.updated = Date.now();
  try {
    localStorage.setItem(LAST, JSON.stringify({ model: conversation.model, settings: conversation.settings }));
    if (conversation.messages.length > 0) {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    }
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Whether an event of the storage is about conversations, as another window changed them. */
export function isAbout(event) {
  return event.key === null || event.key.startsWith(PREFIX);
}

/** What the list calls it. */
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const text = conversation.title || first?.content.trim().replaceAll(/\s+/g, " ") || "New conversation";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text;
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}
