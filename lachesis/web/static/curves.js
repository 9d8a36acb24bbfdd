/* Draw the curves of a page with uPlot: one look, linked cursors, zoom, means, held-out results.
   Every `figure[data-metrics]` is one chart. Their points come in one request, thinned. */
"use strict";

const DASHES = [[], [10, 4], [3, 3], [10, 3, 3, 3]];
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const RAW_STRENGTH = 0.32;
const TOP_PERCENTILE = 0.99;
const SMALL_POINTS = 300;
const LARGE_POINTS = 900;
const WHOLE_NUMBERS = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power));

/** The state of all curves of the page; it stands in the address too. */
const view = readView();
/** The drawn charts by their figure. */
const charts = new Map();
/** The answer of the server: series, held-out results and checkpoints by run. */
let curveData = { runs: {} };

function readView() {
  const query = new URLSearchParams(location.search);
  const number = (name) => (query.has(name) ? Number(query.get(name)) : null);
  return {
    x: query.get("x") || "step",
    mean: Number(query.get("mean") || 15),
    from: number("from"),
    to: number("to"),
    log: new Set((query.get("log") || "").split(",").filter(Boolean)),
  };
}

function writeView() {
  const url = new URL(location.href);
  const shown = { x: view.x === "step" ? null : view.x, mean: view.mean === 15 ? null : view.mean };
  shown.log = [...view.log].join(",") || null;
  for (const [name, value] of Object.entries({ ...shown, from: view.from, to: view.to })) {
    if (value === null) url.searchParams.delete(name);
    else url.searchParams.set(name, value);
  }
  history.pushState(history.state, "", url);
  for (const link of findAll(".choice [data-set]")) {
    const isChosen = String(view[link.dataset.set]) === link.dataset.value;
    if (isChosen) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

/* Numbers. */

const compactNumber = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function formatValue(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size && size < 0.0001) text = value.toExponential(1);
  else if (size && size < 0.01) text = value.toPrecision(2);
  else if (size >= 10000) text = compactNumber.format(value);
  else text = value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 3);
  return text.replace("-", "−").replace("e-", "e−");
}

