// The conversations of this browser, in IndexedDB. Nothing of them leaves it but the requests.

import { Conversation } from "./conversation.js";

const DATABASE = "quire";
const STORE = "conversations";
const MOST_CONVERSATIONS = 200;
const MOST_BYTES = 200e6; // of attachments in all conversations; the oldest conversations make room

function asPromise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class ConversationStore {
  // database: undefined if the browser stores nothing, as in some private windows. The conversations last as long as
  // the page then.
  constructor(database, conversations) {
    this.database = database;
    this.conversations = new Map(conversations.map((conversation) => [conversation.id, conversation]));
  }

  static async open() {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      const database = await asPromise(opening);
      const records = await asPromise(database.transaction(STORE).objectStore(STORE).getAll());
      return new ConversationStore(
        database,
        records.map((record) => new Conversation(record)),
      );
    } catch {
      return new ConversationStore(undefined, []);
    }
  }

  get isStored() {
    return this.database !== undefined;
  }

  get(id) {
    return this.conversations.get(id);
  }

  // All conversations, the latest first.
  list() {
    return [...this.conversations.values()].sort((left, right) => right.record.updated - left.record.updated);
  }

  // Those that contain a text.
  search(text) {
    const words = text.trim().toLowerCase();
    if (!words) return this.list();
    const contains = (content) => content.toLowerCase().includes(words);
    return this.list().filter(
      ({ title, record }) => contains(title) || record.messages.some((message) => contains(message.content)),
    );
  }

  // Stores a conversation, and deletes the oldest ones if there are too many. Returns whether it could be stored.
  async save(conversation) {
    this.conversations.set(conversation.id, conversation);
    for (const old of this.surplus(conversation)) await this.delete(old);
    return this.write((store) => store.put(conversation.record));
  }

  surplus(saved) {
    let bytes = saved.bytes();
    const others = this.list().filter((conversation) => conversation !== saved);
    return others.filter(
      (conversation, index) => (bytes += conversation.bytes()) > MOST_BYTES || index + 1 >= MOST_CONVERSATIONS,
    );
  }

  async delete(conversation) {
    this.conversations.delete(conversation.id);
    return this.write((store) => store.delete(conversation.id));
  }

  async clear() {
    this.conversations.clear();
    return this.write((store) => store.clear());
  }

  async write(change) {
    if (!this.database) return false;
    try {
      await asPromise(change(this.database.transaction(STORE, "readwrite").objectStore(STORE)));
      return true;
    } catch {
      return false; // the disk is full, or the browser's share of it
    }
  }
}
