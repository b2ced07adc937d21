// One answer while it is generated: reads the stream into the message.

import { ServerError, streamChat } from "./server.js";

export class Generation {
  // `onchange` is called whenever the message has changed.
  constructor(conversation, message, onchange) {
    this.conversation = conversation;
    this.message = message;
    this.onchange = onchange;
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  // Runs until the answer ends, in whatever way; errors are put into the message.
  // resumes: the message's text is continued.
  async run(resumes = false) {
    const { message } = this;
    for (const field of ["error", "finish", "metrics", "usage", "rate", "ignored"]) delete message[field];
    try {
      const body = await this.conversation.request(message);
      if (resumes) {
        body.messages.push({ role: "assistant", content: message.content });
        Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
      }
      for await (const chunk of streamChat(body, this.controller.signal)) this.take(chunk);
    } catch (error) {
      this.fail(error);
    }
    this.conversation.touch();
    this.onchange();
  }

  take(chunk) {
    const { message } = this;
    if (chunk.ignored) {
      message.ignored = chunk.ignored;
      return;
    }
    if (chunk.usage) message.usage = chunk.usage;
    if (chunk.metrics) message.metrics = chunk.metrics;
    const [choice] = chunk.choices;
    if (choice) this.takeDelta(choice);
    this.measure();
    this.onchange();
  }

  takeDelta({ delta, finish_reason: finish }) {
    const { message } = this;
    const now = performance.now();
    if (delta.reasoning) {
      this.thinkingSince ??= now;
      message.reasoning = (message.reasoning ?? "") + delta.reasoning;
      message.thoughtFor = now - this.thinkingSince;
    }
    if (delta.content) message.content += delta.content;
    for (const call of delta.tool_calls ?? []) {
      message.calls ??= [];
      const known = (message.calls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id ||= call.id ?? "";
      known.name += call.function?.name ?? call.custom?.name ?? "";
      known.arguments += call.function?.arguments ?? call.custom?.input ?? "";
    }
    if (finish) message.finish = finish;
  }

  // Tokens per second until now. The first token has waited for the prompt, so it does not count.
  measure() {
    const tokens = this.message.usage?.completion_tokens ?? 0;
    if (tokens === 0) return;
    this.since ??= { time: performance.now(), tokens };
    const seconds = (performance.now() - this.since.time) / 1000;
    if (seconds > 0.1) this.message.rate = (tokens - this.since.tokens) / seconds;
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.message.finish = "stopped";
      return;
    }
    const { status = 0, param, retryAfter } = error instanceof ServerError ? error : {};
    const hasAttachments = this.conversation.attachments().length > 0;
    this.message.error = { status, text: error.message, param, retryAfter, hasAttachments };
  }
}
