// The two dialogs: the settings of a conversation, and the key.

import { setKey } from "/ui/api.js";

const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed", "presence_penalty", "frequency_penalty"];

/** The fields of a request that settings make. What is empty is left out. */
export function requestFields(settings) {
  const fields = {};
  for (const name of NUMBERS) {
    if (settings[name]) {
      fields[name] = Number(settings[name]);
    }
  }
  const tools = readTools(settings.tools ?? "");
  if (tools.list) {
    fields.tools = tools.list;
  }
  return fields;
}

function readTools(text) {
  if (text.trim() === "") {
    return {};
  }
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) && list.length > 0 ? { list } : { problem: "Tools must be a JSON list with at least one tool." };
  } catch (error) {
    return { problem: `Tools are not JSON: ${error.message}` };
  }
}

/** The settings dialog; `changed` is called with what it holds. */
export function settingsDialog(changed) {
  const dialog = document.getElementById("settings");
  const form = dialog.querySelector("form");
  const names = ["system", "tools", ...NUMBERS];
  const held = () => Object.fromEntries(names.map((name) => [name, form.elements[name].value]).filter(([, value]) => value !== ""));
  form.addEventListener("submit", (event) => {
    const { problem } = readTools(form.elements.tools.value);
    document.getElementById("tools-problem").textContent = problem ?? "";
    if (problem) {
      event.preventDefault();
      form.elements.tools.focus();
    }
  });
  dialog.addEventListener("close", () => {
    const settings = held();
    if (readTools(settings.tools ?? "").problem) {
      // Left by Esc with tools that are none: nothing of them is sent.
      delete settings.tools;
    }
    changed(settings);
  });
  return {
    open(settings) {
      for (const name of names) {
        form.elements[name].value = settings[name] ?? "";
      }
      document.getElementById("tools-problem").textContent = "";
      dialog.showModal();
    },
  };
}

/** The dialog about the key; `changed` is called when there is another. */
export function keyDialog(changed) {
  const dialog = document.getElementById("key");
  const form = dialog.querySelector("form");
  form.addEventListener("submit", () => {
    setKey(form.elements.key.value.trim(), form.elements.keep.checked);
    form.elements.key.value = "";
    changed();
  });
  return {
    open() {
      if (!dialog.open) {
        dialog.showModal();
      }
    },
  };
}
