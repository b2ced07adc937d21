// A conversation: a tree of messages, because an edited question and a repeated answer leave the earlier ones in place.
// What is shown and sent is the path from the root to the leaf.

import { contentPart } from "./attachments.js";

const TITLE = 60; // characters

export class Conversation {
  // record: what is stored: id, title, model, settings, messages, leaf, updated.
  constructor(record) {
    this.record = record;
  }

  static begin(model, settings) {
    const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    return new Conversation({ id, title: "", model, settings, messages: [], leaf: null, updated: Date.now() });
  }

  get id() {
    return this.record.id;
  }

  get title() {
    return this.record.title || "New chat";
  }

  get settings() {
    return this.record.settings;
  }

  get isEmpty() {
    return this.record.messages.length === 0;
  }

  message(id) {
    return this.record.messages[id]; // messages are never removed
  }

  // Adds a message below another one, and makes it the leaf. Roles are user, assistant and tool.
  add(parent, fields) {
    const message = {
      id: this.record.messages.length,
      parent: parent?.id ?? null,
      content: "",
      at: Date.now(),
      ...fields,
    };
    this.record.messages.push(message);
    this.record.leaf = message.id;
    if (!this.record.title && message.role === "user") this.record.title = titleOf(message);
    this.touch();
    return message;
  }

  touch() {
    this.record.updated = Date.now();
  }

  // The messages that are shown.
  path() {
    const messages = [];
    for (let message = this.message(this.record.leaf); message; message = this.message(message.parent))
      messages.unshift(message);
    return messages;
  }

  // The versions of a message: itself, edits of it or other answers to the same question.
  versions(message) {
    return this.record.messages.filter((other) => other.parent === message.parent && other.role === message.role);
  }

  // Shows another version of a message, with what was last said after it.
  select(message) {
    let leaf = message;
    for (;;) {
      const next = this.record.messages.findLast((other) => other.parent === leaf.id);
      if (!next) break;
      leaf = next;
    }
    this.record.leaf = leaf.id;
  }

  // The attachments that requests have.
  attachments() {
    return this.path().flatMap((message) => (message.isWithoutFiles ? [] : (message.attachments ?? [])));
  }

  // Bytes of all messages, also of those that are not shown. An attachment of two versions is stored once.
  bytes() {
    const sizes = new Map();
    let text = 0;
    for (const message of this.record.messages) {
      text += 2 * (message.content.length + (message.reasoning?.length ?? 0));
      for (const attachment of message.attachments ?? []) sizes.set(attachment.id, attachment.size);
    }
    return [...sizes.values()].reduce((sum, size) => sum + size, text);
  }

  // Leaves the files out of the requests from now on.
  leaveFilesOut() {
    for (const message of this.path()) if (message.attachments) message.isWithoutFiles = true;
  }

  // Whether a message is left out of requests: a question that only got an error, and the error.
  isLeftOut(message) {
    if (message.role === "assistant") return hasErrorOnly(message);
    const answers = this.path().filter((other) => other.parent === message.id);
    return message.role === "user" && answers.length > 0 && answers.every(hasErrorOnly);
  }

  // The body of a request for an answer. `partOf` makes the content part of an attachment.
  async request(answer, partOf = contentPart) {
    const path = this.path();
    const before = path.slice(
      0,
      path.findIndex((message) => message.id === answer.id),
    );
    const question = before.at(-1);
    const sent = before.filter((message) => message === question || !this.isLeftOut(message));
    const { system } = this.settings;
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const message of sent) messages.push(await wireMessage(message, partOf));
    return { model: this.record.model, messages, ...fieldsOf(this.settings) };
  }
}

// Whether an answer is nothing but an error.
export function hasErrorOnly(message) {
  return Boolean(message.error) && !message.content && !message.calls?.length;
}

function titleOf(message) {
  const text = (message.content || message.attachments?.[0]?.name || "New chat").replace(/\s+/g, " ").trim();
  return text.length > TITLE ? `${text.slice(0, TITLE - 1).trimEnd()}…` : text;
}

// A message as chat completions take it.
async function wireMessage(message, partOf) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (message.role === "assistant") {
    const calls = message.calls?.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
    return { role: "assistant", content: message.content || null, ...(calls?.length && { tool_calls: calls }) };
  }
  if (!message.attachments?.length) return { role: "user", content: message.content };
  if (message.isWithoutFiles)
    return { role: "user", content: message.content || message.attachments.map(({ name }) => name).join(", ") };
  const parts = await Promise.all(message.attachments.map(partOf));
  return { role: "user", content: message.content ? [...parts, { type: "text", text: message.content }] : parts };
}

// The fields of a request that a conversation's settings stand for.
export function fieldsOf(settings) {
  const fields = {};
  for (const name of ["temperature", "top_p", "max_completion_tokens", "seed"]) {
    if (Number.isFinite(settings[name])) fields[name] = settings[name];
  }
  if (settings.thinking !== undefined) fields.chat_template_kwargs = { enable_thinking: settings.thinking };
  if (settings.tools?.length) fields.tools = settings.tools;
  if (settings.schema)
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: settings.schema } };
  return fields;
}
