// Drives the chat of the built-in page against the bundled model: node chat.mjs URL FOLDER KEY.
// Screenshots go into FOLDER, and the code of a request as sample.sh and sample.py.
import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import path from "node:path";
import { answered, ask, chatReady, shotEverywhere, withPage } from "./browser.mjs";

const [url, folder, key] = process.argv.slice(2);

async function sums({ page, shot }) {
  await shot("empty");
  await page.getByRole("button", { name: "Add two numbers" }).click();
  const answer = await answered(page);
  assert.match(await answer.locator("> .prose").textContent(), /85/);

  // The reasoning is folded.
  const steps = answer.locator(".reasoning > .prose");
  assert.equal(await steps.isVisible(), false);
  await answer.locator(".reasoning summary").click();
  assert.match(await steps.textContent(), /7\+8=15/);

  // Tokens, their rate and the context.
  await answer.locator(".statistics summary").click();
  assert.match(await answer.locator(".statistics summary").textContent(), /^\d+ tokens · [\d.]+ tokens\/s$/);
  assert.match(await answer.locator(".statistics dl").textContent(), /First token after\d+ ms/);
  assert.match(await page.locator("#context").getAttribute("aria-label"), /^\d+ of 2,048 tokens of the context used$/);
  await shotEverywhere({ page, shot }, "sum");
}

async function versions({ page, shot }) {
  const answer = page.locator(".turn.assistant").last();
  await answer.getByRole("button", { name: "Answer again" }).click();
  await answered(page);
  await page.locator(".turn.assistant .version").getByText("2 / 2").waitFor();

  // An edited question gets an answer of its own; the earlier ones stay.
  await page.locator("#prompt").focus();
  await page.keyboard.press("ArrowUp");
  const editor = page.getByRole("textbox", { name: "Edit the message" });
  await editor.fill("What is 30 + 12?");
  await shot("editing");
  await page.keyboard.press("Enter");
  await answered(page);
  assert.match(await page.locator(".turn.assistant > .prose").last().textContent(), /42/);
  assert.equal(await page.locator(".turn.user .version").textContent(), "2 / 2");
  await page.locator(".turn.user").getByRole("button", { name: "Earlier version" }).click();
  assert.match(await page.locator("#thread").textContent(), /27 \+ 58.*85/s);
  await page.locator(".turn.user").getByRole("button", { name: "Later version" }).click();
  assert.match(await page.locator("#thread").textContent(), /30 \+ 12.*42/s);
}

async function memory({ page }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await ask(page, "My name is Maria.");
  const answer = await ask(page, "What is my name?");
  assert.match(await answer.locator("> .prose").textContent(), /Maria/);
}

async function structured({ page, shot }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await page.getByRole("button", { name: "Get structured output" }).click();
  const answer = await answered(page);
  const json = JSON.parse(await answer.locator("code").textContent());
  assert.deepEqual(json, { name: "Anna", age: 31, city: "Rome" });
  await answer.getByText("Structured output").waitFor();
  await answer.getByRole("button", { name: "Copy the code" }).click();
  await page.getByRole("button", { name: "Copy the code" }).waitFor();
  assert.deepEqual(JSON.parse(await page.evaluate(() => navigator.clipboard.readText())), json);
  await shot("structured");
  await page.getByRole("button", { name: "Remove: Structured output" }).click();
  assert.equal(await page.locator("#chips").textContent(), "");
}

async function tools({ page, shot }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await page.getByRole("button", { name: "Let it call a tool" }).click();
  const answer = await answered(page);
  const call = answer.getByRole("region", { name: "Call of get_weather" });
  assert.deepEqual(JSON.parse(await call.locator("code").textContent()), { city: "Oslo" });
  await answer.getByRole("textbox").fill('{"temperature": 21, "condition": "sunny"}');
  await shot("tool-call");
  await answer.getByRole("button", { name: "Send result" }).click();
  await page.locator(".turn.tool").waitFor();
  await answered(page);
  assert.match(await page.locator(".turn.assistant > .prose").last().textContent(), /21/);
  await shot("tool-result");
}

