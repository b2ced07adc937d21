// Drives the captions of the built-in page: node captions.mjs URL FOLDER WAV KEY [MODEL TEXT].
// Screenshots go into FOLDER. Chromium's microphone plays the wav file. With a model, TEXT is what it hears in the file.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import path from "node:path";
import { drop, withPage } from "./browser.mjs";

const [url, folder, wav, key, model, text] = process.argv.slice(2);
const beginning = model ? text.split(" ").slice(0, 2).join(" ") : "w1";

await withPage({ url, folder, key, microphone: wav }, async ({ page, shot }) => {
  await page.getByRole("tab", { name: "Captions" }).click();

  // Live captions: text appears while the utterance is open, and stays when it is complete.
  const toggle = page.locator("#toggle");
  await page.waitForFunction(() => !document.getElementById("toggle").disabled);
  if (model) await page.locator("#speech-model").selectOption(model);
  await toggle.click();
  await page.waitForFunction(
    (words) => document.querySelector("#captions p.open")?.textContent.includes(words),
    beginning,
  );
  await shot("speaking");
  await page.locator("#captions p:not(.open)").nth(1).waitFor();
  const lines = await page.locator("#captions p:not(.open)").allTextContents();
  for (const line of lines) assert.match(line, /^\d+:\d\d\s*\S/);
  for (const line of lines) assert.ok(line.includes(model ? text : "w1 w2"), line);
  await shot("captions");
  await toggle.click();
  assert.equal(await toggle.textContent(), "Start microphone");

  // A file: transcript and subtitles. A model that only hears sessions has no answer, so that is made up.
  const segments = [
    { start: 0.52, end: 2.9, text: " Hello there." },
    { start: 62.04, end: 3725.5, text: " General <b>remarks</b>." },
  ];
  const answer = async (route) => {
    const body = route.request().postDataBuffer().toString("latin1");
    for (const part of ['name="file"; filename="speech.wav"', 'name="model"', "verbose_json"])
      assert.ok(body.includes(part), part);
    await route.fulfill({ json: { text: "Hello there. General <b>remarks</b>.", segments } });
  };
  if (!model) await page.route("**/v1/audio/transcriptions", answer);
  if (model)
    await drop(page, "#drop", [
      { name: "speech.wav", type: "audio/wav", base64: (await readFile(wav)).toString("base64") },
    ]);
  else await page.locator("#file").setInputFiles(wav);
  await page.waitForFunction(() => !document.getElementById("srt").hidden || !document.getElementById("notice").hidden);
  assert.equal(await page.locator("#notice").isVisible(), false, await page.locator("#notice").textContent());
  const made = {
    srt: "1\n00:00:00,520 --> 00:00:02,900\nHello there.\n\n2\n00:01:02,040 --> 01:02:05,500\nGeneral <b>remarks</b>.\n",
    vtt: "WEBVTT\n\n00:00:00.520 --> 00:00:02.900\nHello there.\n\n00:01:02.040 --> 01:02:05.500\nGeneral <b>remarks</b>.\n",
    txt: "Hello there. General <b>remarks</b>.\n",
  };
  for (const id of ["srt", "vtt", "txt"]) {
    const [download] = await Promise.all([page.waitForEvent("download"), page.locator(`#${id}`).click()]);
    assert.equal(download.suggestedFilename(), `${path.basename(wav, ".wav")}.${id}`);
    const content = await readFile(await download.path(), "utf8");
    if (!model) assert.equal(content, made[id]);
    else if (id === "txt") assert.equal(content, `${text}\n`);
    else
      assert.match(
        content,
        id === "srt"
          ? /^1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n/
          : /^WEBVTT\n\n00:00:0\d\.\d{3} --> 00:00:0\d\.\d{3}\n/,
      );
    if (model) assert.ok(content.includes(`${text}\n`), content);
  }
  await shot("file");
});
