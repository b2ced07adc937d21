// Runs before the first paint, so that a page in the other colours than the system's does not flash.
{
  let theme = null;
  try {
    theme = localStorage.getItem("quire-theme");
  } catch {
    // Storage is switched off: the system's colours are used.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
