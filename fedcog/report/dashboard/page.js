"use strict";
// Polls runs.json, fetches only the new rounds of each drawn run, and draws them.
// Text from files is only ever set as text, never as HTML.

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 5000; // while the page is in the background
const MAX_DRAWN_RUNS = 12; // drawn unless the user ticks others
const MAX_STRIPS = 24; // rounds whose generated images are shown
const MAX_TIPS = 8; // runs named in a tooltip
const MAX_CACHED_IMAGES = 20 * MAX_STRIPS;
const DASHES = ["", "7 3", "2.5 2.5", "9 3 2.5 3"];
const NUM_COLORS = 7;
const NO_GROUP = 6; // color of a run without a group
const STATE_LABELS = {
  running: "● running",
  finished: "✓ finished",
  stopped: "❚❚ stopped",
  diverged: "✕ diverged",
  damaged: "! damaged",
};
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

const runs = new Map(); // by id: the description of a run, and its rounds
const ticked = new Map(); // by id: whether the user wants the run drawn
const imageCache = new Map(); // by generation and address: generated images
const rows = new Map(); // by id: the row of a run in the list
const sections = new Map(); // by name: a list of runs below its heading
let overview = null; // the content of runs.json
let overviewText = "";
let server = null; // identifies the server that gave out the ids
let selected = null; // id of the run that is shown in detail
let numFetches = 0; // answers with new rounds
let drawnState = ""; // what the page was last drawn from

