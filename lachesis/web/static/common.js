/* What all pages do by script: colours, copying, keys, ticks and filters of the list of runs.
   Without it every text, table and link is still there. */
"use strict";

const LETTERS = "ABCDEFGH";
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

/** Tell a screen reader what has happened. */
function announce(text) {
  const region = document.getElementById("said");
  if (region) region.textContent = text;
}

/** Keep a choice; where storage is off, it lasts as long as the page. */
function store(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    /* Storage is off. */
  }
}

function readStored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/* Colours: as the system, light, dark. */
document.querySelector("[data-theme-button]")?.addEventListener("click", () => {
  const root = document.documentElement;
  const themes = ["", "light", "dark"];
  const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  store("theme", next);
  announce(`Colours: ${next || "as the system"}`);
  dispatchEvent(new Event("lachesis:theme"));
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  // A command of several lines is copied as one.
  const text = button.previousElementSibling.textContent.replace(/\s*\\\n\s*/g, " ");
  navigator.clipboard?.writeText(text).then(() => announce("Copied"));
});

/* Ticks of the list of runs. Their order gives each run its letter, and stands in the address. */

function readTicks() {
  const ticked = new URLSearchParams(location.search).get("ticked") || "";
  return ticked.split(",").filter(Boolean).slice(0, LETTERS.length);
}

function makeLetter(index) {
  const letter = document.createElement("span");
  letter.className = `letter run-${LETTERS[index].toLowerCase()}`;
  letter.textContent = LETTERS[index];
  return letter;
}

/** Return an address with these ticks in place of its own. */
function withTicks(href, ticks) {
  const url = new URL(href, location.href);
  url.searchParams.delete("ticked");
  const query = url.searchParams.toString();
  // A comma needs no escape, and the address stays readable.
  const ticked = ticks.length ? `${query ? "&" : ""}ticked=${ticks.join(",")}` : "";
  return url.pathname + (query || ticked ? `?${query}${ticked}` : "");
}

function saveTicks(ticks) {
  history.replaceState(history.state, "", withTicks(location.href, ticks));
  showTicks();
}

function showTicks() {
  const tray = document.getElementById("tray");
  if (!tray) return;
  const ticks = readTicks();
  for (const row of findAll("tr[data-run]")) {
    const index = ticks.indexOf(row.dataset.run);
    row.className = index < 0 ? "" : `ticked run-${LETTERS[index].toLowerCase()}`;
    row.querySelector(".title .letter")?.remove();
    if (index >= 0) row.querySelector(".title").append(makeLetter(index));
    const box = row.querySelector("input");
    box.checked = index >= 0;
    box.disabled = index < 0 && ticks.length >= LETTERS.length;
  }
  for (const link of findAll("#list .chips a, #list .equal a"))
    link.setAttribute("href", withTicks(link.href, ticks));
  tray.hidden = !ticks.length;
  tray.querySelector("ul").replaceChildren(
    ...ticks.map((runId, index) => {
      const item = document.createElement("li");
      const name = document.createElement("span");
      name.className = "code";
      name.textContent = runId;
      item.append(makeLetter(index), name);
      return item;
    }),
  );
  const compare = tray.querySelector("a");
  compare.textContent = ticks.length > 1 ? `Compare ${ticks.length} runs` : "Tick one more run";
  if (ticks.length > 1) compare.setAttribute("href", `/compare?runs=${ticks.join(",")}`);
  else compare.removeAttribute("href");
}

document.addEventListener("change", (event) => {
  const row = event.target.closest("tr[data-run]");
  if (!row) return;
  const ticks = readTicks().filter((runId) => runId !== row.dataset.run);
  if (event.target.checked) ticks.push(row.dataset.run);
  saveTicks(ticks);
});
document.querySelector("[data-clear]")?.addEventListener("click", () => saveTicks([]));
document.addEventListener("htmx:afterSettle", () => {
  showTicks();
  for (const select of findAll(".filters .select"))
    select.classList.toggle("is-set", Boolean(select.querySelector("select").value));
});
showTicks();

document.addEventListener("htmx:configRequest", ({ target, detail }) => {
  if (target.closest("#list")) detail.path = withTicks(detail.path, readTicks());
  else if (target.matches(".filters"))
    // The order and the ticks are those of the address, which other parts of the page change.
    for (const name of ["sort", "ticked"])
      detail.parameters[name] = new URLSearchParams(location.search).get(name) || "";
});

/* An open page asks every two seconds for what has changed (`#poll`); what differs is replaced. A
   hidden page does not ask. What a script has drawn, and what a person types, stays. */

if (window.Idiomorph) {
  const kept = "figure[data-metrics], input:focus, select:focus";
  Idiomorph.defaults.callbacks.beforeNodeMorphed = (node) => !node.matches?.(kept);
}
const isPoll = (event) => event.detail.elt.id === "poll";

/** Say once why the page cannot be renewed; it goes on asking. */
function showLost(event, reason) {
  const strip = document.getElementById("lost");
  if (!isPoll(event) || !strip.hidden) return;
  strip.textContent = `${reason} What you see is of ${new Date().toLocaleTimeString("en-GB")}; the page asks again every two seconds.`;
  strip.hidden = false;
}

document.addEventListener("htmx:beforeRequest", (event) => {
  if (isPoll(event) && document.hidden) event.preventDefault();
});
document.addEventListener("htmx:sendError", (event) => showLost(event, "No connection."));
document.addEventListener("htmx:responseError", (event) =>
  showLost(event, `The server answers with status ${event.detail.xhr.status}.`),
);
document.addEventListener("htmx:afterRequest", (event) => {
  if (isPoll(event) && event.detail.successful) document.getElementById("lost").hidden = true;
});

/* Whoever reads the end of a log goes on reading the end. */
let isAtEnd = false;
document.addEventListener("htmx:beforeSwap", () => {
  isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
});
document.addEventListener("htmx:afterSettle", () => {
  if (isAtEnd && document.getElementById("log-lines")) scrollTo(0, document.documentElement.scrollHeight);
});

/* Keys; a checkbox of their list switches the single letters off. */

function moveFocus(selector, distance) {
  const links = findAll(selector).filter((link) => link.offsetParent);
  const here = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, here + distance))]?.focus();
}

const KEYS = {
  "/": () => document.querySelector("#search, [type=search]")?.focus(),
  "?": () => document.getElementById("keys")?.showModal(),
  j: () => moveFocus(".runs .title a, .groups a", 1),
  k: () => moveFocus(".runs .title a, .groups a", -1),
  x: () => document.activeElement.closest("tr[data-run]")?.querySelector("input").click(),
  c: () => document.querySelector("#tray:not([hidden]) a[href]")?.click(),
  "[": () => document.querySelector("[rel=prev]")?.click(),
  "]": () => document.querySelector("[rel=next]")?.click(),
};
const keySwitch = document.querySelector("[data-keys]");
if (keySwitch) {
  keySwitch.checked = readStored("keys") !== "off";
  keySwitch.addEventListener("change", () => store("keys", keySwitch.checked ? "" : "off"));
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  if (keySwitch && !keySwitch.checked && event.key !== "?") return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea, dialog[open]")) return;
  event.preventDefault();
  KEYS[event.key]();
});
