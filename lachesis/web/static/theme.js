/* Set the colours before the first paint. Loaded in the head, before the stylesheets. */
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("with-script");
  let theme = null;
  try {
    theme = localStorage.getItem("theme");
  } catch {
    /* Storage is off; the colours follow the system. */
  }
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
})();
