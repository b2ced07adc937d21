// The field for messages: text, attachments from the disk, the clipboard, a drop or the camera, and what settings add.

import { attach, MODALITIES, MOST_ATTACHMENTS, MOST_BYTES } from "./attachments.js";
import { takePicture } from "./camera.js";
import { byId, count, element, icon, iconButton, toast } from "./elements.js";
import { attachmentCard } from "./message.js";

export class Composer {
  // handlers: send(text, attachments), stop(), editLast(), openSettings(name), clearSetting(name),
  // chooseModel(name), and bytes(), those of attachments that the conversation has already.
  constructor(handlers) {
    this.handlers = handlers;
    this.attachments = [];
    this.models = [];
    this.isBusy = false;
    this.area = byId("prompt");
    this.button = byId("send");
    this.area.addEventListener("input", () => this.onInput());
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    this.area.addEventListener("paste", (event) => this.onPaste(event));
    byId("composer").addEventListener("submit", (event) => this.onSubmit(event));
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = "";
    });
    const camera = byId("camera");
    camera.hidden = !navigator.mediaDevices?.getUserMedia; // without HTTPS, browsers offer it to local pages only
    camera.addEventListener("click", async () => {
      const picture = await takePicture();
      if (picture) await this.add([picture]);
    });
    this.listenForDrops(byId("chat-panel"));
  }

  listenForDrops(panel) {
    let depth = 0; // dragenter and dragleave come for each element inside as well
    const show = (change) => {
      depth = change ? Math.max(0, depth + change) : 0;
      panel.classList.toggle("dropping", depth > 0);
    };
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    panel.addEventListener("dragenter", (event) => hasFiles(event) && show(1));
    panel.addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
    panel.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    panel.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      show(0);
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      try {
        if (this.attachments.length >= MOST_ATTACHMENTS)
          throw new Error(`A message may have ${MOST_ATTACHMENTS} files.`);
        const attachment = await attach(file);
        const bytes = [...this.attachments, attachment].reduce((sum, { size }) => sum + size, this.handlers.bytes());
        if (bytes > MOST_BYTES)
          throw new Error(`The files of a conversation may have ${MOST_BYTES / 1e6} MB together.`);
        this.attachments.push(attachment);
      } catch (error) {
        toast(error.message);
      }
    }
    this.drawAttachments();
    this.area.focus();
  }

  drawAttachments() {
    const cards = this.attachments.map((attachment) =>
      attachmentCard(attachment, { onremove: () => this.remove(attachment) }),
    );
    byId("attachments").replaceChildren(...cards);
    const unread = this.attachments.filter(
      ({ kind }) => MODALITIES[kind] && !this.model?.reads.includes(MODALITIES[kind]),
    );
    byId("attachment-hint").replaceChildren(...(unread.length ? this.hint(unread) : []));
    this.onInput();
  }

  // Says that the model does not read some attachments, and offers the first that does.
  hint(unread) {
    const kinds = unread.some(({ kind }) => kind === "picture") ? "pictures" : "audio";
    const text = `${this.model?.id ?? "This model"} does not read ${kinds}, so it may refuse the message.`;
    const reader = this.models.find(({ reads }) => unread.every(({ kind }) => reads.includes(MODALITIES[kind])));
    if (!reader) return [text];
    const onclick = () => this.handlers.chooseModel(reader.id);
    return [text, " ", element("button", { type: "button", onclick }, `Ask ${reader.id}`)];
  }

  remove(attachment) {
    this.attachments = this.attachments.filter((other) => other !== attachment);
    this.drawAttachments();
    this.area.focus();
  }

  onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length === 0) return;
    event.preventDefault();
    this.add(files);
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.isBusy) byId("composer").requestSubmit();
    }
    if (event.key === "ArrowUp" && !this.area.value) {
      event.preventDefault();
      this.handlers.editLast();
    }
  }

  onInput() {
    this.area.style.setProperty("height", "auto");
    this.area.style.setProperty("height", `${this.area.scrollHeight}px`);
    this.button.disabled = !this.isBusy && (!this.model || (!this.area.value.trim() && this.attachments.length === 0));
  }

  onSubmit(event) {
    event.preventDefault();
    if (this.isBusy) {
      this.handlers.stop();
      return;
    }
    const text = this.area.value.trim();
    if (this.button.disabled) return;
    const { attachments } = this;
    this.clear();
    this.handlers.send(text, attachments);
  }

  clear() {
    this.area.value = "";
    this.attachments = [];
    this.drawAttachments();
  }

  fill(text) {
    this.area.value = text;
    this.onInput();
    this.area.focus();
  }

  setBusy(isBusy) {
    if (isBusy === this.isBusy) return;
    this.isBusy = isBusy;
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.classList.toggle("stop", isBusy);
    this.button.setAttribute("aria-label", isBusy ? "Stop the answer" : "Send");
    this.button.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
    this.onInput();
  }

  setModel(model, models) {
    this.model = model;
    this.models = models;
    this.area.placeholder = model ? `Message ${model.id}` : "No model of this server generates text";
    this.area.disabled = !model;
    this.drawAttachments();
  }

  // Shows what the settings of the conversation add to requests; each can be taken away.
  setSettings(settings) {
    const chips = [];
    const add = (name, text) => chips.push({ name, text });
    if (settings.system) add("system", "Instructions");
    if (settings.tools?.length)
      add(
        "tools",
        settings.tools.length === 1 ? settings.tools[0].function.name : count(settings.tools.length, "tool"),
      );
    if (settings.schema) add("schema", "Structured output");
    if (settings.thinking !== undefined) add("thinking", settings.thinking ? "Thinking on" : "Thinking off");
    byId("chips").replaceChildren(
      ...chips.map(({ name, text }) =>
        element(
          "span",
          { class: "chip" },
          element(
            "button",
            { type: "button", title: "Open the settings", onclick: () => this.handlers.openSettings(name) },
            text,
          ),
          iconButton("close", `Remove: ${text}`, () => this.handlers.clearSetting(name)),
        ),
      ),
    );
  }

  // How much of the model's context the conversation has used.
  setContext(used, size) {
    const ring = byId("context");
    ring.hidden = !used || !size;
    if (ring.hidden) return;
    const share = Math.min(1, used / size);
    const text = `${used.toLocaleString("en")} of ${count(size, "token")} of the context used`;
    ring.style.setProperty("--share", `${Math.round(share * 100)}%`);
    ring.classList.toggle("nearly-full", share > 0.85);
    ring.title = text;
    ring.setAttribute("aria-label", text);
    byId("context-text").textContent = `${Math.round(share * 100)} %`;
  }
}
