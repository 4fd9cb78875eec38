// The server's API: models, answers in a stream, and the key that goes with every request.

const KEY = "genset.key";

/** What the server refused with, or what became of the connection. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** The key; empty where there is none. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Takes a key for this window, or to be kept. */
export function setKey(value, isKept) {
  localStorage.removeItem(KEY);
  sessionStorage.removeItem(KEY);
  if (value) {
    (isKept ? localStorage : sessionStorage).setItem(KEY, value);
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) {
    headers.authorization = `Bearer ${key()}`;
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) {
    throw await refusal(response);
  }
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy in between has its own pages.
  }
  const message = error.message ?? `The server answered ${response.status}.`;
  return new ApiError(message, { status: response.status, param: error.param, code: error.code });
}

/** The models, as the API lists them. */
export async function models() {
  const response = await ask("/v1/models");
  return (await response.json()).data;
}

/** One model, with its workers where the server shows them. */
export async function model(name) {
  const response = await ask(`/v1/models/${name.split("/").map(encodeURIComponent).join("/")}`);
  return response.json();
}

/** Text at a path that needs no key. */
export async function text(path) {
  return (await ask(path)).text();
}

/** The chunks of an answer as they come. It throws where the server refuses, and where the stream breaks off. */
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(chunk.error.message, chunk.error);
    }
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** The data of each event of a stream. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") {
          throw error;
        }
        throw new ApiError("The connection broke before the answer ended.");
      }
      if (piece.done) {
        return;
      }
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
