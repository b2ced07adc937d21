// The chat: which conversation is shown, and what sends, stops, edits and repeats its messages.

import { localUrl, releaseUrls } from "./attachments.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { announce, byId, download, toast } from "./elements.js";
import { Generation } from "./generation.js";
import { recall, remember } from "./preferences.js";
import { showSamples } from "./samples.js";
import { asMarkdown, confirmed, defaultSettings, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { drawSuggestions } from "./suggestions.js";
import { openPicture, Thread } from "./thread.js";

const SAVE_INTERVAL = 2000; // milliseconds between two saves of an answer that is being generated
const FINE_POINTER = matchMedia("(pointer: fine)"); // elsewhere the focus would open a keyboard on the screen
const READ_OUT = 2000; // characters of an answer that screen readers get at once

export class Chat {
  // handlers: askForKey(), onopen(conversation) when another conversation is shown.
  constructor(store, handlers) {
    this.store = store;
    this.handlers = handlers;
    this.generations = new Map(); // by id of the conversation
    this.models = [];
    this.thread = new Thread(this.actions());
    this.sidebar = new Sidebar(store, {
      open: (conversation) => this.open(conversation),
      rename: (conversation, title) => this.rename(conversation, title),
      delete: (conversation) => this.delete(conversation),
    });
    this.settings = new SettingsDialog((settings) => this.changeSettings(settings));
    this.composer = new Composer({
      send: (text, attachments) => this.send(text, attachments),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
      openSettings: (name) => this.settings.open(this.conversation.settings, name),
      clearSetting: (name) => this.changeSettings({ ...this.conversation.settings, [name]: undefined }),
      chooseModel: (name) => this.chooseModel(name),
      bytes: () => this.conversation.attachments().reduce((sum, { size }) => sum + size, 0),
    });
    this.listen();
    this.begin();
  }

  listen() {
    byId("new-chat").addEventListener("click", () => (this.sidebar.close(), this.begin()));
    byId("settings").addEventListener("click", () => this.settings.open(this.conversation.settings));
    byId("model").addEventListener("change", () => this.chooseModel(byId("model").value));
    byId("save-markdown").addEventListener("click", () =>
      download("conversation.md", asMarkdown(this.conversation), "text/markdown"),
    );
    byId("delete-all").addEventListener("click", () => this.deleteAll());
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (byId("chat-panel").hidden || document.querySelector("dialog[open]")) return;
    const isTyping = event.target.closest("textarea, input, select");
    if (event.key === "Escape" && this.running && !event.target.closest(".editor, #sidebar")) this.stop();
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      byId("prompt").focus();
    }
    if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
      event.preventDefault();
      this.begin();
    }
  }

  // What the buttons of messages do.
  actions() {
    return {
      edit: (message, text, attachments) => this.ask(this.conversation.message(message.parent), text, attachments),
      retry: (message) => this.retry(message),
      resume: (message) => this.generate(message, true),
      select: (message) => {
        this.conversation.select(message);
        this.save(this.conversation);
        this.draw();
      },
      answerCalls: (message, results) => this.answerCalls(message, results),
      showCode: (message) => showSamples(this.conversation, message),
      withoutAttachments: (message) => this.withoutAttachments(message),
      openPicture: (attachment) => openPicture(localUrl(attachment), attachment.name),
      askForKey: () => this.handlers.askForKey(),
    };
  }

  // Models

  setModels(models) {
    this.models = models.filter((model) => model.tasks.includes("generate"));
    const select = byId("model");
    select.replaceChildren(...this.models.map((model) => new Option(model.id)));
    select.disabled = this.models.length === 0;
    this.chooseModel(this.conversation.record.model ?? recall("model"));
  }

  chooseModel(name) {
    this.model = this.models.find((model) => model.id === name) ?? this.models[0];
    if (this.model) {
      byId("model").value = this.model.id;
      this.conversation.record.model = this.model.id;
      remember("model", this.model.id);
    }
    this.composer.setModel(this.model, this.models);
    this.draw();
  }

  // Conversations

  get running() {
    return this.generations.get(this.conversation.id);
  }

  begin() {
    this.show(Conversation.begin(this.model?.id, defaultSettings()));
    byId("prompt").focus();
  }

  open(conversation) {
    for (const message of conversation.record.messages) {
      const isEnded = message.role !== "assistant" || message.finish || message.error;
      if (!isEnded && !this.generations.has(conversation.id)) message.finish = "stopped"; // the page was closed
    }
    this.show(conversation);
  }

  show(conversation) {
    if (conversation === this.conversation) return;
    releaseUrls();
    this.conversation = conversation;
    this.handlers.onopen(conversation);
    this.chooseModel(conversation.record.model);
  }

  async save(conversation) {
    const isStored = await this.store.save(conversation);
    byId("storage-note").hidden = isStored;
    this.drawSidebar();
  }

  rename(conversation, title) {
    conversation.record.title = title;
    this.save(conversation);
    this.draw();
  }

  async delete(conversation) {
    this.generations.get(conversation.id)?.stop();
    if (conversation === this.conversation) this.begin();
    await this.store.delete(conversation);
    this.drawSidebar();
    toast("The conversation is deleted.", "Undo", () => this.save(conversation));
  }

  async deleteAll() {
    if (!(await confirmed("Delete all conversations of this browser?", "Delete all"))) return;
    for (const generation of this.generations.values()) generation.stop();
    await this.store.clear();
    byId("settings-dialog").close();
    this.begin();
    this.drawSidebar();
  }

  changeSettings(settings) {
    this.conversation.record.settings = settings;
    if (!this.conversation.isEmpty) this.save(this.conversation);
    this.draw();
  }

  // Messages

  send(text, attachments) {
    this.ask(this.conversation.path().at(-1), text, attachments);
  }

  ask(parent, text, attachments) {
    const question = this.conversation.add(parent, {
      role: "user",
      content: text,
      ...(attachments.length && { attachments }),
    });
    this.answer(question);
  }

  answer(question) {
    const structured = Boolean(this.conversation.settings.schema);
    this.generate(
      this.conversation.add(question, { role: "assistant", model: this.model?.id, ...(structured && { structured }) }),
    );
  }

  retry(message) {
    if (!message.error || message.content) {
      this.answer(this.conversation.message(message.parent));
      return;
    }
    message.model = this.model?.id; // nothing is lost of an answer that has failed
    for (const field of ["reasoning", "thoughtFor", "calls"]) delete message[field];
    this.thread.forget(message);
    this.generate(message);
  }

  withoutAttachments(message) {
    this.conversation.leaveFilesOut();
    this.retry(message);
  }

  answerCalls(message, results) {
    let last = message;
    message.calls.forEach(({ id, name }, index) => {
      last = this.conversation.add(last, { role: "tool", call: id, name, content: results[index] });
    });
    this.answer(last);
  }

  editLast() {
    const question = this.conversation.path().findLast((message) => message.role === "user");
    if (question && !this.running) this.thread.views.get(question.id)?.edit();
  }

  stop() {
    this.running?.stop();
    byId("prompt").focus();
  }

  async generate(message, resumes = false) {
    const { conversation } = this;
    let savedAt = performance.now();
    const generation = new Generation(conversation, message, () => {
      if (this.store.get(conversation.id) && performance.now() - savedAt > SAVE_INTERVAL) {
        savedAt = performance.now();
        this.store.save(conversation);
      }
      if (conversation === this.conversation) this.drawSoon();
    });
    this.generations.set(conversation.id, generation);
    this.thread.follows = true;
    this.handlers.onopen(conversation);
    this.draw();
    this.save(conversation);
    if (FINE_POINTER.matches) byId("prompt").focus(); // the button that asked for the answer may be gone
    announce("Answering");
    await generation.run(resumes);
    this.generations.delete(conversation.id);
    if (this.store.get(conversation.id)) this.save(conversation); // it may have been deleted
    if (conversation !== this.conversation) return;
    this.draw();
    if (!message.error) announce(message.content.slice(0, READ_OUT) || "The answer is complete.");
  }

  // Drawing

  // While an answer grows, at most once a frame.
  drawSoon() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.drawThread();
    });
  }

  draw() {
    const { conversation } = this;
    const { isEmpty } = conversation;
    document.title = isEmpty ? "Quire" : `${conversation.title} · Quire`;
    byId("chat-panel").classList.toggle("is-empty", isEmpty);
    byId("empty").hidden = !isEmpty;
    if (isEmpty) drawSuggestions(this.model, (suggestion) => this.follow(suggestion));
    this.composer.setBusy(Boolean(this.running));
    this.composer.setSettings(conversation.settings);
    byId("save-markdown").disabled = isEmpty;
    this.drawThread();
    this.drawSidebar();
  }

  drawThread() {
    this.thread.show(this.conversation, this.running?.message);
    const counted = this.conversation.path().findLast((message) => message.usage);
    this.composer.setContext(counted?.usage.total_tokens, this.model?.context);
  }

  drawSidebar() {
    this.sidebar.draw(this.conversation, new Set(this.generations.keys()));
  }

  follow({ text, settings }) {
    if (settings) this.conversation.record.settings = { ...this.conversation.settings, ...settings };
    if (text) this.send(text, []);
    else byId("attach-file").click();
  }
}
