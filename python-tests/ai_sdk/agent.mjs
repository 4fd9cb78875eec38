// The AI SDK's agent on one question. Its argument is JSON: {baseURL, model, api, streamed, question}. It writes JSON:
// {calls, text}. The tools are those of agent_case.py.

import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const WEATHER = { Paris: "sunny, 18 degrees", Oslo: "rain, 11 degrees" };
const MAX_STEPS = 10;

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

const openai = createOpenAI({ baseURL: asked.baseURL, apiKey: "unused" });
const model = asked.api === "responses" ? openai.responses(asked.model) : openai.chat(asked.model);
const agent = new ToolLoopAgent({
  model,
  tools,
  temperature: 0,
  maxRetries: 0,
  stopWhen: stepCountIs(MAX_STEPS),
});

async function whole(prompt) {
  return (await agent.generate({ prompt })).text;
}

async function streamedText(prompt) {
  const run = await agent.stream({ prompt });
  const pieces = [];
  for await (const part of run.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") pieces.push(part.text);
  }
  return pieces.join("");
}

const text = await (asked.streamed ? streamedText : whole)(asked.question);
console.log(JSON.stringify({ calls, text }));
