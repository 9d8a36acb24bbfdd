/* The page of rollouts: filters that act at once, choosing steps by dragging, and a line that
   describes the token under the pointer or the arrow keys. */
"use strict";

for (const form of findAll("form[data-auto-submit]")) {
  form.addEventListener("change", () => form.requestSubmit());
  form.addEventListener("submit", (event) => {
    // Empty fields do not belong into the address.
    event.preventDefault();
    const fields = [...new FormData(form)].filter(([, value]) => value !== "");
    const query = new URLSearchParams(fields).toString();
    location.assign(query ? `${form.action}?${query}` : form.action);
  });
}

/* Tokens. */

function formatSigned(number, digits) {
  return number.toFixed(digits).replace("-", "−");
}

function describeToken(token) {
  for (const other of findAll(".tokens .is-chosen")) other.classList.remove("is-chosen");
  token.classList.add("is-chosen");
  const logprob = Number(token.dataset.logprob);
  const text = token.firstChild ? token.firstChild.textContent : "";
  const parts = [
    `Token “${text}”: probability ${Math.exp(logprob).toPrecision(2)}`,
    `log-probability ${formatSigned(logprob, 3)}`,
  ];
  if (token.dataset.difference !== undefined) {
    const difference = Number(token.dataset.difference);
    parts.push(`trainer ${formatSigned(logprob - difference, 3)}`);
    parts.push(`difference ${formatSigned(difference, 3)}`);
  }
  const line = document.getElementById("inspect");
  if (line) line.textContent = parts.join(", ");
  return parts.join(", ");
}

for (const answer of findAll(".tokens")) {
  for (const name of ["pointerover", "click"])
    answer.addEventListener(name, (event) => {
      const token = event.target.closest("i[data-logprob]");
      if (token) describeToken(token);
    });
  answer.addEventListener("keydown", (event) => {
    const distance = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!distance) return;
    event.preventDefault();
    const tokens = findAll("i[data-logprob]", answer);
    const here = tokens.findIndex((token) => token.classList.contains("is-chosen"));
    const next = here < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, here + distance));
    if (tokens[next]) announce(describeToken(tokens[next]));
  });
}

/* Steps: a drag across the strip chooses them, a click chooses one. */
const strip = document.querySelector(".step-strip");
if (strip) {
  const lastStep = Number(strip.dataset.lastStep);
  let start = null;
  const findStep = (event) => {
    const box = strip.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    return Math.max(1, Math.min(lastStep, Math.ceil(share * lastStep)));
  };
  strip.addEventListener("pointerdown", (event) => {
    start = findStep(event);
    strip.setPointerCapture(event.pointerId);
  });
  strip.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const steps = [start, findStep(event)].sort((first, second) => first - second);
    start = null;
    const url = new URL(location.href);
    for (const name of ["group", "page"]) url.searchParams.delete(name);
    url.searchParams.set("from", steps[0]);
    url.searchParams.set("to", steps[1]);
    location.assign(url);
  });
}