function formatSeconds(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function formatPlace(x) {
  if (view.x === "tokens") return compactNumber.format(x);
  if (view.x === "time") return formatSeconds(x);
  return Math.round(x).toLocaleString("en");
}

function formatTicks(values) {
  const steps = values.slice(1).map((value, index) => Math.abs(value - values[index]));
  const isWhole = (count) => steps.every((step) => Number.isInteger(+(step * 10 ** count).toFixed(6)));
  const digits = [0, 1, 2, 3].find(isWhole) ?? 4;
  return values.map((value) => {
    if (value === null) return "";
    if (value === 0) return "0";
    if (Math.abs(value) >= 10000) return compactNumber.format(value);
    if (Math.abs(value) < 0.0001) return value.toExponential(0).replaceAll("-", "−");
    return value.toFixed(digits).replace("-", "−");
  });
}

/* Colours of the page, as a canvas needs them. */

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

function readColour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/* Points. */

function listFigures() {
  return findAll("figure[data-metrics]").filter((figure) => !figure.dataset.waiting);
}

async function fetchCurves(figures) {
  const metrics = [...new Set(figures.flatMap((figure) => figure.dataset.metrics.split(" ")))];
  const runs = [...new Set(figures.flatMap((figure) => figure.dataset.runs.split(" ")))];
  const isLarge = figures.some((figure) => figure.classList.contains("large"));
  const query = new URLSearchParams({
    runs: runs.join(","),
    metrics: metrics.join(","),
    x: view.x,
    mean: view.mean,
    points: isLarge ? LARGE_POINTS : SMALL_POINTS,
  });
  if (view.from !== null) query.set("from", view.from);
  if (view.to !== null) query.set("to", view.to);
  const answer = await fetch(`/curves.json?${query}`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

/* A report holds the points of its curves, with their means as the server takes them. */

const recorded = document.getElementById("recorded");
const recordedRuns = recorded ? JSON.parse(recorded.textContent) : null;

function selectRecorded() {
  const runs = {};
  for (const [runId, run] of Object.entries(recordedRuns)) {
    const axis = run.axes[view.x];
    const isInside = (at) => at >= (view.from ?? -Infinity) && at <= (view.to ?? Infinity);
    const series = {};
    for (const [name, curve] of Object.entries(run.metrics)) {
      const choose = (values) => values.filter((_, index) => isInside(axis[curve.places[index]]));
      const x = choose(curve.places).map((place) => axis[place]);
      const mean = curve.means[view.mean] ?? curve.raw;
      if (x.length) series[name] = { x, raw: choose(curve.raw), mean: choose(mean) };
    }
    const heldOut = run.held_out.map((point) => ({ ...point, x: point.x[view.x] }));
    const checkpoints = run.checkpoints.map((place) => place[view.x]);
    const since = run.since ? run.since[view.x] : null;
    runs[runId] = { series, held_out: heldOut, checkpoints, since };
  }
  return { runs };
}

/** Fetch and draw; the old curves stay until the new ones are there. */
async function showCurves(figures = listFigures(), draw = drawFigure) {
  if (!figures.length) return;
  const late = setTimeout(() => markLoading(figures, true), 1000);
  const wanted = [view.x, view.mean, view.from, view.to].join();
  try {
    const answer = recordedRuns ? selectRecorded() : await fetchCurves(figures);
    // An answer may come after that to a later question.
    if ([view.x, view.mean, view.from, view.to].join() !== wanted) return;
    if (figures.length === listFigures().length) curveData = answer;
    else mergeCurves(answer);
    for (const figure of figures) draw(figure);
  } catch (error) {
    for (const figure of figures) if (!charts.has(figure)) showEmpty(figure, "cannot be loaded");
    announce(`The curves cannot be loaded: ${error.message}`);
  } finally {
    clearTimeout(late);
    markLoading(figures, false);
  }
}

function mergeCurves(answer) {
  for (const [runId, run] of Object.entries(answer.runs)) {
    const known = curveData.runs[runId] || { series: {} };
    curveData.runs[runId] = { ...run, series: { ...known.series, ...run.series } };
  }
}

function markLoading(figures, isLoading) {
  for (const figure of figures) {
    const output = figure.querySelector("output");
    if (isLoading) output.textContent = "loading";
    else if (output.textContent === "loading") output.textContent = "";
  }
}

function showEmpty(figure, text) {
  const plot = figure.querySelector(".plot");
  plot.classList.add("is-empty");
  plot.textContent = text;
}

/** Return the lines of a chart: one per run and metric that has points. */
function listLines(figure) {
  const runs = figure.dataset.runs.split(" ");
  const metrics = figure.dataset.metrics.split(" ");
  const labels = (figure.dataset.labels || "").split(" ");
  const lines = [];
  for (const [place, runId] of runs.entries()) {
    for (const [index, metric] of metrics.entries()) {
      const series = curveData.runs[runId]?.series[metric];
      if (!series) continue;
      const letter = LETTERS[runs.length > 1 ? place : index];
      lines.push({
        runId,
        metric,
        letter,
        label: runs.length > 1 ? letter : labels[index] || "",
        colour: readColour(`run-${letter.toLowerCase()}`),
        dash: runs.length > 1 ? DASHES[place % DASHES.length] : [],
        x: series.x,
        raw: series.raw,
        mean: view.mean > 1 && series.mean ? series.mean : series.raw,
      });
    }
  }
  return lines;
}

/** Return whether a small curve of a run's page would be a level line, which shows nothing. */
function isFlat(figure, lines) {
  if (!figure.matches("#curves .small")) return false;
  return lines.every((line) => line.raw.length > 1 && line.raw.every((value) => value === line.raw[0]));
}

/** Return uPlot's data and series. The raw line lies under the mean, at a third of its strength. */
function makeSeries(figure, lines) {
  const isLarge = figure.classList.contains("large");
  const areRawShown = view.mean > 1 && new Set(lines.map((line) => line.runId)).size === 1;
  const tables = [];
  const series = [{}];
  for (const line of lines) {
    if (areRawShown) {
      tables.push([line.x, line.raw]);
      series.push({ stroke: line.colour, alpha: RAW_STRENGTH, width: 1, points: { show: false }, spanGaps: true });
    }
    tables.push([line.x, line.mean]);
    line.place = series.length;
    series.push({
      stroke: line.colour,
      width: isLarge ? 2 : 1.5,
      dash: line.dash,
      // A single point makes no line.
      points: { show: (chart) => chart.data[0].length < 2, size: 6 },
      spanGaps: true,
    });
  }
  return { data: uPlot.join(tables), series };
}

/** Return the vertical range: shares from 0 to 1, others from 0 to their 99th percentile. */
function makeRange(figure, lines) {
  const values = lines.flatMap((line) => line.raw).filter((value) => value !== null);
  values.sort((first, second) => first - second);
  const high = values[Math.min(values.length - 1, Math.floor(values.length * TOP_PERCENTILE))];
  const lowest = values[0];
  const isShare = "share" in figure.dataset || ("heldOut" in figure.dataset && lowest >= 0 && values.at(-1) <= 1);
  if (isShare) return [0, 1];
  const limit = Number(figure.dataset.limit || 0);
  const low = Math.min(0, values[Math.floor(values.length * (1 - TOP_PERCENTILE))]);
  const top = Math.max(high * 1.12, limit * 1.12);
  return [low * 1.12, top > low ? top : low + 1];
}

function drawFigure(figure) {
  const plot = figure.querySelector(".plot");
  charts.get(figure)?.destroy();
  charts.delete(figure);
  const lines = listLines(figure);
  if (!lines.length) return showEmpty(figure, "not measured");
  figure.hidden = isFlat(figure, lines);
  if (figure.hidden) return;
  plot.classList.remove("is-empty");
  plot.textContent = "";
  const { data, series } = makeSeries(figure, lines);
  const chart = new uPlot(makeOptions(figure, plot, lines, series), data, plot);
  chart.lines = lines;
  charts.set(figure, chart);
  const isLog = view.log.has(figure.dataset.chart);
  figure.querySelector("[data-log]").textContent = isLog ? "Linear scale" : "Log scale";
  showValues(figure, chart, null);
}

function makeOptions(figure, plot, lines, series) {
  const isLarge = figure.classList.contains("large");
  const isCompared = figure.dataset.runs.includes(" ");
  const isLog = view.log.has(figure.dataset.chart);
  const axis = { stroke: readColour("ink-3"), font: FONT, ticks: { show: false } };
  const line = readColour("line");
  return {
    width: plot.clientWidth,
    height: plot.clientHeight,
    padding: [12, isLarge && isCompared ? 28 : 16, 0, 0],
    legend: { show: false },
    series,
    cursor: {
      y: false,
      sync: { key: "lachesis" },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6, width: 0, show: true },
    },
    scales: {
      x: { time: false, range: (chart, low, high) => rangeX(low, high) },
      // The lines grow while a run trains, and their range with them.
      y: isLog ? { distr: 3 } : { range: () => makeRange(figure, lines) },
    },
    axes: [
      // There is no half of a step.
      { ...axis, ...(view.x === "step" && { incrs: WHOLE_NUMBERS }), grid: { show: false }, border: { show: true, stroke: line, width: 1 }, size: 28, gap: 6, space: isLarge ? 80 : 64, values: (chart, values) => values.map(formatPlace) },
      { ...axis, grid: { stroke: line, width: 1 }, size: 46, gap: 6, space: isLarge ? 48 : 36, values: (chart, values) => formatTicks(values) },
    ],
    hooks: {
      setCursor: [(chart) => showValues(figure, chart, chart.cursor.idx)],
      setSelect: [zoomToSelection],
      draw: [(chart) => drawMarks(figure, chart, lines)],
    },
  };
}

function rangeX(low, high) {
  if (view.from !== null || view.to !== null) return [view.from ?? low, view.to ?? high];
  const start = view.x !== "step" || low <= 1 ? 0 : low;
  return [start, high > start ? high : start + 1];
}

/** Show the values at the cursor in the caption, or the last ones. */
function showValues(figure, chart, index) {
  const output = figure.querySelector("output");
  const lines = chart.lines || [];
  const hasPlace = index !== null && index !== undefined;
  const parts = lines.map((line) => {
    const part = document.createElement("span");
    const values = chart.data[line.place];
    const value = hasPlace ? values[index] : line.mean.findLast((number) => number !== null);
    if (lines.length > 1) {
      const sign = document.createElement("i");
      const isRun = line.label === line.letter;
      sign.className = `${isRun ? "letter" : "dot"} run-${line.letter.toLowerCase()}`;
      if (isRun) sign.textContent = line.letter;
      part.append(sign);
      if (!isRun) part.append(`${line.label} `);
    }
    part.append(formatValue(value));
    return part;
  });
  if (hasPlace && figure.classList.contains("large")) {
    const place = document.createElement("em");
    place.textContent = `at ${view.x === "step" ? "step " : ""}${formatPlace(chart.data[0][index])}`;
    parts.unshift(place);
  }
  output.replaceChildren(...parts);
}

/* What is drawn over the lines: limits, held-out results, checkpoints, letters. */

function drawMarks(figure, chart, lines) {
  const canvas = chart.ctx;
  canvas.save();
  if (figure.dataset.limit) drawLimit(figure, chart);
  if (!figure.dataset.runs.includes(" ")) drawFirstBadStep(figure, chart);
  // Of several runs the intervals would hide the lines; a table of their own shows them.
  if ("heldOut" in figure.dataset && !figure.dataset.runs.includes(" ")) drawHeldOut(figure, chart);
  if (figure.classList.contains("large") && figure.dataset.runs.includes(" ")) drawLetters(chart, lines);
  canvas.restore();
}

function drawLimit(figure, chart) {
  const { ctx: canvas, bbox: box } = chart;
  const y = chart.valToPos(Number(figure.dataset.limit), "y", true);
  if (y < box.top) return;
  const right = box.left + box.width;
  canvas.strokeStyle = canvas.fillStyle = readColour("warn");
  canvas.lineWidth = devicePixelRatio;
  canvas.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  canvas.beginPath();
  canvas.moveTo(box.left, y);
  canvas.lineTo(right, y);
  canvas.stroke();
  canvas.setLineDash([]);
  canvas.font = `${12 * devicePixelRatio}px system-ui`;
  canvas.textAlign = "right";
  canvas.textBaseline = "bottom";
  canvas.fillText(figure.dataset.limitWord, right, y - 3 * devicePixelRatio);
}

/** Draw a line where the run went wrong, with its word where the curve is evidence. */
function drawFirstBadStep(figure, chart) {
  const since = curveData.runs[figure.dataset.runs].since ?? null;
  if (since === null) return;
  const { ctx: canvas, bbox: box } = chart;
  const x = chart.valToPos(since, "x", true);
  if (!isInside(chart, x)) return;
  canvas.strokeStyle = canvas.fillStyle = readColour("bad");
  canvas.lineWidth = devicePixelRatio;
  canvas.beginPath();
  canvas.moveTo(x, box.top);
  canvas.lineTo(x, box.top + box.height);
  canvas.stroke();
  if (!("since" in figure.dataset)) return;
  canvas.font = `${12 * devicePixelRatio}px system-ui`;
  const word = `step ${figure.dataset.since}`;
  const isRoomLeft = x - canvas.measureText(word).width > box.left + 8 * devicePixelRatio;
  canvas.textAlign = isRoomLeft ? "right" : "left";
  canvas.textBaseline = "top";
  canvas.fillText(word, x + (isRoomLeft ? -6 : 6) * devicePixelRatio, box.top);
}

function drawHeldOut(figure, chart) {
  const run = curveData.runs[figure.dataset.runs];
  const colour = readColour("run-b");
  for (const point of run.held_out) drawInterval(chart, point, colour);
  for (const x of run.checkpoints) drawCheckpoint(chart, x);
}

function isInside(chart, position) {
  const tolerance = 2 * devicePixelRatio;
  const { left, width } = chart.bbox;
  return position >= left - tolerance && position <= left + width + tolerance;
}

function drawInterval(chart, point, colour) {
  const canvas = chart.ctx;
  const unit = devicePixelRatio;
  const x = chart.valToPos(point.x, "x", true);
  if (!isInside(chart, x)) return;
  const place = (value) => chart.valToPos(value, "y", true);
  const middle = place(point.percent_correct);
  canvas.strokeStyle = canvas.fillStyle = colour;
  canvas.lineWidth = 1.5 * unit;
  if (point.low !== null && point.high !== null) {
    canvas.beginPath();
    canvas.moveTo(x, place(point.low));
    canvas.lineTo(x, place(point.high));
    for (const end of [place(point.low), place(point.high)]) {
      canvas.moveTo(x - 4 * unit, end);
      canvas.lineTo(x + 4 * unit, end);
    }
    canvas.stroke();
  }
  canvas.beginPath();
  canvas.moveTo(x, middle - 5 * unit);
  canvas.lineTo(x + 5 * unit, middle);
  canvas.lineTo(x, middle + 5 * unit);
  canvas.lineTo(x - 5 * unit, middle);
  canvas.closePath();
  canvas.fill();
}

function drawCheckpoint(chart, position) {
  const canvas = chart.ctx;
  const unit = devicePixelRatio;
  const x = chart.valToPos(position, "x", true);
  if (!isInside(chart, x)) return;
  const bottom = chart.bbox.top + chart.bbox.height;
  canvas.fillStyle = readColour("ink");
  canvas.beginPath();
  canvas.moveTo(x - 4 * unit, bottom);
  canvas.lineTo(x + 4 * unit, bottom);
  canvas.lineTo(x, bottom - 6 * unit);
  canvas.fill();
}

/** Draw the letter of each run at the end of its line, one below the other where they meet. */
function drawLetters(chart, lines) {
  const canvas = chart.ctx;
  const unit = devicePixelRatio;
  const ends = lines
    .map((line) => ({
      line,
      x: chart.valToPos(line.x.at(-1), "x", true),
      y: chart.valToPos(line.mean.findLast((value) => value !== null), "y", true),
    }))
    .sort((first, second) => first.y - second.y);
  for (let index = 1; index < ends.length; index += 1) {
    const [above, below] = [ends[index - 1], ends[index]];
    const isNear = Math.abs(below.x - above.x) < 24 * unit;
    if (isNear && below.y - above.y < 18 * unit) below.y = above.y + 18 * unit;
  }
  canvas.font = `600 ${11 * unit}px system-ui`;
  canvas.textAlign = "center";
  canvas.textBaseline = "middle";
  for (const { line, x, y } of ends) {
    canvas.fillStyle = line.colour;
    canvas.beginPath();
    canvas.roundRect(x + 6 * unit, y - 8 * unit, 16 * unit, 16 * unit, 4 * unit);
    canvas.fill();
    canvas.fillStyle = "FG".includes(line.letter) ? "#101318" : readColour("bg");
    canvas.fillText(line.letter, x + 14 * unit, y + 0.5 * unit);
  }
}

/* Zoom: a selection in one chart is the shown part of all. */

function zoomToSelection(chart) {
  const { left, width } = chart.select;
  if (width < 4) return;
  view.from = Number(chart.posToVal(left, "x").toPrecision(5));
  view.to = Number(chart.posToVal(left + width, "x").toPrecision(5));
  chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  writeView();
  showCurves();
}

function showWholeRun() {
  if (view.from === null && view.to === null) return;
  view.from = view.to = null;
  writeView();
  showCurves();
}

/* Controls. */

document.addEventListener("click", (event) => {
  const choice = event.target.closest(".choice [data-set]");
  const figure = event.target.closest("figure[data-metrics]");
  if (choice) {
    event.preventDefault();
    const { set, value } = choice.dataset;
    view[set] = set === "mean" ? Number(value) : value;
    // A part of one axis is no part of another.
    if (set === "x") view.from = view.to = null;
    writeView();
    showCurves();
  } else if (event.target.closest("[data-whole]")) showWholeRun();
  else if (figure && event.target.closest("[data-log]")) toggleLogScale(figure);
  else if (figure && event.target.closest("[data-png]")) savePicture(figure);
});
document.addEventListener("dblclick", (event) => {
  if (event.target.closest(".plot")) showWholeRun();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.target.closest("dialog")) showWholeRun();
  const figure = event.target.closest?.("figure[data-metrics]");
  const distance = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!figure || !distance || !event.target.matches(".plot")) return;
  event.preventDefault();
  moveCursor(figure, distance);
});

