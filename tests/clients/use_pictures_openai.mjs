// OpenAI's client library for Node: pictures and a PDF file in chats and responses, in messages and results of tools.
import assert from "node:assert";
import OpenAI from "openai";
import { answer, baseURL, dataURL, model, pdf, pictureURL, question, tokens, tool } from "./pictures.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const file = { filename: "a.pdf", file_data: `data:application/pdf;base64,${pdf.toString("base64")}` };

const chat = (...messages) => client.chat.completions.create({ model, messages, temperature: 0, max_tokens: tokens });
const user = (...parts) => ({ role: "user", content: [...parts, { type: "text", text: question }] });
const text = (await chat(user())).usage.prompt_tokens;
const images = [dataURL, pictureURL].map((url) => ({ type: "image_url", image_url: { url } }));
let counted;
for (const image of images) {
  const { choices, usage } = await chat(user(image));
  assert.equal(choices[0].message.content, answer);
  counted = usage.prompt_tokens_details.multimodal_tokens.image;
  assert.ok(counted > 0 && counted <= usage.prompt_tokens - text);
}
const calls = { role: "assistant", tool_calls: [{ id: "call_1", type: "function", function: { name: tool, arguments: "{}" } }] };
const told = await chat(user(), calls, { role: "tool", tool_call_id: "call_1", content: [images[0]] });
assert.ok(told.choices[0].message.content);
assert.equal(told.usage.prompt_tokens_details.multimodal_tokens.image, counted);
const ofPdf = await chat(user({ type: "file", file }));
assert.ok(ofPdf.choices[0].message.content);
assert.ok(ofPdf.usage.prompt_tokens_details.multimodal_tokens.image > 0);

const respond = (...input) => client.responses.create({ model, input, temperature: 0, max_output_tokens: tokens, store: false });
const asked = (...parts) => ({ role: "user", content: [...parts, { type: "input_text", text: question }] });
const textInput = (await respond(asked())).usage.input_tokens;
const inputs = [dataURL, pictureURL].map((image_url) => ({ type: "input_image", image_url, detail: "auto" }));
for (const image of inputs) {
  const response = await respond(asked(image));
  assert.equal(response.output_text, answer);
  assert.ok(response.usage.input_tokens - textInput >= counted);
}
const call = { type: "function_call", call_id: "call_1", name: tool, arguments: "{}" };
const result = await respond(asked(), call, { type: "function_call_output", call_id: "call_1", output: [inputs[0]] });
assert.ok(result.output_text);
assert.ok(result.usage.input_tokens - textInput >= counted);
const pages = await respond(asked({ type: "input_file", ...file }));
assert.ok(pages.output_text);
assert.ok(pages.usage.input_tokens - textInput > counted);
