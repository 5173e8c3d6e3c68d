// Make elements. Text always becomes a text node, never markup.

const ICONS = {
  attach: "M12.5 7.5l-5 5a3 3 0 0 1-4.2-4.2l5.4-5.4a2 2 0 0 1 2.8 2.8l-5.3 5.4a1 1 0 0 1-1.4-1.4l4.9-4.9",
  bars: "M4 13V7m4 6V9.5M12 13V4",
  branch: "M5 3v10M5 8h3a3 3 0 0 0 3-3V4M9 6l2-2 2 2",
  check: "M3.5 8.5l3 3 6-7",
  chevron: "M6 4l4 4-4 4",
  close: "M4 4l8 8m0-8l-8 8",
  code: "M5 4.5L1.5 8 5 11.5M11 4.5L14.5 8 11 11.5M9 3.5l-2 9",
  copy: "M5.5 5.5V3.5h7v7h-2M3.5 5.5h7v7h-7z",
  dark: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  download: "M8 2.5v8M5 7.5l3 3 3-3M3 13h10",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z",
  key: "M9.5 6.5L13 3m-1.5 1.5L13 6M7 12.5a3 3 0 1 1 0-5.9 3 3 0 0 1 0 5.9z",
  left: "M10 4L6 8l4 4",
  light: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6zM8 1.5v1M8 13.5v1M1.5 8h1M13.5 8h1M3.4 3.4l.7.7M11.9 11.9l.7.7M12.6 3.4l-.7.7M4.1 11.9l-.7.7",
  panel: "M2.5 3h11v10h-11zM6 3v10",
  plus: "M8 3.5v9M3.5 8h9",
  right: "M6 4l4 4-4 4",
  send: "M8 13V3.5M4 7l4-4 4 4",
  sliders: "M3 5h5m4 0h1M3 11h1m4 0h5M10 3.2v3.6M6 9.2v3.6",
  stop: "M5 5h6v6H5z",
  system: "M2.5 3.5h11v7h-11zM6 13h4",
  upload: "M8 10.5v-8M5 5.5l3-3 3 3M3 13h10",
  tokens: "M2.5 5h4v6h-4zM8.5 5h5v6h-5z",
  tool: "M9.5 3.2a3.2 3.2 0 0 0-3.8 4.2L3 10.2 5.8 13l2.8-2.7a3.2 3.2 0 0 0 4.2-3.8L10.8 8.4 8.2 7.8 7.6 5.2z",
  trash: "M3.5 4.5h9M6.5 4.5v-2h3v2M4.5 4.5l.6 9h5.8l.6-9",
  undo: "M3.5 8a4.5 4.5 0 1 0 1.4-3.3M3.5 3v2.5H6",
};

/** Set attributes; functions become listeners, `null`, `undefined` and `false` nothing. */
function dress(element, attributes) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
}

/** Make an HTML element: `h("button", {class: "button", click: run}, "Run")`. */
export function h(name, attributes, ...children) {
  const element = document.createElement(name);
  dress(element, attributes);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make an SVG element. */
export function s(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  dress(element, attributes);
  element.append(...children);
  return element;
}

/** Make the icon of this name; it says nothing to screen readers. */
export function icon(name) {
  return s("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** Make a button that is an icon; `label` is its name and its tooltip. */
export function iconButton(name, label, click, attributes) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click, ...attributes }, icon(name));
}

/** Copy text, and show on the button that it was. */
export async function copyFrom(button, text) {
  await copyText(text);
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  say("Copied");
  setTimeout(() => button.replaceChildren(...before), 1200);
}

/** The clipboard needs a secure context; a page on plain HTTP copies through a text field. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = h("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Tell screen readers. */
export function say(text) {
  document.getElementById("status").textContent = text;
}

/** Show a dialog with a heading and a button that closes it; it is gone when it closes. */
export function openDialog(title, content, { wide = false } = {}) {
  const close = iconButton("close", "Close", () => dialog.close());
  const head = h("div", { class: "row" }, h("h2", { id: "dialog-title" }, title), h("div", { class: "space" }), close);
  const dialog = h("dialog", { class: wide ? "wide" : "", "aria-labelledby": "dialog-title", close: () => dialog.remove() }, head, content);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

let toast = null;

/** Show a line above the composer for a while, with a button where something can still be done: it has the focus then.
 *
 * The line stays while the pointer or the focus is on it. Another one takes its place.
 */
export function notify(text, label, act) {
  toast?.close();
  const close = () => {
    clearTimeout(timer);
    element.remove();
    if (toast === own) toast = null;
  };
  const button = label && h("button", { type: "button", class: "button small", click: () => { close(); act(); } }, label);
  const element = h("div", { class: "toast" }, h("span", {}, text), button, iconButton("close", "Dismiss", close));
  const own = { close };
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => (element.matches(":hover, :focus-within") ? wait() : close()), 10000);
  };
  toast = own;
  document.body.append(element);
  button?.focus();
  say(label ? `${text}. ${label}?` : text);
  wait();
}

/** Offer `text` as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Let the user pick files; call `take` with them. */
export function pickFiles(accept, take) {
  const picker = h("input", { type: "file", multiple: true, accept, class: "picker", hidden: true, "aria-label": "Files" });
  picker.addEventListener("change", () => {
    take([...picker.files]);
    picker.remove();
  });
  picker.addEventListener("cancel", () => picker.remove());
  document.body.append(picker);
  picker.click();
}
