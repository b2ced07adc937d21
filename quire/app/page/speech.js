// The tab with live captions of the microphone and transcripts of files.

import { Captions } from "./captions.js";
import { byId, clock, element, icon } from "./elements.js";
import { call } from "./server.js";

const DROP_TEXT = "Drop an audio file here, or choose one";
const DOWNLOADS = ["srt", "vtt", "txt"];

function subtitles(segments, separator, isNumbered) {
  return segments
    .map((segment, index) => {
      const times = `${stamp(segment.start, separator)} --> ${stamp(segment.end, separator)}`;
      return `${isNumbered ? `${index + 1}\n` : ""}${times}\n${segment.text.trim()}\n`;
    })
    .join("\n");
}

function stamp(seconds, separator) {
  const milliseconds = Math.round(seconds * 1000);
  const parts = [3600000, 60000, 1000].map((unit, index) => {
    const value = Math.floor(milliseconds / unit);
    return String(index ? value % 60 : value).padStart(2, "0");
  });
  return `${parts.join(":")}${separator}${String(milliseconds % 1000).padStart(3, "0")}`;
}

export class Speech {
  constructor() {
    this.files = 0;
    this.toggle = byId("toggle");
    this.toggle.addEventListener("click", () => this.onToggle());
    byId("clear").addEventListener("click", () => byId("captions").replaceChildren());
    byId("file").addEventListener("change", (event) => {
      const [file] = event.target.files;
      event.target.value = "";
      if (file) this.transcribe(file);
    });
    this.listenForDrops(byId("drop"));
    this.stopped("");
  }

  setModels(models) {
    const hearing = models.filter((model) => model.tasks.includes("transcribe"));
    byId("speech-model").replaceChildren(...hearing.map((model) => new Option(model.id)));
    const none =
      "None of the models of this server transcribes speech. Serve one, for example a whisper model: quire serve PATH.";
    this.notice(hearing.length ? "" : none);
    for (const id of ["speech-model", "toggle", "file"]) byId(id).disabled = hearing.length === 0;
    this.toggle.disabled ||= !navigator.mediaDevices?.getUserMedia;
    byId("microphone-note").hidden = Boolean(navigator.mediaDevices?.getUserMedia);
  }

  notice(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  }

  get language() {
    return byId("language").value.trim();
  }

  // Live captions

  async onToggle() {
    if (this.captions) {
      const { captions } = this;
      this.stopped("");
      captions.stop();
      return;
    }
    this.notice("");
    this.captions = new Captions(this.captionHandlers());
    this.drawToggle("Stop microphone", "stop", true);
    try {
      await this.captions.start({ model: byId("speech-model").value, language: this.language });
    } catch (error) {
      this.stopped(`The microphone could not be started: ${error.message}`);
    }
  }

  drawToggle(text, symbol, isPressed) {
    this.toggle.replaceChildren(icon(symbol), text);
    this.toggle.setAttribute("aria-pressed", String(isPressed));
  }

  stopped(message) {
    this.captions = undefined;
    this.drawToggle("Start microphone", "microphone", false);
    byId("state").textContent = "";
    byId("level").value = 0;
    if (message) this.notice(message);
  }

  captionHandlers() {
    return {
      opened: () => (byId("state").textContent = "Listening"),
      text: (item, text, milliseconds) =>
        this.caption(item, text, "open", milliseconds === undefined ? undefined : milliseconds / 1000),
      completed: (item, text) => this.caption(item, text, ""),
      failed: (item, message) => this.caption(item, message, "failed"),
      level: (value) => (byId("level").value = Math.min(1, value * 4)),
      closed: (message) => this.stopped(message),
    };
  }

  caption(item, text, kind, seconds) {
    const list = byId("captions");
    let paragraph = list.querySelector(`p[data-item="${CSS.escape(item)}"]`);
    if (!paragraph) {
      paragraph = element("p", { "data-item": item });
      list.append(paragraph);
    }
    if (seconds !== undefined) paragraph.dataset.seconds = seconds;
    paragraph.className = kind;
    const start = paragraph.dataset.seconds;
    drawLine(paragraph, text || (kind === "open" ? "…" : ""), start === undefined ? undefined : Number(start));
    if (kind === "" && !text) paragraph.remove();
    list.scrollTop = list.scrollHeight;
  }

  // Transcripts of files

  listenForDrops(drop) {
    for (const kind of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(kind, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", kind === "dragover");
        const file = kind === "drop" ? event.dataTransfer.files[0] : undefined;
        if (file && !byId("file").disabled) this.transcribe(file);
      });
    }
  }

  async transcribe(file) {
    const number = ++this.files; // only the latest file is shown
    this.notice("");
    for (const id of DOWNLOADS) byId(id).hidden = true;
    byId("transcript").replaceChildren();
    byId("drop-text").textContent = `Transcribing ${file.name} …`;
    const body = new FormData();
    body.append("file", file);
    body.append("model", byId("speech-model").value);
    body.append("response_format", "verbose_json");
    if (this.language) body.append("language", this.language);
    try {
      const result = await (await call("v1/audio/transcriptions", { method: "POST", body })).json();
      if (number === this.files) this.showTranscript(file.name, result);
    } catch (error) {
      if (number === this.files) this.notice(`${file.name} could not be transcribed: ${error.message}`);
    } finally {
      if (number === this.files) byId("drop-text").textContent = DROP_TEXT;
    }
  }

  showTranscript(name, result) {
    const segments = result.segments ?? [];
    const lines = segments.map((segment) => drawLine(element("li"), segment.text.trim(), segment.start));
    byId("transcript").replaceChildren(...lines);
    const stem = name.replace(/\.[^.]*$/, "");
    const contents = {
      srt: subtitles(segments, ",", true),
      vtt: `WEBVTT\n\n${subtitles(segments, ".", false)}`,
      txt: `${result.text.trim()}\n`,
    };
    for (const id of DOWNLOADS) offer(byId(id), `${stem}.${id}`, contents[id]);
  }
}

function drawLine(line, text, seconds) {
  line.replaceChildren(element("time", {}, seconds === undefined ? "" : clock(seconds)), text);
  return line;
}

function offer(link, name, content) {
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([content], { type: "text/plain" }));
  link.download = name;
  link.hidden = false;
}
