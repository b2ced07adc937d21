// A realtime session: audio of the microphone goes out, captions come back.

import { address, apiKey, call } from "./server.js";

const RATE = 24000;
const HIGHEST_BACKLOG = 1 << 20; // bytes that may wait to be sent, about 15 seconds of audio

export class Captions {
  // `on` has functions: opened(), text(item, text, startMs), completed(item, text), failed(item, message),
  // level(value), closed(message).
  constructor(on) {
    this.on = on;
    this.texts = new Map();
    this.starts = new Map();
  }

  async start({ model, language }) {
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
      if (!this.stopping) await this.open(model, language);
      if (!this.stopping) await this.record();
      if (this.stopping) this.stop(); // while one of these was awaited
    } catch (error) {
      const wasStopped = this.stopping;
      this.stop();
      if (!wasStopped) throw error;
    }
  }

  stop() {
    this.stopping = true;
    this.stream?.getTracks().forEach((track) => track.stop());
    this.context?.close();
    this.stream = this.context = undefined;
    if (this.socket?.readyState === WebSocket.OPEN) {
      // What was said last is still transcribed; then the connection is closed.
      this.socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
      setTimeout(() => this.socket.close(), 10000);
    } else {
      this.socket?.close();
    }
  }

  async open(model, language) {
    const url = address("v1/realtime");
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("model", model);
    const protocols = apiKey() ? ["realtime", `openai-insecure-api-key.${await clientSecret()}`] : ["realtime"];
    this.socket = new WebSocket(url, protocols);
    this.socket.onmessage = (message) => this.receive(JSON.parse(message.data));
    await new Promise((resolve, reject) => {
      this.socket.onopen = resolve;
      this.socket.onclose = () => reject(new Error("The server has refused the session."));
    });
    this.socket.onclose = (event) => {
      // Who has stopped has shown it, and may have started another session since.
      if (!this.stopping) this.on.closed(event.code === 1000 ? "" : event.reason || "The connection was lost.");
    };
    const transcription = { model, ...(language && { language }) };
    const input = { format: { type: "audio/pcm", rate: RATE }, transcription };
    this.socket.send(JSON.stringify({ type: "session.update", session: { type: "transcription", audio: { input } } }));
    this.on.opened();
  }

  async record() {
    this.context = new AudioContext({ sampleRate: RATE });
    await this.context.audioWorklet.addModule(new URL("microphone.js", import.meta.url));
    const chunker = new AudioWorkletNode(this.context, "chunker", { numberOfOutputs: 0 });
    chunker.port.onmessage = ({ data }) => this.send(data);
    this.context.createMediaStreamSource(this.stream).connect(chunker);
  }

  send(buffer) {
    const samples = new Int16Array(buffer);
    this.on.level(Math.sqrt(samples.reduce((sum, sample) => sum + (sample / 32768) ** 2, 0) / samples.length));
    if (this.socket.readyState !== WebSocket.OPEN || this.stopping) return;
    if (this.socket.bufferedAmount > HIGHEST_BACKLOG) {
      this.on.closed("The server is overloaded and cannot keep up with the audio.");
      this.stop();
      return;
    }
    const audio = btoa(String.fromCharCode(...new Uint8Array(buffer)));
    this.socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio }));
  }

  receive(event) {
    const item = event.item_id;
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.starts.set(item, event.audio_start_ms);
        this.texts.set(item, "");
        this.show(item);
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.texts.set(item, (this.texts.get(item) ?? "") + event.delta);
        this.show(item);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.on.completed(item, event.transcript);
        this.finish(item);
        break;
      case "conversation.item.input_audio_transcription.failed":
        this.on.failed(item, event.error.message);
        this.finish(item);
        break;
      case "error":
        if (event.error.code === "input_audio_buffer_commit_empty") this.finish();
        else this.on.failed(`error ${event.event_id}`, event.error.message);
        break;
    }
  }

  show(item) {
    this.on.text(item, this.texts.get(item), this.starts.get(item));
  }

  finish(item) {
    this.texts.delete(item);
    if (this.stopping && this.texts.size === 0) this.socket.close(1000);
  }
}

// A key that expires, because the subprotocol in which a browser has to send it may be logged on the way.
async function clientSecret() {
  const headers = { "Content-Type": "application/json" };
  const answer = await call("v1/realtime/client_secrets", { method: "POST", headers, body: "{}" });
  return (await answer.json()).value;
}
