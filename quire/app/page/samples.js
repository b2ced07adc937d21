// A request as code that sends it again: curl for a shell, and Python with OpenAI's client.

import { contentPart } from "./attachments.js";
import { byId } from "./elements.js";
import { codeBlock } from "./markdown.js";
import { address, apiKey } from "./server.js";

const CLIENT_FIELDS = [
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_completion_tokens",
  "seed",
  "tools",
  "response_format",
];
const KEY_VARIABLE = "QUIRE_API_KEY";

// Stands for the content of a file in a request: the code reads it from the disk.
class FileContent {
  constructor(name, type, isUrl) {
    this.name = name;
    this.prefix = isUrl ? `data:${type};base64,` : "";
    this.mark = `${this.prefix}file-${Math.random().toString(36).slice(2)}`;
  }

  toJSON() {
    return this.mark;
  }

  // In a shell's document.
  get shell() {
    return `${this.prefix}$(base64 < '${this.name.replaceAll("'", "'\\''")}' | tr -d '\\n')`;
  }

  get python() {
    const content = `base64_of(${JSON.stringify(this.name)})`;
    return this.prefix ? `${JSON.stringify(this.prefix)} + ${content}` : content;
  }
}

// Opens a dialog with the code for the request of an answer.
export async function showSamples(conversation, answer) {
  const samples = await samplesOf(conversation, answer);
  const dialog = byId("code-dialog");
  const draw = () => {
    const isPython = byId("code-python").checked;
    byId("code-sample").replaceChildren(
      isPython ? codeBlock(samples.python, "python") : codeBlock(samples.curl, "bash"),
    );
  };
  for (const id of ["code-curl", "code-python"]) byId(id).onchange = draw;
  draw();
  dialog.showModal();
}

async function samplesOf(conversation, answer) {
  const files = [];
  const body = await conversation.request(answer, async (attachment) => {
    if (attachment.kind === "text") return contentPart(attachment);
    const file = new FileContent(attachment.name, attachment.type, attachment.kind !== "audio");
    files.push(file);
    return withFile(await contentPart({ ...attachment, blob: new Blob([], { type: attachment.type }) }), file);
  });
  return { curl: curlOf(body, files), python: pythonOf(body, files) };
}

// A content part whose base64 is replaced by a file.
function withFile(part, file) {
  const [name] = Object.keys(part).filter((key) => key !== "type");
  const [field] = ["url", "file_data", "data"].filter((key) => key in part[name]);
  return { ...part, [name]: { ...part[name], [field]: file } };
}

function curlOf(body, files) {
  let json = JSON.stringify(body, null, 2);
  let quote = "'";
  if (files.length > 0) {
    json = json.replace(/[\\$`]/g, "\\$&");
    quote = "";
    for (const file of files) json = json.replace(file.mark, () => file.shell);
  }
  const url = address("v1/chat/completions");
  const key = apiKey() ? ` \\\n  -H "Authorization: Bearer $${KEY_VARIABLE}"` : "";
  const command = `curl ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  --data-binary @-`;
  return `${command} <<${quote}JSON${quote}\n${json}\nJSON\n`;
}

function pythonOf(body, files) {
  const known = Object.entries(body).filter(([name]) => CLIENT_FIELDS.includes(name));
  const extra = Object.entries(body).filter(([name]) => !CLIENT_FIELDS.includes(name));
  const fields = extra.length ? [...known, ["extra_body", Object.fromEntries(extra)]] : known;
  const lines = fields.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  const imports = [...(files.length ? ["import base64"] : []), ...(apiKey() ? ["import os"] : [])];
  const key = apiKey() ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  const base = String(address("v1"));
  const reader = [
    "",
    "",
    "def base64_of(path):",
    '    with open(path, "rb") as file:',
    "        return base64.b64encode(file.read()).decode()",
    "",
  ];
  const ends = body.tools
    ? [")", "message = answer.choices[0].message", "print(message.content or message.tool_calls)"]
    : [
        "    stream=True,",
        ")",
        "for chunk in answer:",
        "    if chunk.choices:",
        '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "print()",
      ];
  return [
    ...imports,
    ...(imports.length ? [""] : []),
    "from openai import OpenAI",
    ...(files.length ? reader : []),
    "",
    `client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ...ends,
    "",
  ].join("\n");
}

// A value as Python writes it.
function literal(value, level) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (value instanceof FileContent) return value.python;
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close, entries] = Array.isArray(value)
    ? ["[", "]", value.map((entry) => literal(entry, level + 1))]
    : ["{", "}", Object.entries(value).map(([name, entry]) => `${JSON.stringify(name)}: ${literal(entry, level + 1)}`)];
  const line = `${open}${entries.join(", ")}${close}`;
  if (line.length < 88 - 4 * level && !line.includes("\n")) return line;
  const indent = "    ".repeat(level);
  return `${open}\n${entries.map((entry) => `${indent}    ${entry},\n`).join("")}${indent}${close}`;
}
