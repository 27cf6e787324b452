// Uses the page of a trace as a person would, and leaves what it saw in an element of its own. test_trace.py runs it.
"use strict";
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => problems.push(words.join(" "));

addEventListener("load", () => {
  const find = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const look = () => ({
    title: find("step-title").textContent,
    sentence: find("sentence").textContent,
    nodes: all("#tree .node").length,
    now: all(".t.now").map((span) => Number(span.dataset.i)),
    later: all(".t.later").length,
    slider: Number(find("slider").value),
  });
  const seen = {problems, opened: look(), shown: find("text").textContent, steps: []};
  seen.figures = find("figures").textContent;
  seen.beside = find("plain").textContent;
  seen.width = [document.documentElement.scrollWidth, innerWidth];
  seen.unnamed = all("button, input, select, svg[role=img]").filter((each) => !each.getAttribute("aria-label")).length;
  seen.unexplained = all("abbr").map((each) => `${each.textContent}: ${each.getAttribute("aria-description")}`)
    .filter((words) => /: (null|undefined)$/.test(words));
  find("figures").querySelector("abbr").focus();
  seen.term = find("tip").textContent;
  press("Home");
  seen.home = look();
  for (let k = 0; k < Number(find("slider").max); k++) {
    find("forth").click();
    seen.steps.push(look());
    for (const each of all(".t, .node, #mask svg, #bars svg"))
      for (const type of ["pointerenter", "pointermove"]) {
        const box = each.getBoundingClientRect();
        each.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + 2}));
      }
    seen.readout = find("readout").textContent;
    seen.tip = find("tip").textContent;
  }
  seen.isOver = find("forth").disabled;
  press("ArrowLeft");
  seen.left = look();
  press("ArrowRight");
  seen.right = look();
  find("slider").value = 1;
  find("slider").dispatchEvent(new Event("input"));
  seen.slid = look();
  document.querySelector(".t[data-i='0']").click();
  seen.clicked = look();
  press("End");
  press(" ");
  seen.playing = find("play").getAttribute("aria-label");
  setTimeout(() => {
    press(" ");
    seen.played = look();
    seen.paused = find("play").getAttribute("aria-label");
    const result = document.createElement("pre");
    result.id = "result";
    result.textContent = JSON.stringify(seen);
    document.body.append(result);
  }, 1500);
});
