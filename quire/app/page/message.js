// The view of one message of a conversation.

import { localUrl } from "./attachments.js";
import { hasErrorOnly } from "./conversation.js";
import { copyButton, count, duration, element, fileSize, icon, iconButton } from "./elements.js";
import { codeBlock, MarkdownView } from "./markdown.js";

// Titles of errors by status.
const TITLES = {
  0: "No answer",
  401: "An API key is needed",
  408: "It took too long",
  413: "Too large",
  429: "The server is busy",
  500: "The server made an error",
  503: "The server is busy",
};

// Makes the view of a message. `actions` has the functions that its buttons call: edit, retry, resume, select,
// answerCalls, showCode, withoutAttachments, openPicture, askForKey.
export function messageView(message, actions) {
  if (message.role === "user") return new Question(message, actions);
  return message.role === "tool" ? new ToolResult(message) : new Answer(message, actions);
}

function heading(text) {
  return element("h2", { class: "visually-hidden" }, text);
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return undefined;
  }
}

// Buttons that lead to other versions of a message; nothing if there is one only.
function versionButtons(message, versions, select) {
  if (versions.length < 2) return [];
  const index = versions.indexOf(message);
  const step = (offset, name, label) =>
    iconButton(name, label, () => select(versions[index + offset]), { disabled: !versions[index + offset] });
  return [
    step(-1, "left", "Earlier version"),
    element("span", { class: "version" }, `${index + 1} / ${versions.length}`),
    step(1, "right", "Later version"),
  ];
}

// An attachment as a card: a picture, a player or a name. `onremove`: what its button does, if it has one.
export function attachmentCard(attachment, { onopen, onremove } = {}) {
  const { name, kind, size } = attachment;
  const remove = onremove && iconButton("close", `Remove ${name}`, onremove, { class: "icon-button remove" });
  if (kind === "picture") {
    const picture = element("img", { src: localUrl(attachment), alt: name });
    const content = onopen
      ? element(
          "button",
          { type: "button", class: "picture", "aria-label": `Enlarge ${name}`, onclick: () => onopen(attachment) },
          picture,
        )
      : picture;
    return element("div", { class: "attachment with-picture" }, content, remove);
  }
  const text = element(
    "span",
    { class: "file-text" },
    element("b", {}, name),
    element("small", {}, `${{ pdf: "PDF", audio: "Audio", text: "Text" }[kind]} · ${fileSize(size)}`),
  );
  const player =
    kind === "audio" && onopen && element("audio", { controls: true, src: localUrl(attachment), "aria-label": name });
  return element("div", { class: "attachment" }, icon(kind === "audio" ? "microphone" : "file"), text, player, remove);
}

class Question {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.attachments = element(
      "div",
      { class: "attachments" },
      (message.attachments ?? []).map((attachment) => attachmentCard(attachment, { onopen: actions.openPicture })),
    );
    this.bubble = element("div", { class: "bubble" }, message.content);
    this.note = element("p", { class: "turn-note" });
    this.bar = element("div", { class: "turn-bar" });
    this.element = element(
      "article",
      { class: "turn user" },
      heading("You"),
      this.attachments,
      message.content && this.bubble,
      this.note,
      this.bar,
    );
  }

  update({ versions, isLeftOut, isBusy }) {
    const { isWithoutFiles } = this.message;
    const state = JSON.stringify([versions.map(({ id }) => id), isLeftOut, isBusy, isWithoutFiles]);
    if (state === this.state) return;
    this.state = state;
    this.element.classList.toggle("left-out", isLeftOut);
    this.element.classList.toggle("without-files", Boolean(isWithoutFiles));
    this.note.textContent = noteOf(isLeftOut, isWithoutFiles);
    this.note.hidden = !this.note.textContent;
    this.bar.replaceChildren(
      ...versionButtons(this.message, versions, this.actions.select),
      copyButton("Copy the message", () => this.message.content),
      iconButton("edit", "Edit the message", () => this.edit(), { disabled: isBusy }),
    );
  }

  edit() {
    const editor = element("form", { class: "editor" });
    let attachments = [...(this.message.attachments ?? [])];
    const area = element("textarea", {
      "aria-label": "Edit the message",
      rows: Math.min(12, this.message.content.split("\n").length + 1),
    });
    area.value = this.message.content;
    const close = () => {
      editor.replaceWith(this.bar);
      this.element.classList.remove("editing");
      this.bar.querySelector('[aria-label="Edit the message"]')?.focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (!area.value.trim() && attachments.length === 0) return;
      close();
      this.actions.edit(this.message, area.value.trim(), attachments);
    };
    const cards = element("div", { class: "attachments" });
    const draw = () =>
      cards.replaceChildren(
        ...attachments.map((attachment) => attachmentCard(attachment, { onremove: () => remove(attachment) })),
      );
    const remove = (attachment) => {
      attachments = attachments.filter((other) => other !== attachment);
      draw();
    };
    draw();
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    });
    editor.addEventListener("submit", send);
    const buttons = element(
      "div",
      { class: "editor-bar" },
      element("button", { type: "button", class: "quiet-button", onclick: close }, "Cancel"),
      element("button", { type: "submit", class: "main-button" }, "Send"),
    );
    editor.append(cards, area, buttons);
    this.element.classList.add("editing");
    this.bar.replaceWith(editor);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function noteOf(isLeftOut, isWithoutFiles) {
  if (isLeftOut) return "Not part of the conversation, because the request failed";
  return isWithoutFiles ? "The files are not sent" : "";
}

