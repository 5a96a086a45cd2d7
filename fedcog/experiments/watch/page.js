"use strict";
// Polls runs.json, fetches of each drawn run only the rounds that are new, and draws. Text is only ever set as text.

const POLL = 1000, AWAY = 5000, DRAWN = 12, STRIPS = 24, TIPS = 8;
const DASHES = ["", "7 3", "2.5 2.5", "9 3 2.5 3"];
const WORDS = { running: "● running", finished: "✓ finished", stopped: "❚❚ stopped", diverged: "✕ diverged", damaged: "! damaged" };
const $ = id => document.getElementById(id);
const known = new Map(); // by a run's number: what is told of it, and its rounds
const ticked = new Map(); // by a run's number: whether somebody wants it drawn
const pictures = new Map(); // by address: what was generated
const rows = new Map(); // by a run's number: its row in the list
let page = null, server = null, chosen = null, seen = "", curves = 0, drawn = "";

function make(name, values = {}, ...inner) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(values)) {
    if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    else element.setAttribute(key, value);
  }
  element.append(...inner);
  return element;
}

function shape(name, values, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

async function get(address) {
  const answer = await fetch(address, { cache: "no-cache" });
  if (!answer.ok) throw new Error(`${answer.status} for ${address}`);
  return answer.json();
}

async function poll() {
  try {
    const text = await fetch("runs.json", { cache: "no-cache" }).then(answer => {
      if (!answer.ok) throw new Error(String(answer.status));
      return answer.text();
    });
    if (text !== seen) {
      seen = text;
      page = JSON.parse(text);
      take();
    }
    await fetchCurves();
    show();
    await showPictures();
  } catch (error) {
    $("status").className = "lost";
    $("status").lastChild.textContent = "not connected: trying again";
    if (!(error instanceof TypeError)) throw error; // not of the network: a fault of this page
  } finally {
    setTimeout(poll, document.hidden ? AWAY : POLL);
  }
}

function take() {
  if (page.server !== server) { // its numbers are not those of before
    server = page.server;
    known.clear();
    ticked.clear();
    pictures.clear();
    chosen = null;
    for (const row of rows.values()) row.all.remove();
    rows.clear();
    $("partition").querySelector("img").removeAttribute("src");
    delete $("generated").dataset.told;
  }
  const there = new Set(page.runs.map(run => run.id));
  for (const id of known.keys()) if (!there.has(id)) known.delete(id);
  for (const run of page.runs) {
    const old = known.get(run.id);
    known.set(run.id, { ...run, have: old ? old.have : -1, loss: old ? old.loss : [], score: old ? old.score : [] });
  }
  if (!known.has(chosen)) {
    const first = page.runs.find(run => run.state === "running") || page.runs.find(run => run.exhibits.length) || page.runs[0];
    chosen = first ? first.id : null;
  }
}

function isDrawn(run) {
  if (ticked.has(run.id)) return ticked.get(run.id);
  const going = page.runs.filter(one => one.state === "running");
  const order = [...going, ...page.runs.filter(one => one.state !== "running")];
  return order.indexOf(page.runs.find(one => one.id === run.id)) < DRAWN;
}

async function fetchCurves() {
  for (const run of known.values()) {
    while (isDrawn(run) && known.has(run.id) && (run.have !== run.generation || run.loss.length < run.done)) {
      const have = run.have === run.generation ? run.loss.length : 0;
      const news = await get(`runs/${run.id}/curves.json?generation=${run.generation}&first=${have}`);
      if (news.gone) break;
      if (news.generation !== run.have || news.first !== run.loss.length) {
        if (news.first !== 0) break;
        run.loss = [];
        run.score = [];
      }
      run.have = news.generation;
      for (const value of news.loss) run.loss.push(value);
      for (const value of news.score) run.score.push(value);
      curves += 1;
      if (!news.loss.length || news.generation !== run.generation) break;
    }
  }
}

function show() {
  const runs = [...known.values()], count = state => runs.filter(run => run.state === state).length;
  const told = Object.keys(WORDS).filter(count).map(state => `${count(state)} ${state}`).join(", ");
  $("status").className = "live";
  if ($("status").lastChild.textContent !== (told || "waiting for runs")) $("status").lastChild.textContent = told || "waiting for runs";
  const mark = seen + curves + chosen + JSON.stringify([...ticked]) + document.documentElement.clientWidth;
  if (mark === drawn) return;
  drawn = mark;
  $("where").textContent = page.where.join(", ");
  $("empty").hidden = runs.length > 0;
  for (const name of ["curves", "list"]) $(name).hidden = !runs.length;
  $("more").hidden = !page.more;
  $("more").textContent = `${page.more} older runs are not shown.`;
  showRuns(runs);
  showTable();
  const lines = runs.filter(isDrawn).filter(run => run.loss.length);
  const groups = [...new Set(lines.map(run => run.group))].filter(group => group !== null).sort((a, b) => a - b);
  $("legend").replaceChildren(...groups.map(group => make("li", {}, key(group), make("span", { text: page.groups[group] }))));
  const measure = [...new Set(lines.map(run => run.measure))].join(" or ") || "Test accuracy";
  $("score-name").textContent = `${measure} (%)`;
  chart($("score"), lines, run => run.score, 100, `${measure} in % over rounds`);
  chart($("loss"), lines, run => run.loss, 1, "Training loss over rounds");
  showOne();
}

function key(group) {
  const svg = shape("svg", { class: "key", viewBox: "0 0 28 10", "aria-hidden": "true" });
  svg.append(shape("line", { x1: 1, y1: 5, x2: 27, y2: 5, ...stroke(group), "stroke-width": 2.5 }));
  return svg;
}

function stroke(group) {
  const number = group === null ? 6 : group;
  return { class: `curve k${number % 7}`, "stroke-dasharray": DASHES[number % 4] || "none" };
}

function percent(value) {
  return value === null || value === undefined ? "" : (100 * value).toFixed(2);
}

function lasting(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// A row of the list is made once and then only changed, so that nobody loses the focus.
function showRuns(runs) {
  for (const [id, row] of rows) if (!known.has(id)) { row.all.remove(); rows.delete(id); }
  runs.forEach((run, place) => {
    let row = rows.get(run.id);
    if (!row) {
      row = { tick: make("input", { type: "checkbox", "aria-label": `Draw the curves of ${run.name}` }) };
      row.name = make("button", { type: "button", text: run.name });
      row.facts = make("div", { class: "facts" });
      row.way = make("div", { class: "way" });
      row.bar = make("progress", { "aria-label": `Rounds of ${run.name}` });
      row.count = make("span");
      row.way.append(row.bar, row.count);
      row.score = make("div", { class: "score" });
      row.badge = make("span", { class: "badge" });
      row.all = make("li", {}, row.tick, make("div", { class: "name" }, row.name), row.badge, row.facts, row.score, row.way);
      row.tick.addEventListener("change", () => { ticked.set(run.id, row.tick.checked); now(); });
      row.name.addEventListener("click", () => { chosen = run.id; now(); });
      rows.set(run.id, row);
    }
    if ($("runs").children[place] !== row.all) $("runs").insertBefore(row.all, $("runs").children[place] || null);
    row.tick.checked = isDrawn(run);
    row.all.className = `${run.state}${run.id === chosen ? " chosen" : ""}`;
    row.name.setAttribute("aria-pressed", String(run.id === chosen));
    row.badge.className = `badge ${run.state}`;
    row.badge.textContent = WORDS[run.state];
    row.facts.textContent = run.algorithm === undefined ? run.why : `${run.algorithm} on ${run.dataset}, seed ${run.seed}`;
    row.bar.max = Math.max(run.rounds || run.done, 1);
    row.bar.value = run.done;
    const left = run.left === null ? "" : `, ${lasting(run.left)} left`;
    row.count.textContent = run.rounds === undefined ? `${run.done} rounds` : `${run.done} of ${run.rounds}${left}`;
    row.score.replaceChildren();
    if (run.last !== null && run.last !== undefined)
      row.score.append(`${percent(run.last)} %`, make("br"), make("small", { text: `best ${percent(run.best)}` }));
  });
}

function showTable() {
  const [head, body] = $("comparison").querySelectorAll("thead tr, tbody");
  $("comparison").hidden = !page.table.length;
  const used = page.columns.map((_, place) => page.table.some(row => row.cells[place] !== ""));
  head.replaceChildren(...page.columns.filter((_, place) => used[place]).map(name => make("th", { scope: "col", text: name })));
  body.replaceChildren(...page.table.map(row => make("tr", {}, ...row.cells.filter((_, place) => used[place]).map((cell, place) =>
    place ? make("td", { text: cell }) : make("th", { scope: "row" }, key(row.group), cell)))));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= rough) || 10 * power;
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return found;
}

function short(value) {
  return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(1) : String(+value.toPrecision(4));
}

// The points of a line, no more than the screen has room for: of each column of pixels the lowest and the highest.
function thin(values, scale, room) {
  const points = [];
  values.forEach((value, place) => { if (value !== null) points.push([place + 1, scale * value]); });
  if (points.length <= 2 * room) return points;
  const found = [], size = points.length / room;
  for (let column = 0; column < room; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    let low = part[0], high = part[0];
    for (const point of part) { if (point[1] < low[1]) low = point; if (point[1] > high[1]) high = point; }
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  found.push(points[points.length - 1]);
  return found;
}

function chart(place, runs, values, scale, words) {
  const width = place.clientWidth || 320, height = place.clientHeight || 260;
  const box = { left: 46, right: 10, top: 10, bottom: 26 };
  const lines = runs.map(run => ({ run, points: thin(values(run), scale, Math.max(50, width - 60)) })).filter(one => one.points.length);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  place.replaceChildren(svg);
  if (!lines.length) {
    svg.setAttribute("aria-label", `${words}: nothing yet`);
    svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to draw yet"));
    return;
  }
  let most = 2, low = Infinity, high = -Infinity;
  for (const { points } of lines) {
    most = Math.max(most, points[points.length - 1][0]);
    for (const [, value] of points) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  low = Math.max(low - room, low >= 0 ? 0 : -Infinity);
  high = scale === 100 ? Math.min(high + room, Math.max(100, high)) : high + room;
  const x = round => box.left + (round - 1) / (most - 1) * (width - box.left - box.right);
  const y = value => height - box.bottom - (value - low) / (high - low) * (height - box.top - box.bottom);
  for (const tick of ticks(low, high, 5)) {
    svg.append(shape("line", { class: "grid", x1: box.left, x2: width - box.right, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  svg.append(shape("line", { class: "axis", x1: box.left, x2: width - box.right, y1: height - box.bottom, y2: height - box.bottom }));
  const whole = ticks(1, most, Math.min(most - 1, Math.floor(width / 70))).filter(tick => Number.isInteger(tick) && tick >= 1);
  for (const tick of whole) svg.append(shape("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, String(tick)));
  for (const { run, points } of lines) {
    const way = points.map(([round, value], n) => `${n ? "L" : "M"}${x(round).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(shape("path", { ...stroke(run.group), d: way, "data-run": run.id, "data-points": points.length }));
    const [round, value] = points[points.length - 1];
    svg.append(shape("circle", { class: `dot f${(run.group === null ? 6 : run.group) % 7}`, cx: x(round), cy: y(value), r: 2.8 }));
  }
  const ends = lines.slice(0, TIPS).map(({ run, points }) => `${run.name} ${short(points[points.length - 1][1])}`).join(", ");
  svg.setAttribute("aria-label", `${words}, up to round ${most}; last: ${ends}`);
  hover(place, svg, { box, width, height, most, x, lines, values, scale });
}

function hover(place, svg, { box, width, height, most, x, lines, values, scale }) {
  const mark = shape("line", { class: "at", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  const tip = make("div", { class: "tip", hidden: "" });
  svg.append(mark);
  place.append(tip);
  svg.addEventListener("pointermove", event => {
    const frame = svg.getBoundingClientRect(), across = (event.clientX - frame.left) * width / frame.width;
    const round = Math.round(1 + (across - box.left) / (width - box.left - box.right) * (most - 1));
    const found = lines.map(({ run }) => [run, values(run)[round - 1]]).filter(([, value]) => value !== null && value !== undefined);
    mark.setAttribute("visibility", found.length ? "visible" : "hidden");
    tip.hidden = !found.length;
    if (!found.length) return;
    found.sort((a, b) => b[1] - a[1]);
    mark.setAttribute("x1", x(round));
    mark.setAttribute("x2", x(round));
    const told = found.slice(0, TIPS).map(([run, value]) => make("span", {}, key(run.group), `${(scale * value).toPrecision(4)}  ${run.name}`));
    tip.replaceChildren(make("b", { text: `round ${round}` }), ...told);
    tip.style.left = across < width / 2 ? `${x(round) + 10}px` : "";
    tip.style.right = across < width / 2 ? "" : `${width - x(round) + 10}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); });
}

function showOne() {
  const run = known.get(chosen);
  $("one").hidden = !run;
  if (!run) return;
  $("one-head").textContent = run.name;
  $("one-words").textContent = run.algorithm === undefined ? "" :
    `${run.algorithm} on ${run.dataset}, seed ${run.seed}: ${run.rule}; ${run.done} of ${run.rounds} rounds, ${run.state}.`;
  $("one-why").hidden = !run.why;
  $("one-why").textContent = run.why;
  $("partition").hidden = !run.partition;
  const image = $("partition").querySelector("img"), address = run.partition ? `runs/${run.id}/partition.svg` : "";
  if (run.partition && image.getAttribute("src") !== address) {
    image.src = address;
    image.alt = `Examples per client and class of ${run.name}`;
  }
}

async function showPictures() {
  const run = known.get(chosen);
  $("generated").hidden = !run || !run.exhibits.length;
  if (!run || !run.exhibits.length) return;
  const found = [];
  for (const round of run.exhibits.slice(-STRIPS).reverse()) {
    const address = `runs/${run.id}/generated/${round}.json`, mark = `${run.generation} ${address}`;
    if (!pictures.has(mark)) pictures.set(mark, await get(address));
    const one = pictures.get(mark);
    if (one.rows) found.push({ round, ...one });
  }
  while (pictures.size > 20 * STRIPS) pictures.delete(pictures.keys().next().value);
  const told = `${run.id} ${run.generation} ${found.map(one => one.round)}`;
  $("generated").hidden = !found.length;
  if (!found.length || $("generated").dataset.told === told) return;
  $("generated").dataset.told = told;
  const [latest, ...earlier] = found;
  $("generated").querySelector("h3").textContent = `Generated in round ${latest.round}, from noise on`;
  $("generated").querySelector(".sheet").replaceChildren(make("b"), names(latest),
    ...latest.rows.flatMap(row => [make("b", { text: `step ${row.step}` }), strip(row, latest, `round ${latest.round}, step ${row.step}`)]));
  $("earlier-head").hidden = !earlier.length;
  $("earlier").replaceChildren(...earlier.map(one => make("div", { class: "sheet" }, make("b"), names(one),
    make("b", { text: `round ${one.round}` }), strip(one.rows[one.rows.length - 1], one, `round ${one.round}`))));
}

function names(one) {
  const all = make("div", { class: "names" }, ...one.names.map(name => make("span", { text: name, title: name })));
  all.style.setProperty("--n", one.width);
  return all;
}

function strip(row, one, words) {
  return make("img", { class: one.small ? "small" : "", src: row.picture, alt: `Generated as ${one.names.join(", ")}: ${words}` });
}

async function now() {
  await fetchCurves();
  show();
  await showPictures();
}

new ResizeObserver(() => { if (page) show(); }).observe(document.documentElement);
poll();
