// Drives the attachments and errors of the built-in page: node files.mjs URL FOLDER PICTURE.
// quire-nano refuses pictures, quire-nano-see reads them; other answers are made up.
import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { answerChat, answered, ask, chatReady, drop, expectStatus, shotEverywhere, withPage } from "./browser.mjs";

const [url, folder, drawn] = process.argv.slice(2);
const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const PDF = Buffer.from("%PDF-1.4\n%%EOF\n").toString("base64");
const picture = { name: "dot's $1.png", type: "image/png", base64: PIXEL };
const pdf = { name: "report.pdf", type: "application/pdf", base64: PDF };

async function refused({ page, complaints, shot }) {
  await drop(page, "#chat-panel", [picture]);
  await page.getByText("quire-nano does not read pictures, so it may refuse the message.").waitFor();
  await shot("attached");
  const answer = await ask(page, "What is 27 + 58?");
  const card = answer.getByRole("alert");
  assert.match(
    await card.textContent(),
    /The request was refused.*image_url.*Status 400 · messages\[0\]\.content\[0\]/s,
  );
  expectStatus(complaints, 400);
  await shotEverywhere({ page, shot }, "refused");

  // A message after it is answered, because the refused one is left out.
  const next = await ask(page, "What is 30 + 12?");
  assert.match(await next.locator("> .prose").textContent(), /42/);
  await page.locator(".turn.left-out").getByText("Not part of the conversation").waitFor();

  await page.getByRole("button", { name: "New chat" }).click();
  await drop(page, "#chat-panel", [picture]);
  await page.locator("#attachments img").waitFor();
  await ask(page, "What is 27 + 58?");
  expectStatus(complaints, 400);
  await page.getByRole("button", { name: "Ask without the files" }).click();
  await page.getByText("The files are not sent").waitFor();
  assert.match(await (await answered(page)).locator("> .prose").textContent(), /85/);
}

async function seen({ page, shot }) {
  await page.getByRole("button", { name: "New chat" }).click();
  const base64 = (await readFile(drawn)).toString("base64");
  await drop(page, "#chat-panel", [{ name: "drawn.png", type: "image/png", base64 }]);
  await page.getByRole("button", { name: "Ask quire-nano-see" }).click();
  assert.equal(await page.locator("#attachment-hint").textContent(), "");
  const answer = await ask(page, "What colour is the circle?");
  assert.match(await answer.locator("> .prose").textContent(), /red/);
  await shotEverywhere({ page, shot }, "seen");

  // The page of a PDF is a picture.
  await page.getByRole("button", { name: "New chat" }).click();
  const pages = (await readFile(drawn.replace(/png$/, "pdf"))).toString("base64");
  await drop(page, "#chat-panel", [{ name: "drawn.pdf", type: "application/pdf", base64: pages }]);
  await page.locator("#attachments .attachment").waitFor();
  const read = await ask(page, "What colour is the circle?");
  assert.match(await read.locator("> .prose").textContent(), /red/);
  await shotEverywhere({ page, shot }, "read");
  await page.getByRole("button", { name: "New chat" }).click();
  await page.getByRole("combobox", { name: "Model" }).selectOption("quire-nano");
}

