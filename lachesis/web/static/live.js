/* Keep a page up to date by one stream of events. A hidden page gives its stream up and catches up
   in one request when it is seen again. What a person has opened, typed or chosen is not replaced. */
"use strict";

const RETRY_S = [1, 2, 5, 10, 30];
const SILENT_S = 10;
const LATE_STEPS = 3;
const stream = {
  path: document.body.dataset.stream,
  source: null,
  failures: 0,
  lostAt: null,
  retryAt: null,
  lastStepAt: null,
  stepSeconds: 0,
  isOver: false,
};

function getStreamAddress() {
  const url = new URL(stream.path, location.href);
  if (typeof view === "object") {
    url.searchParams.set("x", view.x);
    url.searchParams.set("mean", view.mean);
    const metrics = findAll("figure[data-metrics]").flatMap((figure) => figure.dataset.metrics.split(" "));
    if (metrics.length) url.searchParams.set("metrics", [...new Set(metrics)].join(","));
  }
  return url;
}

function openStream() {
  closeStream();
  if (stream.isOver || document.hidden) return;
  const source = new EventSource(getStreamAddress());
  stream.source = source;
  source.addEventListener("hello", () => {
    if (stream.lostAt) catchUp();
    stream.failures = 0;
    stream.lostAt = stream.retryAt = null;
    showConnection();
  });
  source.addEventListener("steps", (event) => showSteps(JSON.parse(event.data)));
  source.addEventListener("parts", (event) => replaceParts(JSON.parse(event.data)));
  source.addEventListener("changed", () => htmx.trigger("#list", "lachesis:changed"));
  source.addEventListener("ended", () => {
    stream.isOver = true;
    closeStream();
    catchUp();
  });
  source.addEventListener("error", () => {
    // The browser would try again at its own pace.
    closeStream();
    stream.lostAt ??= new Date();
    const wait = RETRY_S[Math.min(stream.failures, RETRY_S.length - 1)];
    stream.failures += 1;
    stream.retryAt = Date.now() + wait * 1000;
    showConnection();
  });
}

function closeStream() {
  stream.source?.close();
  stream.source = null;
}

/** Read once what the stream may have missed. */
function catchUp() {
  const list = document.getElementById("list");
  if (list) htmx.trigger(list, "lachesis:changed");
  else if (findAll("figure[data-metrics]").length) {
    showCurves();
    refreshParts(["verdict", "amounts", "service-logs", "live"]);
  } else location.reload();
}

async function refreshParts(ids) {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const id of ids) {
    const [here, there] = [document.getElementById(id), page.getElementById(id)];
    if (here && there && !isInUse(here)) here.replaceWith(document.adoptNode(there));
  }
}

/** Return whether a person has the focus or a selection in a part. */
function isInUse(part) {
  const selection = getSelection();
  const isSelected = selection && !selection.isCollapsed && selection.containsNode(part, true);
  const hasFocusInside = part.contains(document.activeElement) && part !== document.activeElement;
  return hasFocusInside || isSelected;
}

/** Put new HTML of the server into the parts of these ids. */
function replaceParts(parts) {
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
  for (const [id, html] of Object.entries(parts)) {
    const part = document.getElementById(id);
    if (!part || isInUse(part)) continue;
    const page = new DOMParser().parseFromString(html, "text/html");
    part.replaceChildren(...[...page.body.childNodes].map((node) => document.adoptNode(node)));
    // Whoever reads the end of a log goes on reading the end.
    if (id === "log-lines" && isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
  }
}

function showSteps(detail) {
  stream.lastStepAt = Date.now();
  stream.stepSeconds = detail.seconds || 0;
  if (!findAll("figure[data-metrics]").length) location.reload();
  dispatchEvent(new CustomEvent("lachesis:steps", { detail }));
  document.body.dataset.step = detail.step;
  showConnection();
}

function formatClock(date) {
  return date.toLocaleTimeString("en-GB");
}

/** Show the strip of a lost connection, and in the bar how old the newest step is. */
function showConnection() {
  const strip = document.getElementById("lost");
  const isLost = stream.lostAt !== null && Date.now() - stream.lostAt > SILENT_S * 1000;
  strip.hidden = !isLost;
  if (isLost) {
    const bold = document.createElement("b");
    bold.textContent = `No connection since ${formatClock(stream.lostAt)}.`;
    const step = document.body.dataset.step;
    const seconds = Math.max(0, Math.round((stream.retryAt - Date.now()) / 1000));
    const text = document.createElement("span");
    text.textContent = `${step ? `What you see is of step ${step}. ` : ""}Trying again in ${seconds} s.`;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try now";
    button.addEventListener("click", openStream);
    strip.replaceChildren(bold, text, button);
  }
  const live = document.getElementById("live");
  if (!stream.lastStepAt || !live) return;
  const age = (Date.now() - stream.lastStepAt) / 1000;
  const isLate = age > Math.max(5, LATE_STEPS * stream.stepSeconds);
  live.classList.toggle("is-late", isLate);
  const dot = document.createElement("i");
  live.replaceChildren(dot, isLate ? `${Math.round(age)} s ago` : `step ${document.body.dataset.step}`);
}

if (stream.path) {
  openStream();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) closeStream();
    else {
      openStream();
      catchUp();
    }
  });
  // Another mean or axis needs other points.
  document.addEventListener("click", (event) => {
    if (event.target.closest(".choice [data-set]")) openStream();
  });
  setInterval(() => {
    if (stream.source || stream.isOver || document.hidden) return showConnection();
    if (stream.retryAt !== null && Date.now() >= stream.retryAt) openStream();
    else showConnection();
  }, 1000);
}
