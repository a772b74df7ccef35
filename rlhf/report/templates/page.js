"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const button = document.getElementById("theme");
  const chips = [...document.querySelectorAll("[data-toggle]")];

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const color = (role) => getComputedStyle(root).getPropertyValue("--" + role).trim();

  // Python names a role for every trace; the style sheet says what color the role has in this theme.
  function colored(trace) {
    const value = color((trace.meta && trace.meta.role) || "s1");
    const copy = { ...trace, marker: { ...trace.marker, color: value } };
    if (trace.type !== "bar") copy.line = { ...trace.line, color: value };
    if (trace.fill) copy.fillcolor = value + "26";
    if (trace.error_y) copy.error_y = { ...trace.error_y, color: value };
    return copy;
  }

  // Chips, if a page has them, show and hide all that belongs to an arm: traces, figures, completions.
  const hidden = () => new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") !== "true").map((chip) => chip.dataset.toggle));

  function layoutOf(figure) {
    const axis = {
      gridcolor: color("grid"), linecolor: color("grid"), zerolinecolor: color("grid"),
      automargin: true, nticks: 6, exponentformat: "e", fixedrange: touch,
    };
    return {
      ...figure.layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("muted"), size: 12, family: getComputedStyle(document.body).fontFamily },
      margin: { l: 44, r: 10, t: 8, b: 36 },
      height: figure.layout.height || 250,
      // Above the curves: beside them a phone has no room for a legend.
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("grid"), font: { color: color("ink") } },
      hovermode: figure.layout.hovermode || "x unified",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("muted"), activecolor: color("ink") },
      dragmode: touch ? false : "zoom",
      uirevision: "keep",
      xaxis: { ...figure.layout.xaxis, ...axis, title: { ...(figure.layout.xaxis || {}).title, standoff: 4, font: { size: 11 } } },
      yaxis: { ...figure.layout.yaxis, ...axis, title: { ...(figure.layout.yaxis || {}).title, standoff: 4, font: { size: 11 } } },
    };
  }

  // Pointing at a chart shows one button, which saves it as SVG.
  const saving = (name) => ({
    displaylogo: false,
    modeBarButtons: [["toImage"]],
    toImageButtonOptions: { format: "svg", filename: name.replace(/[^\w-]+/g, "_") },
  });

  function draw() {
    const away = hidden();
    for (const part of document.querySelectorAll("[data-arm]")) part.hidden = away.has(part.dataset.arm);
    for (const place of document.querySelectorAll(".chart")) {
      if (place.closest("[hidden]")) continue; // it has no width to draw in
      const figure = figures[place.dataset.figure];
      const traces = figure.data.map(colored).map((trace) => ({ ...trace, visible: !away.has(trace.legendgroup) }));
      Plotly.react(place, traces, layoutOf(figure), { ...saving(place.dataset.figure), responsive: true });
    }
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
  }

  function press(chip, on) {
    chip.setAttribute("aria-pressed", String(on));
  }
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      press(chip, chip.getAttribute("aria-pressed") !== "true");
      draw();
    });
  }
  for (const every of document.querySelectorAll("[data-all]")) {
    every.addEventListener("click", () => {
      for (const chip of chips) press(chip, every.dataset.all === "true");
      draw();
    });
  }
  if (chips.length) document.getElementById("arms").hidden = false;

  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("rlhf-theme", root.dataset.theme);
    } catch (error) {
      // No storage: see theme.js.
    }
    draw();
  });
  system.addEventListener("change", draw);
  draw();
  root.dataset.drawn = String(document.querySelectorAll(".chart .main-svg").length > 0);
})();
