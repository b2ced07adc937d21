// Vercel's AI SDK, with the chat completions and the Responses API.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [, , baseURL] = process.argv;
const compatible = createOpenAICompatible({ name: "quire", baseURL, supportsStructuredOutputs: true });
const official = createOpenAI({ baseURL, apiKey: "none" });
const temperature = 0;
const maxRetries = 0;

for (const model of [compatible("quire-nano"), official.responses("quire-nano")]) {
  const common = { model, temperature, maxRetries };
  const { text } = await generateText({ ...common, prompt: "What is 27 + 58?" });
  assert.match(text, /85/);

  const pieces = [];
  for await (const piece of streamText({ ...common, prompt: "What are you?" }).textStream) pieces.push(piece);
  assert.ok(pieces.length > 2);
  assert.match(pieces.join(""), /quire-nano/);

  const get_weather = tool({
    description: "Get the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      assert.match(city, /Paris/);
      return { temperature: "21 degrees" };
    },
  });
  const asked = { ...common, prompt: "What is the weather in Paris?", tools: { get_weather }, stopWhen: stepCountIs(3) };
  assert.match((await generateText(asked)).text, /21/);

  const options = z.object({ unit: z.enum(["celsius", "fahrenheit"]), days: z.int() }).meta({ id: "Options" });
  const forecast = tool({ description: "Get the weather of a city.", inputSchema: z.object({ options, city: z.string() }) });
  const required = { ...common, prompt: "What is the weather in Paris?", tools: { forecast }, toolChoice: "required" };
  const [nested] = (await generateText(required)).toolCalls;
  assert.match(nested.input.city, /Paris/);
  assert.ok(Number.isInteger(nested.input.options.days));

  const { object } = await generateObject({ ...common, prompt: "What is 27 + 58?", schema: z.object({ total: z.int() }) });
  assert.ok(Number.isInteger(object.total));
}
