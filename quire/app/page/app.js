// The page: its tabs, colours, models and key.

import { Chat } from "./chat.js";
import { byId, drawIcons, icon, toast } from "./elements.js";
import { recall, remember } from "./preferences.js";
import { apiKey, listModels, setApiKey } from "./server.js";
import { Speech } from "./speech.js";
import { ConversationStore } from "./store.js";

const TABS = ["chat", "speech"];
const CAPTIONS = "#captions"; // the address of the second tab
const THEMES = { system: "system", light: "sun", dark: "moon" };

class App {
  constructor(store) {
    drawIcons();
    for (const button of document.querySelectorAll("[data-closes]"))
      button.addEventListener("click", () => button.closest("dialog").close());
    this.store = store;
    this.speech = new Speech();
    this.listenToTabs();
    this.listenToTheme();
    this.listenToKey();
    this.chat = new Chat(store, {
      askForKey: () => this.askForKey(Boolean(apiKey())),
      onopen: (conversation) => this.onOpen(conversation),
    });
    byId("storage-note").hidden = store.isStored;
    this.route();
    addEventListener("hashchange", () => this.route());
  }

  async loadModels() {
    try {
      const models = await listModels();
      this.chat.setModels(models);
      this.speech.setModels(models);
    } catch (error) {
      if (error.status === 401) this.askForKey(Boolean(apiKey()));
      else toast(`The models could not be listed: ${error.message}`, "Try again", () => this.loadModels());
    }
  }

  // Addresses: #captions, or #chat- and the id of a conversation

  route() {
    const { hash } = location;
    this.selectTab(hash === CAPTIONS ? "speech" : "chat");
    const conversation = hash.startsWith("#chat-") && this.store.get(hash.slice(6));
    if (conversation) this.chat.open(conversation);
    else if (hash === "#chat" && !this.chat.conversation.isEmpty) this.chat.begin();
  }

  onOpen(conversation) {
    const hash = conversation.isEmpty ? "#chat" : `#chat-${conversation.id}`;
    if (this.chat && location.hash !== hash) history.pushState(null, "", hash);
  }

  // Tabs

  listenToTabs() {
    for (const name of TABS) {
      const tab = byId(`${name}-tab`);
      tab.addEventListener("click", () => this.goTo(name));
      tab.addEventListener("keydown", (event) => {
        if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
        const other = TABS.find((candidate) => candidate !== name);
        this.goTo(other);
        byId(`${other}-tab`).focus();
      });
    }
  }

  goTo(name) {
    const { conversation } = this.chat;
    const chat = conversation.isEmpty ? "#chat" : `#chat-${conversation.id}`;
    location.hash = name === "speech" ? CAPTIONS : chat;
  }

  selectTab(name) {
    for (const tab of TABS) {
      byId(`${tab}-tab`).setAttribute("aria-selected", String(tab === name));
      byId(`${tab}-tab`).tabIndex = tab === name ? 0 : -1;
      byId(`${tab}-panel`).hidden = tab !== name;
    }
    document.body.dataset.tab = name;
  }

  // Colours: the system's, light or dark

  listenToTheme() {
    this.showTheme(recall("theme") ?? "system");
    byId("theme").addEventListener("click", () => {
      const names = Object.keys(THEMES);
      const next = names[(names.indexOf(this.theme) + 1) % names.length];
      remember("theme", next === "system" ? null : next);
      this.showTheme(next);
    });
  }

  showTheme(name) {
    this.theme = THEMES[name] ? name : "system";
    if (this.theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.theme;
    const button = byId("theme");
    button.replaceChildren(icon(THEMES[this.theme]));
    button.title = `Colours: ${this.theme}`;
    button.setAttribute("aria-label", button.title);
  }

  // API key

  listenToKey() {
    const dialog = byId("key-dialog");
    byId("change-key").addEventListener("click", () => this.askForKey(false));
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "save") return;
      setApiKey(byId("key").value.trim());
      this.loadModels();
    });
  }

  // isRefused: the server does not accept the present key.
  askForKey(isRefused) {
    const dialog = byId("key-dialog");
    byId("key-problem").hidden = !isRefused;
    byId("key").value = "";
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
  }
}

const app = new App(await ConversationStore.open());
await app.loadModels();
