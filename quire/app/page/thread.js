// The messages of a conversation, one below the other.

import { byId, element } from "./elements.js";
import { messageView } from "./message.js";

const NEAR = 80; // pixels from the end at which the view follows an answer

export class Thread {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map();
    this.scroller = byId("scroller");
    this.list = byId("thread");
    this.jump = byId("jump");
    this.follows = true;
    this.scroller.addEventListener("scroll", () => this.onScroll(), { passive: true });
    this.jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follows && this.toEnd()).observe(this.list);
  }

  // Shows the path of a conversation. Views of messages that were shown already stay, with what is unfolded in them.
  show(conversation, running) {
    if (conversation !== this.conversation) {
      this.views.clear();
      this.list.replaceChildren();
      this.follows = true;
    }
    this.conversation = conversation;
    const path = conversation.path();
    const views = path.map((message) => {
      if (!this.views.has(message.id)) this.views.set(message.id, messageView(message, this.actions));
      return this.views.get(message.id);
    });
    const elements = views.map((view) => view.element);
    for (const old of [...this.list.children]) if (!elements.includes(old)) old.remove();
    elements.forEach((item, index) => {
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index] ?? null);
    });
    path.forEach((message, index) => {
      views[index].update({
        versions: conversation.versions(message),
        isLast: index === path.length - 1,
        isLeftOut: index < path.length - 2 && conversation.isLeftOut(message),
        isRunning: message === running,
        isBusy: Boolean(running),
      });
    });
  }

  // Shows a message anew from the start, because it is generated again.
  forget(message) {
    this.views.get(message.id)?.element.remove();
    this.views.delete(message.id);
  }

  onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.jump.hidden = this.follows;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.follows = true;
    this.jump.hidden = true;
  }
}

// A picture in full size.
export function openPicture(url, name) {
  const dialog = element("dialog", { class: "viewer", "aria-label": name }, element("img", { src: url, alt: name }));
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
