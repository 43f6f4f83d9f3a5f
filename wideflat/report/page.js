"use strict";
// Draws the figures with plotly: hover, zoom of the axes, series that go and come. The page can be read without it.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LIGHT = { ink: "#1c1e21", paper: "#ffffff", grid: "#e6e8ec", line: "#8a9099" };
const colours = () => ({ ink: css("--ink"), paper: css("--paper"), grid: css("--grid"), line: css("--quiet") });
const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not draw a box

function dressed(layout, colour) {
  const font = { family: 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif', size: 13, color: colour.ink };
  const axis = (old) => ({ ...old, gridcolor: colour.grid, linecolor: colour.line, tickcolor: colour.line });
  return {
    ...layout, font, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), dragmode: coarse ? false : layout.dragmode,
    hoverlabel: { bgcolor: colour.paper, bordercolor: colour.line, font: { ...font, color: colour.ink } },
  };
}

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  element.remove();
}

function save(blob, file) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = file;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function enliven(figure) {
  const name = figure.dataset.name;
  const plot = figure.querySelector(".plot");
  const live = figure.querySelector(".live");
  const given = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  const home = JSON.stringify(given.layout);
  const logButton = figure.querySelector('button[data-action="log"]');
  figure.classList.add("drawn");
  await Plotly.newPlot(live, given.data, dressed(given.layout, colours()), { displayModeBar: false, responsive: true, showTips: false });

  const traces = (test) => given.data.map((trace, i) => (test(trace.meta) ? i : -1)).filter((i) => i >= 0);
  const span = () => Object.fromEntries(["xaxis", "yaxis"].map((axis) => [axis, live._fullLayout[axis].range.slice()]));
  const fixed = JSON.parse(home).xaxis.range; // of a distribution: its columns stay where they are
  const everything = () => ({ "yaxis.autorange": true, ...(fixed ? { "xaxis.range": fixed.slice() } : { "xaxis.autorange": true }) });
  const shift = (change) => {
    const ranges = span();
    return Plotly.relayout(live, { "xaxis.range": change(ranges.xaxis, 0), "yaxis.range": change(ranges.yaxis, 1) });
  };
  const zoom = (factor) => shift(([low, high]) => {
    const middle = (low + high) / 2, half = ((high - low) / 2) * factor;
    return [middle - half, middle + half];
  });
  const move = (...parts) => shift(([low, high], which) => [low, high].map((end) => end + parts[which] * (high - low)));
  const reset = () => Plotly.relayout(live, everything());

  // Zero and less are nowhere on a logarithmic axis: a band that reaches there ends a tenth below the curve's lowest point.
  const bands = traces((meta) => meta.part === "band");
  const unclipped = bands.map((i) => given.data[i].y.slice());
  const clipped = bands.map((i) => {
    const curve = given.data.find((trace) => trace.meta.series === given.data[i].meta.series && trace.meta.part === "line");
    const floor = Math.min(...curve.y.filter((value) => value > 0)) / 10;
    return given.data[i].y.map((value) => Math.max(value, floor));
  });
  const setLog = async (on) => {
    logButton.setAttribute("aria-pressed", String(on));
    if (bands.length) await Plotly.restyle(live, { y: on ? clipped : unclipped }, bands);
    await Plotly.relayout(live, { "yaxis.type": on ? "log" : "linear", "yaxis.tickformat": on ? "~g" : "", "yaxis.nticks": on ? 6 : 0, "yaxis.dtick": null, ...everything() });
  };
  // Of a decade or two the labels 9, 8, 7 would touch each other: 1, 2 and 5 alone.
  live.on("plotly_relayout", () => {
    const { type, range } = live._fullLayout.yaxis, decades = Math.abs(range[1] - range[0]);
    const wanted = type === "log" && decades > 0.8 && decades < 2.5 ? "D2" : null;
    if ((live.layout.yaxis.dtick ?? null) !== wanted) Plotly.relayout(live, { "yaxis.dtick": wanted });
  });
  if (given.layout.yaxis.type === "log") await setLog(true);

  const picture = (format) => {
    const layout = { ...dressed(live.layout, LIGHT), paper_bgcolor: "#ffffff", showlegend: given.data.some((t) => t.meta.part === "line" || t.meta.part === "points"),
      title: { text: figure.querySelector("h3").textContent, font: { size: 15 } }, margin: { ...live.layout.margin, t: 44 } };
    return Plotly.toImage({ data: live.data, layout }, { format, width: 800, height: 500, scale: format === "png" ? 2 : 1 });
  };
  const blobOf = (url) => {
    const comma = url.indexOf(","), head = url.slice(5, comma), body = url.slice(comma + 1);
    const bytes = head.endsWith(";base64") ? Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0)) : decodeURIComponent(body);
    return new Blob([bytes], { type: head.split(";")[0] });
  };
  const actions = {
    in: () => zoom(0.7), out: () => zoom(1 / 0.7), reset,
    log: () => setLog(logButton.getAttribute("aria-pressed") !== "true"),
    svg: async () => save(blobOf(await picture("svg")), `${name}.svg`),
    png: async () => save(blobOf(await picture("png")), `${name}.png`),
    csv: () => {
      const text = figure.querySelector('script[type="text/csv"]').textContent.trim().replaceAll("<\\/", "</") + "\n";
      save(new Blob([text], { type: "text/csv" }), `${name}.csv`);
    },
  };
  for (const button of figure.querySelectorAll("button[data-action]")) {
    button.addEventListener("click", () => actions[button.dataset.action]());
  }
  plot.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(0.8), "=": () => zoom(0.8), "-": () => zoom(1.25), "0": reset,
      ArrowLeft: () => move(-0.1, 0), ArrowRight: () => move(0.1, 0), ArrowUp: () => move(0, 0.1), ArrowDown: () => move(0, -0.1),
    };
    if (event.key in keys && !event.ctrlKey && !event.metaKey && !event.altKey) {
      keys[event.key]();
      event.preventDefault();
    }
  });
  for (const button of figure.querySelectorAll("button[data-series]")) {
    button.addEventListener("click", async () => {
      const visible = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(visible));
      const mine = traces((meta) => meta.series === Number(button.dataset.series));
      await Plotly.update(live, { visible }, everything(), mine);
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    Plotly.relayout(live, dressed(live.layout, colours()));
  });
  figure.querySelector(".tools").hidden = false;
  figure.dataset.ready = "true";
}

function explain() {
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  for (const term of document.querySelectorAll(".term")) {
    const show = () => {
      tip.textContent = document.getElementById(term.getAttribute("aria-describedby")).textContent;
      tip.hidden = false;
      const word = term.getBoundingClientRect(), box = tip.getBoundingClientRect();
      const below = word.bottom + 6 + box.height < innerHeight;
      tip.style.left = `${Math.max(8, Math.min(word.left, innerWidth - box.width - 8))}px`;
      tip.style.top = `${below ? word.bottom + 6 : word.top - 6 - box.height}px`;
    };
    for (const start of ["mouseenter", "focus"]) term.addEventListener(start, show);
    for (const end of ["mouseleave", "blur"]) term.addEventListener(end, hide);
    term.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  }
}

(async () => {
  explain();
  const packed = document.getElementById("plotly");
  if (!packed || typeof DecompressionStream === "undefined") return;
  await unpack(packed);
  for (const figure of document.querySelectorAll("figure[data-name]")) await enliven(figure);
  document.documentElement.dataset.ready = "true";
})();
