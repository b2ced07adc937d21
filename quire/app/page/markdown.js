// Shows Markdown as elements. Text becomes text nodes only, never HTML; links lead to http, https and mailto addresses
// and open in a new tab; pictures of other hosts are shown as links.

import { copyButton, download, element, iconButton } from "./elements.js";
import { highlight } from "./highlight.js";

const DEPTH = 12; // levels of quotes and lists; deeper ones are shown as text
const LINK_TEXT = 1000; // longest text of a link
const OPENERS = 100; // delimiters of emphasis that may be open at once
const EXTENSIONS = {
  bash: "sh",
  javascript: "js",
  json: "json",
  markdown: "md",
  python: "py",
  rust: "rs",
  shell: "sh",
  typescript: "ts",
};

// A container whose text grows. Blocks whose source is still the same keep their elements, so that a stream costs
// little, and that what a reader has selected or focused stays.
export class MarkdownView {
  constructor(container) {
    this.container = container;
    this.sources = [];
    this.text = "";
  }

  update(text) {
    if (text === this.text) return;
    this.text = text;
    const blocks = parseBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
    blocks.forEach((block, index) => {
      if (this.sources[index] === block.source) return;
      const rendered = renderBlock(block);
      if (index < this.sources.length) this.container.children[index].replaceWith(rendered);
      else this.container.append(rendered);
    });
    while (this.container.children.length > blocks.length) this.container.lastElementChild.remove();
    this.sources = blocks.map((block) => block.source);
  }
}

// Blocks

function indentOf(line) {
  return line.length - line.trimStart().length;
}

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const MARKER = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( +)|$)/;

function isRule(line) {
  const marks = line.replace(/\s/g, "");
  return (
    marks.length > 2 && indentOf(line) < 4 && "-*_".includes(marks[0]) && [...marks].every((mark) => mark === marks[0])
  );
}

function opensBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || isRule(line) || /^ {0,3}>/.test(line) || MARKER.test(line);
}