class ToolResult {
  constructor(message) {
    const content = prettyJson(message.content);
    const shown = content ? codeBlock(content, "json") : element("div", { class: "bubble" }, message.content);
    this.element = element(
      "article",
      { class: "turn tool" },
      heading(`Result of ${message.name}`),
      element("p", { class: "call-title" }, icon("tool"), "Result of ", element("b", {}, message.name)),
      shown,
    );
  }

  update() {}
}

class Answer {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = new Reasoning();
    this.prose = element("div", { class: "prose" });
    this.markdown = new MarkdownView(this.prose);
    this.calls = new Calls(message, actions);
    this.end = element("div", { class: "turn-end" });
    this.bar = element("div", { class: "turn-bar" });
    this.rate = element("span", { class: "rate" });
    const name = element(
      "p",
      { class: "who", "aria-hidden": "true" },
      element("img", { src: "page/icon.svg", alt: "", class: "mark" }),
      message.model,
    );
    this.element = element(
      "article",
      { class: "turn assistant" },
      heading(message.model),
      name,
      this.reasoning.element,
      this.prose,
      this.calls.element,
      this.end,
      this.bar,
    );
  }

  update({ versions, isRunning, isLast, isBusy }) {
    const { message } = this;
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", String(isRunning));
    this.reasoning.update(message, isRunning);
    this.showContent(isRunning);
    this.calls.update(message, { isOpen: isLast && !isRunning });
    if (isRunning) {
      this.state = undefined;
      this.end.replaceChildren();
      if (this.bar.firstChild !== this.rate) this.bar.replaceChildren(this.rate);
      this.rate.textContent = rateOf(message);
      return;
    }
    const state = JSON.stringify([versions.map(({ id }) => id), isLast, isBusy, message.finish, message.error]);
    if (state === this.state) return;
    this.state = state;
    this.end.replaceChildren(...this.ending(isLast && !isBusy));
    this.bar.replaceChildren(...this.buttons(versions, isBusy));
  }

  showContent(isRunning) {
    const { content, structured } = this.message;
    if (!structured) {
      this.markdown.update(content);
      return;
    }
    if (this.structuredText === content + isRunning) return;
    this.structuredText = content + isRunning;
    const block = codeBlock(prettyJson(content) ?? content, "json", isRunning);
    this.prose.replaceChildren(
      ...(content ? [element("p", { class: "call-title" }, icon("code"), "Structured output"), block] : []),
    );
  }

  // What stands below an answer that did not end by itself.
  ending(canContinue) {
    const { message } = this;
    if (message.error) return [errorCard(message, canContinue, this.actions)];
    const text = { length: "The answer has reached its limit of tokens.", stopped: "Stopped." }[message.finish];
    if (!text) return [];
    const resume =
      canContinue &&
      message.content &&
      !message.calls?.length &&
      element(
        "button",
        { type: "button", class: "text-button", onclick: () => this.actions.resume(message) },
        "Continue",
      );
    return [element("p", { class: "turn-note" }, text, resume)];
  }

  buttons(versions, isBusy) {
    const { message, actions } = this;
    return [
      ...versionButtons(message, versions, actions.select),
      message.content && copyButton("Copy the answer", () => message.content),
      !hasErrorOnly(message) && iconButton("retry", "Answer again", () => actions.retry(message), { disabled: isBusy }),
      iconButton("code", "Show the request as code", () => actions.showCode(message)),
      message.usage && statistics(message),
    ].filter(Boolean);
  }
}

// The reasoning of an answer, folded.
class Reasoning {
  constructor() {
    this.title = element("span", { class: "reasoning-title" });
    this.prose = element("div", { class: "prose" });
    this.markdown = new MarkdownView(this.prose);
    this.element = element(
      "details",
      { class: "reasoning", hidden: true },
      element("summary", {}, icon("right"), this.title),
      this.prose,
    );
  }