async function limits({ page }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await page.getByRole("button", { name: "Settings of the chat" }).click();
  await page.locator("#setting-tools").fill("[{]");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await page.getByText("This is no JSON").waitFor();
  await page.locator("#setting-tools").fill("");
  await page.locator("#setting-thinking").selectOption("off");
  await page.locator("#setting-max_completion_tokens").fill("8");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  const answer = await ask(page, "How do I start the server?");
  await page.getByText("The answer has reached its limit of tokens.").waitFor();
  const before = await answer.locator("> .prose").textContent();
  await answer.getByRole("button", { name: "Continue" }).click();
  await answered(page);
  const after = await answer.locator("> .prose").textContent();
  assert.ok(after.startsWith(before) && after.length > before.length, `${before} / ${after}`);
}

async function code({ page, shot }) {
  await page.getByRole("button", { name: "Show the request as code" }).last().click();
  for (const [choice, name] of [
    ["curl", "sample.sh"],
    ["Python", "sample.py"],
  ]) {
    await page.locator("#code-dialog").getByText(choice, { exact: true }).click();
    await page.locator("#code-dialog").getByRole("button", { name: "Copy the code" }).click();
    await page.getByText("Copied").waitFor({ state: "attached" });
    await writeFile(path.join(folder, name), await page.evaluate(() => navigator.clipboard.readText()));
  }
  await shot("code");
  await page.keyboard.press("Escape");
}

// Conversations are still there when the page is opened again; they can be found, renamed and deleted.
async function conversations({ page, shot }) {
  const titles = () => page.locator(".conversation").allTextContents();
  const before = await titles();
  assert.ok(before.includes("What is my name?") === false && before.includes("My name is Maria."), String(before));
  await page.reload();
  await chatReady(page);
  assert.deepEqual(await titles(), before);
  await page.locator("#search").fill("maria");
  assert.deepEqual(await titles(), ["My name is Maria."]);
  await page.getByRole("button", { name: "My name is Maria.", exact: true }).click();
  assert.match(await page.locator("#thread").textContent(), /What is my name\?/);
  await page.getByRole("button", { name: "Rename My name is Maria." }).click();
  await page.keyboard.type("Names");
  await page.keyboard.press("Enter");
  await page.locator("#search").fill("");
  assert.ok((await titles()).includes("Names"));
  await page.getByRole("button", { name: "Names", exact: true }).hover();
  await page.getByRole("button", { name: "Delete Names" }).click();
  await page.getByText("The conversation is deleted.").waitFor();
  await page.waitForFunction(
    () => ![...document.querySelectorAll(".conversation")].some((button) => button.textContent === "Names"),
  );
  await page.getByRole("button", { name: "Undo" }).click();
  await page.getByRole("button", { name: "Names", exact: true }).waitFor();
  await shot("conversations");
  await page.getByRole("button", { name: "Settings of the chat" }).click();
  await page.getByRole("button", { name: "Delete all conversations" }).click();
  await page.getByRole("button", { name: "Delete all", exact: true }).click();
  await page.getByText("Conversations will be listed here.").waitFor();
  await page.reload();
  await chatReady(page);
  assert.deepEqual(await titles(), []);
}

async function keyboard({ page }) {
  await page.getByRole("tab", { name: "Chat" }).focus();
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.getByRole("tab", { name: "Captions" }).getAttribute("aria-selected"), "true");
  await page.getByRole("tabpanel", { name: "Captions" }).waitFor();
  await page.keyboard.press("ArrowLeft");
  await page.getByRole("tabpanel", { name: "Chat" }).waitFor();
  await page.keyboard.press("/");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  await page.keyboard.type("two");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("lines");
  assert.equal(await page.locator("#prompt").inputValue(), "two\nlines");
}

await withPage({ url, folder, key }, async (opened) => {
  await chatReady(opened.page);
  for (const drive of [sums, versions, memory, structured, tools, limits, code, conversations, keyboard])
    await drive(opened);
});