// The blocks of lines; each has the text that it was made of as `source`.
function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = parseBlock(lines, at, depth);
    blocks.push({ ...block, source: `${block.type} ${block.open ?? ""}\n${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  if (depth < DEPTH) {
    if (FENCE.test(line)) return parseFence(lines, at);
    const heading = HEADING.exec(line);
    if (heading)
      return [
        { type: "heading", level: heading[1].length, text: (heading[2] ?? "").replace(/ #+ *$/, "").trim() },
        at + 1,
      ];
    if (isRule(line)) return [{ type: "rule" }, at + 1];
    if (/^ {0,3}>/.test(line)) return parseQuote(lines, at, depth);
    if (MARKER.test(line)) return parseList(lines, at, depth);
    if (isTable(lines, at)) return parseTable(lines, at);
  }
  let end = at + 1;
  while (
    end < lines.length &&
    lines[end].trim() &&
    (depth >= DEPTH || (!opensBlock(lines[end]) && !isTable(lines, end)))
  )
    end += 1;
  return [
    {
      type: "paragraph",
      text: lines
        .slice(at, end)
        .map((text) => text.trim())
        .join("\n"),
    },
    end,
  ];
}

function parseFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && indentOf(line) < 4 && [...text].every((mark) => mark === fence[0]);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return [
    { type: "code", language: language.trim().split(/\s/)[0], text: code.join("\n"), open: end === lines.length },
    Math.min(end + 1, lines.length),
  ];
}

function parseQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].trim() && (/^ {0,3}>/.test(lines[end]) || !opensBlock(lines[end]))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function parseList(lines, at, depth) {
  const first = MARKER.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const kind = first[2].at(-1);
  const items = [];
  let loose = false;
  let end = at;
  while (end < lines.length) {
    const marker = MARKER.exec(lines[end]);
    if (!marker || marker[2].at(-1) !== kind || /\d/.test(marker[2]) !== ordered || isRule(lines[end])) break;
    const [inner, next] = takeItem(lines, end, marker);
    const blank = next < lines.length && !lines[next - 1].trim();
    items.push(inner);
    loose ||= inner.some((line, index) => !line.trim() && index < inner.length - 1);
    end = next;
    if (blank && MARKER.test(lines[next])) loose = true;
  }
  const parsed = items.map((inner) => {
    const task = /^\[([ xX])\] /.exec(inner[0]);
    const text = task ? [inner[0].slice(4), ...inner.slice(1)] : inner;
    return { checked: task ? task[1] !== " " : undefined, blocks: parseBlocks(text, depth + 1) };
  });
  return [{ type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, loose, items: parsed }, end];
}

// The lines of a list's item without their indentation, and where it ends. Models often indent nested lists by 2 spaces
// where CommonMark wants 3, so that is enough.
function takeItem(lines, at, marker) {
  const width = marker[0].length - (marker[3]?.length > 4 ? marker[3].length - 1 : 0) + (marker[3] ? 0 : 1);
  const least = Math.min(width, marker[1].length + 2);
  const inner = [lines[at].slice(Math.min(width, lines[at].length))];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const blank = !line.trim();
    const continues = blank || indentOf(line) >= least || (lines[end - 1].trim() && !opensBlock(line));
    if (!continues) break;
    inner.push(line.slice(Math.min(width, indentOf(line))));
    end += 1;
  }
  while (inner.length > 1 && !inner.at(-1).trim()) inner.pop();
  return [inner, end];
}

function cellsOf(line) {
  const cells = [""];
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\" && text[at + 1] === "|") cells[cells.length - 1] += text[++at];
    else if (text[at] === "|") cells.push("");
    else cells[cells.length - 1] += text[at];
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const columns = cellsOf(lines[at + 1]);
  return columns.every((cell) => /^:?-+:?$/.test(cell)) && columns.length === cellsOf(lines[at]).length;
}

function parseTable(lines, at) {
  const align = cellsOf(lines[at + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "start";
    return cell.startsWith(":") ? "center" : "end";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  return [{ type: "table", align, head: cellsOf(lines[at]), rows: lines.slice(at + 2, end).map(cellsOf) }, end];
}

function renderBlock(block) {
  switch (block.type) {
    case "heading": // below the headings of the page itself
      return element(`h${Math.min(6, block.level + 2)}`, { class: `heading-${block.level}` }, inline(block.text));
    case "code":
      return codeBlock(block.text, block.language, block.open);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, block.blocks.map(renderBlock));
    case "list":
      return renderList(block);
    case "table":
      return renderTable(block);
    default:
      return element("p", {}, inline(block.text));
  }
}

function renderList({ ordered, start, loose, items }) {
  const entries = items.map(({ checked, blocks }) => {
    const children = blocks.flatMap((block) =>
      block.type === "paragraph" && !loose ? inline(block.text) : [renderBlock(block)],
    );
    const box =
      checked === undefined
        ? []
        : [element("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" })];
    return element("li", { class: box.length > 0 && "task" }, box, children);
  });
  return element(ordered ? "ol" : "ul", { start: ordered && start !== 1 && start }, entries);
}

function renderTable({ align, head, rows }) {
  const cell = (tag, text, column) =>
    element(tag, { class: `align-${align[column]}`, scope: tag === "th" && "col" }, inline(text));
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      align.map((_, column) => cell("td", row[column] ?? "", column)),
    ),
  );
  const table = element(
    "table",
    {},
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        head.map((text, column) => cell("th", text, column)),
      ),
    ),
    element("tbody", {}, body),
  );
  return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

// A block of code with its language, and buttons that copy and save it. While it is being written, it is not coloured.
export function codeBlock(text, language, open = false) {
  const name = language.toLowerCase();
  const code = element("code", {}, open ? text : highlight(text, name));
  const save = () =>
    download(`code.${EXTENSIONS[name] ?? (/^[a-z\d]{1,8}$/.test(name) ? name : "txt")}`, text, "text/plain");
  const bar = element(
    "div",
    { class: "code-bar" },
    element("span", {}, language || "text"),
    iconButton("download", "Save the code", save),
    copyButton("Copy the code", () => text),
  );
  return element("div", { class: "code" }, bar, element("pre", { tabindex: "0" }, code));
}

// Inline text

// The nodes of a text with emphasis, code and links.
export function inline(text, depth = 0) {
  return new InlineParser(text, depth).parse();
}

class InlineParser {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.nodes = [];
    this.plain = "";
    this.openers = []; // delimiters of emphasis whose end has not come yet: character, length, index in `nodes`
    this.unclosed = new Set(); // lengths of runs of backticks that have no end
  }

  parse() {
    while (this.at < this.text.length) {
      if (!this.special()) this.plain += this.text[this.at++];
    }
    this.flush();
    return this.nodes;
  }

  flush() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  push(node, length) {
    this.flush();
    this.nodes.push(node);
    this.at += length;
    return true;
  }

  special() {
    switch (this.text[this.at]) {
      case "\\":
        return this.escape();
      case "\n":
        return this.push(element("br"), 1);
      case "`":
        return this.code();
      case "!":
        return this.text[this.at + 1] === "[" && this.link(1);
      case "[":
        return this.link(0);
      case "<":
        return this.bracketed();
      case "*":
      case "_":
      case "~":
        return this.emphasis();
      case "h":
        return this.bareAddress();
      default:
        return false;
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  runLength() {
    let end = this.at;
    while (this.text[end] === this.text[this.at]) end += 1;
    return end - this.at;
  }

  code() {
    const length = this.runLength();
    const end = this.unclosed.has(length) ? -1 : endOfCode(this.text, this.at + length, length);
    if (end < 0) {
      this.unclosed.add(length);
      this.plain += "`".repeat(length);
      this.at += length;
      return true;
    }
    const content = this.text.slice(this.at + length, end).replace(/\n/g, " ");
    const padded = /^ .*[^ ].* $/.test(content);
    return this.push(element("code", {}, padded ? content.slice(1, -1) : content), end + length - this.at);
  }

  link(skip) {
    const link = this.depth > 3 ? undefined : linkAt(this.text, this.at + skip);
    if (!link) return false;
    const url = safeAddress(link.address);
    const label = skip ? [`Picture: ${link.label || link.address}`] : inline(link.label, this.depth + 1);
    const content = url ? anchor(url, label) : element("span", {}, label);
    return this.push(content, link.end - this.at);
  }

  bracketed() {
    const match = /^<((?:https?:|mailto:)[^\s<>]{1,2000})>/.exec(this.text.slice(this.at, this.at + 2010));
    const url = match && safeAddress(match[1]);
    return url ? this.push(anchor(url, [match[1]]), match[0].length) : false;
  }

  bareAddress() {
    if (this.depth > 0 || /\w/.test(this.text[this.at - 1] ?? "")) return false;
    const match = /^https?:\/\/[^\s<>"'`|]{1,2000}/.exec(this.text.slice(this.at, this.at + 2010));
    if (!match) return false;
    let written = match[0].replace(/[.,;:!?*_~\]]+$/, "");
    if (written.endsWith(")") && !written.includes("(")) written = written.slice(0, -1).replace(/[.,;:!?]+$/, "");
    const url = safeAddress(written);
    return url ? this.push(anchor(url, [written]), written.length) : false;
  }

  emphasis() {
    const character = this.text[this.at];
    const length = this.runLength();
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + length] ?? " ";
    const inWord = character === "_" && /\w/.test(before) && /\w/.test(after);
    if (inWord || length > 3 || (character === "~" && length !== 2)) {
      this.plain += character.repeat(length);
      this.at += length;
      return true;
    }
    this.flush();
    this.at += length;
    const remaining = /\S/.test(before) ? this.close(character, length) : length;
    if (remaining > 0) {
      if (/\S/.test(after)) this.openers.push({ character, length: remaining, index: this.nodes.length });
      if (this.openers.length > OPENERS) this.openers.shift();
      this.nodes.push(document.createTextNode(character.repeat(remaining)));
    }
    return true;
  }

  // Ends emphasis that is open. Returns how many delimiters are left.
  close(character, length) {
    let remaining = length;
    while (remaining > 0) {
      const position = this.openers.findLastIndex((opener) => opener.character === character);
      if (position < 0) break;
      const opener = this.openers[position];
      const used = character === "~" || (remaining > 1 && opener.length > 1) ? 2 : 1;
      const content = this.nodes.splice(opener.index + 1);
      if (content.length === 0) break;
      opener.length -= used;
      remaining -= used;
      this.openers.length = opener.length > 0 ? position + 1 : position;
      if (opener.length > 0) this.nodes[opener.index].data = character.repeat(opener.length);
      else this.nodes.pop();
      const tag = { "~": "del" }[character] ?? (used === 2 ? "strong" : "em");
      this.nodes.push(element(tag, {}, content));
    }
    return remaining;
  }
}

function endOfCode(text, start, length) {
  let at = text.indexOf("`", start);
  while (at >= 0) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === length) return at;
    at = text.indexOf("`", end);
  }
  return -1;
}

// A link [label](address "title") at a position, or undefined.
function linkAt(text, start) {
  let level = 0;
  let close = start;
  for (const last = Math.min(text.length, start + LINK_TEXT); close < last; close++) {
    if (text[close] === "\\") close += 1;
    else if (text[close] === "[") level += 1;
    else if (text[close] === "]" && --level === 0) break;
  }
  if (level !== 0 || text[close] !== "]" || text[close + 1] !== "(") return undefined;
  const match = /^\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\)){0,2000})>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
    text.slice(close + 1, close + 3000),
  );
  if (!match) return undefined;
  return { label: text.slice(start + 1, close), address: match[1], end: close + 1 + match[0].length };
}

function safeAddress(written) {
  try {
    const url = new URL(written);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : undefined;
  } catch {
    return undefined; // relative addresses would lead to this server
  }
}

function anchor(url, content) {
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, content);
}
