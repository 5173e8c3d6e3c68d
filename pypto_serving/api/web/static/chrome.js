// The bar of both pages: brand, theme, API key.

import { askForKey, needsKey, onKeyWanted } from "./api.js";
import { icon, s, say } from "./dom.js";

const THEMES = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

/** Fill the bar in; the key is asked for where the server wants one. */
export function furnish() {
  const mark = s("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" });
  mark.append(
    s("rect", { width: 20, height: 20, rx: 5, fill: "currentcolor" }),
    s("path", { d: "M5 14V6m5 8V9m5 5V4", stroke: "#fff", "stroke-width": 2.4, "stroke-linecap": "round" }),
  );
  document.getElementById("brand").prepend(mark);
  furnishTheme(document.getElementById("theme"));
  const key = document.getElementById("key");
  key.append(icon("key"));
  key.title = "API key";
  key.addEventListener("click", () => askForKey());
  key.hidden = !needsKey();
  onKeyWanted(() => {
    key.hidden = false;
  });
}

function furnishTheme(button) {
  const show = (theme) => {
    button.replaceChildren(icon(theme));
    button.setAttribute("aria-label", THEMES[theme]);
    button.title = THEMES[theme];
  };
  const names = Object.keys(THEMES);
  show(document.documentElement.dataset.theme ?? "system");
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "system";
    const next = names[(names.indexOf(now) + 1) % names.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("pypto.theme", next);
    show(next);
    say(THEMES[next]);
  });
}
