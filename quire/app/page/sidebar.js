// The list of conversations beside the chat.

import { byId, element, iconButton } from "./elements.js";

const DAY = 24 * 3600 * 1000;
const SHOWN = 200; // the store has no more

export class Sidebar {
  // handlers: open(conversation), rename(conversation, title), delete(conversation).
  constructor(store, handlers) {
    this.store = store;
    this.handlers = handlers;
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    byId("menu").addEventListener("click", () => this.toggle());
    byId("scrim").addEventListener("click", () => this.close());
    byId("sidebar").addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    this.narrow = matchMedia("(max-width: 56rem)");
    this.narrow.addEventListener("change", () => this.setOpen(!this.narrow.matches));
    this.setOpen(!this.narrow.matches);
  }

  setOpen(isOpen) {
    document.body.classList.toggle("with-sidebar", isOpen);
    byId("menu").setAttribute("aria-expanded", String(isOpen));
  }

  toggle() {
    const isOpen = !document.body.classList.contains("with-sidebar");
    this.setOpen(isOpen);
    if (isOpen && this.narrow.matches) byId("new-chat").focus();
  }

  // Closes it where it covers the chat.
  close() {
    if (!this.narrow.matches || !document.body.classList.contains("with-sidebar")) return;
    this.setOpen(false);
    byId("menu").focus();
  }

  // current: the conversation that is shown; running: ids of those that are being answered.
  draw(current = this.current, running = this.running ?? new Set()) {
    this.current = current;
    this.running = running;
    if (byId("conversations").querySelector(".rename")) return; // a title is being written
    const groups = new Map();
    const conversations = this.store.search(this.search.value).slice(0, SHOWN);
    for (const conversation of conversations) {
      const name = periodOf(conversation.record.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.entry(conversation));
    }
    const sections = [...groups].map(([name, entries]) =>
      element("section", { "aria-label": name }, element("h2", { class: "period" }, name), element("ul", {}, entries)),
    );
    const nothing = this.search.value ? "Nothing was found." : "Conversations will be listed here.";
    byId("conversations").replaceChildren(...(sections.length ? sections : [element("p", { class: "hint" }, nothing)]));
  }

  entry(conversation) {
    const isCurrent = conversation === this.current;
    const open = element(
      "button",
      {
        type: "button",
        class: "conversation",
        "aria-current": isCurrent && "true",
        title: conversation.title,
        onclick: () => (this.close(), this.handlers.open(conversation)),
      },
      conversation.title,
    );
    const item = element(
      "li",
      { class: this.running.has(conversation.id) && "answering" },
      open,
      iconButton("edit", `Rename ${conversation.title}`, () => this.rename(conversation, item)),
      iconButton("trash", `Delete ${conversation.title}`, () => this.handlers.delete(conversation)),
    );
    return item;
  }

  rename(conversation, item) {
    const field = element("input", { class: "rename", maxlength: 100, "aria-label": "Title of the conversation" });
    field.value = conversation.title;
    let isDone = false;
    const end = (title) => {
      if (isDone) return; // removing a focused field blurs it
      isDone = true;
      field.remove();
      if (title && title !== conversation.title) this.handlers.rename(conversation, title);
      else this.draw();
    };
    field.addEventListener("blur", () => end(field.value.trim()));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(field.value.trim());
      if (event.key === "Escape") {
        event.stopPropagation();
        end("");
      }
    });
    item.replaceChildren(field);
    field.select();
  }
}

function periodOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "Last week" : "Earlier";
}
