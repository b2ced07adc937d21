// What the drives of the built-in page share: Chromium, its complaints, and files to drop.
import assert from "node:assert/strict";
import path from "node:path";
import { chromium } from "playwright-core";

// Opens the page, and gives it to `drive`. Everything that the browser complains of fails the test, unless the drive
// takes it out of `complaints`. Options: url, folder for screenshots (the variable SCREENSHOTS names another), key,
// viewport, colorScheme, and microphone, a wav file that is played over and over.
export async function withPage(
  { url, folder, key, microphone, viewport = { width: 1200, height: 800 }, colorScheme = "light" },
  drive,
) {
  const media = microphone ? [`--use-file-for-fake-audio-capture=${microphone}`] : [];
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", ...media],
  });
  const complaints = [];
  try {
    const permissions = ["microphone", "camera", "clipboard-read", "clipboard-write"];
    const context = await browser.newContext({ permissions, viewport, colorScheme });
    const page = await context.newPage();
    page.setDefaultTimeout(60000);
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
    page.on("pageerror", (error) => complaints.push(String(error)));
    page.on("request", (request) => {
      const target = new URL(request.url());
      if (!["blob:", "data:"].includes(target.protocol) && target.host !== new URL(url).host)
        complaints.push(`request to ${target.host}`);
    });
    await page.goto(url);
    if (key) await enterKey(page, key, complaints);
    const shot = (name) => page.screenshot({ path: path.join(process.env.SCREENSHOTS ?? folder, `${name}.png`) });
    await drive({ page, context, complaints, shot });
    assert.deepEqual(complaints, []);
  } finally {
    await browser.close();
  }
}

// Waits for the ends of animations.
export async function settled(page) {
  await page.evaluate(async () => {
    for (const _ of [1, 2]) await new Promise(requestAnimationFrame); // in which they begin
    const moving = document.getAnimations().filter((animation) => animation.effect.getTiming().iterations !== Infinity);
    await Promise.all(moving.map((animation) => animation.finished.catch(() => {})));
  });
}

// Takes screenshots, wide and narrow, light and dark.
export async function shotEverywhere({ page, shot }, name) {
  const viewport = page.viewportSize();
  for (const colorScheme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    for (const [width, height] of [
      [390, 844],
      [1280, 800],
    ]) {
      await page.setViewportSize({ width, height });
      await settled(page);
      await shot(`${name}-${width}-${colorScheme}`);
    }
  }
  await page.setViewportSize(viewport);
}

// Takes the complaints of responses with a status, which browsers log, out of the list.
export function expectStatus(complaints, status) {
  assert.deepEqual(
    complaints.splice(0).filter((text) => !text.includes(String(status))),
    [],
  );
}

async function enterKey(page, key, complaints) {
  await page.getByRole("heading", { name: "This server needs an API key" }).waitFor();
  expectStatus(complaints, 401);
  await page.locator("#key").fill("wrong");
  await page.keyboard.press("Enter");
  await page.getByText("The server does not accept this key.").waitFor();
  expectStatus(complaints, 401);
  await page.locator("#key").fill(key);
  await page.keyboard.press("Enter");
  await page.locator("#key-dialog").waitFor({ state: "hidden" });
}

// Waits until the chat has its models.
export async function chatReady(page) {
  await page.waitForFunction(() => !document.getElementById("prompt").disabled);
}

// Sends a message and waits for the end of its answer. Returns the answer's element.
export async function ask(page, text) {
  await page.locator("#prompt").fill(text);
  await page.keyboard.press("Enter");
  return answered(page);
}

export async function answered(page) {
  await page.locator('#send[aria-label="Send"]').waitFor();
  return page.locator(".turn.assistant").last();
}

// Drops files on an element: a list of { name, type, base64 }.
export async function drop(page, selector, files) {
  const dataTransfer = await page.evaluateHandle((contents) => {
    const transfer = new DataTransfer();
    for (const { name, type, base64 } of contents) {
      const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
      transfer.items.add(new File([bytes], name, { type }));
    }
    return transfer;
  }, files);
  for (const kind of ["dragenter", "dragover", "drop"])
    await page.locator(selector).dispatchEvent(kind, { dataTransfer });
}

// Answers the next chat in place of the server. `check` gets the body of the request.
export async function answerChat(page, check, { reasoning, content, status = 200, headers = {}, error }) {
  const usage = { prompt_tokens: 20, completion_tokens: 10, total_tokens: 30 };
  const chunk = (delta, finish) => ({ choices: [{ index: 0, delta, finish_reason: finish ?? null }], usage });
  const chunks = [
    chunk({ role: "assistant", content: "" }),
    ...(reasoning ? [chunk({ reasoning })] : []),
    chunk({ content }),
    chunk({}, "stop"),
  ];
  const body = `${chunks.map((data) => `data: ${JSON.stringify(data)}\n\n`).join("")}data: [DONE]\n\n`;
  let failure;
  await page.route(
    "**/v1/chat/completions",
    async (route) => {
      try {
        check(route.request().postDataJSON());
      } catch (problem) {
        failure = problem;
      }
      if (error) await route.fulfill({ status, headers, json: { error } });
      else await route.fulfill({ status, headers, contentType: "text/event-stream", body });
    },
    { times: 1 },
  );
  return () => {
    if (failure) throw failure;
  };
}
