// The field for messages, with files that go along as text.

import { h, icon, iconButton, notify, pickFiles } from "./dom.js";
import { bytes } from "./format.js";

const MAX_BYTES = 256 * 1024;
const MAX_FILES = 8;

/** Fill the form in. `does` has send(text, files), which returns false to keep them, and stop(). */
export class Composer {
  constructor(form, does) {
    this.does = does;
    this.files = [];
    this.running = false;
    this.input = h("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message", autofocus: true });
    this.submit = h("button", { class: "icon-button send" });
    this.chips = h("ul", { class: "chips", hidden: true, "aria-label": "Attached files" });
    const attach = iconButton("attach", "Attach text files", () => pickFiles("", (files) => this.attach(files)), { class: "icon-button attach" });
    const box = h("div", { class: "box" }, this.chips, h("div", { class: "line" }, attach, this.input, this.submit));
    form.append(box, h("p", { class: "hint" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " breaks the line, ", h("kbd", {}, "Esc"), " stops"));
    this.showRunning(false);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) does.stop();
      else this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    const taken = (event) => [...(event.dataTransfer ?? event.clipboardData).files];
    box.addEventListener("dragover", (event) => event.preventDefault());
    for (const kind of ["drop", "paste"]) {
      box.addEventListener(kind, (event) => {
        if (!taken(event).length) return;
        event.preventDefault();
        this.attach(taken(event));
      });
    }
  }

  send() {
    if (!this.input.value.trim() && !this.files.length) return;
    if (this.does.send(this.input.value, this.files) === false) return;
    this.input.value = "";
    this.files = [];
    this.showFiles();
  }

  showRunning(running) {
    const label = running ? "Stop" : "Send";
    this.running = running;
    this.submit.replaceChildren(icon(running ? "stop" : "send"));
    this.submit.setAttribute("aria-label", label);
    this.submit.title = label;
  }

  /** Take files that are text; say of any other why not. */
  async attach(files) {
    for (const file of files) {
      const wrong = this.files.length >= MAX_FILES ? `there are ${MAX_FILES} files already` : file.size > MAX_BYTES ? `it has ${bytes(file.size)}, more than ${bytes(MAX_BYTES)}` : "";
      const text = wrong ? null : await textOf(file);
      if (text === null) notify(`${file.name} is not attached: ${wrong || "it is not text"}`);
      else this.files.push({ name: file.name, text });
    }
    this.showFiles();
    this.input.focus();
  }

  showFiles() {
    this.chips.hidden = !this.files.length;
    this.chips.replaceChildren(
      ...this.files.map((file) => {
        const drop = iconButton("close", `Remove ${file.name}`, () => {
          this.files = this.files.filter((other) => other !== file);
          this.showFiles();
          this.input.focus();
        });
        return h("li", { class: "chip" }, icon("attach"), h("span", { class: "title", title: file.name }, file.name), h("span", { class: "muted figures" }, bytes(file.text.length)), drop);
      }),
    );
  }
}

/** The text of a file, or null if it is not UTF-8 or has null characters. */
async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
