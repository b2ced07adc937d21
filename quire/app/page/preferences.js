// What the page remembers in this browser. Where storage is switched off, it remembers nothing.

export function recall(name) {
  try {
    return localStorage.getItem(`quire-${name}`);
  } catch {
    return null;
  }
}

export function remember(name, text) {
  try {
    if (text === null) localStorage.removeItem(`quire-${name}`);
    else localStorage.setItem(`quire-${name}`, text);
  } catch {
    // The choice lasts as long as the page.
  }
}
