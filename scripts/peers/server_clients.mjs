// Clients of npm, as scripts/server_clients.py runs them: node server_clients.mjs URL KEY MODEL
import OpenAI from "openai"; import Anthropic from "@anthropic-ai/sdk";
const [url, apiKey, model] = process.argv.slice(2);
const call = '<tool>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool>';
const equal = (a, b) => { if (JSON.stringify(a) !== JSON.stringify(b)) throw new Error(JSON.stringify(a) + " is not " + JSON.stringify(b)); };
const o = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "so " + call }];
const whole = await o.chat.completions.create({ model, messages, temperature: 0 });
equal(whole.choices[0].message.tool_calls[0].function.name, "add");
const streamed = await o.chat.completions.stream({ model, messages, temperature: 0 }).finalChatCompletion();
equal(streamed.choices[0].message.content, "so"); equal(streamed.choices[0].finish_reason, "tool_calls");
const r = await o.responses.stream({ model, input: "<think>a b</think>return y " + call, temperature: 0 }).finalResponse();
equal(r.output.map((x) => x.type), ["reasoning", "message", "function_call"]);
const a = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const m = await a.messages.stream({ model, max_tokens: 200, messages }).finalMessage();
equal(m.content.map((x) => x.type), ["text", "tool_use"]); equal(m.content[1].input, { a: 1, b: 2 }); equal(m.stop_reason, "tool_use");