/** Move the cursor by one drawn point, and say the value there. */
function moveCursor(figure, distance) {
  const chart = charts.get(figure);
  if (!chart) return;
  const last = chart.data[0].length - 1;
  const index = Math.max(0, Math.min(last, (chart.cursor.idx ?? last + 1) + distance));
  chart.setCursor({ left: chart.valToPos(chart.data[0][index], "x"), top: 10 });
  announce(`${formatPlace(chart.data[0][index])}: ${figure.querySelector("output").textContent}`);
}

function toggleLogScale(figure) {
  const name = figure.dataset.chart;
  if (!view.log.delete(name)) view.log.add(name);
  writeView();
  figure.querySelector("details").open = false;
  drawFigure(figure);
}

/** Save a chart on the colour of the page, with its title. */
function savePicture(figure) {
  const drawn = charts.get(figure)?.ctx.canvas;
  if (!drawn) return;
  const unit = devicePixelRatio;
  const canvas = document.createElement("canvas");
  canvas.width = drawn.width;
  canvas.height = drawn.height + 28 * unit;
  const context = canvas.getContext("2d");
  context.fillStyle = readColour("bg");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = readColour("ink");
  context.font = `600 ${13 * unit}px system-ui`;
  const runs = figure.dataset.runs.split(" ").join(", ");
  context.fillText(`${figure.querySelector("b").textContent}, ${runs}`, 8 * unit, 18 * unit);
  context.drawImage(drawn, 0, 28 * unit);
  canvas.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${figure.dataset.chart}-${runs.replaceAll(", ", "-")}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
  figure.querySelector("details").open = false;
}