  update({ reasoning, thoughtFor, content, calls }, isRunning) {
    this.element.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = isRunning && !content && !calls?.length;
    this.element.classList.toggle("thinking", isThinking);
    this.title.textContent = isThinking
      ? "Thinking…"
      : thoughtFor > 50
        ? `Thought for ${duration(thoughtFor)}`
        : "Thought briefly";
    this.markdown.update(reasoning);
  }
}

// The tool calls of an answer, and fields for their results while there are none.
class Calls {
  constructor(message, actions) {
    this.actions = actions;
    this.list = element("div", { class: "calls" });
    this.form = element("form", { class: "results", hidden: true });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const results = [...this.form.querySelectorAll("textarea")].map((area) => area.value.trim());
      this.actions.answerCalls(message, results);
    });
    this.element = element("div", { hidden: true }, this.list, this.form);
  }

  update({ calls = [] }, { isOpen }) {
    this.element.hidden = calls.length === 0;
    const state = JSON.stringify([calls, isOpen]);
    if (calls.length === 0 || state === this.state) return;
    this.state = state;
    this.list.replaceChildren(
      ...calls.map((call) =>
        element(
          "section",
          { class: "call", "aria-label": `Call of ${call.name}` },
          element("p", { class: "call-title" }, icon("tool"), "Calls ", element("b", {}, call.name)),
          codeBlock(prettyJson(call.arguments) ?? call.arguments, "json"),
        ),
      ),
    );
    this.form.hidden = !isOpen;
    if (isOpen) this.drawForm(calls);
  }

  drawForm(calls) {
    const fields = calls.map((call) =>
      element(
        "label",
        {},
        element("span", {}, `Result of ${call.name}`),
        element("textarea", {
          rows: 2,
          required: true,
          spellcheck: "false",
          placeholder: 'What the tool returns, such as {"temperature": 21}',
        }),
      ),
    );
    this.form.replaceChildren(
      ...fields,
      element("button", { type: "submit", class: "main-button" }, calls.length > 1 ? "Send results" : "Send result"),
    );
  }
}

function errorCard(message, canContinue, actions) {
  const { status, text, param, retryAfter, hasAttachments } = message.error;
  const buttons = [
    element(
      "button",
      { type: "button", class: "quiet-button", onclick: () => actions.retry(message) },
      icon("retry"),
      "Try again",
    ),
  ];
  if (status === 401)
    buttons.unshift(
      element("button", { type: "button", class: "main-button", onclick: actions.askForKey }, "Enter a key"),
    );
  if (hasAttachments && status >= 400 && status < 500 && status !== 401) {
    buttons.push(
      element(
        "button",
        { type: "button", class: "quiet-button", onclick: () => actions.withoutAttachments(message) },
        "Ask without the files",
      ),
    );
  }
  const facts = [status > 0 && `Status ${status}`, param, retryAfter && `Try again in ${count(retryAfter, "second")}`]
    .filter(Boolean)
    .join(" · ");
  return element(
    "div",
    { class: "error-card", role: "alert" },
    icon("warning"),
    element(
      "div",
      {},
      element("p", { class: "error-title" }, TITLES[status] ?? "The request was refused"),
      element("p", {}, text),
      facts && element("p", { class: "error-facts" }, facts),
      canContinue && element("div", { class: "error-bar" }, buttons),
    ),
  );
}

// Tokens and tokens per second, as far as they are known.
function rateOf({ usage, metrics, rate: measured }) {
  if (!usage?.completion_tokens) return "";
  const tokens = count(usage.completion_tokens, "token");
  const rate = metrics?.tokens_per_second ?? measured ?? 0;
  return rate > 0 ? `${tokens} · ${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s` : tokens;
}

// Where the time of an answer went.
function statistics(message) {
  const { usage, metrics, ignored } = message;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const reasoning = usage.completion_tokens_details?.reasoning_tokens ?? 0;
  const rows = [
    ["Prompt", `${count(usage.prompt_tokens, "token")}, ${cached} of them cached`],
    ["Answer", `${count(usage.completion_tokens, "token")}, ${reasoning} of them reasoning`],
  ];
  if (metrics) {
    rows.push(
      ["Preparation", duration(metrics.preprocess_time_ms)],
      ["Waited in the queue", duration(metrics.queue_time_ms)],
      ["Prompt computed in", duration(metrics.prefill_time_ms)],
      ["First token after", duration(metrics.time_to_first_token_ms)],
      ["Generation", duration(metrics.generation_time_ms)],
    );
  }
  if (ignored?.length) rows.push(["Without effect", ignored.join(", ")]);
  const list = element(
    "dl",
    {},
    rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]).flat(),
  );
  return element(
    "details",
    { class: "statistics" },
    element("summary", { title: "Where the time went" }, rateOf(message) || "0 tokens"),
    list,
  );
}
