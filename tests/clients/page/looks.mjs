// Looks at the built-in page, wide and narrow, light and dark: node looks.mjs URL FOLDER. Nothing is cut off, axe finds
// no barrier, and Markdown of hostile models stays text.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { answerChat, ask, chatReady, settled, withPage } from "./browser.mjs";

const [url, folder] = process.argv.slice(2);
const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const MARKDOWN = `# Title

Some **bold**, *italic* and \`code\`, a [link](https://example.org/a_(b)) and https://example.org/path.

1. First
   - nested
2. Second

| Planet | Diameter |
|:--|--:|
| Earth | 12,742 km |

\`\`\`python
def double(number):
    return 2 * number  # twice
\`\`\`
`;

async function barriers(page, name) {
  await page.evaluate(axe);
  await settled(page);
  const violations = await page.evaluate(async () => {
    const result = await window.axe.run(document, { resultTypes: ["violations"] });
    return result.violations.map(
      ({ id, nodes }) => `${id}: ${nodes.map(({ html, failureSummary }) => `${html} ${failureSummary}`).join("\n")}`,
    );
  });
  assert.deepEqual(violations, [], name);
}

// No control of a part of the page lies beyond its right edge.
async function fits(page, name, part = "#stage") {
  const [needed, available] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(needed <= available, `${name}: ${needed} > ${available}`);
  const cut = await page.evaluate((selector) => {
    const { right } = document.querySelector(selector).getBoundingClientRect();
    const controls = [...document.querySelectorAll(`${selector} :is(button, select, textarea)`)];
    const isCut = (control) => control.checkVisibility() && control.getBoundingClientRect().right > right + 1;
    return controls.filter(isCut).map(({ id, title }) => id || title);
  }, part);
  assert.deepEqual(cut, [], name);
}

async function look({ page, shot }, name) {
  await chatReady(page);
  await fits(page, `${name}-empty`);
  await barriers(page, `${name}-empty`);
  await shot(`${name}-empty`);
  const check = await answerChat(page, () => {}, { reasoning: "I think.", content: MARKDOWN });
  const answer = await ask(page, "Show me some Markdown.");
  check();
  await answer.locator(".statistics summary").click();
  await fits(page, `${name}-answer`);
  await barriers(page, `${name}-answer`);
  await shot(`${name}-answer`);
  await answer.getByRole("button", { name: "Show the request as code" }).click();
  await fits(page, `${name}-code`, "#code-dialog");
  await barriers(page, `${name}-code`);
  await shot(`${name}-code`);
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "Settings of the chat" }).click();
  await fits(page, `${name}-settings`, "#settings-dialog");
  await barriers(page, `${name}-settings`);
  await shot(`${name}-settings`);
  await page.keyboard.press("Escape");
  await page.getByRole("tab", { name: "Captions" }).click();
  await fits(page, `${name}-captions`);
  await barriers(page, `${name}-captions`);
  await shot(`${name}-captions`);
  await page.getByRole("tab", { name: "Chat" }).click();
}

// The list of conversations covers a narrow page; it opens and closes with the keyboard.
async function drawer({ page, shot }) {
  const sidebar = page.getByRole("complementary", { name: "Conversations" });
  assert.equal(await sidebar.isVisible(), false);
  await page.getByRole("button", { name: "Conversations", exact: true }).click();
  await page.getByRole("button", { name: "New chat" }).and(page.locator(":focus")).waitFor();
  await settled(page);
  await shot("narrow-conversations");
  await page.keyboard.press("Escape");
  await sidebar.waitFor({ state: "hidden" });
  assert.equal(await page.evaluate(() => document.activeElement.id), "menu");
}

// The switch of colours wins over the system's, also when the page is opened again.
async function colours({ page }) {
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await paper();
  await page.locator("#theme").click();
  await page.locator("#theme").click();
  assert.equal(await page.locator("#theme").getAttribute("aria-label"), "Colours: dark");
  const dark = await paper();
  assert.notEqual(dark, light);
  await page.reload();
  await chatReady(page);
  assert.equal(await paper(), dark);
  await page.locator("#theme").click();
  assert.equal(await paper(), light);
}

const HOSTILE = [
  [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "<p>&lt;img src=x onerror=alert(1)&gt;&lt;script&gt;alert(1)&lt;/script&gt;</p>",
  ],
  [
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/v1/models)",
    "<p><span>a</span> <span>b</span> <span>c</span></p>",
  ],
  [
    "![tracker](https://example.org/x.png)",
    '<p><a href="https://example.org/x.png" target="_blank" rel="noopener noreferrer nofollow" title="https://example.org/x.png">Picture: tracker</a></p>',
  ],
  [
    "**a *b* c** *f __d__ snake_case_name ~~e~~ \\*f\\*",
    "<p><strong>a <em>b</em> c</strong> *f <strong>d</strong> snake_case_name <del>e</del> *f*</p>",
  ],
  ["- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"],
  ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
  ["> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"],
  ["`` a`b `` and `<b>`", "<p><code>a`b</code> and <code>&lt;b&gt;</code></p>"],
  ["a | b\nno table", "<p>a | b<br>no table</p>"],
];
const LARGE = [
  "[".repeat(50000),
  "*a_".repeat(20000),
  "`"
    .repeat(300)
    .split("")
    .map((mark, index) => mark.repeat(index))
    .join(" "),
  "> ".repeat(5000),
  "- ".repeat(5000),
  "|-".repeat(20000),
  "#".repeat(50000),
  " ".repeat(50000) + "x",
  "~".repeat(50000) + "`",
  "http://".repeat(5000),
  "<http://".repeat(5000),
  "a\n".repeat(20000),
  "<!--".repeat(10000),
];

async function markdown({ page }) {
  const render = (texts) =>
    page.evaluate(async (sources) => {
      const { MarkdownView } = await import(new URL("page/markdown.js", document.baseURI));
      return sources.map((source) => {
        const container = document.createElement("div");
        const view = new MarkdownView(container);
        for (const share of [0.3, 0.7, 1]) view.update(source.slice(0, share * source.length)); // as a stream does
        return container.innerHTML;
      });
    }, texts);
  assert.deepEqual(
    await render(HOSTILE.map(([source]) => source)),
    HOSTILE.map(([, html]) => html),
  );
  for (const source of LARGE) assert.ok((await render([source]))[0].length > 0, source.slice(0, 10));
}

const options = { url, folder };
const narrow = { viewport: { width: 390, height: 844 } };
await withPage(options, async (opened) => {
  await look(opened, "wide-light");
  await colours(opened);
  await markdown(opened);
});
await withPage({ ...options, colorScheme: "dark" }, (opened) => look(opened, "wide-dark"));
await withPage({ ...options, ...narrow, colorScheme: "dark" }, (opened) => look(opened, "narrow-dark"));
await withPage({ ...options, ...narrow }, async (opened) => {
  await look(opened, "narrow-light");
  await drawer(opened);
});