/* New steps of a living run: its curves are asked for again, and keep their cursor. */
let shownStep = document.getElementById("main").dataset.step;
document.addEventListener("htmx:afterSettle", () => {
  const { step } = document.getElementById("main").dataset;
  if (step === shownStep || view.to !== null) return;
  shownStep = step;
  showCurves(listFigures(), updateFigure);
});

/** Give a drawn chart its new points without drawing it anew, so that a cursor stays. */
function updateFigure(figure) {
  const chart = charts.get(figure);
  if (!chart) return drawFigure(figure);
  const lines = listLines(figure);
  if (lines.length !== chart.lines.length || isFlat(figure, lines)) return drawFigure(figure);
  const { data } = makeSeries(figure, lines);
  // The marks and the range are made of these lines.
  chart.lines.splice(0, chart.lines.length, ...lines);
  chart.setData(data);
  showValues(figure, chart, chart.cursor.idx);
}

/* Sizes and colours. */

function drawAll() {
  // A copy: drawing takes a figure out of the map and puts it in again.
  for (const figure of [...charts.keys()]) drawFigure(figure);
}
let drawnWidth = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === drawnWidth) return;
  drawnWidth = document.body.clientWidth;
  drawAll();
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("lachesis:theme", drawAll);
addEventListener("popstate", () => {
  Object.assign(view, readView());
  showCurves();
});

/* A page with very many curves draws those that are seen. */
const MANY = 16;
const all = findAll("figure[data-metrics]");
if (all.length > MANY) {
  for (const figure of all) figure.dataset.waiting = "";
  const observer = new IntersectionObserver(
    (entries) => {
      const seen = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
      for (const figure of seen) {
        delete figure.dataset.waiting;
        observer.unobserve(figure);
      }
      showCurves(seen);
    },
    { rootMargin: "400px" },
  );
  for (const figure of all) observer.observe(figure);
} else showCurves();
