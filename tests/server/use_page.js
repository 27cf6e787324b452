// Runs the script of the chat page (a file, the first argument) with as much of a browser as it needs. It begins a new
// chat in the middle of an answer, asks where the server fails, and writes the conversations that were sent.
"use strict";
const elements = {}, sent = [], streams = [];
let fails = false;

function element(name) {
  return {
    name, value: "", textContent: "", children: [], on: {},
    append(one) { this.children.push(one); },
    replaceChildren() { this.children = []; },
    addEventListener(kind, call) { this.on[kind] = call; },
    scrollIntoView() {},
  };
}
globalThis.document = {
  getElementById: (name) => (elements[name] ||= element(name)),
  createElement: element,
};
globalThis.fetch = async (path, options) => {
  if (path !== "/v1/chat/completions") return { ok: false };
  sent.push(JSON.parse(options.body).messages);
  if (fails) return { ok: false, json: async () => ({ error: { message: "no" } }) };
  const body = new ReadableStream({
    start(stream) {
      streams.push(stream);
      options.signal.addEventListener("abort", () => stream.error(Object.assign(new Error(), { name: "AbortError" })));
    },
  });
  return { ok: true, body };
};
const turn = () => new Promise((go) => setTimeout(go, 20));
const usage = { prompt_tokens: 1, completion_tokens: 1, prompt_tokens_details: { cached_tokens: 0 } };
const write = (text) =>
  streams.at(-1).enqueue(new TextEncoder().encode(
    "data: " + JSON.stringify({ choices: [{ delta: { content: text } }], usage }) + "\n\n"));

async function ask(text) {
  elements.said.value = text;
  elements.form.on.submit({ preventDefault() {} });
  await turn();
}

async function use() {
  await ask("one");
  write("half");
  await turn();
  elements.anew.on.click();
  await turn();
  const shown = elements.turns.children.length;
  await ask("two");
  write("whole");
  streams.at(-1).close();
  await turn();
  fails = true;
  await ask("three");
  fails = false;
  await ask("four");
  console.log(JSON.stringify({ sent, shown }));
}

new Function(require("fs").readFileSync(process.argv[2], "utf8").match(/<script>([^]*)<\/script>/)[1])();
use();
