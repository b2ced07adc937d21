// Pictures, PDFs, audio and text files that go along with a question.

export const MOST_ATTACHMENTS = 16; // of a message
export const MOST_BYTES = 20e6; // of the attachments of a conversation, which are sent with each request of it
const LARGEST_TEXT = 1e6; // bytes
const LONGEST_SIDE = 2048; // pixels of a picture; larger ones are made smaller
const LARGEST_PICTURE = 3e6; // bytes of a picture that is sent as it is
const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const AUDIO_FORMATS = {
  "audio/mpeg": "mp3",
  "audio/wav": "wav",
  "audio/x-wav": "wav",
  "audio/wave": "wav",
  "audio/flac": "flac",
  "audio/ogg": "ogg",
};

const urls = new Map(); // object URLs of attachments, by id

// An attachment: id, name, type, size, blob, and a kind, which is picture, pdf, audio or text.
// Throws an Error that says why if a file cannot be attached.
export async function attach(file) {
  const kind = await kindOf(file);
  const blob = kind === "picture" ? await smaller(file) : file.slice(0, file.size, file.type);
  if (blob.size > MOST_BYTES) throw new Error(`${file.name} is larger than ${MOST_BYTES / 1e6} MB.`);
  const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return { id, name: file.name || "picture.png", type: blob.type, size: blob.size, kind, blob };
}

async function kindOf(file) {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return "picture";
  if (file.type === "application/pdf") return "pdf";
  if (file.type.startsWith("audio/")) return "audio";
  if (file.size > LARGEST_TEXT)
    throw new Error(`${file.name} is neither a picture, a PDF, audio nor a text of up to 1 MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return "text";
  } catch {
    // It is no text: the error below says so.
  }
  throw new Error(`${file.name} is neither a picture, a PDF, audio nor text.`);
}

// A picture that models read and that is not needlessly large.
async function smaller(file) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    return file.slice(0, file.size, file.type); // this browser cannot read it, but the server may
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= LARGEST_PICTURE && SENT_AS_THEY_ARE.includes(file.type)) {
    picture.close();
    return file.slice(0, file.size, file.type);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvasBlob(canvas);
}

export function canvasBlob(canvas) {
  return new Promise((resolve, reject) => {
    const done = (blob) => (blob ? resolve(blob) : reject(new Error("The picture is too large for this browser.")));
    canvas.toBlob(done, "image/jpeg", 0.9);
  });
}

// An address at which the page can show an attachment.
export function localUrl(attachment) {
  if (!urls.has(attachment.id)) urls.set(attachment.id, URL.createObjectURL(attachment.blob));
  return urls.get(attachment.id);
}

// Frees what shows attachments; they can be shown again.
export function releaseUrls() {
  for (const url of urls.values()) URL.revokeObjectURL(url);
  urls.clear();
}

// An attachment as a content part of chat completions.
export async function contentPart(attachment) {
  const { kind, name, blob } = attachment;
  if (kind === "picture") return { type: "image_url", image_url: { url: await dataUrl(blob) } };
  if (kind === "pdf") return { type: "file", file: { filename: name, file_data: await dataUrl(blob) } };
  if (kind === "text") return { type: "text", text: `File ${name}:\n\n${await blob.text()}` };
  const url = await dataUrl(blob);
  return {
    type: "input_audio",
    input_audio: { data: url.slice(url.indexOf(",") + 1), format: AUDIO_FORMATS[attachment.type] ?? extension(name) },
  };
}

function extension(name) {
  return /\.([a-z\d]{1,5})$/i.exec(name)?.[1].toLowerCase() ?? "wav";
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file can no longer be read."));
    reader.readAsDataURL(blob);
  });
}

// What models that read a kind of attachment name among their modalities. PDFs have text as well.
export const MODALITIES = { picture: "image", audio: "audio" };
