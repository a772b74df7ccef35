// Ask the search of a built site questions: node tests/site_search.mjs SITE < questions.json
// Reads {question: [page, ...]}, prints {question: [the first three pages found]}. It runs the site's own search worker.
import fs from "node:fs";
import vm from "node:vm";

const site = process.argv[2];
const folder = `${site}/assets/javascripts/workers`;
const worker = fs.readdirSync(folder).find((name) => name.startsWith("search") && name.endsWith(".js"));
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));
const questions = JSON.parse(fs.readFileSync(0, "utf8"));

let answer, handler;
const page = {
  console, setTimeout, performance, URL, location: { href: "http://localhost/" }, importScripts: () => {},
  addEventListener: (_, listener) => { handler = listener; },
  postMessage: (message) => answer(message),
};
page.self = page.window = page;
vm.createContext(page);
vm.runInContext(fs.readFileSync(`${folder}/${worker}`, "utf8"), page);
const send = (type, data) => new Promise((resolve) => { answer = resolve; handler({ data: { type, data } }); });

await send(0, { config: index.config, docs: index.docs, options: { suggest: true } });
const found = {};
for (const question of Object.keys(questions)) {
  const { data } = await send(2, question);
  const pages = data.items.map((sections) => sections[0].location.split("#")[0].replace(/\/$/, ""));
  found[question] = [...new Set(pages)].slice(0, 3);
}
console.log(JSON.stringify(found));