function make(name, values = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(values)) {
    if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(name, values, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(values)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

async function fetchText(address) {
  const response = await fetch(address, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${response.status} for ${address}`);
  return response.text();
}

async function fetchJson(address) {
  return JSON.parse(await fetchText(address));
}

async function poll() {
  try {
    const text = await fetchText("runs.json");
    if (text !== overviewText) {
      overviewText = text;
      overview = JSON.parse(text);
      updateRuns();
    }
    await update();
  } catch (error) {
    $("status").className = "lost";
    $("status").lastChild.textContent = "not connected: trying again";
    if (!(error instanceof TypeError)) throw error; // not a network error: a bug of this page
  } finally {
    setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
  }
}

async function update() {
  await fetchCurves();
  show();
  await showGenerated();
}

function updateRuns() {
  if (overview.server !== server) reset();
  const ids = new Set(overview.runs.map(run => run.id));
  for (const id of runs.keys()) {
    if (!ids.has(id)) runs.delete(id);
  }
  for (const run of overview.runs) {
    const old = runs.get(run.id) || newCurves();
    const { fetchedGeneration, loss, score, clientScore } = old;
    runs.set(run.id, { ...run, fetchedGeneration, loss, score, clientScore });
  }
  if (!runs.has(selected)) {
    const running = overview.runs.find(run => run.state === "running");
    const withImages = overview.runs.find(run => run.exhibits.length);
    const first = running || withImages || overview.runs[0];
    selected = first ? first.id : null;
  }
}

function newCurves() {
  return { fetchedGeneration: -1, loss: [], score: [], clientScore: [] };
}

// Forget everything about another server: its ids mean other runs.
function reset() {
  server = overview.server;
  runs.clear();
  ticked.clear();
  imageCache.clear();
  selected = null;
  for (const row of rows.values()) row.element.remove();
  rows.clear();
  for (const section of sections.values()) section.remove();
  sections.clear();
  $("partition").querySelector("img").removeAttribute("src");
  delete $("generated").dataset.content;
}

function isDrawn(run) {
  if (ticked.has(run.id)) return ticked.get(run.id);
  const running = overview.runs.filter(other => other.state === "running");
  const others = overview.runs.filter(other => other.state !== "running");
  return [...running, ...others].findIndex(other => other.id === run.id) < MAX_DRAWN_RUNS;
}

function isComplete(run) {
  return run.fetchedGeneration === run.generation && run.loss.length >= run.done;
}

async function fetchCurves() {
  for (const run of runs.values()) {
    while (isDrawn(run) && runs.has(run.id) && !isComplete(run)) {
      const first = run.fetchedGeneration === run.generation ? run.loss.length : 0;
      const query = `generation=${run.generation}&first=${first}`;
      const curves = await fetchJson(`runs/${run.id}/curves.json?${query}`);
      if (curves.gone) break;
      if (curves.generation !== run.fetchedGeneration || curves.first !== run.loss.length) {
        if (curves.first !== 0) break;
        run.loss = [];
        run.score = [];
        run.clientScore = [];
      }
      run.fetchedGeneration = curves.generation;
      for (const value of curves.loss) run.loss.push(value);
      for (const value of curves.score) run.score.push(value);
      for (const value of curves.clientScore) run.clientScore.push(value);
      numFetches += 1;
      if (!curves.loss.length || curves.generation !== run.generation) break;
    }
  }
}

function show() {
  const allRuns = overview.runs.map(run => runs.get(run.id));
  showStatus(allRuns);
  const width = document.documentElement.clientWidth;
  const state = overviewText + numFetches + selected + JSON.stringify([...ticked]) + width;
  if (state === drawnState) return;
  drawnState = state;
  $("where").textContent = overview.where.join(", ");
  $("empty").hidden = allRuns.length > 0;
  for (const id of ["curves", "list"]) $(id).hidden = !allRuns.length;
  $("more").hidden = !overview.more;
  $("more").textContent = `${overview.more} older runs are not shown.`;
  showRuns(allRuns);
  showComparison();
  showCurves(allRuns.filter(isDrawn).filter(run => run.loss.length));
  showDetails();
}

function showStatus(allRuns) {
  const count = state => allRuns.filter(run => run.state === state).length;
  const states = Object.keys(STATE_LABELS).filter(count);
  const text = states.map(state => `${count(state)} ${state}`).join(", ") || "waiting for runs";
  $("status").className = "live";
  if ($("status").lastChild.textContent !== text) $("status").lastChild.textContent = text;
}

function showCurves(drawnRuns) {
  const groups = [...new Set(drawnRuns.map(run => run.group))].filter(group => group !== null);
  groups.sort((a, b) => a - b);
  $("legend").replaceChildren(...groups.map(group =>
    make("li", {}, lineSample(group), make("span", { text: overview.groups[group] }))));
  const labels = [...new Set(drawnRuns.map(run => run.measure))];
  const label = labels.join(" or ") || "Test accuracy";
  $("score-name").textContent = `${label} (%)`;
  drawChart($("score"), drawnRuns, run => run.score, 100, `${label} in % over rounds`);
  const clientRuns = drawnRuns.filter(run => run.clientScore.some(value => value !== null));
  $("client-figure").hidden = !clientRuns.length;
  const clientLabel = "On the clients' own test examples";
  drawChart($("client-score"), clientRuns, run => run.clientScore, 100, `${clientLabel}, in %`);
  drawChart($("loss"), drawnRuns, run => run.loss, 1, "Training loss over rounds");
}

function lineSample(group) {
  const svg = makeSvg("svg", { class: "key", viewBox: "0 0 28 10", "aria-hidden": "true" });
  const position = { x1: 1, y1: 5, x2: 27, y2: 5 };
  svg.append(makeSvg("line", { ...position, ...lineStyle(group), "stroke-width": 2.5 }));
  return svg;
}

function lineStyle(group) {
  const index = group === null ? NO_GROUP : group;
  const dashes = DASHES[index % DASHES.length] || "none";
  return { class: `curve k${index % NUM_COLORS}`, "stroke-dasharray": dashes };
}

function percent(value) {
  return value === null || value === undefined ? "" : (100 * value).toFixed(2);
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// A row of the list is created once and then updated, so that it keeps the focus.
function showRuns(allRuns) {
  for (const [id, row] of rows) {
    if (!runs.has(id)) {
      row.element.remove();
      rows.delete(id);
    }
  }
  const names = [...new Set(allRuns.map(run => run.section))];
  for (const [name, section] of sections) {
    if (!names.includes(name)) {
      section.remove();
      sections.delete(name);
    }
  }
  names.forEach((name, index) => {
    if (!sections.has(name)) sections.set(name, makeSection(name));
    putAt($("runs"), sections.get(name), index);
    const list = sections.get(name).lastChild;
    allRuns.filter(run => run.section === name).forEach((run, position) => {
      if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
      putAt(list, rows.get(run.id).element, position);
      updateRow(rows.get(run.id), run);
    });
  });
}

function makeSection(name) {
  return make("div", {}, make("h3", { text: name }), make("ul", { "aria-label": name }));
}

function putAt(parent, child, index) {
  if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
}

function makeRow(run) {
  const row = {
    tick: make("input", { type: "checkbox", "aria-label": `Draw the curves of ${run.name}` }),
    name: make("button", { type: "button", title: run.name }),
    badge: make("span", { class: "badge" }),
    facts: make("div", { class: "facts" }),
    score: make("div", { class: "score" }),
    bar: make("progress", { "aria-label": `Rounds of ${run.name}` }),
    count: make("span"),
  };
  const name = make("div", { class: "name" }, row.name);
  const progress = make("div", { class: "way" }, row.bar, row.count);
  row.element = make("li", {}, row.tick, name, row.badge, row.facts, row.score, progress);
  row.tick.addEventListener("change", () => {
    ticked.set(run.id, row.tick.checked);
    update();
  });
  row.name.addEventListener("click", () => {
    selected = run.id;
    update();
  });
  return row;
}

function updateRow(row, run) {
  const isSelected = run.id === selected;
  const isKnown = run.algorithm !== undefined; // else its settings cannot be read
  row.tick.checked = isDrawn(run);
  row.name.textContent = run.label;
  row.element.className = `${run.state}${isSelected ? " chosen" : ""}`;
  row.name.setAttribute("aria-pressed", String(isSelected));
  row.badge.className = `badge ${run.state}`;
  row.badge.textContent = STATE_LABELS[run.state];
  const facts = isKnown ? `${run.algorithm} on ${run.dataset}, seed ${run.seed}` : run.why;
  row.facts.textContent = `${run.name}: ${facts}`;
  row.bar.max = Math.max(run.rounds || run.done, 1);
  row.bar.value = run.done;
  const left = run.left === null ? "" : `, ${duration(run.left)} left`;
  row.count.textContent = isKnown ? `${run.done} of ${run.rounds}${left}` : `${run.done} rounds`;
  row.score.replaceChildren();
  if (run.last !== null && run.last !== undefined) {
    const best = make("small", { text: `best ${percent(run.best)}` });
    row.score.append(`${percent(run.last)} %`, make("br"), best);
  }
}

function showComparison() {
  const [head, body] = $("comparison").querySelectorAll("thead tr, tbody");
  $("comparison").hidden = !overview.table.length;
  const isUsed = (_, column) => overview.table.some(row => row.cells[column] !== "");
  const names = overview.columns.filter(isUsed);
  head.replaceChildren(...names.map(name => make("th", { scope: "col", text: name })));
  body.replaceChildren(...overview.table.map(row => {
    const [label, ...values] = row.cells.filter(isUsed);
    const header = make("th", { scope: "row" }, lineSample(row.group), label);
    return make("tr", {}, header, ...values.map(value => make("td", { text: value })));
  }));
}

// Round numbers between two values, about `count` of them.
function ticksBetween(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(digit => digit * power).find(size => size >= rough) || 10 * power;
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9; index++) {
    ticks.push(index * step);
  }
  return ticks;
}

function formatNumber(value) {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
  return String(+value.toPrecision(4));
}

// The points of a line: of more than two per column of pixels, the lowest and the highest.
function thin(values, scale, numColumns) {
  const points = [];
  values.forEach((value, index) => {
    if (value !== null) points.push([index + 1, scale * value]);
  });
  if (points.length <= 2 * numColumns) return points;
  const thinned = [];
  const size = points.length / numColumns;
  for (let column = 0; column < numColumns; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    let low = part[0];
    let high = part[0];
    for (const point of part) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    thinned.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  thinned.push(points[points.length - 1]);
  return thinned;
}

function drawChart(place, drawnRuns, values, scale, description) {
  const width = place.clientWidth || 320;
  const height = place.clientHeight || 260;
  const numColumns = Math.max(50, width - 60);
  const lines = drawnRuns
    .map(run => ({ run, points: thin(values(run), scale, numColumns) }))
    .filter(line => line.points.length);
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  place.replaceChildren(svg);
  if (!lines.length) {
    svg.setAttribute("aria-label", `${description}: no data yet`);
    const center = { x: width / 2, y: height / 2, "text-anchor": "middle" };
    svg.append(makeSvg("text", center, "no data yet"));
    return;
  }
  const axes = makeAxes(lines, width, height, scale);
  drawAxes(svg, axes);
  for (const line of lines) drawLine(svg, axes, line);
  const ends = lines.slice(0, MAX_TIPS).map(({ run, points }) =>
    `${run.label} ${formatNumber(points[points.length - 1][1])}`);
  const label = `${description}, up to round ${axes.lastRound}; last: ${ends.join(", ")}`;
  svg.setAttribute("aria-label", label);
  addTooltip(place, svg, axes, lines.map(line => line.run), values, scale);
}

// The ranges of both axes, and the functions from values to pixels.
function makeAxes(lines, width, height, scale) {
  const margin = { left: 46, right: 10, top: 10, bottom: 26 };
  let lastRound = 2;
  let low = Infinity;
  let high = -Infinity;
  for (const { points } of lines) {
    lastRound = Math.max(lastRound, points[points.length - 1][0]);
    for (const [, value] of points) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  const padding = (high - low || Math.abs(high) || 1) * 0.06;
  low = Math.max(low - padding, low >= 0 ? 0 : -Infinity);
  const isPercent = scale === 100;
  high = isPercent ? Math.min(high + padding, Math.max(100, high)) : high + padding;
  const innerWidth = width - margin.left - margin.right;
  const innerHeight = height - margin.top - margin.bottom;
  const x = round => margin.left + (round - 1) / (lastRound - 1) * innerWidth;
  const y = value => height - margin.bottom - (value - low) / (high - low) * innerHeight;
  return { margin, width, height, innerWidth, lastRound, low, high, x, y };
}

function drawAxes(svg, { margin, width, height, lastRound, low, high, x, y }) {
  const right = width - margin.right;
  const bottom = height - margin.bottom;
  for (const tick of ticksBetween(low, high, 5)) {
    const line = { class: "grid", x1: margin.left, x2: right, y1: y(tick), y2: y(tick) };
    const label = { x: margin.left - 6, y: y(tick) + 4, "text-anchor": "end" };
    svg.append(makeSvg("line", line));
    svg.append(makeSvg("text", label, formatNumber(tick)));
  }
  const axis = { class: "axis", x1: margin.left, x2: right, y1: bottom, y2: bottom };
  svg.append(makeSvg("line", axis));
  const numTicks = Math.min(lastRound - 1, Math.floor(width / 70));
  for (const tick of ticksBetween(1, lastRound, numTicks)) {
    if (!Number.isInteger(tick) || tick < 1) continue;
    const label = { x: x(tick), y: height - 8, "text-anchor": "middle" };
    svg.append(makeSvg("text", label, String(tick)));
  }
}

function drawLine(svg, { x, y }, { run, points }) {
  const path = points
    .map(([round, value], index) =>
      `${index ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`)
    .join("");
  const data = { "data-run": run.id, "data-points": points.length };
  svg.append(makeSvg("path", { ...lineStyle(run.group), d: path, ...data }));
  const [round, value] = points[points.length - 1];
  const color = (run.group === null ? NO_GROUP : run.group) % NUM_COLORS;
  svg.append(makeSvg("circle", { class: `dot f${color}`, cx: x(round), cy: y(value), r: 2.8 }));
}

function addTooltip(place, svg, axes, drawnRuns, values, scale) {
  const { margin, width, height, innerWidth, lastRound, x } = axes;
  const vertical = { y1: margin.top, y2: height - margin.bottom, visibility: "hidden" };
  const mark = makeSvg("line", { class: "at", ...vertical });
  const tip = make("div", { class: "tip", hidden: "" });
  svg.append(mark);
  place.append(tip);
  svg.addEventListener("pointermove", event => {
    const frame = svg.getBoundingClientRect();
    const pointer = (event.clientX - frame.left) * width / frame.width;
    const round = Math.round(1 + (pointer - margin.left) / innerWidth * (lastRound - 1));
    const scores = drawnRuns
      .map(run => [run, values(run)[round - 1]])
      .filter(([, value]) => value !== null && value !== undefined);
    mark.setAttribute("visibility", scores.length ? "visible" : "hidden");
    tip.hidden = !scores.length;
    if (!scores.length) return;
    scores.sort((a, b) => b[1] - a[1]);
    mark.setAttribute("x1", x(round));
    mark.setAttribute("x2", x(round));
    const entries = scores.slice(0, MAX_TIPS).map(([run, value]) =>
      make("span", {}, lineSample(run.group), `${(scale * value).toPrecision(4)}  ${run.label}`));
    tip.replaceChildren(make("b", { text: `round ${round}` }), ...entries);
    const isLeft = pointer < width / 2;
    tip.style.left = isLeft ? `${x(round) + 10}px` : "";
    tip.style.right = isLeft ? "" : `${width - x(round) + 10}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    mark.setAttribute("visibility", "hidden");
  });
}

function showDetails() {
  const run = runs.get(selected);
  $("one").hidden = !run;
  if (!run) return;
  $("one-head").textContent = run.name;
  $("one-words").textContent = run.algorithm === undefined ? "" :
    `${run.algorithm} on ${run.dataset}, seed ${run.seed}: ${run.rule}; ` +
    `${run.done} of ${run.rounds} rounds, ${run.state}.`;
  $("one-why").hidden = !run.why;
  $("one-why").textContent = run.why;
  $("partition").hidden = !run.partition;
  if (!run.partition) return;
  const image = $("partition").querySelector("img");
  const address = `runs/${run.id}/partition.svg`;
  if (image.getAttribute("src") !== address) {
    image.src = address;
    image.alt = `Examples per client and class of ${run.name}`;
  }
}

async function showGenerated() {
  const run = runs.get(selected);
  const section = $("generated");
  section.hidden = !run || !run.exhibits.length;
  if (section.hidden) return;
  const rounds = await fetchGenerated(run);
  const content = `${run.id} ${run.generation} ${rounds.map(images => images.round)}`;
  section.hidden = !rounds.length;
  if (!rounds.length || section.dataset.content === content) return;
  section.dataset.content = content;
  const [latest, ...earlier] = rounds;
  section.querySelector("h3").textContent = `Generated in round ${latest.round}, starting from noise`;
  const latestStrips = latest.rows.flatMap(row => {
    const label = `step ${row.step}`;
    return [make("b", { text: label }), makeStrip(row, latest, `round ${latest.round}, ${label}`)];
  });
  section.querySelector(".sheet").replaceChildren(make("b"), makeNames(latest), ...latestStrips);
  $("earlier-head").hidden = !earlier.length;
  $("earlier").replaceChildren(...earlier.map(images => {
    const label = `round ${images.round}`;
    const strip = makeStrip(images.rows[images.rows.length - 1], images, label);
    const name = make("b", { text: label });
    return make("div", { class: "sheet" }, make("b"), makeNames(images), name, strip);
  }));
}

// The generated images of the latest rounds, the latest first.
async function fetchGenerated(run) {
  const rounds = [];
  for (const round of run.exhibits.slice(-MAX_STRIPS).reverse()) {
    const address = `runs/${run.id}/generated/${round}.json`;
    const key = `${run.generation} ${address}`;
    if (!imageCache.has(key)) imageCache.set(key, await fetchJson(address));
    const images = imageCache.get(key);
    if (images.rows) rounds.push({ round, ...images });
  }
  while (imageCache.size > MAX_CACHED_IMAGES) imageCache.delete(imageCache.keys().next().value);
  return rounds;
}

function makeNames(images) {
  const spans = images.names.map(name => make("span", { text: name, title: name }));
  const element = make("div", { class: "names" }, ...spans);
  element.style.setProperty("--n", images.width);
  return element;
}

function makeStrip(row, images, label) {
  const alt = `Generated as ${images.names.join(", ")}: ${label}`;
  return make("img", { class: images.small ? "small" : "", src: row.picture, alt });
}

new ResizeObserver(() => { if (overview) show(); }).observe(document.documentElement);
poll();
