// The AI SDK's agent on one question, and a further question after its answer. Its argument is JSON: {baseURL, model,
// api, streamed, question}. It writes JSON: {calls, text, references}. The first two are those of the first answer;
// `references` is how many items the requests named by their ids. The tools are those of agent_case.py.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const WEATHER = { Paris: "sunny, 18 degrees", Oslo: "rain, 11 degrees" };
const MAX_STEPS = 10;
const FURTHER_QUESTION = "What is the capital of France?";
const FURTHER_TOKENS = 50;

const asked = JSON.parse(process.argv[2]);
const calls = [];

// Each tool records its calls.
const tools = {
  get_weather: tool({
    description: "Get the current weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      calls.push(["get_weather", city]);
      return WEATHER[city] ?? "unknown";
    },
  }),
  multiply: tool({
    description: "Multiply two numbers.",
    inputSchema: z.object({ a: z.int(), b: z.int() }),
    execute: async ({ a, b }) => {
      calls.push(["multiply", a, b]);
      return a * b;
    },
  }),
};

let references = 0;

// The SDK's fetch, which counts.
async function countingFetch(url, options) {
  const { input } = JSON.parse(options.body);
  const items = Array.isArray(input) ? input : [];
  references += items.filter((item) => item.type === "item_reference").length;
  return fetch(url, options);
}

const openai = createOpenAI({ baseURL: asked.baseURL, apiKey: "unused", fetch: countingFetch });
const model = asked.api === "responses" ? openai.responses(asked.model) : openai.chat(asked.model);
const agent = new ToolLoopAgent({
  model,
  tools,
  temperature: 0,
  maxRetries: 0,
  stopWhen: stepCountIs(MAX_STEPS),
});

async function whole(prompt) {
  const { text, response } = await agent.generate({ prompt });
  return { text, messages: response.messages };
}

async function streamed(prompt) {
  const run = await agent.stream({ prompt });
  const pieces = [];
  for await (const part of run.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") pieces.push(part.text);
  }
  return { text: pieces.join(""), messages: (await run.response).messages };
}

const first = await (asked.streamed ? streamed : whole)(asked.question);
const answer = { calls: [...calls], text: first.text };
// Sent to see whether the server accepts it; what it answers does not matter.
await generateText({
  model,
  tools,
  messages: [{ role: "user", content: asked.question }, ...first.messages, { role: "user", content: FURTHER_QUESTION }],
  temperature: 0,
  maxRetries: 0,
  maxOutputTokens: FURTHER_TOKENS,
});
console.log(JSON.stringify({ ...answer, references }));
