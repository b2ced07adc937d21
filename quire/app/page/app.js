import { Captions } from "./captions.js";

const get = (id) => document.getElementById(id);
const toggle = get("toggle");
let captions;
let files = 0;

function notice(text) {
  get("notice").textContent = text;
  get("notice").hidden = !text;
}

function clock(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}

function line(element, text, seconds) {
  const time = document.createElement("time");
  time.textContent = seconds === undefined ? "" : clock(seconds);
  element.replaceChildren(time, text);
}

async function call(path, options = {}) {
  const key = get("key").value;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL(path, document.baseURI), { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message ?? `The server has answered with status ${answer.status}.`), {
    status: answer.status,
  });
}

async function listModels() {
  const select = get("model");
  let models = [];
  try {
    const list = await (await call("v1/models")).json();
    models = list.data.filter((model) => model.tasks?.includes("transcribe"));
    notice(models.length ? "" : "None of the models of this server transcribes speech. Serve one, for example a whisper model: quire serve PATH.");
  } catch (error) {
    notice(error.status === 401 ? "This server needs an API key." : `The models could not be listed: ${error.message}`);
  }
  select.replaceChildren(...models.map((model) => new Option(model.id)));
  for (const id of ["model", "toggle", "file"]) get(id).disabled = models.length === 0;
}

// Live captions

function paragraph(item) {
  let found = document.querySelector(`#captions p[data-item="${CSS.escape(item)}"]`);
  if (!found) {
    found = document.createElement("p");
    found.dataset.item = item;
    get("captions").append(found);
  }
  return found;
}

function caption(item, text, kind, seconds) {
  const shown = paragraph(item);
  if (seconds !== undefined) shown.dataset.seconds = seconds;
  shown.className = kind;
  const start = shown.dataset.seconds;
  line(shown, text || (kind === "open" ? "…" : ""), start === undefined ? undefined : Number(start));
  if (kind === "" && !text) shown.remove();
  get("captions").scrollTop = get("captions").scrollHeight;
}

function stopped(message) {
  captions = undefined;
  toggle.textContent = "Start microphone";
  toggle.setAttribute("aria-pressed", "false");
  get("state").textContent = "";
  get("level").value = 0;
  if (message) notice(message);
}

const handlers = {
  opened: () => (get("state").textContent = "listening"),
  text: (item, text, milliseconds) => caption(item, text, "open", milliseconds === undefined ? undefined : milliseconds / 1000),
  completed: (item, text) => caption(item, text, ""),
  failed: (item, message) => caption(item, message, "failed"),
  level: (value) => (get("level").value = Math.min(1, value * 4)),
  closed: stopped,
};

toggle.addEventListener("click", async () => {
  if (captions) {
    const running = captions;
    stopped("");
    running.stop();
    return;
  }
  notice("");
  captions = new Captions(handlers);
  toggle.textContent = "Stop microphone";
  toggle.setAttribute("aria-pressed", "true");
  try {
    await captions.start({ model: get("model").value, language: get("language").value.trim(), key: get("key").value });
  } catch (error) {
    stopped(`The microphone could not be started: ${error.message}`);
  }
});

get("clear").addEventListener("click", () => get("captions").replaceChildren());

// Transcripts of files

function stamp(seconds, separator) {
  const milliseconds = Math.round(seconds * 1000);
  const parts = [3600000, 60000, 1000].map((unit, index) => {
    const value = Math.floor(milliseconds / unit);
    return String(index ? value % 60 : value).padStart(2, "0");
  });
  return `${parts.join(":")}${separator}${String(milliseconds % 1000).padStart(3, "0")}`;
}

function subtitles(segments, separator, numbered) {
  return segments
    .map((segment, index) => {
      const times = `${stamp(segment.start, separator)} --> ${stamp(segment.end, separator)}`;
      return `${numbered ? `${index + 1}\n` : ""}${times}\n${segment.text.trim()}\n`;
    })
    .join("\n");
}

function offer(id, name, content) {
  const link = get(id);
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([content], { type: "text/plain" }));
  link.download = name;
  link.hidden = false;
}

function show(name, result) {
  const segments = result.segments ?? [];
  get("transcript").replaceChildren(
    ...segments.map((segment) => {
      const entry = document.createElement("li");
      line(entry, segment.text.trim(), segment.start);
      return entry;
    }),
  );
  const stem = name.replace(/\.[^.]*$/, "");
  offer("srt", `${stem}.srt`, subtitles(segments, ",", true));
  offer("vtt", `${stem}.vtt`, `WEBVTT\n\n${subtitles(segments, ".", false)}`);
  offer("txt", `${stem}.txt`, `${result.text.trim()}\n`);
}

async function transcribe(file) {
  const number = ++files; // only the latest file is shown
  notice("");
  for (const id of ["srt", "vtt", "txt"]) get(id).hidden = true;
  get("transcript").replaceChildren();
  get("drop-text").textContent = `Transcribing ${file.name} …`;
  const body = new FormData();
  body.append("file", file);
  body.append("model", get("model").value);
  body.append("response_format", "verbose_json");
  const language = get("language").value.trim();
  if (language) body.append("language", language);
  try {
    const result = await (await call("v1/audio/transcriptions", { method: "POST", body })).json();
    if (number === files) show(file.name, result);
  } catch (error) {
    if (number === files) notice(`${file.name} could not be transcribed: ${error.message}`);
  } finally {
    if (number === files) get("drop-text").textContent = "Drop an audio file here, or choose one";
  }
}

get("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) transcribe(file);
});

const drop = get("drop");
for (const kind of ["dragover", "dragleave", "drop"]) {
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    const file = kind === "drop" ? event.dataTransfer.files[0] : undefined;
    if (file && !get("file").disabled) transcribe(file);
  });
}

get("key").addEventListener("change", listModels);
listModels();
