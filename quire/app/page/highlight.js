// Colours code a little: comments, strings, numbers and the keywords that most languages share.

const LONGEST = 20000; // characters; longer code stays plain
const HASH_COMMENTS = new Set([
  "bash",
  "dockerfile",
  "ini",
  "make",
  "makefile",
  "perl",
  "py",
  "python",
  "r",
  "rb",
  "ruby",
  "sh",
  "shell",
  "toml",
  "yaml",
  "yml",
  "zsh",
]);
const DASH_COMMENTS = new Set(["haskell", "hs", "lua", "sql"]);
const PLAIN = new Set(["", "diff", "markdown", "md", "plain", "plaintext", "text", "txt"]);
const KEYWORDS = new Set(
  [
    "abstract and as assert async await begin bool break case catch class const continue def default defer del do",
    "done double elif else elsif end enum esac except export extends extern false False fi final finally float fn",
    "for foreach from func function global go goto if impl implements import in include int interface is lambda",
    "let long loop match mod module mut namespace new nil None nonlocal not null of or package pass priv private",
    "protected pub public raise return select self short static struct super switch then this throw throws trait",
    "true True try type typedef typeof union unless unsafe unsigned until use using val var virtual void volatile",
    "when where while with yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT",
    "RIGHT INNER ON GROUP ORDER BY LIMIT AND OR NOT NULL AS",
  ].flatMap((words) => words.split(" ")),
);

function patternFor(language) {
  let comment = String.raw`\/\/[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/|$)`;
  if (HASH_COMMENTS.has(language)) comment = "#[^\\n]*";
  else if (DASH_COMMENTS.has(language)) comment = "--[^\\n]*";
  else if (["html", "xml", "svg"].includes(language)) comment = "<!--(?:[^-]|-(?!->))*(?:-->|$)";
  const string = String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\[^])*`";
  const number = String.raw`\b(?:0x[\da-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
  return new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>${number})|(?<word>[A-Za-z_]\\w*)`, "g");
}

// Text nodes and spans.
export function highlight(text, language) {
  if (PLAIN.has(language) || text.length > LONGEST) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(patternFor(language))) {
    const kind = kindOf(match, text);
    if (!kind) continue;
    const span = document.createElement("span");
    span.className = `code-${kind}`;
    span.textContent = match[0];
    nodes.push(text.slice(end, match.index), span);
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function kindOf({ groups, index, 0: matched }, text) {
  if (groups.comment) return "comment";
  if (groups.string)
    return /^\s*:/.test(text.slice(index + matched.length, index + matched.length + 3)) ? "key" : "string";
  if (groups.number) return "number";
  return KEYWORDS.has(matched) ? "keyword" : undefined;
}
