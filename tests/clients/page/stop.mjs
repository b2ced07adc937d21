// Stops an answer of the built-in page: node stop.mjs URL FOLDER. The server says a few words and then nothing more.
import assert from "node:assert/strict";
import { answered, chatReady, shotEverywhere, withPage } from "./browser.mjs";

const [url, folder] = process.argv.slice(2);

await withPage({ url, folder }, async ({ page, shot }) => {
  await chatReady(page);
  await page.locator("#prompt").fill("Count for ever.");
  await page.keyboard.press("Enter");
  await page.locator(".turn.assistant > .prose").getByText("one two three").waitFor();
  assert.equal(await page.locator(".turn.assistant").getAttribute("aria-busy"), "true");
  await shot("running");

  // Another conversation can be looked at meanwhile.
  await page.getByRole("button", { name: "New chat" }).click();
  assert.equal(await page.locator("#send").getAttribute("aria-label"), "Send");
  await page.getByRole("button", { name: "Count for ever.", exact: true }).click();
  assert.equal(await page.locator("#send").getAttribute("aria-label"), "Stop the answer");
  await page.locator("#prompt").focus();
  await page.keyboard.press("Escape");
  const answer = await answered(page);
  assert.match(await answer.locator("> .prose").textContent(), /^one two three/);
  await answer.getByText("Stopped.").waitFor();
  await shotEverywhere({ page, shot }, "stopped");
});
