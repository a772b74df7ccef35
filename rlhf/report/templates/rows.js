"use strict";
// The browser of all rows of a comparison. The text of a model enters the page as text, never as HTML.
(() => {
  const data = document.getElementById("rows-data");
  if (!data) return;
  const PAGE = 4; // prompts shown at a time
  const sources = JSON.parse(data.textContent);
  const section = document.getElementById("rows");
  const [source, seed, number, search] = ["source", "seed", "number", "search"].map((name) => section.querySelector(`[name=${name}]`));
  const list = section.querySelector("[data-list]");
  const status = section.querySelector("[data-status]");
  const steps = [...section.querySelectorAll("[data-step]")];
  let place = 0; // of the first prompt on the page, among those that have the searched text

  const chosen = () => sources[source.value];
  const ofSeed = () => chosen().seeds[seed.value];
  const prompts = () => chosen().prompts[ofSeed().prompts];
  const plain = (text) => (typeof text === "string" ? text : text.map((passage) => passage[1]).join(""));
  const count = (value, noun) => `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;

  function add(parent, tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.textContent = text;
    parent.append(element);
    return element;
  }

  // The numbers of the prompts that have the searched text, in the prompt or in a completion.
  function matches() {
    const wanted = search.value.trim().toLowerCase();
    const has = (text) => plain(text).toLowerCase().includes(wanted);
    const rows = prompts().map((_, row) => row);
    if (!wanted) return rows;
    return rows.filter((row) => has(prompts()[row]) || ofSeed().arms.some((arm) => arm.rows[row] && has(arm.rows[row][0])));
  }

  // Chips, if the page has them, hide arms.
  function isHidden(arm) {
    const chips = [...document.querySelectorAll("[data-toggle]")];
    return chips.some((chip) => chip.dataset.toggle === arm && chip.getAttribute("aria-pressed") !== "true");
  }

  function write(parent, text) {
    const box = add(parent, "div", "text");
    box.dir = "auto";
    if (typeof text !== "string") {
      box.classList.add("episode");
      for (const [writer, passage, remark] of text) add(box, "span", "by-" + writer, passage).title = remark;
    } else if (text.trim()) {
      box.textContent = text;
    } else {
      add(box, "span", "muted", text ? "(white space)" : "(empty)");
    }
  }

  function completion(parent, arm, row) {
    const box = add(parent, "div", "completion");
    box.dataset.arm = arm.arm;
    box.hidden = isHidden(arm.arm);
    add(box, "div", "when", arm.arm);
    if (!arm.rows[row]) {
      add(box, "p", "muted", "not sampled");
      return;
    }
    const [text, ...values] = arm.rows[row];
    write(box, text);
    const measures = add(box, "div", "measures");
    arm.names.forEach((name, i) => {
      if (values[i] !== null) add(add(measures, "span", "", name + " "), "b", "", values[i]);
    });
  }

  function card(row) {
    const article = add(list, "article", "card pair");
    article.dataset.row = row;
    const prompt = add(article, "div", "prompt");
    add(prompt, "span", "when", `Prompt ${row}`);
    write(prompt, prompts()[row]);
    const sides = add(article, "div", "sides many");
    for (const arm of ofSeed().arms) completion(sides, arm, row);
  }

  function show() {
    const rows = matches();
    place = Math.max(0, Math.min(place, rows.length - 1));
    const shown = rows.slice(place, place + PAGE);
    list.replaceChildren();
    shown.forEach(card);
    const { total } = ofSeed();
    const kept = prompts().length;
    const leftOut = total > kept ? ` ${(total - kept).toLocaleString("en")} of ${count(total, "prompt")} did not fit into this page: ${chosen().file} has all.` : "";
    const having = search.value.trim() ? " with this text" : "";
    const range = shown.length ? `; shown: ${shown.join(", ")}` : "";
    status.textContent = `${count(rows.length, "prompt")}${having}${range}.${leftOut}`;
    number.max = kept - 1;
    number.value = shown.length ? shown[0] : "";
    for (const step of steps) step.disabled = step.dataset.step === "1" ? place + PAGE >= rows.length : place === 0;
  }

  function fill(select, names, selected) {
    select.replaceChildren();
    names.forEach((name, i) => (add(select, "option", "", name).value = i));
    select.value = Math.max(0, names.indexOf(selected));
  }

  function showSource() {
    const before = seed.selectedOptions.length ? seed.selectedOptions[0].textContent : "";
    fill(seed, chosen().seeds.map((entry) => String(entry.seed)), before);
    place = 0;
    show();
  }

  source.addEventListener("change", showSource);
  seed.addEventListener("change", () => {
    place = matches().findIndex((row) => row >= Number(number.value));
    show();
  });
  search.addEventListener("input", () => {
    place = 0;
    show();
  });
  number.addEventListener("change", () => {
    if (number.value === "") return;
    search.value = "";
    place = Math.trunc(Number(number.value));
    show();
  });
  for (const step of steps) {
    step.addEventListener("click", () => {
      place += PAGE * Number(step.dataset.step);
      show();
    });
  }
  fill(source, sources.map((entry) => entry.name), "");
  showSource();
  for (const part of section.querySelectorAll(".controls")) part.hidden = false;
})();
