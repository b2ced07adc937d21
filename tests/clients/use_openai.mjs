// OpenAI's client library for Node.
import assert from "node:assert";
import OpenAI from "openai";
import { zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const [, , baseURL] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "quire-nano";
const sum = [{ role: "user", content: "What is 27 + 58?" }];
const weather = { role: "user", content: "What is the weather in Paris?" };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const about = { name: "get_weather", description: "Get the weather of a city.", parameters };
const schema = { type: "object", properties: { total: { type: "integer" } }, required: ["total"], additionalProperties: false };

const answer = await client.chat.completions.create({ model, messages: sum, temperature: 0 });
assert.match(answer.choices[0].message.content, /85/);

const about_itself = [{ role: "user", content: "What are you?" }]; // a long answer comes in several pieces, also from a busy server
const stream = client.chat.completions.stream({ model, messages: about_itself, temperature: 0 });
let pieces = 0;
stream.on("content", () => pieces++);
assert.match(await stream.finalContent(), /quire-nano/);
assert.ok(pieces > 2);

const tools = [{ type: "function", function: about }];
const asked = await client.chat.completions.create({ model, messages: [weather], tools, temperature: 0 });
const { message } = asked.choices[0];
const [call] = message.tool_calls;
assert.match(JSON.parse(call.function.arguments).city, /Paris/);
const result = { role: "tool", tool_call_id: call.id, content: '{"temperature": "21 degrees"}' };
const told = await client.chat.completions.create({ model, messages: [weather, message, result], tools, temperature: 0 });
assert.match(told.choices[0].message.content, /21/);

const Options = z.object({ unit: z.enum(["celsius", "fahrenheit"]), days: z.int() });
const forecast = zodFunction({ name: "forecast", parameters: z.object({ options: Options, city: z.string() }) });
const nested = await client.chat.completions.parse({ model, messages: [weather], tools: [forecast], tool_choice: "required", temperature: 0 });
const { parsed_arguments } = nested.choices[0].message.tool_calls[0].function;
assert.match(parsed_arguments.city, /Paris/);
assert.ok(Number.isInteger(parsed_arguments.options.days));

const response_format = { type: "json_schema", json_schema: { name: "sum", schema, strict: true } };
const structured = await client.chat.completions.create({ model, messages: sum, response_format, temperature: 0 });
assert.ok(Number.isInteger(JSON.parse(structured.choices[0].message.content).total));

const response = await client.responses.create({ model, input: sum[0].content, temperature: 0 });
assert.match(response.output_text, /85/);
const events = client.responses.stream({ model, input: sum[0].content, temperature: 0 });
let text = "";
for await (const event of events) if (event.type === "response.output_text.delta") text += event.delta;
assert.match(text, /85/);
assert.match((await events.finalResponse()).output_text, /85/);
const first = await client.responses.create({ model, input: [weather], tools: [{ type: "function", ...about }], temperature: 0 });
const wanted = first.output.find((item) => item.type === "function_call");
const output = { type: "function_call_output", call_id: wanted.call_id, output: '{"temperature": "21 degrees"}' };
const second = await client.responses.create({ model, input: [output], previous_response_id: first.id, temperature: 0 });
assert.match(second.output_text, /21/);
