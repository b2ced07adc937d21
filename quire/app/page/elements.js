// Elements of the page. They are made without HTML text: what users and models write is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Strokes on a grid of 24 x 24.
const ICONS = {
  attach:
    "M20 11.5 11.8 19.7a5.2 5.2 0 0 1-7.4-7.4L12.9 3.8a3.5 3.5 0 0 1 4.9 4.9l-8.3 8.3a1.7 1.7 0 0 1-2.5-2.5L14.5 7",
  camera:
    "M4 8h3l1.6-2.5h6.8L17 8h3a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V9a1 1 0 0 1 1-1ZM12 16.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7Z",
  check: "m5 12.5 4.5 4.5L19 7.5",
  close: "m6 6 12 12M18 6 6 18",
  code: "m8.5 7-5 5 5 5M15.5 7l5 5-5 5",
  copy: "M9 9h10a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H9a1 1 0 0 1-1-1V10a1 1 0 0 1 1-1ZM16 9V4a1 1 0 0 0-1-1H5a1 1 0 0 0-1 1v11a1 1 0 0 0 1 1h3",
  down: "M12 5v14M6 13l6 6 6-6",
  download: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 20h14",
  edit: "M4 20h4L19.5 8.5a2.1 2.1 0 0 0-3-3L5 17l-1 3ZM14.5 7.5l3 3",
  file: "M6 3h8l5 5v12a1 1 0 0 1-1 1H6a1 1 0 0 1-1-1V4a1 1 0 0 1 1-1ZM14 3v5h5",
  left: "m14.5 6-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h10",
  microphone: "M12 3a3 3 0 0 1 3 3v5a3 3 0 0 1-6 0V6a3 3 0 0 1 3-3ZM5.5 11a6.5 6.5 0 0 0 13 0M12 17.5V21",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5Z",
  plus: "M12 5v14M5 12h14",
  question: "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18ZM9.3 9.3a2.8 2.8 0 1 1 4.1 2.5c-.9.5-1.4 1-1.4 2M12 16.8v.2",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9.3M20 4.5v4.8h-4.8",
  right: "m9.5 6 6 6-6 6",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14ZM20.5 20.5 16 16",
  send: "M12 19V5M6 11l6-6 6 6",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 9a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM9 19a2 2 0 1 0 0-4 2 2 0 0 0 0 4Z",
  stop: "M7.5 7.5h9v9h-9Z",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8ZM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  system: "M4 5h16a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H4a1 1 0 0 1-1-1V6a1 1 0 0 1 1-1ZM9 20.5h6M12 17v3.5",
  tool: "M14.5 6.5a4.2 4.2 0 0 1 5.3-2.6l-2.7 2.7 2.3 2.3L22 6.3a4.2 4.2 0 0 1-5.6 5.2L8 19.8a2 2 0 0 1-2.9-2.9l8.4-8.3a4.2 4.2 0 0 1 1-2.1Z",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.5 11v5M13.5 11v5",
  warning: "M12 4 2.8 20h18.4L12 4ZM12 10v4.5M12 17.3v.2",
};

// An element. Properties whose names begin with "on" are listeners, the others attributes; false and undefined are left out.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

export function icon(name) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  drawing.append(path);
  return drawing;
}

// A button that shows an icon only, so its label is its name and its tooltip.
export function iconButton(name, label, onclick, properties = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}

export function byId(id) {
  return document.getElementById(id);
}

// Fills elements of index.html that ask for an icon.
export function drawIcons(root = document) {
  for (const place of root.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}

// Reads a text out to users of screen readers. It is emptied first, so that the same text twice is read twice.
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  requestAnimationFrame(() => (region.textContent = text));
}

// A short message at the bottom of the page, with a button if there is something to do about it.
export function toast(text, action, onaction) {
  const hide = () => message.remove();
  const button =
    action && element("button", { type: "button", class: "text-button", onclick: () => (hide(), onaction()) }, action);
  const message = element("div", { class: "toast" }, element("span", {}, text), button);
  byId("toasts").replaceChildren(message);
  setTimeout(hide, action ? 8000 : 4000);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copySelection(text); // without HTTPS, browsers offer no clipboard
  }
}

function copySelection(text) {
  const host = document.querySelector("dialog[open]") ?? document.body;
  const area = element("textarea", { class: "visually-hidden", "aria-hidden": "true", readonly: true });
  const focused = document.activeElement;
  area.value = text;
  host.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

// A button that copies what `text` returns, and says so.
export function copyButton(label, text, properties = {}) {
  const button = iconButton(
    "copy",
    label,
    async () => {
      await copyText(text());
      button.replaceChildren(icon("check"));
      announce("Copied");
      setTimeout(() => button.replaceChildren(icon("copy")), 1500);
    },
    properties,
  );
  return button;
}

// Offers a file to the user's downloads.
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function clock(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function fileSize(bytes) {
  if (bytes < 1000) return count(bytes, "byte");
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

export function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
