// Vercel's AI SDK, with chats and responses: pictures and a PDF file in messages, and with responses in results of tools.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import { answer, baseURL, model, pdf, picture, pictureURL, question, tokens, tool } from "./pictures.mjs";

// Without `supportedUrls` the SDK fetches pictures itself, but not from private addresses.
const supportedUrls = () => ({ "image/*": [/^https?:/] });
const compatible = createOpenAICompatible({ name: "quire", baseURL, supportedUrls, includeUsage: true });
const official = createOpenAI({ baseURL, apiKey: "none" });
const text = { type: "text", text: question };
const user = (...parts) => ({ role: "user", content: [...parts, text] });

for (const served of [compatible(model), official.responses(model)]) {
  const common = { model: served, temperature: 0, maxOutputTokens: tokens, maxRetries: 0 };
  const ask = (...messages) => generateText({ ...common, messages });
  const withoutPicture = (await ask(user())).usage.inputTokens;
  let withPicture;
  for (const image of [picture, new URL(pictureURL)]) {
    const said = await ask(user({ type: "image", image, mediaType: "image/png" }));
    assert.equal(said.text, answer);
    withPicture = said.usage.inputTokens;
    assert.ok(withPicture > withoutPicture);
  }
  const stream = streamText({ ...common, messages: [user({ type: "image", image: picture })] });
  assert.equal(await stream.text, answer);
  assert.equal((await stream.usage).inputTokens, withPicture);

  const file = { type: "file", data: pdf, mediaType: "application/pdf", filename: "a.pdf" };
  const ofPdf = await ask(user(file));
  assert.ok(ofPdf.text);
  assert.ok(ofPdf.usage.inputTokens > withPicture);

  if (served.provider.startsWith("openai")) { // in chats the SDK makes a text of the result
    const value = [{ type: "image-data", data: picture.toString("base64"), mediaType: "image/png" }];
    const call = { toolCallId: "call_1", toolName: tool };
    const told = await ask(
      user(),
      { role: "assistant", content: [{ type: "tool-call", ...call, input: {} }] },
      { role: "tool", content: [{ type: "tool-result", ...call, output: { type: "content", value } }] },
    );
    assert.ok(told.text);
    assert.ok(told.usage.inputTokens >= withPicture);
  }
}