async function asked({ page, shot }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await drop(page, "#chat-panel", [picture, pdf]);
  await page.locator("#attachments .attachment").nth(1).waitFor();
  const check = await answerChat(
    page,
    ({ messages, model }) => {
      assert.equal(model, "quire-nano");
      const [image, file, text] = messages[0].content;
      assert.deepEqual(image, { type: "image_url", image_url: { url: `data:image/png;base64,${PIXEL}` } });
      assert.deepEqual(file, {
        type: "file",
        file: { filename: "report.pdf", file_data: `data:application/pdf;base64,${PDF}` },
      });
      assert.deepEqual(text, { type: "text", text: "What do you see?" });
    },
    { content: "A single dot." },
  );
  const answer = await ask(page, "What do you see?");
  check();
  assert.equal(await answer.locator("> .prose").textContent(), "A single dot.");
  await page.getByRole("button", { name: `Enlarge ${picture.name}` }).click();
  await page.getByRole("dialog", { name: picture.name }).waitFor();
  await page.keyboard.press("Escape");
  await shot("picture");

  // The code of the request reads the files from the disk.
  await answer.getByRole("button", { name: "Show the request as code" }).click();
  for (const [choice, name] of [
    ["curl", "files.sh"],
    ["Python", "files.py"],
  ]) {
    await page.locator("#code-dialog").getByText(choice, { exact: true }).click();
    await writeFile(path.join(folder, name), await page.locator("#code-sample code").textContent());
  }
  await writeFile(path.join(folder, picture.name), Buffer.from(PIXEL, "base64"));
  await writeFile(path.join(folder, pdf.name), Buffer.from(PDF, "base64"));
  await page.keyboard.press("Escape");

  // The picture goes along with the next question too, and is still there when the page is opened again.
  await page.reload();
  await chatReady(page);
  await page.locator(".turn.user img").waitFor();
  const again = await answerChat(page, ({ messages }) => assert.equal(messages[0].content[0].type, "image_url"), {
    content: "Red.",
  });
  await ask(page, "Which colour?");
  again();
}

async function pasted({ page }) {
  await page.getByRole("button", { name: "New chat" }).click();
  await page.evaluate((base64) => {
    const clipboardData = new DataTransfer();
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    clipboardData.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
    document
      .getElementById("prompt")
      .dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
  }, PIXEL);
  await page.getByRole("img", { name: "pasted.png" }).waitFor();
  await page.getByRole("button", { name: "Remove pasted.png" }).click();
  assert.equal(await page.locator("#attachments").textContent(), "");
}

async function photographed({ page, shot }) {
  await page.getByRole("button", { name: "Take a picture" }).click();
  await page.waitForFunction(() => document.getElementById("camera-video").videoWidth > 0);
  await shot("camera");
  await page.getByRole("button", { name: "Take it" }).click();
  await page.getByRole("img", { name: "camera.jpg" }).waitFor();
  await page.getByRole("button", { name: "Remove camera.jpg" }).click();
}

async function chosen({ page }) {
  const text = { name: "notes.md", mimeType: "text/markdown", buffer: Buffer.from("# Notes") };
  const binary = { name: "data.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0, 255, 0]) };
  await page.locator("#attach-file").setInputFiles([text, binary]);
  await page.getByText("data.bin is neither a picture, a PDF, audio nor text.").waitFor();
  const check = await answerChat(
    page,
    ({ messages }) => assert.equal(messages[0].content[0].text, "File notes.md:\n\n# Notes"),
    { content: "Notes." },
  );
  await ask(page, "What is this?");
  check();
}

async function failures({ page, complaints, shot }) {
  await page.getByRole("button", { name: "New chat" }).click();
  const error = { message: "The queue is full.", type: "server_error", param: null, code: 503 };
  const check = await answerChat(page, () => {}, { status: 503, headers: { "retry-after": "3" }, error });
  const answer = await ask(page, "What is 27 + 58?");
  check();
  assert.match(
    await answer.getByRole("alert").textContent(),
    /The server is busy.*The queue is full\..*Try again in 3 seconds/s,
  );
  expectStatus(complaints, 503);
  await shot("busy");
  await page.route("**/v1/chat/completions", (route) => route.abort(), { times: 1 });
  await page.getByRole("button", { name: "Try again" }).click();
  await page.getByText("The server cannot be reached.").waitFor();
  expectStatus(complaints, "ERR_FAILED");
  await page.getByRole("button", { name: "Try again" }).click();
  await page.locator(".turn.assistant > .prose").getByText("85").waitFor();
  assert.equal(await page.getByRole("alert").count(), 0);
}

await withPage({ url, folder }, async (opened) => {
  await chatReady(opened.page);
  for (const drive of [refused, seen, asked, pasted, photographed, chosen, failures]) await drive(opened);
});
