// The settings of a conversation: what its requests have besides messages.

import { byId, element } from "./elements.js";
import { recall, remember } from "./preferences.js";
import { PERSON_SCHEMA, WEATHER_TOOL } from "./suggestions.js";

const DEFAULTS = "settings";
const NUMBERS = ["temperature", "top_p", "max_completion_tokens", "seed"];
const THINKING = { default: undefined, on: true, off: false };

function field(name) {
  return byId(`setting-${name}`);
}

// The settings that new conversations begin with.
export function defaultSettings() {
  try {
    return JSON.parse(recall(DEFAULTS)) ?? {};
  } catch {
    return {};
  }
}

export class SettingsDialog {
  // onchange(settings) is called with the changed ones.
  constructor(onchange) {
    this.onchange = onchange;
    this.dialog = byId("settings-dialog");
    this.form = byId("settings-form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    byId("example-tools").addEventListener("click", () => this.insert("tools", [WEATHER_TOOL]));
    byId("example-schema").addEventListener("click", () => this.insert("schema", PERSON_SCHEMA));
    for (const name of ["tools", "schema"]) field(name).addEventListener("input", () => this.check(name));
  }

  insert(name, example) {
    field(name).value = JSON.stringify(example, null, 2);
    this.check(name);
  }

  // Opens the dialog at a setting.
  open(settings, name = "system") {
    field("system").value = settings.system ?? "";
    for (const number of NUMBERS) field(number).value = settings[number] ?? "";
    field("thinking").value = Object.keys(THINKING).find((key) => THINKING[key] === settings.thinking);
    field("tools").value = settings.tools?.length ? JSON.stringify(settings.tools, null, 2) : "";
    field("schema").value = settings.schema ? JSON.stringify(settings.schema, null, 2) : "";
    field("defaults").checked = false;
    for (const json of ["tools", "schema"]) this.check(json);
    this.dialog.showModal();
    field(name).focus();
    field(name).scrollIntoView({ block: "center" });
  }

  // Shows what is wrong with a field of JSON. Returns its value; undefined if it is empty or wrong.
  check(name) {
    const area = field(name);
    const text = area.value.trim();
    let value;
    let problem = "";
    try {
      if (text) value = (name === "tools" ? toolsOf : schemaOf)(JSON.parse(text));
    } catch (error) {
      problem = error instanceof SyntaxError ? `This is no JSON: ${error.message}` : error.message;
    }
    area.setAttribute("aria-invalid", String(Boolean(problem)));
    byId(`problem-${name}`).textContent = problem;
    return value;
  }

  save() {
    const settings = { system: field("system").value.trim() || undefined, thinking: THINKING[field("thinking").value] };
    for (const number of NUMBERS)
      settings[number] = field(number).value === "" ? undefined : Number(field(number).value);
    for (const name of ["tools", "schema"]) settings[name] = this.check(name);
    const wrong = this.form.querySelector('[aria-invalid="true"]');
    if (wrong) {
      wrong.focus();
      return;
    }
    const filled = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== undefined));
    if (field("defaults").checked) remember(DEFAULTS, JSON.stringify(filled));
    this.dialog.close();
    this.onchange(filled);
  }
}

// Tools as chat completions take them. A function without the object around it is accepted, and so is a single one.
function toolsOf(value) {
  const tools = (Array.isArray(value) ? value : [value]).map((tool) =>
    tool?.name ? { type: "function", function: tool } : tool,
  );
  for (const tool of tools) {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string") {
      throw new Error('Each tool needs the form {"type": "function", "function": {"name": …, "parameters": …}}.');
    }
  }
  return tools;
}

function schemaOf(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new Error("A JSON schema is an object.");
  return value;
}

// A conversation as a Markdown document.
export function asMarkdown(conversation) {
  const names = { user: "You", tool: "Tool" };
  const turns = conversation.path().map((message) => {
    const files = (message.attachments ?? []).map(({ name }) => `*${name}*\n\n`).join("");
    const calls = (message.calls ?? []).map(({ name, arguments: text }) => `\n\n\`${name}(${text})\``).join("");
    return `## ${names[message.role] ?? message.model}\n\n${files}${message.content}${calls}\n`;
  });
  return `# ${conversation.title}\n\n${turns.join("\n")}`;
}

// Asks before something is lost. Returns whether it may be.
export function confirmed(question, action) {
  const dialog = byId("confirm-dialog");
  byId("confirm-question").textContent = question;
  byId("confirm-action").replaceChildren(element("span", {}, action));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }),
  );
}
