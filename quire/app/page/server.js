// Requests to the server that the page comes from.

const KEY = "quire-api-key";

export class ServerError extends Error {
  // status: of the response, 0 if there was none; param: the field that caused the error; retryAfter: in seconds.
  constructor(message, { status = 0, param, retryAfter } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

let key = storedKey();

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is switched off
  }
}

// The API key lasts as long as the tab.
export function apiKey() {
  return key;
}

export function setApiKey(text) {
  key = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    // It lasts as long as the page.
  }
}

// Headers carry bytes only: of a key with other characters, those of UTF-8.
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

export function address(path) {
  return new URL(path, document.baseURI);
}

export async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${bytesOf(key)}` }) };
  let answer;
  try {
    answer = await fetch(address(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new ServerError(body.error?.message ?? `The server has answered with status ${answer.status}.`, {
    status: answer.status,
    param: body.error?.param,
    retryAfter: Number(answer.headers.get("retry-after")) || undefined,
  });
}

// The served models: id, context length, tasks and what they read.
export async function listModels() {
  const { data } = await (await call("v1/models")).json();
  return data.map((card) => ({
    id: card.id,
    context: card.max_model_len,
    tasks: card.tasks ?? [],
    reads: card.input_modalities ?? ["text"],
  }));
}

// The chunks of a streamed chat, and first of all the names of fields that had no effect.
export async function* streamChat(body, signal) {
  const request = {
    ...body,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_metrics: true,
  };
  const headers = { "Content-Type": "application/json" };
  const answer = await call("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
  const ignored = answer.headers.get("x-quire-ignored-fields");
  yield { ignored: ignored ? ignored.split(",").map((name) => name.trim()) : [] };
  for await (const data of serverSentEvents(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  throw new ServerError("The connection was lost before the answer was complete.");
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await receive(reader);
      if (done) return;
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

async function receive(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the answer was complete.");
  }
}
